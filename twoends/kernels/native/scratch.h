// Aligned memory for the life of one call, and the few sums that sizes need.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace twoends {

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Scratch = std::unique_ptr<float, Free>;

inline Scratch scratch_of(size_t floats) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, (floats == 0 ? 1 : floats) * sizeof(float)) != 0) throw std::bad_alloc();
  return Scratch(static_cast<float*>(p));
}

inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
inline size_t larger(size_t a, size_t b) { return a < b ? b : a; }
// What a row of `cols` elements takes once it is split.
inline size_t padded_cols(size_t cols) { return ceil_div(cols, 32) * 32; }

}  // namespace twoends
