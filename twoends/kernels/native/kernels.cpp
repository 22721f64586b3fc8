#include "kernels.h"

#include <stdexcept>
#include <vector>

namespace twoends {
namespace {

size_t vectors(size_t size) { return ceil_div(size, 16); }

// Bounds the memory for scores: floats per worker, reached at a context of a hundred thousand positions.
constexpr size_t kScoreFloats = size_t(1) << 20;

}  // namespace

Kernels::Kernels(const std::string& isa, size_t threads) : table_(table_of(isa)), pool_(threads) {
  if (threads == 0) throw std::invalid_argument("at least one thread");
}

void Kernels::rms_norm(NormJob job, size_t size) {
  if (size != 0) run(table_.rms_norm, job, size / job.dim, size);
}

void Kernels::l2_norm(NormJob job, size_t size) {
  if (size != 0) run(table_.l2_norm, job, size / job.dim, size);
}

void Kernels::gated_norm(NormJob job, size_t size) {
  if (size != 0) run(table_.gated_norm, job, size / job.dim, elementary(size));
}

void Kernels::short_conv(ConvJob job) {
  run(table_.short_conv, job, vectors(job.channels), elementary(job.channels * job.num_tokens));
}

void Kernels::kda_decay(DecayJob job, size_t pieces) {
  run(table_.kda_decay, job, pieces, elementary(pieces * job.key_dim));
}

Scratch Kernels::choose_block(KdaJob& job) const {
  // One token streams whole state rows; many tokens keep a narrow block of the state in the first-level cache.
  job.block = job.num_tokens == 1 ? 128 : 64;
  Scratch scratch = scratch_of(job.num_tokens == 1 ? 0 : pool_.threads() * job.key_dim * job.block);
  job.scratch = job.num_tokens == 1 ? nullptr : scratch.get();
  return scratch;
}

void Kernels::kda_steps(KdaJob job) {
  const Scratch scratch = choose_block(job);
  const size_t pieces = job.heads * ceil_div(job.value_dim, job.block);
  run(table_.kda_steps, job, pieces, job.num_tokens * job.heads * job.key_dim * job.value_dim * 4);
}

void Kernels::kda_mix(KdaMixJob job) {
  const KdaJob& steps = job.steps;
  const size_t size = steps.num_tokens * steps.heads * steps.key_dim;
  if (size == 0) return;
  const Scratch scratch = choose_block(job.steps);
  run(table_.kda_mix, job, steps.heads, elementary(4 * size) + size * steps.value_dim * 4);
}

void Kernels::kda_tiles(KdaTilesJob job, size_t pieces) {
  const Scratch scratch = scratch_of(pool_.threads() * table_.kda_tiles_scratch(job));
  job.scratch = scratch.get();
  run(table_.kda_tiles, job, pieces, pieces * job.tokens * job.key_dim * job.value_dim * 4);
}

void Kernels::kda_tiles_back(KdaTilesJob job, size_t pieces) {
  const Scratch scratch = scratch_of(pool_.threads() * table_.kda_tiles_back_scratch(job));
  job.scratch = scratch.get();
  run(table_.kda_tiles_back, job, pieces, pieces * job.tokens * job.key_dim * job.value_dim * 12);
}

void Kernels::conv_train(ConvTrainJob job, size_t rows) {
  run(table_.conv_train, job, rows * ceil_div(job.channels, 32), elementary(rows * job.tokens * job.channels));
}

void Kernels::conv_train_back(ConvTrainJob job, size_t rows) {
  run(table_.conv_train_back, job, rows * ceil_div(job.channels, 32), elementary(rows * job.tokens * job.channels));
}

void Kernels::mla_heads(MlaJob job) {
  if (job.num_rows == 0) return;
  Scratch unpacked;
  if (job.w.packed != nullptr) {
    unpacked = scratch_of(ceil_div(job.w.rows * job.w.cols, 2));
    const Scratch lists = scratch_of(pool_.threads() * job.w.packed->lists_bytes(1) / sizeof(float));
    UnpackJob unpack = {job.w.packed, (uint8_t*)unpacked.get(), (uint8_t*)lists.get()};
    run(table_.unpack, unpack, job.w.rows, job.w.rows * job.w.cols);
    job.w = {Format::bf16, unpack.out, nullptr, job.w.rows, job.w.cols};
  }
  const size_t seen = job.start + job.num_rows;
  const size_t room = kScoreFloats / seen;
  const size_t queries = room == 0 ? 1 : smaller(room, table_.mla_queries);
  job.tile_rows = smaller(job.num_rows, queries);
  job.tile_heads = smaller(queries / job.tile_rows, ceil_div(job.num_heads, pool_.threads()));
  const Scratch scratch = scratch_of(pool_.threads() * table_.mla_scratch(job));
  job.scratch = scratch.get();
  const size_t pieces = ceil_div(job.num_heads, job.tile_heads) * ceil_div(job.num_rows, job.tile_rows);
  const size_t width = seen + job.nope_dim + job.value_dim;
  run(table_.mla_heads, job, pieces, job.num_rows * job.num_heads * width * job.w.cols);
}

void Kernels::attnres_mix(const float* sources, const float* f, float* out, size_t num_sources, size_t num_tokens,
                          size_t dim, double eps) {
  const size_t padded = vectors(num_sources) * 16, split_size = padded_cols(dim);
  const Scratch scratch = scratch_of(split_size + pool_.threads() * padded);
  table_.split(f, 1, dim, scratch.get());
  MixJob job = {sources,     scratch.get(), out, scratch.get() + split_size, padded, num_sources, num_tokens,
                dim, eps};
  run(table_.attnres_mix, job, num_tokens, num_sources * num_tokens * dim * 3);
}

void Kernels::route(RouteJob& job) {
  const PlainFloats floats;
  const Scratch scratch = scratch_of(2 * vectors(job.experts) * 16);
  job.scratch = scratch.get();
  table_.route(job, 0, job.num_tokens, 0);
}

void Kernels::unary(UnaryJob job) { run(table_.unary, job, vectors(job.size), elementary(job.size)); }

void Kernels::glu(GluJob job) { run(table_.glu, job, vectors(job.size), 2 * elementary(job.size)); }

void Kernels::fma(FmaJob job) { run(table_.fma, job, vectors(job.size), job.size); }

void Kernels::mxfp8(Mxfp8Job job, size_t size) { run(table_.mxfp8, job, size / 32, 16 * size); }

void Kernels::combine(CombineJob job, size_t num_tokens) {
  run(table_.combine, job, num_tokens, num_tokens * job.num_ranks * job.dim);
}

uint64_t Kernels::read(const uint8_t* data, size_t size) {
  std::vector<uint64_t> sums(pool_.threads() * 8);
  ReadJob job = {data, sums.data()};
  run(table_.read, job, size / 4096, size, 256);
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum ^= s;
  return sum;
}

}  // namespace twoends
