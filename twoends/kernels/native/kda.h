// Kimi Delta Attention: convolution, decay and the recurrence.
#pragma once
#include "elementary.h"
#include "lanes.h"
#include "norm.h"

namespace twoends {
namespace TWOENDS_ISA {

// The four taps of 16 channels (4 consecutive floats each) as four vectors.
inline void load_taps(const float* w, size_t channels, f32x16 (&tap)[4]) {
  alignas(64) float padded[64] = {};
  if (channels < kLanes) {
    std::memcpy(padded, w, channels * 4 * sizeof(float));
    w = padded;
  }
  f32x16 even_a, odd_a, even_b, odd_b;
  deinterleave(load(w), load(w + 16), even_a, odd_a);
  deinterleave(load(w + 32), load(w + 48), even_b, odd_b);
  deinterleave(even_a, even_b, tap[0], tap[2]);
  deinterleave(odd_a, odd_b, tap[1], tap[3]);
}

// Channels begin .. end - 1.
inline void conv_channels(const ConvJob& job, size_t begin, size_t end) {
  for (size_t at = begin; at < end; at += kLanes) {
    const size_t n = smaller(kLanes, end - at);
    f32x16 tap[4];
    load_taps(job.w + 4 * at, n, tap);
    f32x16 u[3];
    for (size_t j = 0; j < 3; ++j) u[j] = load_some(job.tail + j * job.channels + at, n);
    for (size_t t = 0; t < job.num_tokens; ++t) {
      const f32x16 now = load_some(job.u + t * job.channels + at, n);
      const f32x16 acc = fma(tap[3], now, fma(tap[2], u[2], fma(tap[1], u[1], tap[0] * u[0])));
      store_some(job.out + t * job.channels + at, silu(acc), n);
      u[0] = u[1], u[1] = u[2], u[2] = now;
    }
    for (size_t j = 0; j < 3; ++j) store_some(job.tail + j * job.channels + at, u[j], n);
  }
}

inline void short_conv(ConvJob& job, size_t begin, size_t end, size_t) {
  conv_channels(job, begin * kLanes, smaller(end * kLanes, job.channels));
}

inline void kda_decay(DecayJob& job, size_t begin, size_t end, size_t) {
  for (size_t piece = begin; piece < end; ++piece) {
    const size_t head = piece % job.heads;
    const float *z = job.z + piece * job.key_dim, *dt = job.dt_bias + head * job.key_dim;
    float* out = job.out + piece * job.key_dim;
    const f32x16 a = exp(set1(job.a_log[head]));
    for_vectors(job.key_dim, 0, (job.key_dim + 15) / 16, [&](size_t at, size_t n) {
      const f32x16 s = load_some(z + at, n) + load_some(dt + at, n);
      const f32x16 g = job.bounded ? set1(job.bound) * sigmoid(a * s) : negate(a * softplus(s));
      store_some(out + at, exp(g), n);
    });
  }
}

#if defined(TWOENDS_USE_AVX512)
constexpr bool kWideColumns = true;
#else
constexpr bool kWideColumns = false;
#endif

// Value columns at .. at + 16 * NV - 1 of one head, or fewer (n of them, NV = 1), through all tokens; their
// state lies at `state`, a row every `stride` floats.
template <int NV, bool WHOLE>
inline void kda_columns(const KdaJob& job, size_t head, size_t at, size_t n, float* state, size_t stride) {
  const auto get = [n](const float* p) { return WHOLE ? load(p) : load_n(p, n); };
  const auto put = [n](float* p, f32x16 a) {
    if (WHOLE)
      store(p, a);
    else
      store_n(p, a, n);
  };
  for (size_t t = 0; t < job.num_tokens; ++t) {
    const size_t row = t * job.heads + head;
    const float *q = job.q + row * job.key_dim, *k = job.k + row * job.key_dim, *alpha = job.alpha + row * job.key_dim;
    f32x16 sum[NV], delta[NV];
    TWOENDS_UNROLL
    for (int c = 0; c < NV; ++c) sum[c] = zero();
    for (size_t i = 0; i < job.key_dim; ++i) {
      const f32x16 decay = set1(alpha[i]), key = set1(k[i]);
      TWOENDS_UNROLL
      for (int c = 0; c < NV; ++c) {
        float* p = state + i * stride + c * kLanes;
        const f32x16 s = get(p) * decay;
        put(p, s);
        sum[c] = fma(s, key, sum[c]);
      }
    }
    const f32x16 beta = set1(job.beta[row]);
    TWOENDS_UNROLL
    for (int c = 0; c < NV; ++c) {
      delta[c] = beta * (get(job.v + row * job.value_dim + at + c * kLanes) - sum[c]);
      sum[c] = zero();
    }
    for (size_t i = 0; i < job.key_dim; ++i) {
      const f32x16 query = set1(q[i]), key = set1(k[i]);
      TWOENDS_UNROLL
      for (int c = 0; c < NV; ++c) {
        float* p = state + i * stride + c * kLanes;
        const f32x16 s = fma(key, delta[c], get(p));
        put(p, s);
        sum[c] = fma(s, query, sum[c]);
      }
    }
    TWOENDS_UNROLL
    for (int c = 0; c < NV; ++c) put(job.out + row * job.value_dim + at + c * kLanes, sum[c]);
  }
}

// Columns at .. stop - 1 in the widest blocks that the registers hold.
inline void kda_block(const KdaJob& job, size_t head, size_t at, size_t stop, float* state, size_t stride) {
  while (at < stop) {
    const size_t left = stop - at;
    size_t done = smaller(kLanes, left);
    if (kWideColumns && left >= 8 * kLanes)
      kda_columns<8, true>(job, head, at, 0, state, stride), done = 8 * kLanes;
    else if (left >= 4 * kLanes)
      kda_columns<4, true>(job, head, at, 0, state, stride), done = 4 * kLanes;
    else if (left >= kLanes)
      kda_columns<1, true>(job, head, at, 0, state, stride);
    else
      kda_columns<1, false>(job, head, at, left, state, stride);
    at += done, state += done;
  }
}

inline void copy_columns(const float* from, size_t from_stride, float* to, size_t to_stride, size_t rows, size_t cols) {
  for (size_t i = 0; i < rows; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, cols * sizeof(float));
}

// With scratch, the columns of a piece are gathered first: in place their rows, a power of two apart, would
// compete for a few sets of the first-level cache.
inline void kda_steps(KdaJob& job, size_t begin, size_t end, size_t worker) {
  const size_t blocks = (job.value_dim + job.block - 1) / job.block;
  for (size_t piece = begin; piece < end; ++piece) {
    const size_t head = piece / blocks, at = piece % blocks * job.block;
    const size_t stop = smaller(at + job.block, job.value_dim);
    float* state = job.state + head * job.key_dim * job.value_dim + at;
    if (job.scratch == nullptr) {
      kda_block(job, head, at, stop, state, job.value_dim);
      continue;
    }
    float* gathered = job.scratch + worker * job.key_dim * job.block;
    copy_columns(state, job.value_dim, gathered, job.block, job.key_dim, stop - at);
    kda_block(job, head, at, stop, gathered, job.block);
    copy_columns(gathered, job.block, state, job.value_dim, job.key_dim, stop - at);
  }
}

inline void kda_mix(KdaMixJob& job, size_t begin, size_t end, size_t worker) {
  const size_t heads = job.steps.heads, key_dim = job.steps.key_dim, value_dim = job.steps.value_dim;
  const size_t blocks = (value_dim + job.steps.block - 1) / job.steps.block;
  for (size_t head = begin; head < end; ++head) {
    conv_channels(job.q_conv, head * key_dim, (head + 1) * key_dim);
    conv_channels(job.k_conv, head * key_dim, (head + 1) * key_dim);
    conv_channels(job.v_conv, head * value_dim, (head + 1) * value_dim);
    for (size_t t = 0; t < job.steps.num_tokens; ++t) {
      const size_t row = t * heads + head;
      l2_norm(job.q_norm, row, row + 1, worker);
      l2_norm(job.k_norm, row, row + 1, worker);
      kda_decay(job.decay, row, row + 1, worker);
      store_n(job.beta + row, sigmoid(load_n(job.beta_logits + row, 1)), 1);
    }
    kda_steps(job.steps, head * blocks, (head + 1) * blocks, worker);
    for (size_t t = 0; t < job.steps.num_tokens; ++t)
      gated_norm(job.out_norm, t * heads + head, t * heads + head + 1, worker);
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
