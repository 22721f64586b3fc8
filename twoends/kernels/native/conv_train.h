// The short convolution of training with its SiLU, forward and backward: silu(sum_j w[c, 3 - j] x[t - j, c]), a
// token of another document and what lies before the row counting as zero.
#pragma once
#include "kda.h"

namespace twoends {
namespace TWOENDS_ISA {

constexpr size_t kTaps = 4;
// Vectors of channels that walk through the tokens together: two whole lines of the cache.
constexpr size_t kWalk = 2;

// Whether the three tokens before `t` are seen by it, as 1 or 0.
inline void seen_before(const int64_t* documents, size_t t, f32x16 (&seen)[kTaps - 1]) {
  for (size_t j = 1; j < kTaps; ++j)
    seen[j - 1] = set1(t >= j && (documents == nullptr || documents[t] == documents[t - j]) ? 1.f : 0.f);
}

// What a walk over the tokens of one row of the batch carries, for 16 channels.
struct ConvWalk {
  f32x16 tap[kTaps], before[kTaps - 1];  // before[j]: the token j + 1 back
  size_t at, n;

  void begin(const float* w, size_t first, size_t channels) {
    at = first;
    n = first < channels ? smaller(kLanes, channels - first) : 0;
    load_taps(n != 0 ? w + first * kTaps : w, n, tap);
    for (f32x16& b : before) b = zero();
  }
  TWOENDS_INLINE f32x16 sum(f32x16 now, const f32x16 (&seen)[kTaps - 1]) const {
    f32x16 acc = tap[3] * now;
    TWOENDS_UNROLL
    for (size_t j = 1; j < kTaps; ++j) acc = fma(tap[3 - j], before[j - 1] * seen[j - 1], acc);
    return acc;
  }
  TWOENDS_INLINE void move_on(f32x16 now) { before[2] = before[1], before[1] = before[0], before[0] = now; }
};

inline size_t conv_blocks(const ConvTrainJob& job) { return (job.channels + kWalk * kLanes - 1) / (kWalk * kLanes); }

inline void conv_train(ConvTrainJob& job, size_t begin, size_t end, size_t) {
  for (size_t piece = begin; piece < end; ++piece) {
    const size_t row = piece / conv_blocks(job), block = piece % conv_blocks(job) * kWalk * kLanes;
    const int64_t* documents = job.documents == nullptr ? nullptr : job.documents + row * job.tokens;
    const size_t first = row * job.tokens * job.channels;
    ConvWalk walk[kWalk];
    for (size_t v = 0; v < kWalk; ++v) walk[v].begin(job.w, block + v * kLanes, job.channels);
    for (size_t t = 0; t < job.tokens; ++t) {
      f32x16 seen[kTaps - 1];
      seen_before(documents, t, seen);
      for (ConvWalk& w : walk) {
        if (w.n == 0) continue;
        const size_t here = first + t * job.channels + w.at;
        const f32x16 now = load_some(job.x + here, w.n);
        store_some(job.out + here, silu(w.sum(now, seen)), w.n);
        w.move_on(now);
      }
    }
  }
}

// d_x of a token is whole once the three tokens behind it have been seen; d_w is summed along the row.
inline void conv_train_back(ConvTrainJob& job, size_t begin, size_t end, size_t) {
  const f32x16 one = set1(1.f);
  for (size_t piece = begin; piece < end; ++piece) {
    const size_t row = piece / conv_blocks(job), block = piece % conv_blocks(job) * kWalk * kLanes;
    const int64_t* documents = job.documents == nullptr ? nullptr : job.documents + row * job.tokens;
    const size_t first = row * job.tokens * job.channels;
    ConvWalk walk[kWalk];
    f32x16 d_tap[kWalk][kTaps], owed[kWalk][kTaps - 1];  // owed[v][j]: d_x so far of the token j + 1 back
    for (size_t v = 0; v < kWalk; ++v) {
      walk[v].begin(job.w, block + v * kLanes, job.channels);
      for (f32x16& d : d_tap[v]) d = zero();
      for (f32x16& d : owed[v]) d = zero();
    }
    for (size_t t = 0; t < job.tokens; ++t) {
      f32x16 seen[kTaps - 1];
      seen_before(documents, t, seen);
      for (size_t v = 0; v < kWalk; ++v) {
        ConvWalk& w = walk[v];
        if (w.n == 0) continue;
        const size_t here = first + t * job.channels + w.at;
        const f32x16 now = load_some(job.x + here, w.n), sum = w.sum(now, seen), s = sigmoid(sum);
        const f32x16 d = load_some(job.d_out + here, w.n) * (s * fma(sum, one - s, one));
        d_tap[v][3] = fma(d, now, d_tap[v][3]);
        TWOENDS_UNROLL
        for (size_t j = 1; j < kTaps; ++j) {
          const f32x16 reached = d * seen[j - 1];
          d_tap[v][3 - j] = fma(reached, w.before[j - 1], d_tap[v][3 - j]);
          owed[v][j - 1] = fma(reached, w.tap[3 - j], owed[v][j - 1]);
        }
        if (t >= 3) store_some(job.d_x + here - 3 * job.channels, owed[v][2], w.n);
        owed[v][2] = owed[v][1], owed[v][1] = owed[v][0], owed[v][0] = d * w.tap[3];
        w.move_on(now);
      }
    }
    for (size_t v = 0; v < kWalk; ++v) {
      const ConvWalk& w = walk[v];
      for (size_t j = 0; j < smaller(kTaps - 1, job.tokens) && w.n != 0; ++j)
        store_some(job.d_x + first + (job.tokens - 1 - j) * job.channels + w.at, owed[v][j], w.n);
      for (size_t j = 0; j < kTaps && w.n != 0; ++j)
        store_some(job.d_w + (row * kTaps + j) * job.channels + w.at, d_tap[v][j], w.n);
    }
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
