// f32x16 as two ymm registers (AVX2, FMA).
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace twoends {
namespace TWOENDS_ISA {

struct f32x16 {
  __m256 a, b;
};

// All bits in the lanes first .. first + 7 that lie below n.
inline __m256i lanes_below(size_t n, int first) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
}

inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load_n(const float* p, size_t n) {
  return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
}
inline void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_n(float* p, f32x16 x, size_t n) {
  _mm256_maskstore_ps(p, lanes_below(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, lanes_below(n, 8), x.b);
}

inline f32x16 operator+(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline f32x16 operator-(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline f32x16 operator*(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline f32x16 operator/(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

// a < b ? x : y and a <= b ? x : y; a comparison with NaN is false.
inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
inline f32x16 select_le(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LE_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LE_OQ))};
}
inline f32x16 abs(f32x16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline f32x16 negate(f32x16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(sign, x.a), _mm256_xor_ps(sign, x.b)};
}
inline f32x16 copy_sign(f32x16 x, f32x16 from) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, x.a), _mm256_and_ps(sign, from.a)),
          _mm256_or_ps(_mm256_andnot_ps(sign, x.b), _mm256_and_ps(sign, from.b))};
}
inline f32x16 rint(f32x16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}

inline __m256 scale_half(__m256 y, __m256 n) {
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}

// (y * 2^(n >> 1)) * 2^(n - (n >> 1)) for integral n between -151 and 129; a NaN in n comes with one in y.
inline f32x16 scale_by_power(f32x16 y, f32x16 n) { return {scale_half(y.a, n.a), scale_half(y.b, n.b)}; }

// The upper half is added to the lower half, 16 -> 8 -> 4 -> 2 -> 1.
inline float reduce(f32x16 x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// lo, hi: elements 0..15 and 16..31 of a group; even, odd: elements 2l and 2l+1 in lane l.
inline void deinterleave(f32x16 lo, f32x16 hi, f32x16& even, f32x16& odd) {
  const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
  even.a = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(lo.a, lo.b, 0x88), order);
  odd.a = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(lo.a, lo.b, 0xdd), order);
  even.b = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(hi.a, hi.b, 0x88), order);
  odd.b = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(hi.a, hi.b, 0xdd), order);
}

inline __m256i load_words(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline f32x16 bf16_even(const uint8_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load_words(p + 32), 16))};
}
inline f32x16 bf16_odd(const uint8_t* p) {
  const __m256i high = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(load_words(p), high)),
          _mm256_castsi256_ps(_mm256_and_si256(load_words(p + 32), high))};
}

// Magnitude by the low three bits of `code`; the sign is bit 31 of `sign_source`.
inline __m256 e2m1(__m256i code, __m256i sign_source) {
  const __m256 magnitudes = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
  const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(sign_source), _mm256_set1_ps(-0.0f));
  return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, code), sign);
}

// 16 packed bytes: lane l gets the low nibble of byte l (even) and its high nibble (odd).
inline void mxfp4(const uint8_t* p, f32x16& even, f32x16& odd) {
  const __m256i lo = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i hi = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)));
  even.a = e2m1(lo, _mm256_slli_epi32(lo, 28));
  even.b = e2m1(hi, _mm256_slli_epi32(hi, 28));
  odd.a = e2m1(_mm256_srli_epi32(lo, 4), _mm256_slli_epi32(lo, 24));
  odd.b = e2m1(_mm256_srli_epi32(hi, 4), _mm256_slli_epi32(hi, 24));
}

// Sixteen binary64 lanes.
struct f64x16 {
  __m256d v[4];
};
inline f64x16 zero64() {
  const __m256d z = _mm256_setzero_pd();
  return {{z, z, z, z}};
}
inline __m256d add_square(__m256d acc, __m128 x) {
  const __m256d wide = _mm256_cvtps_pd(x);
  return _mm256_add_pd(acc, _mm256_mul_pd(wide, wide));
}
inline f64x16 add_square(f64x16 acc, f32x16 x) {
  return {{add_square(acc.v[0], _mm256_castps256_ps128(x.a)), add_square(acc.v[1], _mm256_extractf128_ps(x.a, 1)),
           add_square(acc.v[2], _mm256_castps256_ps128(x.b)), add_square(acc.v[3], _mm256_extractf128_ps(x.b, 1))}};
}
inline double reduce(f64x16 x) {
  const __m256d four = _mm256_add_pd(_mm256_add_pd(x.v[0], x.v[2]), _mm256_add_pd(x.v[1], x.v[3]));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// Towards the second-level cache.
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace TWOENDS_ISA
}  // namespace twoends
