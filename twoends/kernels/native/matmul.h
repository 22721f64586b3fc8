// Matrix products: every output element is one dot; blocks of rows and inputs share loads, never sums.
#pragma once
#include <cmath>

#include "packed.h"

namespace twoends {
namespace TWOENDS_ISA {

// 2^(byte - 127): byte 0 is a subnormal, 255 is NaN.
struct ScaleTable {
  uint32_t bits[256];
  constexpr ScaleTable() : bits() {
    for (uint32_t byte = 1; byte < 255; ++byte) bits[byte] = byte << 23;
    bits[0] = 0x00400000u;
    bits[255] = 0x7fc00000u;
  }
};
static constexpr ScaleTable kScales;

TWOENDS_INLINE f32x16 scale_of(uint8_t byte) {
  float s;
  std::memcpy(&s, &kScales.bits[byte], sizeof s);
  return set1(s);
}

// acc[r][t] = fma(w[r], x[t], acc[r][t]) for one half, even or odd, of a group.
template <int R, int T>
TWOENDS_INLINE void half_step(const f32x16 (&w)[R], const float* x, size_t x_stride, f32x16 (&acc)[R][T]) {
  TWOENDS_UNROLL
  for (int t = 0; t < T; ++t) {
    const f32x16 xt = load(x + t * x_stride);
    TWOENDS_UNROLL
    for (int r = 0; r < R; ++r) acc[r][t] = fma(w[r], xt, acc[r][t]);
  }
}

// One group of R rows met with the same group of T inputs.
template <class W, int R, int T>
TWOENDS_INLINE void plain_step(const uint8_t* const (&w)[R], const float* x, size_t x_stride, f32x16 (&acc)[R][T]) {
  f32x16 even[R], odd[R];
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    if constexpr (W::separable)
      even[r] = W::even(w[r]);
    else
      W::pair(w[r], even[r], odd[r]);
  }
  half_step<R, T>(even, x, x_stride, acc);
  if constexpr (W::separable) {
    TWOENDS_UNROLL
    for (int r = 0; r < R; ++r) odd[r] = W::odd(w[r]);
  }
  half_step<R, T>(odd, x + kLanes, x_stride, acc);
}

// A block is R rows, `step` apart, against T inputs.
template <class W, int R, int T>
inline void plain_block(const MatmulJob& job, size_t row, size_t step, size_t first_x) {
  const size_t cols = job.w.cols, whole = cols / kGroup, x_stride = groups_of(cols) * kGroup;
  const size_t row_bytes = cols * W::element_bytes;
  const float* x = job.x_split + first_x * x_stride;
  const uint8_t* w[R];
  f32x16 acc[R][T];
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    w[r] = job.w.data + (row + r * step) * row_bytes;
    TWOENDS_UNROLL
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  for (size_t g = 0; g < whole; ++g) {
    plain_step<W, R, T>(w, x + g * kGroup, x_stride, acc);
    TWOENDS_UNROLL
    for (int r = 0; r < R; ++r) w[r] += kGroup * W::element_bytes;
  }
  if (cols % kGroup != 0) {
    for (int r = 0; r < R; ++r) {
      const Tail<W> tail(w[r], cols % kGroup);
      f32x16 even, odd;
      W::pair(tail.bytes, even, odd);
      for (int t = 0; t < T; ++t) {
        const float* last = x + t * x_stride + whole * kGroup;
        acc[r][t] = fma(odd, load(last + kLanes), fma(even, load(last), acc[r][t]));
      }
    }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) job.out[(first_x + t) * job.out_stride + row + r * step] = reduce(acc[r][t]);
}

// Decoding keeps the hardware from running far enough ahead of these streams; a kilobyte or two is enough.
constexpr size_t kAhead = 2048;

// MXFP4: p on the unscaled values, then one fma with the scale of the group.
template <int R, int T>
TWOENDS_INLINE void mxfp4_step(const uint8_t* const (&w)[R], const uint8_t* const (&scale)[R], size_t g,
                               const float* x, size_t x_stride, f32x16 (&acc)[R][T]) {
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    f32x16 even, odd;
    mxfp4(w[r] + g * kLanes, even, odd);
    const f32x16 s = scale_of(scale[r][g]);
    TWOENDS_UNROLL
    for (int t = 0; t < T; ++t) {
      const float* xg = x + t * x_stride + g * kGroup;
      const f32x16 p = fma(odd, load(xg + kLanes), even * load(xg));
      acc[r][t] = fma(p, s, acc[r][t]);
    }
  }
}

template <int R, int T>
inline void mxfp4_block(const MatmulJob& job, size_t row, size_t step, size_t first_x) {
  const size_t groups = job.w.cols / kGroup, x_stride = job.w.cols;
  const float* x = job.x_split + first_x * x_stride;
  const uint8_t *w[R], *scale[R];
  f32x16 acc[R][T];
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    w[r] = job.w.data + (row + r * step) * groups * kLanes;
    scale[r] = job.w.scale + (row + r * step) * groups;
    TWOENDS_UNROLL
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  size_t g = 0;
  for (; g + 4 <= groups; g += 4) {
    TWOENDS_UNROLL
    for (int u = 0; u < 4; ++u) mxfp4_step<R, T>(w, scale, g + u, x, x_stride, acc);
    TWOENDS_UNROLL
    for (int r = 0; r < R; ++r) prefetch(w[r] + g * kLanes + kAhead);
  }
  for (; g < groups; ++g) mxfp4_step<R, T>(w, scale, g, x, x_stride, acc);
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) job.out[(first_x + t) * job.out_stride + row + r * step] = reduce(acc[r][t]);
}

