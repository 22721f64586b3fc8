// The walk of a row in groups of 32 (docs/contracts.md, "Lanes and dot"), for each kind of element.
#pragma once
#include <cstring>

#include "jobs.h"
#include "simd.h"

namespace twoends {
namespace TWOENDS_ISA {

// How one group of 32 elements lies in memory, and its even and odd elements.
struct Bf16 {
  static constexpr size_t element_bytes = 2;
  // Whether even and odd elements by themselves cost no more than both together.
  static constexpr bool separable = true;
  static TWOENDS_INLINE f32x16 even(const uint8_t* p) { return bf16_even(p); }
  static TWOENDS_INLINE f32x16 odd(const uint8_t* p) { return bf16_odd(p); }
  static TWOENDS_INLINE void pair(const uint8_t* p, f32x16& e, f32x16& o) {
    e = even(p);
    o = odd(p);
  }
};
struct F32 {
  static constexpr size_t element_bytes = 4;
  static constexpr bool separable = false;
  static TWOENDS_INLINE void pair(const uint8_t* p, f32x16& e, f32x16& o) {
    deinterleave(load((const float*)p), load((const float*)p + 16), e, o);
  }
};

// The last, ragged group of a row, filled with zeros, in a form that W::pair reads.
template <class W>
struct Tail {
  alignas(64) uint8_t bytes[kGroup * W::element_bytes];
  Tail(const uint8_t* p, size_t num_elements) {
    std::memset(bytes, 0, sizeof bytes);
    std::memcpy(bytes, p, num_elements * W::element_bytes);
  }
};

// One row of x as groups of 16 even then 16 odd elements, the tail filled with zeros.
inline void split_row(const float* x, size_t cols, float* out) {
  const size_t whole = cols / kGroup;
  f32x16 even, odd;
  for (size_t g = 0; g < whole; ++g) {
    F32::pair((const uint8_t*)(x + g * kGroup), even, odd);
    store(out + g * kGroup, even);
    store(out + g * kGroup + kLanes, odd);
  }
  if (cols % kGroup != 0) {
    const Tail<F32> tail((const uint8_t*)(x + whole * kGroup), cols % kGroup);
    F32::pair(tail.bytes, even, odd);
    store(out + whole * kGroup, even);
    store(out + whole * kGroup + kLanes, odd);
  }
}

inline void split(const float* x, size_t count, size_t cols, float* out) {
  for (size_t t = 0; t < count; ++t) split_row(x + t * cols, cols, out + t * groups_of(cols) * kGroup);
}

// The reverse: groups of even and odd elements back to their order.
inline void join_row(const float* split, size_t cols, float* out) {
  for (size_t c = 0; c < cols; ++c) {
    const size_t within = c % kGroup;
    out[c] = split[c - within + within / 2 + (within & 1) * kLanes];
  }
}

// dot of one unsplit row with a split x.
inline float dot_row(const float* w, const float* x_split, size_t cols) {
  const size_t whole = cols / kGroup;
  f32x16 acc = zero(), even, odd;
  for (size_t g = 0; g < whole; ++g) {
    F32::pair((const uint8_t*)(w + g * kGroup), even, odd);
    acc = fma(even, load(x_split + g * kGroup), acc);
    acc = fma(odd, load(x_split + g * kGroup + kLanes), acc);
  }
  if (cols % kGroup != 0) {
    const Tail<F32> tail((const uint8_t*)(w + whole * kGroup), cols % kGroup);
    F32::pair(tail.bytes, even, odd);
    acc = fma(even, load(x_split + whole * kGroup), acc);
    acc = fma(odd, load(x_split + whole * kGroup + kLanes), acc);
  }
  return reduce(acc);
}

inline double sum_of_squares(const float* x, size_t cols) {
  const size_t whole = cols / kGroup;
  f64x16 acc = zero64();
  f32x16 even, odd;
  for (size_t g = 0; g < whole; ++g) {
    F32::pair((const uint8_t*)(x + g * kGroup), even, odd);
    acc = add_square(add_square(acc, even), odd);
  }
  if (cols % kGroup != 0) {
    const Tail<F32> tail((const uint8_t*)(x + whole * kGroup), cols % kGroup);
    F32::pair(tail.bytes, even, odd);
    acc = add_square(add_square(acc, even), odd);
  }
  return reduce(acc);
}

// Calls body(first element, number of elements <= 16) over pieces of 16 elements.
template <class Body>
TWOENDS_INLINE void for_vectors(size_t size, size_t begin, size_t end, Body body) {
  for (size_t piece = begin; piece < end; ++piece) {
    const size_t at = piece * kLanes;
    body(at, smaller(kLanes, size - at));
  }
}

TWOENDS_INLINE f32x16 load_some(const float* p, size_t n) { return n == kLanes ? load(p) : load_n(p, n); }
TWOENDS_INLINE void store_some(float* p, f32x16 a, size_t n) {
  if (n == kLanes)
    store(p, a);
  else
    store_n(p, a, n);
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
