// Router, gated units, combination of experts, and the elementwise functions by themselves.
#pragma once
#include "elementary.h"
#include "lanes.h"
#include "mxfp8.h"

namespace twoends {
namespace TWOENDS_ISA {

// Inserts expert `id` into the `count` best so far, best first; equal scores keep the lower id in front.
inline void insert_best(const float* biased, int32_t* ids, size_t count, size_t id) {
  size_t at = count;
  for (; at > 0 && biased[ids[at - 1]] < biased[id]; --at) ids[at] = ids[at - 1];
  ids[at] = (int32_t)id;
}

inline void route(RouteJob& job, size_t begin, size_t end, size_t) {
  const size_t padded = (job.experts + 15) / 16 * 16;
  float *scores = job.scratch, *biased = scores + padded;
  for (size_t t = begin; t < end; ++t) {
    const float* logits = job.logits + t * job.experts;
    for_vectors(job.experts, 0, padded / 16, [&](size_t at, size_t n) {
      const f32x16 s = sigmoid(load_some(logits + at, n));
      store(scores + at, s);
      store(biased + at, s + load_some(job.bias + at, n));
    });
    for (size_t e = 0; e < job.experts; ++e) {
      if (!(biased[e] - biased[e] == 0.f)) {
        job.bad_row = t;
        return;
      }
    }
    int32_t* ids = job.ids + t * job.chosen;
    float* weights = job.weights + t * job.chosen;
    for (size_t e = 0; e < job.chosen; ++e) insert_best(biased, ids, e, e);
    for (size_t e = job.chosen; e < job.experts; ++e)
      if (biased[ids[job.chosen - 1]] < biased[e]) insert_best(biased, ids, job.chosen - 1, e);
    float total = 0.f;
    for (size_t s = 0; s < job.chosen; ++s) total = total + scores[ids[s]];
    total = total + 1e-20f;
    for (size_t s = 0; s < job.chosen; ++s) {
      const float score = scores[ids[s]];
      weights[s] = (job.renormalize ? score / total : score) * job.scaling;
    }
  }
}

inline void unary(UnaryJob& job, size_t begin, size_t end, size_t) {
  const auto each = [&](auto function) {
    for_vectors(job.size, begin, end,
                [&](size_t at, size_t n) { store_some(job.out + at, function(load_some(job.x + at, n)), n); });
  };
  switch (job.function) {
    case Unary::exp: return each([](f32x16 x) { return exp(x); });
    case Unary::sigmoid: return each([](f32x16 x) { return sigmoid(x); });
    case Unary::tanh: return each([](f32x16 x) { return tanh(x); });
    case Unary::softplus: return each([](f32x16 x) { return softplus(x); });
    case Unary::silu: return each([](f32x16 x) { return silu(x); });
  }
}

inline void glu(GluJob& job, size_t begin, size_t end, size_t) {
  const f32x16 beta = set1(job.beta), linear = set1(job.linear_beta);
  const auto each = [&](auto function) {
    for_vectors(job.size, begin, end, [&](size_t at, size_t n) {
      store_some(job.out + at, function(load_some(job.gate + at, n), load_some(job.up + at, n)), n);
    });
  };
  const auto capped = [&](f32x16 g) { return (beta * tanh(g / beta)) * sigmoid(g); };
  switch (job.function) {
    case Glu::sigmoid_gate: return each([](f32x16 gate, f32x16 o) { return o * sigmoid(gate); });
    case Glu::silu: return each([](f32x16 gate, f32x16 up) { return silu(gate) * up; });
    case Glu::situ: return each([&](f32x16 gate, f32x16 up) { return capped(gate) * up; });
    case Glu::situ_linear:
      return each([&](f32x16 gate, f32x16 up) { return capped(gate) * (linear * tanh(up / linear)); });
  }
}

inline void glu_rows(GluRowsJob& job, size_t begin, size_t end, size_t worker) {
  for (size_t row = begin; row < end; ++row) {
    GluJob one = job.glu;
    one.gate += row * job.dim, one.up += row * job.dim, one.out += row * job.dim, one.size = job.dim;
    glu(one, 0, (job.dim + kLanes - 1) / kLanes, worker);
    for (size_t at = 0; job.to_mxfp8 && at < job.dim; at += kGroup) mxfp8_block(one.out + at, one.out + at);
    split_row(one.out, job.dim, job.split + row * job.padded_dim);
  }
}

inline void fma_each(FmaJob& job, size_t begin, size_t end, size_t) {
  for_vectors(job.size, begin, end, [&](size_t at, size_t n) {
    store_some(job.out + at, fma(load_some(job.a + at, n), load_some(job.b + at, n), load_some(job.c + at, n)), n);
  });
}

inline void combine(CombineJob& job, size_t begin, size_t end, size_t) {
  for (size_t t = begin; t < end; ++t) {
    const float *y = job.y + t * job.num_ranks * job.dim, *weights = job.weights + t * job.num_ranks;
    for_vectors(job.dim, 0, (job.dim + 15) / 16, [&](size_t at, size_t n) {
      f32x16 z = zero();
      for (size_t s = 0; s < job.num_ranks; ++s) z = fma(load_some(y + s * job.dim + at, n), set1(weights[s]), z);
      store_some(job.out + t * job.dim + at, z, n);
    });
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