// How many rows are met with T inputs at once: as many sums as the registers hold, and enough of them to hide
// the latency of fma. `inputs` is the most inputs at once.
struct PlainBf16 {
  template <int R, int T>
  static void block(const MatmulJob& job, size_t row, size_t step, size_t x) {
    plain_block<Bf16, R, T>(job, row, step, x);
  }
#if defined(TWOENDS_USE_AVX512)
  static constexpr int inputs = 5;
  static constexpr int rows(int) { return 4; }
#else
  static constexpr int inputs = 2;
  static constexpr int rows(int T) { return T == 1 ? 4 : 2; }
#endif
};

constexpr size_t kChunkUnits = 8;

// The last columns of R rows, from a border of a unit on: `words` [R] holds what remains of each.
template <int R, int T>
TWOENDS_INLINE void packed_rest(const uint8_t (*words)[kChunkUnits * kUnit * 2], size_t cols, const float* x,
                                size_t x_stride, f32x16 (&acc)[R][T]) {
  const uint8_t* w[R];
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) w[r] = words[r];
  for (size_t g = 0; g < cols / kGroup; ++g) {
    plain_step<Bf16, R, T>(w, x + g * kGroup, x_stride, acc);
    TWOENDS_UNROLL
    for (int r = 0; r < R; ++r) w[r] += kGroup * Bf16::element_bytes;
  }
  if (cols % kGroup == 0) return;
  for (int r = 0; r < R; ++r) {
    const Tail<Bf16> tail(w[r], cols % kGroup);
    f32x16 even, odd;
    Bf16::pair(tail.bytes, even, odd);
    for (int t = 0; t < T; ++t) {
      const float* last = x + t * x_stride + cols / kGroup * kGroup;
      acc[r][t] = fma(odd, load(last + kLanes), fma(even, load(last), acc[r][t]));
    }
  }
}

