// What the binding hands to a kernel: one struct per operation, and the table of kernels of one
// instruction set. Every kernel does the pieces begin .. end - 1 of its job; how the pieces are
// divided among calls and threads has no effect on any bit.
#pragma once
#include <cstddef>
#include <cstdint>

#include "packed_block.h"

namespace twoends {

enum class Format { bf16, f32, mxfp4, packed };

// Where the weights of `rows` rows lie; any alignment.
struct Weights {
  Format format;
  const uint8_t* data;
  const uint8_t* scale;  // mxfp4 only
  size_t rows, cols;
  const PackedBlock* packed = nullptr;  // packed only
  const PackedBlock* scales = nullptr;  // mxfp4 only, where its scales are packed; `scale` is then null
};

// Piece: one row of the matrix. `x_split` holds num_x inputs, each as groups of 16 even then 16 odd elements.
struct MatmulJob {
  Weights w;
  const float* x_split;
  size_t num_x;
  float* out;  // out[t * out_stride + row]
  size_t out_stride;
  uint8_t* lists = nullptr;  // packed only: `room` bytes per worker, for lists, then unpacked_rows rows or the scales of a strip
  size_t room = 0, unpacked_rows = 0;
};

// Piece: one row of the products taken together; job i has the rows first[i] .. first[i + 1] - 1, the last of
// which may be none of its own.
struct ProductsJob {
  const MatmulJob* jobs;
  const size_t* first;  // count + 1 of them
  size_t count;
};

// Packed rows that are multiplied at once, at most.
constexpr size_t kPackedRows = 8;

// Piece: one row; out[row * cols] as bf16. `lists` holds block->lists_bytes(1) per worker.
struct UnpackJob {
  const PackedBlock* block;
  uint8_t *out, *lists;
};

// Piece: one row of `dim` elements.
struct NormJob {
  const float *x, *w, *gate;
  float* out;
  size_t dim;
  double eps;
  float scale;
};

// Piece: 16 channels. Taps: w[p * 4 + j], j = 3 meets the current token; tail[j * channels + p], oldest first.
struct ConvJob {
  const float *u, *w;
  float *tail, *out;
  size_t num_tokens, channels;
};

// Piece: one head of one token.
struct DecayJob {
  const float *z, *dt_bias, *a_log;
  float* out;
  size_t heads, key_dim;
  bool bounded;
  float bound;
};

// Piece: `block` value columns of one head, through all tokens. `scratch`, if there is any, holds the state of
// one piece (key_dim x block) per worker.
struct KdaJob {
  const float *q, *k, *v, *alpha, *beta;
  float *state, *out;
  size_t num_tokens, heads, key_dim, value_dim, block;
  float* scratch;
};

// Piece: one head, through all tokens; outputs of one step are inputs of the next. dim: both of key and value.
struct KdaMixJob {
  ConvJob q_conv, k_conv, v_conv;
  NormJob q_norm, k_norm, out_norm;
  DecayJob decay;
  const float* beta_logits;
  float* beta;
  KdaJob steps;
};

// Piece: one tile of tile_heads x tile_rows queries, at most Table::mla_queries. `scratch` holds what
// Table::mla_scratch says per worker.
struct MlaJob {
  Weights w;
  const float *q, *cache;
  float *out, *scratch;
  size_t num_rows, start, first_head, num_heads, all_heads, nope_dim, value_dim, query_dim, cache_dim;
  size_t tile_heads, tile_rows;
  float scale;
};

// Piece: one head of one row of a batch, through all tokens: q, k, g [B,T,H,K], v [B,T,H,V], beta [B,T,H],
// documents [B,T] or null. `states` keeps the state every `segment` tiles, [B*H, segments - 1, K, V], or is null;
// `scratch` holds what Table says per worker. The d_ arrays are of the backward pass alone.
struct KdaTilesJob {
  const float *q, *k, *v, *g, *beta;
  const int64_t* documents;
  float *states, *out;
  size_t tokens, heads, key_dim, value_dim, segment;
  const float* d_out;
  float *d_q, *d_k, *d_v, *d_g, *d_beta;
  float* scratch;
};

// Piece: 32 channels of one row of a batch: x, out [B,T,P], w [P,4] (the last tap meets the current token),
// documents [B,T] or null. Backward: d_out, d_x [B,T,P], d_w [B,4,P].
struct ConvTrainJob {
  const float *x, *w;
  const int64_t* documents;
  float* out;
  size_t tokens, channels;
  const float* d_out;
  float *d_x, *d_w;
};

// Piece: one token. `scratch` holds scratch_floats per worker.
struct MixJob {
  const float *sources, *f_split;
  float *out, *scratch;
  size_t scratch_floats;
  size_t num_sources, num_tokens, dim;
  double eps;
};

// Piece: one token; `bad_row` stays at num_tokens or becomes a row whose scores are not finite (the caller's
// thread alone runs it).
struct RouteJob {
  const float *logits, *bias;
  int32_t* ids;
  float *weights, *scratch;  // scratch: 2 * experts rounded up to 16
  size_t num_tokens, experts, chosen;
  bool renormalize;
  float scaling;
  size_t bad_row;
};

// Piece: 16 elements.
enum class Unary { exp, sigmoid, tanh, softplus, silu };
struct UnaryJob {
  Unary function;
  const float* x;
  float* out;
  size_t size;
};
enum class Glu { sigmoid_gate, silu, situ, situ_linear };
struct GluJob {
  Glu function;
  const float *gate, *up;
  float* out;
  size_t size;
  float beta, linear_beta;
};
// Piece: one row of `dim` elements; `split` gets it as a product takes it, padded_dim floats a row.
struct GluRowsJob {
  GluJob glu;
  float* split;
  size_t dim, padded_dim;
  bool to_mxfp8;
};
// Piece: one block of 32 elements.
struct Mxfp8Job {
  const float* x;
  float* out;
};
struct FmaJob {
  const float *a, *b, *c;
  float* out;
  size_t size;
};

// Piece: one token.
struct CombineJob {
  const float *y, *weights;
  float* out;
  size_t num_ranks, dim;
};

// Piece: 4096 bytes; the XOR of all words goes to out[worker * 8], so that the loads can't be dropped.
struct ReadJob {
  const uint8_t* data;
  uint64_t* out;
};

template <class Job>
using Kernel = void (*)(Job& job, size_t begin, size_t end, size_t worker);

struct Table {
  const char* name;
  void (*split)(const float* x, size_t count, size_t cols, float* out);
  size_t mla_queries;
  size_t (*mla_scratch)(const MlaJob& job);
  Kernel<MatmulJob> matmul;
  Kernel<ProductsJob> products;
  Kernel<UnpackJob> unpack;
  Kernel<NormJob> rms_norm, l2_norm, gated_norm;
  Kernel<ConvJob> short_conv;
  Kernel<DecayJob> kda_decay;
  Kernel<KdaJob> kda_steps;
  Kernel<KdaMixJob> kda_mix;
  size_t (*kda_tiles_scratch)(const KdaTilesJob& job);
  size_t (*kda_tiles_back_scratch)(const KdaTilesJob& job);
  Kernel<KdaTilesJob> kda_tiles, kda_tiles_back;
  Kernel<ConvTrainJob> conv_train, conv_train_back;
  Kernel<MlaJob> mla_heads;
  Kernel<MixJob> attnres_mix;
  Kernel<RouteJob> route;
  Kernel<UnaryJob> unary;
  Kernel<GluJob> glu;
  Kernel<GluRowsJob> glu_rows;
  Kernel<Mxfp8Job> mxfp8;
  Kernel<FmaJob> fma;
  Kernel<CombineJob> combine;
  Kernel<ReadJob> read;
};

}  // namespace twoends
