// Packed bf16 rows (kernels/pack_codec.py says what lies where): decoded into a little of the first-level cache,
// then multiplied by the same steps, in the same order, as rows that were never packed.
#pragma once
#include "lanes.h"
#include "packed_block.h"

namespace twoends {
namespace TWOENDS_ISA {

// Writes the bf16 words of units begin .. end - 1 of a row to `out`, whole units (padding columns too), and
// moves `escapes` past those that were used.
using Decode = void (*)(const PackedBlock& block, size_t row, size_t begin, size_t end, const uint8_t*& escapes,
                        uint8_t* out);

inline void put_word(uint8_t* out, size_t column, uint8_t exponent, uint8_t low) {
  const uint16_t both = (uint16_t)(exponent << 8 | low), word = (uint16_t)(both >> 1 | both << 15);
  out[2 * column] = (uint8_t)word;
  out[2 * column + 1] = (uint8_t)(word >> 8);
}

inline size_t column_of(size_t place) { return (place >> 3 & 1) * 32 + (place >> 4) * 8 + (place & 7); }

template <int BITS>
inline void decode_plain(const PackedBlock& block, size_t row, size_t begin, size_t end, const uint8_t*& escapes,
                         uint8_t* out) {
  const uint8_t* low = block.low + (row * block.units + begin) * kUnit;
  const uint8_t* codes = block.codes + (row * block.units + begin) * 8 * BITS;
  for (size_t unit = begin; unit < end; ++unit, low += kUnit, out += 2 * kUnit) {
    for (size_t place = 0; place < kUnit; place += 8, codes += BITS) {
      uint32_t eight = 0;
      for (int byte = 0; byte < BITS; ++byte) eight |= (uint32_t)codes[byte] << 8 * byte;
      for (size_t i = 0; i < 8; ++i, eight >>= BITS) {
        uint8_t exponent = block.exponents[eight & ((1 << BITS) - 1)];
        if (exponent == block.marker) exponent = *escapes++;
        put_word(out, column_of(place + i), exponent, low[place + i]);
      }
    }
  }
}

#if defined(TWOENDS_USE_AVX2) || defined(TWOENDS_USE_AVX512)

// 32 codes, one to a byte, from the 12 or 16 bytes at p; 4 bytes past 12 are read too.
template <int BITS>
inline __m256i spread_codes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  if constexpr (BITS == 4) {
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    return _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
  } else {
    // Each 32-bit word gets the bytes that its four codes begin in; every other one begins in mid-byte.
    const __m256i where = _mm256_setr_epi8(0, 1, -1, -1, 1, 2, -1, -1, 3, 4, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 7, 8,
                                           -1, -1, 9, 10, -1, -1, 10, 11, -1, -1);
    __m256i four = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), where);
    four = _mm256_srlv_epi32(four, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    const __m256i first = _mm256_and_si256(four, _mm256_set1_epi32(0x7));
    const __m256i second = _mm256_and_si256(_mm256_slli_epi32(four, 5), _mm256_set1_epi32(0x700));
    const __m256i third = _mm256_and_si256(_mm256_slli_epi32(four, 10), _mm256_set1_epi32(0x70000));
    const __m256i fourth = _mm256_and_si256(_mm256_slli_epi32(four, 15), _mm256_set1_epi32(0x7000000));
    return _mm256_or_si256(_mm256_or_si256(first, second), _mm256_or_si256(third, fourth));
  }
}

inline __m256i rotate_right_one(__m256i words) {
  return _mm256_or_si256(_mm256_srli_epi16(words, 1), _mm256_slli_epi16(words, 15));
}

template <int BITS>
inline void decode_avx2(const PackedBlock& block, size_t row, size_t begin, size_t end, const uint8_t*& escapes,
                        uint8_t* out) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)block.exponents));
  const __m256i marker = _mm256_set1_epi8((char)block.marker);
  const uint8_t* low = block.low + (row * block.units + begin) * kUnit;
  const uint8_t* codes = block.codes + (row * block.units + begin) * 8 * BITS;
  for (size_t unit = begin; unit < end; ++unit, low += kUnit, codes += 8 * BITS, out += 2 * kUnit) {
    uint64_t escaped = 0;
    TWOENDS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m256i exponents = _mm256_shuffle_epi8(table, spread_codes<BITS>(codes + half * 4 * BITS));
      const __m256i lows = _mm256_loadu_si256((const __m256i*)(low + half * 32));
      escaped |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(exponents, marker)) << half * 32;
      _mm256_storeu_si256((__m256i*)(out + half * 32), rotate_right_one(_mm256_unpacklo_epi8(lows, exponents)));
      _mm256_storeu_si256((__m256i*)(out + 64 + half * 32), rotate_right_one(_mm256_unpackhi_epi8(lows, exponents)));
    }
    for (; escaped != 0; escaped &= escaped - 1) {
      const size_t place = (size_t)__builtin_ctzll(escaped);
      put_word(out, column_of(place), *escapes++, low[place]);
    }
  }
}
#endif

