// f32x16 as an array, for machines without a known instruction set; the compiler vectorises what it can.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace twoends {
namespace TWOENDS_ISA {

struct f32x16 {
  float v[16];
};

#define TWOENDS_EACH(expression) \
  f32x16 r;                      \
  for (int i = 0; i < 16; ++i) r.v[i] = expression; \
  return r

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) { TWOENDS_EACH(std::fma(x.v[i], y.v[i], z.v[i])); }
#else
// One rounding without the instruction. The product is exact in binary64; its sum with z is rounded to odd
// there, so that the second rounding, to binary32, can't meet a false tie. Two lanes at a time, the widest
// vector of binary64 that every 64-bit machine has.
typedef float two32 __attribute__((vector_size(8)));
typedef double two64 __attribute__((vector_size(16)));
typedef uint64_t two_bits __attribute__((vector_size(16)));

// Not inlined: it is long, and stands everywhere.
inline __attribute__((noinline)) f32x16 fma(const f32x16& x, const f32x16& y, const f32x16& z) {
  f32x16 r;
  for (int i = 0; i < 16; i += 2) {
    two32 a32, b32, c32;
    std::memcpy(&a32, x.v + i, sizeof a32);
    std::memcpy(&b32, y.v + i, sizeof b32);
    std::memcpy(&c32, z.v + i, sizeof c32);
    const two64 c = __builtin_convertvector(c32, two64);
    const two64 product = __builtin_convertvector(a32, two64) * __builtin_convertvector(b32, two64);
    const two64 sum = product + c, part = sum - product;
    const two64 error = (product - (sum - part)) + (c - part);
    const two_bits bits = (two_bits)sum;
    // Up in magnitude (+1) when the error points away from zero, else down (-1).
    const two_bits step = 1 - (((two_bits)error ^ bits) >> 63 << 1);
    const two_bits inexact = (two_bits)(error < 0) | (two_bits)(error > 0), even = (bits & 1) - 1;
    const two32 once = __builtin_convertvector((two64)(bits + (step & inexact & even)), two32);
    std::memcpy(r.v + i, &once, sizeof once);
  }
  return r;
}
#endif

inline f32x16 set1(float x) { TWOENDS_EACH(x); }
inline f32x16 zero() { return set1(0.f); }
// By memcpy: weights may lie at any address.
inline f32x16 load(const float* p) {
  f32x16 r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float* p, f32x16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline f32x16 load_n(const float* p, size_t n) {
  f32x16 r = zero();
  std::memcpy(r.v, p, n * sizeof(float));
  return r;
}
inline void store_n(float* p, f32x16 x, size_t n) { std::memcpy(p, x.v, n * sizeof(float)); }

inline f32x16 operator+(f32x16 x, f32x16 y) { TWOENDS_EACH(x.v[i] + y.v[i]); }
inline f32x16 operator-(f32x16 x, f32x16 y) { TWOENDS_EACH(x.v[i] - y.v[i]); }
inline f32x16 operator*(f32x16 x, f32x16 y) { TWOENDS_EACH(x.v[i] * y.v[i]); }
inline f32x16 operator/(f32x16 x, f32x16 y) { TWOENDS_EACH(x.v[i] / y.v[i]); }

// a < b ? x : y and a <= b ? x : y; a comparison with NaN is false.
inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) { TWOENDS_EACH(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
inline f32x16 select_le(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  TWOENDS_EACH(a.v[i] <= b.v[i] ? x.v[i] : y.v[i]);
}
inline uint32_t bits_of(float x) { return bit_cast<uint32_t>(x); }
inline f32x16 abs(f32x16 x) { TWOENDS_EACH(bit_cast<float>(bits_of(x.v[i]) & 0x7fffffffu)); }
inline f32x16 negate(f32x16 x) { TWOENDS_EACH(bit_cast<float>(bits_of(x.v[i]) ^ 0x80000000u)); }
inline f32x16 copy_sign(f32x16 x, f32x16 from) {
  TWOENDS_EACH(bit_cast<float>((bits_of(x.v[i]) & 0x7fffffffu) | (bits_of(from.v[i]) & 0x80000000u)));
}
// For |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction. A zero may lose its sign, which exp ignores.
inline f32x16 rint(f32x16 x) { TWOENDS_EACH((x.v[i] + 12582912.f) - 12582912.f); }

inline float power_of_two(int32_t n) { return bit_cast<float>((uint32_t)(n + 127) << 23); }
inline float scale1(float y, float n) {
  const int32_t exponent = (int32_t)(n == n ? n : 0.f);
  const int32_t half = exponent >> 1;
  return (y * power_of_two(half)) * power_of_two(exponent - half);
}

// (y * 2^(n >> 1)) * 2^(n - (n >> 1)) for integral n between -151 and 129; a NaN in n comes with one in y.
inline f32x16 scale_by_power(f32x16 y, f32x16 n) { TWOENDS_EACH(scale1(y.v[i], n.v[i])); }

// The upper half is added to the lower half, 16 -> 8 -> 4 -> 2 -> 1.
inline float reduce(f32x16 x) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) x.v[i] = x.v[i] + x.v[i + width];
  return x.v[0];
}

// lo, hi: elements 0..15 and 16..31 of a group; even, odd: elements 2l and 2l+1 in lane l.
inline void deinterleave(f32x16 lo, f32x16 hi, f32x16& even, f32x16& odd) {
  f32x16 e, o;
  for (int i = 0; i < 8; ++i) {
    e.v[i] = lo.v[2 * i], o.v[i] = lo.v[2 * i + 1];
    e.v[i + 8] = hi.v[2 * i], o.v[i + 8] = hi.v[2 * i + 1];
  }
  even = e, odd = o;
}

// Bytes are put together by shifts, so the machine's byte order does not matter.
inline f32x16 bf16_even(const uint8_t* p) {
  TWOENDS_EACH(bit_cast<float>((uint32_t)p[4 * i] << 16 | (uint32_t)p[4 * i + 1] << 24));
}
inline f32x16 bf16_odd(const uint8_t* p) {
  TWOENDS_EACH(bit_cast<float>((uint32_t)p[4 * i + 2] << 16 | (uint32_t)p[4 * i + 3] << 24));
}

// 16 packed bytes: lane l gets the low nibble of byte l (even) and its high nibble (odd).
inline void mxfp4(const uint8_t* p, f32x16& even, f32x16& odd) {
  static constexpr float values[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                       -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
  for (int i = 0; i < 16; ++i) even.v[i] = values[p[i] & 15], odd.v[i] = values[p[i] >> 4];
}

// Sixteen binary64 lanes.
struct f64x16 {
  double v[16];
};
inline f64x16 zero64() { return {}; }
inline f64x16 add_square(f64x16 acc, f32x16 x) {
  for (int i = 0; i < 16; ++i) acc.v[i] = acc.v[i] + (double)x.v[i] * (double)x.v[i];
  return acc;
}
inline double reduce(f64x16 x) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) x.v[i] = x.v[i] + x.v[i + width];
  return x.v[0];
}

inline void prefetch(const void*) {}

#undef TWOENDS_EACH
}  // namespace TWOENDS_ISA
}  // namespace twoends