// Rows in packed form, kChunkUnits units of each at a time: what is decoded is multiplied from the first-level cache.
template <int R, int T>
inline void packed_block(const MatmulJob& job, size_t row, size_t step, size_t first_x) {
  const PackedBlock& block = *job.w.packed;
  const size_t cols = block.cols, x_stride = groups_of(cols) * kGroup;
  const float* x = job.x_split + first_x * x_stride;
  const Decoder decoder(block);
  alignas(64) uint8_t words[R][kChunkUnits * kUnit * 2];
  const uint8_t* listed[R];
  f32x16 acc[R][T];
  TWOENDS_UNROLL
  for (int r = 0; r < R; ++r) {
    const size_t room = block.list_bytes();
    listed[r] = decoder.list_of(row + r * step, job.lists + r * room, job.lists + R * room);
    TWOENDS_UNROLL
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  size_t unit = 0;
#if defined(TWOENDS_USE_AVX512)
  if (has_vbmi()) {
    unit = cols / kUnit;
    const int bits = block.levels[0].bits;
    (bits == 2   ? dot_vbmi<2, R, T>
     : bits == 3 ? dot_vbmi<3, R, T>
                 : dot_vbmi<4, R, T>)(block, row, step, unit, x, x_stride, listed, acc);
  }
#endif
  for (; unit < block.units; unit += kChunkUnits) {
    const size_t end = smaller(unit + kChunkUnits, block.units);
    for (int r = 0; r < R; ++r) {
      decoder.decode(row + r * step, unit, end, listed[r], words[r]);
      fetch_units(block, (row + r * step) * block.units + unit, end - unit);
    }
    packed_rest<R, T>(words, smaller(end * kUnit, cols) - unit * kUnit, x + unit * kUnit, x_stride, acc);
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) job.out[(first_x + t) * job.out_stride + row + r * step] = reduce(acc[r][t]);
}

struct PackedBf16 {
  template <int R, int T>
  static void block(const MatmulJob& job, size_t row, size_t step, size_t x) {
    packed_block<R, T>(job, row, step, x);
  }
  static constexpr int inputs = PlainBf16::inputs;
  // Four rows of 512 columns were faster than eight, and than 1,024 columns: decoding hides the latency of fma.
  static constexpr int rows(int T) { return T == 1 ? 4 : PlainBf16::rows(T); }
};
static_assert(2 * PackedBf16::rows(1) <= kPackedRows && PackedBf16::rows(2) <= kPackedRows, "room for their lists");

struct PlainF32 {
  template <int R, int T>
  static void block(const MatmulJob& job, size_t row, size_t step, size_t x) {
    plain_block<F32, R, T>(job, row, step, x);
  }
#if defined(TWOENDS_USE_AVX512)
  static constexpr int inputs = 5;
  static constexpr int rows(int) { return 4; }
#else
  static constexpr int inputs = 2;
  static constexpr int rows(int T) { return T == 1 ? 4 : 2; }
#endif
};
struct Packed {
  template <int R, int T>
  static void block(const MatmulJob& job, size_t row, size_t step, size_t x) {
    mxfp4_block<R, T>(job, row, step, x);
  }
#if defined(TWOENDS_USE_AVX512)
  static constexpr int inputs = 8;
  static constexpr int rows(int) { return 2; }
#else
  static constexpr int inputs = 3;
  static constexpr int rows(int T) { return T == 1 ? 2 : 1; }
#endif
};
constexpr size_t kWideCols = 4096;
// Rows that stay in the cache while all inputs pass by.
constexpr size_t kStripeRows = 16;

// T inputs (at most K::inputs) against rows begin .. end - 1. The rows of a block are one R-th of the run apart:
// so the bytes come as R long streams, which the hardware fetches ahead of us; rows side by side it would not.
template <class K, int R, int T>
inline void sweep(const MatmulJob& job, size_t begin, size_t end, size_t x) {
  const size_t step = (end - begin) / R;
  for (size_t i = 0; i < step; ++i) K::template block<R, T>(job, begin + i, step, x);
  for (size_t row = begin + step * R; row < end; ++row) K::template block<1, T>(job, row, 1, x);
}

template <class K, int T>
inline void sweep_inputs(const MatmulJob& job, size_t begin, size_t end, size_t x, size_t count) {
  if (count == (size_t)T) {
    if constexpr (T == 1) {
      // One input that fills the first-level cache by itself is better met by more rows at once.
      if (job.w.cols >= kWideCols) return sweep<K, 2 * K::rows(1), 1>(job, begin, end, x);
    }
    sweep<K, K::rows(T), T>(job, begin, end, x);
  } else if constexpr (T > 1) {
    sweep_inputs<K, T - 1>(job, begin, end, x, count);
  }
}

// The inputs are divided evenly among as few passes over a stripe as there can be.
template <class K>
inline void matmul_rows(const MatmulJob& job, size_t begin, size_t end) {
  const size_t passes = (job.num_x + K::inputs - 1) / K::inputs;
  const size_t stripe = passes == 1 ? end - begin : kStripeRows;
  for (size_t first = begin; first < end; first += stripe) {
    const size_t last = smaller(first + stripe, end);
    for (size_t pass = 0, x = 0; pass < passes; ++pass) {
      const size_t left = passes - pass, count = (job.num_x - x + left - 1) / left;
      sweep_inputs<K, K::inputs>(job, first, last, x, count);
      x += count;
    }
  }
}

// With more inputs than a block takes, a stripe of rows is decoded once, for all of them.
inline void packed_rows(MatmulJob job, size_t begin, size_t end, size_t worker) {
  job.lists += worker * job.room;
  if (job.num_x <= (size_t)PackedBf16::inputs) return matmul_rows<PackedBf16>(job, begin, end);
  uint8_t* words = job.lists + job.w.packed->lists_bytes(1);
  for (size_t first = begin; first < end; first += job.unpacked_rows) {
    const size_t last = smaller(first + job.unpacked_rows, end);
    unpack_rows(*job.w.packed, first, last, job.lists, words);
    const Weights w = {Format::bf16, words, nullptr, last - first, job.w.cols};
    matmul_rows<PlainBf16>(MatmulJob{w, job.x_split, job.num_x, job.out + first, job.out_stride}, 0, last - first);
  }
}

// MXFP4 rows whose scales are packed: a strip's are decoded, then its rows multiplied as if they had been plain.
inline void packed_scale_rows(MatmulJob job, size_t begin, size_t end, size_t worker) {
  const PackedBlock& block = *job.w.scales;
  const size_t groups = job.w.cols / kGroup, strip = strip_rows(groups);
  uint8_t *lists = job.lists + worker * job.room, *scale = lists + block.lists_bytes(1);
  for (size_t first = begin; first < end;) {
    const size_t row = first / strip, last = smaller((row + 1) * strip, end);
    unpack_bytes(block, row, lists, scale);
    const Weights w = {Format::mxfp4, job.w.data + first * groups * kLanes, scale + (first - row * strip) * groups,
                       last - first, job.w.cols};
    matmul_rows<Packed>(MatmulJob{w, job.x_split, job.num_x, job.out + first, job.out_stride}, 0, last - first);
    first = last;
  }
}

inline void matmul(const MatmulJob& job, size_t begin, size_t end, size_t worker = 0) {
  switch (job.w.format) {
    case Format::bf16: return matmul_rows<PlainBf16>(job, begin, end);
    case Format::f32: return matmul_rows<PlainF32>(job, begin, end);
    case Format::mxfp4:
      return job.w.scales != nullptr ? packed_scale_rows(job, begin, end, worker) : matmul_rows<Packed>(job, begin, end);
    case Format::packed: return packed_rows(job, begin, end, worker);
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