#if defined(TWOENDS_USE_AVX512)
#define TWOENDS_VBMI __attribute__((target("avx512vbmi,avx512vbmi2,popcnt")))

template <int BITS>
TWOENDS_VBMI inline void decode_vbmi(const PackedBlock& block, size_t row, size_t begin, size_t end,
                                     const uint8_t*& escapes, uint8_t* out) {
  // Eight codes lie in BITS bytes: those go to one 64-bit word, and from there each to its byte. What else the
  // byte holds above its code does not count: the table stands once for each value of those bits.
  alignas(64) static constexpr auto spread = [] {
    struct Index {
      uint8_t byte[64];
    } index = {};
    for (int i = 0; i < 64; ++i) index.byte[i] = (uint8_t)(i / 8 * BITS + i % 8 % 4);
    return index;
  }();
  const __m512i bytes_of_word = _mm512_load_si512(spread.byte);
  const __m512i first_bit = _mm512_set1_epi64(BITS == 3 ? 0x15120f0c09060300ll : 0x1c1814100c080400ll);
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)block.exponents));
  const __m512i marker = _mm512_set1_epi8((char)block.marker);
  const uint8_t* low = block.low + (row * block.units + begin) * kUnit;
  const uint8_t* codes = block.codes + (row * block.units + begin) * 8 * BITS;
  const uint8_t* listed = escapes;
  for (size_t unit = begin; unit < end; ++unit, low += kUnit, codes += 8 * BITS, out += 2 * kUnit) {
    const __m512i lows = _mm512_loadu_si512(low);
    const __m512i raw = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)codes));
    const __m512i spread_out = _mm512_multishift_epi64_epi8(first_bit, _mm512_permutexvar_epi8(bytes_of_word, raw));
    __m512i exponents = _mm512_permutexvar_epi8(spread_out, table);
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(exponents, marker);
    exponents = _mm512_mask_expand_epi8(exponents, escaped, _mm512_loadu_si512(listed));
    listed += _mm_popcnt_u64(escaped);
    const __m512i first = _mm512_unpacklo_epi8(lows, exponents), last = _mm512_unpackhi_epi8(lows, exponents);
    _mm512_storeu_si512(out, _mm512_shrdi_epi16(first, first, 1));
    _mm512_storeu_si512(out + 64, _mm512_shrdi_epi16(last, last, 1));
  }
  escapes = listed;
}
#undef TWOENDS_VBMI
#endif

inline Decode decoder(int bits) {
#if defined(TWOENDS_USE_AVX512)
  if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
    return bits == 3 ? decode_vbmi<3> : decode_vbmi<4>;
#endif
#if defined(TWOENDS_USE_AVX2) || defined(TWOENDS_USE_AVX512)
  return bits == 3 ? decode_avx2<3> : decode_avx2<4>;
#else
  return bits == 3 ? decode_plain<3> : decode_plain<4>;
#endif
}

// What the same units of a later row will need, on its way to the second-level cache.
inline void fetch_units(const PackedBlock& block, size_t row, size_t begin, size_t end) {
  if (row >= block.rows) return;
  const size_t first = row * block.units + begin, unit_codes = 8 * (size_t)block.bits;
  for (size_t unit = 0; unit < end - begin; ++unit) prefetch(block.low + (first + unit) * kUnit);
  for (size_t at = 0; at < (end - begin) * unit_codes; at += 64) prefetch(block.codes + first * unit_codes + at);
}

// Rows begin .. end - 1 as bf16 rows without gaps.
inline void unpack_rows(const PackedBlock& block, size_t begin, size_t end, uint8_t* out) {
  const Decode decode = decoder(block.bits);
  const size_t whole = block.cols / kUnit, row_bytes = block.cols * 2;
  for (size_t row = begin; row < end; ++row, out += row_bytes) {
    const uint8_t* escapes = block.first_escape(row);
    decode(block, row, 0, whole, escapes, out);
    if (whole == block.units) continue;
    uint8_t last[kUnit * 2];
    decode(block, row, whole, block.units, escapes, last);
    std::memcpy(out + whole * kUnit * 2, last, row_bytes - whole * kUnit * 2);
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
