// Packed bf16 rows (kernels/pack_codec.py says what lies where): decoded into a little of the first-level cache,
// then multiplied by the same steps, in the same order, as rows that were never packed.
#pragma once
#include "lanes.h"
#include "packed_block.h"

#if defined(TWOENDS_USE_AVX512)
#include "packed_vbmi.h"
#endif

namespace twoends {
namespace TWOENDS_ISA {

// Expands `units` units of codes, their escapes from `listed`, which moves past those that were used. With
// `low` they become bf16 words in the order of columns; without, bytes in the order of places.
using Decode = void (*)(const PackedLevel& level, const uint8_t* codes, const uint8_t* low, size_t units,
                        const uint8_t*& listed, uint8_t* out);

inline void put_word(uint8_t* out, size_t column, uint8_t exponent, uint8_t low) {
  const uint16_t both = (uint16_t)(exponent << 8 | low), word = (uint16_t)(both >> 1 | both << 15);
  out[2 * column] = (uint8_t)word;
  out[2 * column + 1] = (uint8_t)(word >> 8);
}

inline size_t column_of(size_t place) { return (place >> 3 & 1) * 32 + (place >> 4) * 8 + (place & 7); }

template <int BITS, bool WORDS>
inline void decode_plain(const PackedLevel& level, const uint8_t* codes, const uint8_t* low, size_t units,
                         const uint8_t*& listed, uint8_t* out) {
  for (size_t unit = 0; unit < units; ++unit, out += WORDS ? 2 * kUnit : kUnit) {
    for (size_t place = 0; place < kUnit; place += 8, codes += BITS) {
      uint32_t eight = 0;
      for (int byte = 0; byte < BITS; ++byte) eight |= (uint32_t)codes[byte] << 8 * byte;
      for (size_t i = 0; i < 8; ++i, eight >>= BITS) {
        // Without a branch: a quarter of the codes of a level may be escapes.
        const uint32_t code = eight & ((1 << BITS) - 1), escaped = code == (1 << BITS) - 1;
        const uint8_t from_list = *listed, known = level.exponents[code];
        const uint8_t exponent = escaped ? from_list : known;
        listed += escaped;
        if constexpr (WORDS)
          put_word(out, column_of(place + i), exponent, low[place + i]);
        else
          out[place + i] = exponent;
      }
    }
    if constexpr (WORDS) low += kUnit;
  }
}

#if defined(TWOENDS_USE_AVX2) || defined(TWOENDS_USE_AVX512)

// 32 codes, one to a byte, from the 4, 8, 12 or 16 bytes at p; 16 bytes are read.
template <int BITS>
inline __m256i spread_codes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  if constexpr (BITS == 4) {
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    return _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
  } else if constexpr (BITS == 2) {
    // Each 32-bit word gets one byte, and each of its bytes two bits of that.
    __m256i four = _mm256_cvtepu8_epi32(bytes);
    four = _mm256_or_si256(four, _mm256_slli_epi32(four, 12));
    four = _mm256_or_si256(four, _mm256_slli_epi32(four, 6));
    return _mm256_and_si256(four, _mm256_set1_epi8(3));
  } else if constexpr (BITS == 1) {
    // Each byte of codes goes to the eight places that its bits are of.
    const __m256i where = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i eight = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), where);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(eight, bit), bit), _mm256_set1_epi8(1));
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

// For each set of escapes among eight places: which byte of a list goes to each.
struct ExpandTable {
  uint8_t from[256][8];
  constexpr ExpandTable() : from() {
    for (int set = 0; set < 256; ++set)
      for (int place = 0, next = 0; place < 8; ++place) from[set][place] = (set >> place & 1) != 0 ? next++ : 0;
  }
};
static constexpr ExpandTable kExpand;

// Bytes of `listed` in the order of the bits of `escaped`, 16 of them.
inline __m128i expand_list(uint32_t escaped, const uint8_t*& listed) {
  const uint32_t low_set = escaped & 255, high_set = escaped >> 8 & 255;
  const uint8_t* second = listed + __builtin_popcount(low_set);
  const __m128i low = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i*)listed),
                                       _mm_loadl_epi64((const __m128i*)kExpand.from[low_set]));
  const __m128i high = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i*)second),
                                        _mm_loadl_epi64((const __m128i*)kExpand.from[high_set]));
  listed = second + __builtin_popcount(high_set);
  return _mm_unpacklo_epi64(low, high);
}

