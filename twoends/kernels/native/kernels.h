// Kernels: one instruction set and one pool; divides every operation into pieces and runs them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "scratch.h"

namespace twoends {

// Work is counted in multiply-adds. Below this (a few microseconds) a call stays on its thread.
constexpr size_t kSmallWork = 200000;
inline bool is_small(size_t work) { return work < kSmallWork; }
// The work of an elementary function on `size` elements.
inline size_t elementary(size_t size) { return size * 32; }

// One of several products of the same input; out[t * out_stride + row].
struct Product {
  Weights w;
  float* out;
  size_t out_stride;
};

// One routed expert.
struct Expert {
  int32_t id;
  Weights w1, w2, w3;
};

// The experts' input, where each is wanted, and out[(t * ranks + s) * dim].
struct ExpertsJob {
  const float* z;
  const int32_t* ids;
  float* out;
  size_t num_tokens, ranks, dim;
  GluJob glu;
  bool to_mxfp8;  // whether the input of every product is rounded first
};

class Kernels {
 public:
  // Throws std::invalid_argument for a set that is not available here or for no thread at all.
  Kernels(const std::string& isa, size_t threads);

  const char* isa() const { return table_.name; }
  size_t threads() const { return pool_.threads(); }

  void matmul(const Weights& w, const float* x, size_t num_x, float* out, size_t out_stride);
  void products(const std::vector<Product>& parts, const float* x, size_t num_x);
  // `job.glu` names the unit; the rest of it is set here.
  void experts(const std::vector<Expert>& experts, ExpertsJob job);
  void rms_norm(NormJob job, size_t size);
  void l2_norm(NormJob job, size_t size);
  void gated_norm(NormJob job, size_t size);
  void short_conv(ConvJob job);
  void kda_decay(DecayJob job, size_t pieces);
  void kda_steps(KdaJob job);
  void kda_mix(KdaMixJob job);
  // `pieces`: heads times rows of the batch.
  void kda_tiles(KdaTilesJob job, size_t pieces);
  void kda_tiles_back(KdaTilesJob job, size_t pieces);
  // `rows` of a batch.
  void conv_train(ConvTrainJob job, size_t rows);
  void conv_train_back(ConvTrainJob job, size_t rows);
  void mla_heads(MlaJob job);
  void attnres_mix(const float* sources, const float* f, float* out, size_t num_sources, size_t num_tokens, size_t dim,
                   double eps);
  void route(RouteJob& job);
  void unary(UnaryJob job);
  void glu(GluJob job);
  void fma(FmaJob job);
  void mxfp8(Mxfp8Job job, size_t size);
  void combine(CombineJob job, size_t num_tokens);
  uint64_t read(const uint8_t* data, size_t size);

 private:
  // An expert and its places in the output, t * ranks + s.
  struct Use {
    const Expert* expert;
    std::vector<size_t> places;
  };

  // Runs all pieces; those of one call to the kernel are a multiple of `multiple` where that is possible.
  template <class Job>
  void run(Kernel<Job> kernel, Job& job, size_t pieces, size_t work, size_t multiple = 1);
  void run_products(std::vector<MatmulJob>& jobs);
  void run_experts(const std::vector<Use>& uses, const ExpertsJob& job);
  Scratch choose_block(KdaJob& job) const;

  Table table_;
  Pool pool_;
};

template <class Job>
void Kernels::run(Kernel<Job> kernel, Job& job, size_t pieces, size_t work, size_t multiple) {
  const PlainFloats floats;
  const size_t threads = pool_.threads();
  if (threads == 1 || is_small(work)) {
    kernel(job, 0, pieces, 0);
    return;
  }
  struct Context {
    Kernel<Job> kernel;
    Job* job;
  } context = {kernel, &job};
  const auto call = [](void* c, size_t begin, size_t end, size_t worker) {
    const Context& self = *static_cast<Context*>(c);
    self.kernel(*self.job, begin, end, worker);
  };
  // No run is too small to be worth taking.
  const size_t runs = work / (kSmallWork / 4);
  pool_.run(call, &context, pieces, ceil_div(ceil_div(pieces, runs), multiple) * multiple);
}

}  // namespace twoends
