// Rounding to MXFP8: E4M3 values and a power of two for each 32 of them.
#pragma once
#include "lanes.h"

namespace twoends {
namespace TWOENDS_ISA {

inline uint32_t word_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_from(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The biased exponent of 2^ceil(log2(largest / 448)), at least 0, which stands for 2^-127.
inline uint32_t mxfp8_scale(uint32_t largest_bits) {
  const uint32_t exponent = largest_bits >> 23, above = (largest_bits & 0x7fffffu) > 0x600000u;
  return exponent + above < 8 ? 0 : exponent + above - 8;
}

// In place is allowed.
inline void mxfp8_block(const float* x, float* out) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kGroup; ++i) {
    const uint32_t magnitude = word_of(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= 0x7f800000u) {
    for (size_t i = 0; i < kGroup; ++i) out[i] = float_from(0x7fc00000u);
    return;
  }
  const uint32_t biased = mxfp8_scale(largest);
  const float scale = float_from(biased == 0 ? 0x00400000u : biased << 23), inverse = float_from((254 - biased) << 23);
  for (size_t i = 0; i < kGroup; ++i) {
    const uint32_t sign = word_of(x[i]) & 0x80000000u;
    const float scaled = float_from(word_of(x[i]) & 0x7fffffffu) * inverse;
    const uint32_t bits = word_of(scaled);
    const float kept = float_from((bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u);
    const float small = (scaled + 16384.f) - 16384.f;
    out[i] = float_from(word_of((scaled < 0.015625f ? small : kept) * scale) | sign);
  }
}

inline void mxfp8(Mxfp8Job& job, size_t begin, size_t end, size_t) {
  for (size_t block = begin; block < end; ++block) mxfp8_block(job.x + block * kGroup, job.out + block * kGroup);
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
