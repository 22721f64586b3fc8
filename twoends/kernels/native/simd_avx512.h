// f32x16 as one zmm register (AVX-512 F, BW, VL, DQ).
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace twoends {
namespace TWOENDS_ISA {

struct f32x16 {
  __m512 v;
};

inline __mmask16 first_lanes(size_t n) { return (__mmask16)((1u << n) - 1u); }

inline f32x16 zero() { return {_mm512_setzero_ps()}; }
inline f32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load_n(const float* p, size_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float* p, f32x16 a, size_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// a < b ? x : y and a <= b ? x : y; a comparison with NaN is false.
inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline f32x16 select_le(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ), y.v, x.v)};
}
inline f32x16 abs(f32x16 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
inline f32x16 negate(f32x16 a) { return {_mm512_xor_ps(_mm512_set1_ps(-0.0f), a.v)}; }
inline f32x16 copy_sign(f32x16 a, f32x16 sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, a.v), _mm512_and_ps(bit, sign.v))};
}
inline f32x16 rint(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// (y * 2^(n >> 1)) * 2^(n - (n >> 1)) for integral n between -151 and 129; a NaN in n comes with one in y.
inline f32x16 scale_by_power(f32x16 y, f32x16 n) {
  const __m512i exponent = _mm512_cvtps_epi32(n.v);
  const __m512i half = _mm512_srai_epi32(exponent, 1);
  const __m512i bias = _mm512_set1_epi32(127);
  const __m512i a = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
  const __m512i b = _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(exponent, half), bias), 23);
  return {_mm512_mul_ps(_mm512_mul_ps(y.v, _mm512_castsi512_ps(a)), _mm512_castsi512_ps(b))};
}

// The upper half is added to the lower half, 16 -> 8 -> 4 -> 2 -> 1.
inline float reduce(f32x16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// lo, hi: elements 0..15 and 16..31 of a group; even, odd: elements 2l and 2l+1 in lane l.
inline void deinterleave(f32x16 lo, f32x16 hi, f32x16& even, f32x16& odd) {
  const __m512i pick = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i next = _mm512_add_epi32(pick, _mm512_set1_epi32(1));
  even.v = _mm512_permutex2var_ps(lo.v, pick, hi.v);
  odd.v = _mm512_permutex2var_ps(lo.v, next, hi.v);
}

inline f32x16 bf16_even(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline f32x16 bf16_odd(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)))};
}

// 16 packed bytes: lane l gets the low nibble of byte l (even) and its high nibble (odd).
inline void mxfp4(const uint8_t* p, f32x16& even, f32x16& odd) {
  const __m512 values = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f,
                                       -3.f, -4.f, -6.f);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  even.v = _mm512_permutexvar_ps(bytes, values);
  odd.v = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}

// Sixteen binary64 lanes.
struct f64x16 {
  __m512d lo, hi;
};
inline f64x16 zero64() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline f64x16 add_square(f64x16 acc, f32x16 x) {
  const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
  const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
  return {_mm512_add_pd(acc.lo, _mm512_mul_pd(lo, lo)), _mm512_add_pd(acc.hi, _mm512_mul_pd(hi, hi))};
}
inline double reduce(f64x16 a) {
  const __m512d eight = _mm512_add_pd(a.lo, a.hi);
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// Towards the second-level cache.
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace TWOENDS_ISA
}  // namespace twoends
