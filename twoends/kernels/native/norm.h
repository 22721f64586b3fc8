// Norms and Attention Residuals: squares in binary64, one rounding of the inverse to binary32.
#pragma once
#include <cmath>

#include "elementary.h"
#include "lanes.h"

namespace twoends {
namespace TWOENDS_ISA {

inline float inverse_rms(const float* x, size_t dim, double eps) {
  const double mean = sum_of_squares(x, dim) / (double)dim;
  return (float)(1.0 / std::sqrt(mean + eps));
}

inline void rms_norm(NormJob& job, size_t begin, size_t end, size_t) {
  for (size_t row = begin; row < end; ++row) {
    const float* x = job.x + row * job.dim;
    float* out = job.out + row * job.dim;
    const f32x16 inverse = set1(inverse_rms(x, job.dim, job.eps));
    for_vectors(job.dim, 0, (job.dim + 15) / 16, [&](size_t at, size_t n) {
      store_some(out + at, (load_some(x + at, n) * inverse) * load_some(job.w + at, n), n);
    });
  }
}

inline void l2_norm(NormJob& job, size_t begin, size_t end, size_t) {
  for (size_t row = begin; row < end; ++row) {
    const float* x = job.x + row * job.dim;
    float* out = job.out + row * job.dim;
    const f32x16 inverse = set1((float)(1.0 / std::sqrt(sum_of_squares(x, job.dim) + job.eps)));
    for_vectors(job.dim, 0, (job.dim + 15) / 16, [&](size_t at, size_t n) {
      store_some(out + at, (load_some(x + at, n) * inverse) * set1(job.scale), n);
    });
  }
}

inline void gated_norm(NormJob& job, size_t begin, size_t end, size_t) {
  for (size_t row = begin; row < end; ++row) {
    const float *x = job.x + row * job.dim, *gate = job.gate + row * job.dim;
    float* out = job.out + row * job.dim;
    const f32x16 inverse = set1(inverse_rms(x, job.dim, job.eps));
    for_vectors(job.dim, 0, (job.dim + 15) / 16, [&](size_t at, size_t n) {
      const f32x16 normed = (load_some(x + at, n) * inverse) * load_some(job.w + at, n);
      store_some(out + at, normed * sigmoid(load_some(gate + at, n)), n);
    });
  }
}

// e[i] = exp(score[i] - max) in place; a NaN among the scores makes every sum over e a NaN.
inline void exp_below_max(float* scores, size_t count) {
  float lanes[kLanes], top = scores[0];
  f32x16 tops = set1(top);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) tops = select_lt(tops, load(scores + i), load(scores + i), tops);
  store(lanes, tops);
  for (; i < count; ++i) top = scores[i] > top ? scores[i] : top;
  for (i = 0; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
  for_vectors(count, 0, (count + 15) / 16, [&](size_t at, size_t n) {
    store_some(scores + at, exp(load_some(scores + at, n) - set1(top)), n);
  });
}

inline void attnres_mix(MixJob& job, size_t begin, size_t end, size_t worker) {
  float* e = job.scratch + worker * job.scratch_floats;
  const size_t source_stride = job.num_tokens * job.dim;
  for (size_t t = begin; t < end; ++t) {
    const float* sources = job.sources + t * job.dim;
    for (size_t n = 0; n < job.num_sources; ++n) {
      const float* source = sources + n * source_stride;
      e[n] = dot_row(source, job.f_split, job.dim) * inverse_rms(source, job.dim, job.eps);
    }
    exp_below_max(e, job.num_sources);
    float total = 0.f;
    for (size_t n = 0; n < job.num_sources; ++n) total = total + e[n];
    for (size_t n = 0; n < job.num_sources; ++n) e[n] = e[n] / total;
    for_vectors(job.dim, 0, (job.dim + 15) / 16, [&](size_t at, size_t n) {
      f32x16 h = zero();
      for (size_t s = 0; s < job.num_sources; ++s)
        h = fma(load_some(sources + s * source_stride + at, n), set1(e[s]), h);
      store_some(job.out + t * job.dim + at, h, n);
    });
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
