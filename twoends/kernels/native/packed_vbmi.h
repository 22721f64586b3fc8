// Packed bf16 rows with AVX-512 VBMI and VBMI2: sixty-four codes a step, and products straight from registers.
#pragma once
#include "lanes.h"
#include "packed_block.h"

#define TWOENDS_VBMI __attribute__((target("avx512vbmi,avx512vbmi2,popcnt")))
#define TWOENDS_VBMI_INLINE TWOENDS_VBMI inline __attribute__((always_inline))

namespace twoends {
namespace TWOENDS_ISA {

inline bool has_vbmi() { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"); }

// What one level's codes are decoded with. Eight codes lie in BITS bytes: those go to one 64-bit word, and from
// there each to its byte. What else the byte holds above its code does not count: the table stands once for each
// value of those bits.
template <int BITS>
struct Vbmi {
  __m512i bytes_of_word, first_bit, table, marker;

  TWOENDS_VBMI_INLINE explicit Vbmi(const PackedLevel& level) {
    alignas(64) static constexpr auto spread = [] {
      struct Index {
        uint8_t byte[64];
      } index = {};
      for (int i = 0; i < 64; ++i) index.byte[i] = (uint8_t)(i / 8 * BITS + i % 8 % 4);
      return index;
    }();
    bytes_of_word = _mm512_load_si512(spread.byte);
    first_bit = _mm512_set1_epi64(BITS <= 2   ? 0x0e0c0a0806040200ll
                                  : BITS == 3 ? 0x15120f0c09060300ll
                                              : 0x1c1814100c080400ll);
    table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)level.exponents));
    marker = _mm512_set1_epi8((char)level.marker);
  }

  // The exponents of a unit; `listed` moves past the escapes that were used.
  TWOENDS_VBMI_INLINE __m512i exponents(const uint8_t* codes, const uint8_t*& listed) const {
    if constexpr (BITS == 1) {
      uint64_t escapes;
      std::memcpy(&escapes, codes, sizeof escapes);
      const __m512i known = _mm512_broadcastb_epi8(_mm512_castsi512_si128(table));
      const __m512i found = _mm512_mask_expand_epi8(known, escapes, _mm512_loadu_si512(listed));
      listed += _mm_popcnt_u64(escapes);
      return found;
    }
    const __m512i raw = BITS == 2 ? _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)codes))
                                  : _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)codes));
    const __m512i spread = _mm512_multishift_epi64_epi8(first_bit, _mm512_permutexvar_epi8(bytes_of_word, raw));
    const __m512i found = _mm512_permutexvar_epi8(spread, table);
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(found, marker);
    const __m512i all = _mm512_mask_expand_epi8(found, escaped, _mm512_loadu_si512(listed));
    listed += _mm_popcnt_u64(escaped);
    return all;
  }

  // A unit as bf16 words: columns 0 .. 31 and 32 .. 63.
  TWOENDS_VBMI_INLINE void words(const uint8_t* codes, const uint8_t* low, const uint8_t*& listed, __m512i& first,
                                 __m512i& last) const {
    const __m512i lows = _mm512_loadu_si512(low), high = exponents(codes, listed);
    first = _mm512_unpacklo_epi8(lows, high), last = _mm512_unpackhi_epi8(lows, high);
    first = _mm512_shrdi_epi16(first, first, 1), last = _mm512_shrdi_epi16(last, last, 1);
  }
};

template <int BITS, bool WORDS>
TWOENDS_VBMI inline void decode_vbmi(const PackedLevel& level, const uint8_t* codes, const uint8_t* low, size_t units,
                                     const uint8_t*& listed, uint8_t* out) {
  const Vbmi<BITS> vbmi(level);
  const uint8_t* at = listed;
  for (size_t unit = 0; unit < units; ++unit, codes += 8 * BITS) {
    if constexpr (WORDS) {
      __m512i first, last;
      vbmi.words(codes, low + unit * kUnit, at, first, last);
      _mm512_storeu_si512(out + unit * 2 * kUnit, first);
      _mm512_storeu_si512(out + unit * 2 * kUnit + kUnit, last);
    } else {
      _mm512_storeu_si512(out + unit * kUnit, vbmi.exponents(codes, at));
    }
  }
  listed = at;
}

// acc[r][t] takes units 0 .. units - 1 of R rows, `step` apart, from row `row` on, met with T inputs. `listed` are
// the rows' escapes.
template <int BITS, int R, int T>
TWOENDS_VBMI inline void dot_vbmi(const PackedBlock& block, size_t row, size_t step, size_t units, const float* x,
                                  size_t x_stride, const uint8_t* (&listed)[R], f32x16 (&acc)[R][T]) {
  const Vbmi<BITS> vbmi(block.levels[0]);
  const uint8_t *low[R], *codes[R], *at[R];
  __m512 sum[R][T];
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    low[r] = block.low + (row + r * step) * block.units * kUnit;
    codes[r] = block.levels[0].codes + (row + r * step) * block.units * 8 * BITS;
    at[r] = listed[r];
    TWOENDS_UNROLL
    for (int t = 0; t < T; ++t) sum[r][t] = acc[r][t].v;
  }
  for (size_t unit = 0; unit < units; ++unit, x += kUnit) {
    TWOENDS_UNROLL
    for (int r = 0; r < R; ++r) {
      __m512i first, last;
      vbmi.words(codes[r] + unit * 8 * BITS, low[r] + unit * kUnit, at[r], first, last);
      const __m512i mask = _mm512_set1_epi32((int)0xffff0000);
      const __m512 w[4] = {
          _mm512_castsi512_ps(_mm512_slli_epi32(first, 16)), _mm512_castsi512_ps(_mm512_and_si512(first, mask)),
          _mm512_castsi512_ps(_mm512_slli_epi32(last, 16)), _mm512_castsi512_ps(_mm512_and_si512(last, mask))};
      TWOENDS_UNROLL
      for (int t = 0; t < T; ++t)
        TWOENDS_UNROLL
        for (int i = 0; i < 4; ++i)
          sum[r][t] = _mm512_fmadd_ps(w[i], _mm512_loadu_ps(x + t * x_stride + i * kLanes), sum[r][t]);
      prefetch(low[r] + unit * kUnit + kFetchBytes);
      prefetch(codes[r] + unit * 8 * BITS + kFetchBytes);
    }
  }
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    listed[r] = at[r];
    TWOENDS_UNROLL
    for (int t = 0; t < T; ++t) acc[r][t].v = sum[r][t];
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
