// Kernels: one instruction set and one pool; divides every operation into pieces and runs them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "isa.h"
#include "pool.h"

namespace twoends {

// Work is counted in multiply-adds. Below this (a few microseconds) a call stays on its thread.
constexpr size_t kSmallWork = 200000;
inline bool is_small(size_t work) { return work < kSmallWork; }
// The work of an elementary function on `size` elements.
inline size_t elementary(size_t size) { return size * 32; }

class Kernels {
 public:
  // Throws std::invalid_argument for a set that is not available here or for no thread at all.
  Kernels(const std::string& isa, size_t threads);

  const char* isa() const { return table_.name; }
  size_t threads() const { return pool_.threads(); }

  void matmul(const Weights& w, const float* x, size_t num_x, float* out, size_t out_stride);
  void rms_norm(NormJob job, size_t size);
  void l2_norm(NormJob job, size_t size);
  void gated_norm(NormJob job, size_t size);
  void short_conv(ConvJob job);
  void kda_decay(DecayJob job, size_t pieces);
  void kda_steps(KdaJob job);
  void mla_heads(MlaJob job);
  void attnres_mix(const float* sources, const float* f, float* out, size_t num_sources, size_t num_tokens, size_t dim,
                   double eps);
  void route(RouteJob& job);
  void unary(UnaryJob job);
  void glu(GluJob job);
  void fma(FmaJob job);
  void combine(CombineJob job, size_t num_tokens);
  uint64_t read(const uint8_t* data, size_t size);

 private:
  // Runs all pieces; those of one call to the kernel are a multiple of `multiple` where that is possible.
  template <class Job>
  void run(Kernel<Job> kernel, Job& job, size_t pieces, size_t work, size_t multiple = 1);

  Table table_;
  Pool pool_;
};

}  // namespace twoends
