// Matrix products: one, several of one input, and the experts of a layer.
#include "kernels.h"

namespace twoends {
namespace {

// Packed rows that are decoded for many inputs, per worker (engine/layout.py counts them).
constexpr size_t kUnpackedBytes = 256 * 1024, kLeastUnpackedRows = 4, kMostUnpackedRows = 16;
// Runs of rows begin at multiples of this: the blocks of rows and inputs divide it.
constexpr size_t kRowMultiple = 16;

// Bytes that a worker needs beside a product of packed rows: lists that are expanded, and rows for many inputs.
size_t packed_room(MatmulJob& job) {
  const Weights& w = job.w;
  if (w.scales != nullptr) return w.scales->lists_bytes(1) + w.scales->units * kUnit;
  if (w.packed == nullptr) return 0;
  // No instruction set multiplies fewer than two inputs at once; more may need whole rows decoded.
  if (job.num_x > 2)
    job.unpacked_rows = larger(kLeastUnpackedRows, smaller(kMostUnpackedRows, kUnpackedBytes / (w.cols * 2)));
  return w.packed->lists_bytes(kPackedRows) + job.unpacked_rows * w.cols * 2;
}

}  // namespace

void Kernels::matmul(const Weights& w, const float* x, size_t num_x, float* out, size_t out_stride) {
  products({{w, out, out_stride}}, x, num_x);
}

void Kernels::products(const std::vector<Product>& parts, const float* x, size_t num_x) {
  if (parts.empty() || num_x == 0) return;
  const size_t cols = parts[0].w.cols;
  const Scratch split = scratch_of(num_x * padded_cols(cols));
  table_.split(x, num_x, cols, split.get());
  std::vector<MatmulJob> jobs;
  jobs.reserve(parts.size());
  for (const Product& part : parts)
    if (part.w.rows != 0) jobs.push_back({part.w, split.get(), num_x, part.out, part.out_stride});
  run_products(jobs);
}

void Kernels::run_products(std::vector<MatmulJob>& jobs) {
  std::vector<size_t> first(jobs.size() + 1);
  size_t work = 0, room = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    MatmulJob& job = jobs[i];
    first[i + 1] = first[i] + ceil_div(job.w.rows, kRowMultiple) * kRowMultiple;
    work += job.w.rows * job.w.cols * job.num_x;
    room = larger(room, ceil_div(packed_room(job), 64) * 64);
  }
  const Scratch scratch = scratch_of(pool_.threads() * room / sizeof(float));
  for (MatmulJob& job : jobs) job.lists = (uint8_t*)scratch.get(), job.room = room;
  ProductsJob all = {jobs.data(), first.data(), jobs.size()};
  run(table_.products, all, first.back(), work, kRowMultiple);
}

void Kernels::experts(const std::vector<Expert>& experts, ExpertsJob job) {
  const Scratch rounded = scratch_of(job.to_mxfp8 ? job.num_tokens * job.dim : 0);
  if (job.to_mxfp8) {
    mxfp8({job.z, rounded.get()}, job.num_tokens * job.dim);
    job.z = rounded.get();
  }
  std::vector<Use> uses;
  size_t inputs = 0;
  for (const Expert& expert : experts) {
    Use use = {&expert, {}};
    for (size_t place = 0; place < job.num_tokens * job.ranks; ++place)
      if (job.ids[place] == expert.id) use.places.push_back(place);
    if (use.places.empty()) continue;
    // As many experts at once as have no more inputs together than one could have by itself, or one choice has:
    // that is what the memory plan counts.
    if (inputs != 0 && inputs + use.places.size() > larger(job.num_tokens, job.ranks)) {
      run_experts(uses, job);
      uses.clear();
      inputs = 0;
    }
    inputs += use.places.size();
    uses.push_back(std::move(use));
  }
  run_experts(uses, job);
}

void Kernels::run_experts(const std::vector<Use>& uses, const ExpertsJob& job) {
  if (uses.empty()) return;
  const size_t width = uses[0].expert->w1.rows, split_z = padded_cols(job.dim), split_f = padded_cols(width);
  size_t inputs = 0;
  for (const Use& use : uses) inputs += use.places.size();
  const Scratch scratch = scratch_of(inputs * (split_z + 2 * width + split_f + job.dim));
  float *z = scratch.get(), *gate = z + inputs * split_z, *up = gate + inputs * width;
  float *hidden = up + inputs * width, *y = hidden + inputs * split_f;
  std::vector<MatmulJob> in, out;
  in.reserve(2 * uses.size()), out.reserve(uses.size());
  size_t at = 0;
  for (const Use& use : uses) {
    const size_t count = use.places.size();
    for (size_t i = 0; i < count; ++i)
      table_.split(job.z + use.places[i] / job.ranks * job.dim, 1, job.dim, z + (at + i) * split_z);
    in.push_back({use.expert->w1, z + at * split_z, count, gate + at * width, width});
    in.push_back({use.expert->w3, z + at * split_z, count, up + at * width, width});
    out.push_back({use.expert->w2, hidden + at * split_f, count, y + at * job.dim, job.dim});
    at += count;
  }
  run_products(in);
  GluRowsJob glu = {job.glu, hidden, width, split_f, job.to_mxfp8};
  glu.glu.gate = gate, glu.glu.up = up, glu.glu.out = gate;
  run(table_.glu_rows, glu, inputs, 2 * elementary(inputs * width));
  run_products(out);
  at = 0;
  for (const Use& use : uses)
    for (const size_t place : use.places) {
      const float* row = y + at++ * job.dim;
      std::copy(row, row + job.dim, job.out + place * job.dim);
    }
}

}  // namespace twoends