template <int BITS, bool WORDS>
inline void decode_avx2(const PackedLevel& level, const uint8_t* codes, const uint8_t* low, size_t units,
                        const uint8_t*& listed, uint8_t* out) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)level.exponents));
  const __m256i marker = _mm256_set1_epi8((char)level.marker);
  for (size_t half = 0; half < units * 2; ++half, codes += 4 * BITS) {
    __m256i exponents = _mm256_shuffle_epi8(table, spread_codes<BITS>(codes));
    const __m256i is_escape = _mm256_cmpeq_epi8(exponents, marker);
    const uint32_t escaped = (uint32_t)_mm256_movemask_epi8(is_escape);
    if (escaped != 0) {
      const __m128i first = expand_list(escaped & 0xffff, listed);
      const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), expand_list(escaped >> 16, listed), 1);
      exponents = _mm256_blendv_epi8(exponents, both, is_escape);
    }
    if constexpr (WORDS) {
      const __m256i lows = _mm256_loadu_si256((const __m256i*)(low + half * 32));
      uint8_t* to = out + half / 2 * 2 * kUnit + half % 2 * 32;
      _mm256_storeu_si256((__m256i*)to, rotate_right_one(_mm256_unpacklo_epi8(lows, exponents)));
      _mm256_storeu_si256((__m256i*)(to + 64), rotate_right_one(_mm256_unpackhi_epi8(lows, exponents)));
    } else {
      _mm256_storeu_si256((__m256i*)(out + half * 32), exponents);
    }
  }
}
#endif

template <int BITS, bool WORDS>
inline Decode decoder_of() {
#if defined(TWOENDS_USE_AVX512)
  if (has_vbmi()) return decode_vbmi<BITS, WORDS>;
#endif
#if defined(TWOENDS_USE_AVX2) || defined(TWOENDS_USE_AVX512)
  return decode_avx2<BITS, WORDS>;
#else
  return decode_plain<BITS, WORDS>;
#endif
}

template <bool WORDS>
inline Decode decoder(int bits) {
  switch (bits) {
    case 1: return decoder_of<1, WORDS>();
    case 2: return decoder_of<2, WORDS>();
    case 3: return decoder_of<3, WORDS>();
    default: return decoder_of<4, WORDS>();
  }
}

// How the levels of one block are decoded.
struct Decoder {
  const PackedBlock& block;
  Decode words, bytes[kMostLevels];

  explicit Decoder(const PackedBlock& b) : block(b), words(decoder<true>(b.levels[0].bits)), bytes() {
    for (int k = 0; k < b.num_levels; ++k) bytes[k] = decoder<false>(b.levels[k].bits);
  }

  // The exponents that a row's first level lists, expanded into `list` if they are coded; `inner` takes those
  // of levels between.
  const uint8_t* list_of(size_t row, uint8_t* list, uint8_t* inner) const {
    const uint8_t* listed = block.first_escape(row);
    for (int k = block.num_levels - 1; k > 0; --k) {
      const PackedLevel& level = block.levels[k];
      const size_t first = level.first_group(row), groups = level.first_group(row + 1) - first;
      uint8_t* to = k == 1 ? list : inner;
      bytes[k](level, level.codes + first * level.bits, nullptr, (groups + 7) / 8, listed, to);
      listed = to;
    }
    return listed;
  }

  // Units begin .. end - 1 of a row as bf16 words, whole units (padding columns too).
  void decode(size_t row, size_t begin, size_t end, const uint8_t*& listed, uint8_t* out) const {
    const size_t unit = row * block.units + begin;
    words(block.levels[0], block.levels[0].codes + unit * 8 * block.levels[0].bits, block.low + unit * kUnit, end - begin,
          listed, out);
  }
};

// All values of one row of a block as bytes, whole units; `lists` has room for block.lists_bytes(1).
inline void unpack_bytes(const PackedBlock& block, size_t row, uint8_t* lists, uint8_t* out) {
  const Decoder decoder(block);
  const PackedLevel& level = block.levels[0];
  const uint8_t* listed = decoder.list_of(row, lists, lists + block.list_bytes());
  decoder.bytes[0](level, level.codes + row * block.units * 8 * level.bits, nullptr, block.units, listed, out);
}

// Fetches what lies behind `units` units that begin at unit `first` of the block.
inline void fetch_units(const PackedBlock& block, size_t first, size_t units) {
  const size_t unit_codes = 8 * (size_t)block.levels[0].bits;
  const uint8_t* low = block.low + first * kUnit + kFetchBytes;
  const uint8_t* codes = block.levels[0].codes + first * unit_codes + kFetchBytes;
  for (size_t unit = 0; unit < units; ++unit) prefetch(low + unit * kUnit);
  for (size_t at = 0; at < units * unit_codes; at += 64) prefetch(codes + at);
}

// Rows begin .. end - 1 as bf16 rows without gaps; `lists` has room for block.lists_bytes(1).
inline void unpack_rows(const PackedBlock& block, size_t begin, size_t end, uint8_t* lists, uint8_t* out) {
  const Decoder decoder(block);
  const size_t whole = block.cols / kUnit, row_bytes = block.cols * 2;
  for (size_t row = begin; row < end; ++row, out += row_bytes) {
    const uint8_t* listed = decoder.list_of(row, lists, lists + block.list_bytes());
    decoder.decode(row, 0, whole, listed, out);
    if (whole == block.units) continue;
    uint8_t last[kUnit * 2];
    decoder.decode(row, whole, block.units, listed, last);
    std::memcpy(out + whole * kUnit * 2, last, row_bytes - whole * kUnit * 2);
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
