// f32x16 as four q registers (arm64).
#pragma once
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace twoends {
namespace TWOENDS_ISA {

struct f32x16 {
  float32x4_t q[4];
};

inline f32x16 set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
inline f32x16 zero() { return set1(0.f); }
inline f32x16 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline void store(float* p, f32x16 x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.q[i]);
}
inline f32x16 load_n(const float* p, size_t n) {
  float padded[16] = {};
  std::memcpy(padded, p, n * sizeof(float));
  return load(padded);
}
inline void store_n(float* p, f32x16 x, size_t n) {
  float whole[16];
  store(whole, x);
  std::memcpy(p, whole, n * sizeof(float));
}

#define TWOENDS_EACH(expression) \
  f32x16 r;                      \
  for (int i = 0; i < 4; ++i) r.q[i] = expression; \
  return r

inline f32x16 operator+(f32x16 x, f32x16 y) { TWOENDS_EACH(vaddq_f32(x.q[i], y.q[i])); }
inline f32x16 operator-(f32x16 x, f32x16 y) { TWOENDS_EACH(vsubq_f32(x.q[i], y.q[i])); }
inline f32x16 operator*(f32x16 x, f32x16 y) { TWOENDS_EACH(vmulq_f32(x.q[i], y.q[i])); }
inline f32x16 operator/(f32x16 x, f32x16 y) { TWOENDS_EACH(vdivq_f32(x.q[i], y.q[i])); }
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) { TWOENDS_EACH(vfmaq_f32(z.q[i], x.q[i], y.q[i])); }

// a < b ? x : y and a <= b ? x : y; a comparison with NaN is false.
inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  TWOENDS_EACH(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), x.q[i], y.q[i]));
}
inline f32x16 select_le(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  TWOENDS_EACH(vbslq_f32(vcleq_f32(a.q[i], b.q[i]), x.q[i], y.q[i]));
}
inline f32x16 abs(f32x16 x) { TWOENDS_EACH(vabsq_f32(x.q[i])); }
inline f32x16 negate(f32x16 x) { TWOENDS_EACH(vnegq_f32(x.q[i])); }
inline f32x16 copy_sign(f32x16 x, f32x16 from) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  TWOENDS_EACH(vbslq_f32(sign, from.q[i], x.q[i]));
}
inline f32x16 rint(f32x16 x) { TWOENDS_EACH(vrndnq_f32(x.q[i])); }

inline float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
inline float32x4_t scale_quarter(float32x4_t y, float32x4_t n) {
  const int32x4_t exponent = vcvtq_s32_f32(n);
  const int32x4_t half = vshrq_n_s32(exponent, 1);
  return vmulq_f32(vmulq_f32(y, power_of_two(half)), power_of_two(vsubq_s32(exponent, half)));
}

// (y * 2^(n >> 1)) * 2^(n - (n >> 1)) for integral n between -151 and 129; a NaN in n comes with one in y.
inline f32x16 scale_by_power(f32x16 y, f32x16 n) { TWOENDS_EACH(scale_quarter(y.q[i], n.q[i])); }

// The upper half is added to the lower half, 16 -> 8 -> 4 -> 2 -> 1.
inline float reduce(f32x16 x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// lo, hi: elements 0..15 and 16..31 of a group; even, odd: elements 2l and 2l+1 in lane l.
inline void deinterleave(f32x16 lo, f32x16 hi, f32x16& even, f32x16& odd) {
  const f32x16 e = {{vuzp1q_f32(lo.q[0], lo.q[1]), vuzp1q_f32(lo.q[2], lo.q[3]), vuzp1q_f32(hi.q[0], hi.q[1]),
                     vuzp1q_f32(hi.q[2], hi.q[3])}};
  odd = {{vuzp2q_f32(lo.q[0], lo.q[1]), vuzp2q_f32(lo.q[2], lo.q[3]), vuzp2q_f32(hi.q[0], hi.q[1]),
          vuzp2q_f32(hi.q[2], hi.q[3])}};
  even = e;
}

inline uint32x4_t load_words(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
inline f32x16 bf16_even(const uint8_t* p) {
  TWOENDS_EACH(vreinterpretq_f32_u32(vshlq_n_u32(load_words(p + 16 * i), 16)));
}
inline f32x16 bf16_odd(const uint8_t* p) {
  const uint32x4_t high = vdupq_n_u32(0xffff0000u);
  TWOENDS_EACH(vreinterpretq_f32_u32(vandq_u32(load_words(p + 16 * i), high)));
}

// The upper sixteen bits of each E2M1 value, looked up as two bytes.
inline f32x16 e2m1(uint8x16_t code) {
  const uint8x16_t low_bytes = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  const uint8x16_t high_bytes = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  const uint8x16_t low = vqtbl1q_u8(low_bytes, code), high = vqtbl1q_u8(high_bytes, code);
  const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high));
  const uint16x8_t last = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(first), 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(last), 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(last), 16))}};
}

// 16 packed bytes: lane l gets the low nibble of byte l (even) and its high nibble (odd).
inline void mxfp4(const uint8_t* p, f32x16& even, f32x16& odd) {
  const uint8x16_t bytes = vld1q_u8(p);
  even = e2m1(vandq_u8(bytes, vdupq_n_u8(15)));
  odd = e2m1(vshrq_n_u8(bytes, 4));
}

// Sixteen binary64 lanes.
struct f64x16 {
  float64x2_t d[8];
};
inline f64x16 zero64() {
  f64x16 r;
  for (int i = 0; i < 8; ++i) r.d[i] = vdupq_n_f64(0.0);
  return r;
}
inline f64x16 add_square(f64x16 acc, f32x16 x) {
  for (int i = 0; i < 4; ++i) {
    const float64x2_t lo = vcvt_f64_f32(vget_low_f32(x.q[i])), hi = vcvt_high_f64_f32(x.q[i]);
    acc.d[2 * i] = vaddq_f64(acc.d[2 * i], vmulq_f64(lo, lo));
    acc.d[2 * i + 1] = vaddq_f64(acc.d[2 * i + 1], vmulq_f64(hi, hi));
  }
  return acc;
}
inline double reduce(f64x16 x) {
  for (int width = 4; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) x.d[i] = vaddq_f64(x.d[i], x.d[i + width]);
  return vgetq_lane_f64(x.d[0], 0) + vgetq_lane_f64(x.d[0], 1);
}

// Towards the second-level cache.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef TWOENDS_EACH
}  // namespace TWOENDS_ISA
}  // namespace twoends
