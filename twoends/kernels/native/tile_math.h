// Products and transposes of small matrices that lie in scratch: row-major, columns in whole vectors, 16 rows
// or a multiple of it. Every element is one chain of fused additions in the order of the inner index, so how
// the elements are blocked has no effect on any bit.
#pragma once
#include "simd.h"

namespace twoends {
namespace TWOENDS_ISA {

constexpr size_t kTile = 16;

// Accumulators that the registers hold beside what they are fed from.
#if defined(TWOENDS_USE_AVX512) || defined(TWOENDS_USE_NEON)
constexpr int kAccumulators = 16;
#else
constexpr int kAccumulators = 4;
#endif

// A matrix as the left factor: element (i, p) is at[i * row + p * col], so that a transpose costs nothing.
struct Left {
  const float* at;
  size_t row, col;
};

template <int VECTORS, bool ADD>
inline void product_columns(size_t rows, size_t inner, Left a, const float* b, size_t b_row, float* c, size_t c_row) {
  constexpr int ROWS = kAccumulators / VECTORS;
  for (size_t i = 0; i < rows; i += ROWS) {
    f32x16 acc[ROWS][VECTORS];
    TWOENDS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      TWOENDS_UNROLL
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = ADD ? load(c + (i + r) * c_row + v * kLanes) : zero();
    }
    for (size_t p = 0; p < inner; ++p) {
      f32x16 row[VECTORS];
      TWOENDS_UNROLL
      for (int v = 0; v < VECTORS; ++v) row[v] = load(b + p * b_row + v * kLanes);
      TWOENDS_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const f32x16 x = set1(a.at[(i + r) * a.row + p * a.col]);
        TWOENDS_UNROLL
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(x, row[v], acc[r][v]);
      }
    }
    TWOENDS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      TWOENDS_UNROLL
      for (int v = 0; v < VECTORS; ++v) store(c + (i + r) * c_row + v * kLanes, acc[r][v]);
    }
  }
}

// c [rows, cols] = a b, or c + a b; a [rows, inner], b [inner, cols].
template <bool ADD>
inline void product(size_t rows, size_t inner, size_t cols, Left a, const float* b, float* c) {
  constexpr int WIDE = kAccumulators < 4 ? kAccumulators : 4;
  size_t at = 0;
  for (; at + WIDE * kLanes <= cols; at += WIDE * kLanes)
    product_columns<WIDE, ADD>(rows, inner, a, b + at, cols, c + at, cols);
  for (; at < cols; at += kLanes) product_columns<1, ADD>(rows, inner, a, b + at, cols, c + at, cols);
}

// 256 numbers counted by row and column: each round moves the last bit of their number to the front, and after
// four the column is the row.
TWOENDS_INLINE void transpose_square(const float* from, size_t from_row, float* to, size_t to_row) {
  f32x16 a[kTile], b[kTile];
  TWOENDS_UNROLL
  for (size_t i = 0; i < kTile; ++i) a[i] = load(from + i * from_row);
  TWOENDS_UNROLL
  for (int round = 0; round < 2; ++round) {
    TWOENDS_UNROLL
    for (size_t i = 0; i < kTile / 2; ++i) deinterleave(a[2 * i], a[2 * i + 1], b[i], b[i + 8]);
    TWOENDS_UNROLL
    for (size_t i = 0; i < kTile / 2; ++i) deinterleave(b[2 * i], b[2 * i + 1], a[i], a[i + 8]);
  }
  TWOENDS_UNROLL
  for (size_t i = 0; i < kTile; ++i) store(to + i * to_row, a[i]);
}

// to [cols, rows] of from [rows, cols]; both sides multiples of 16.
inline void transpose(const float* from, size_t rows, size_t cols, float* to) {
  for (size_t i = 0; i < rows; i += kTile)
    for (size_t j = 0; j < cols; j += kTile) transpose_square(from + i * cols + j, cols, to + j * rows + i, rows);
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
