// Latent attention in absorbed form. A tile is up to kMlaQueries queries: some heads times some rows.
// The weights of a head are decoded once per tile, and so is every row of the cache.
#pragma once
#include "elementary.h"
#include "matmul.h"
#include "norm.h"

namespace twoends {
namespace TWOENDS_ISA {

#if defined(TWOENDS_USE_AVX512)
constexpr int kContextQueries = 5, kContextVectors = 4, kMlaQueries = 5;
#else
constexpr int kContextQueries = 2, kContextVectors = 2, kMlaQueries = 6;
#endif
// Positions whose cache rows stay in the second-level cache while all columns and queries pass by.
constexpr size_t kPositions = 64;

// One worker's memory, carved from job.scratch.
struct MlaScratch {
  float *query, *query_split, *context, *context_split, *scores;
  size_t query_stride, context_stride, scores_stride, floats;

  MlaScratch(const MlaJob& job, size_t worker) {
    const size_t queries = job.tile_heads * job.tile_rows;
    query_stride = groups_of(job.cache_dim) * kGroup;
    context_stride = groups_of(job.w.cols) * kGroup;
    scores_stride = (job.start + job.num_rows + 15) / 16 * 16;
    floats = queries * (2 * query_stride + 2 * context_stride + scores_stride);
    query = job.scratch + worker * floats;
    query_split = query + queries * query_stride;
    context = query_split + queries * query_stride;
    context_split = context + queries * context_stride;
    scores = context_split + queries * context_stride;
  }
};

inline size_t mla_scratch(const MlaJob& job) { return MlaScratch(job, 0).floats; }

// acc[t] (split) += over D nope rows in order of row * q[t][d], for the group of columns whose bytes start at w.
constexpr size_t kLineBytes = 64;

template <class W, int D>
TWOENDS_INLINE void absorb_group(const uint8_t* const (&w)[D], const float* q, size_t q_stride, size_t rows,
                                 float* acc, size_t acc_stride) {
  f32x16 even[D], odd[D];
  TWOENDS_UNROLL
  for (int d = 0; d < D; ++d) W::pair(w[d], even[d], odd[d]);
  for (size_t t = 0; t < rows; ++t) {
    float* at = acc + t * acc_stride;
    f32x16 a = load(at), b = load(at + kLanes);
    TWOENDS_UNROLL
    for (int d = 0; d < D; ++d) {
      const f32x16 factor = set1(q[t * q_stride + d]);
      a = fma(even[d], factor, a);
      b = fma(odd[d], factor, b);
    }
    store(at, a);
    store(at + kLanes, b);
  }
}

template <class W, int D>
inline void absorb_rows(const uint8_t* first, size_t cols, const float* q, size_t q_stride, size_t rows, float* acc,
                        size_t acc_stride, size_t ahead) {
  const size_t whole = cols / kGroup, row_bytes = cols * W::element_bytes;
  for (size_t g = 0; g < whole; ++g) {
    const uint8_t* w[D];
    TWOENDS_UNROLL
    for (int d = 0; d < D; ++d) {
      w[d] = first + d * row_bytes + g * kGroup * W::element_bytes;
      for (size_t line = 0; line < kGroup * W::element_bytes; line += kLineBytes) prefetch(w[d] + ahead + line);
    }
    absorb_group<W, D>(w, q, q_stride, rows, acc + g * kGroup, acc_stride);
  }
  if (cols % kGroup != 0) {
    for (int d = 0; d < D; ++d) {
      const Tail<W> tail(first + d * row_bytes + whole * kGroup * W::element_bytes, cols % kGroup);
      const uint8_t* w[1] = {tail.bytes};
      absorb_group<W, 1>(w, q + d, q_stride, rows, acc + whole * kGroup, acc_stride);
    }
  }
}

// The absorbed queries (split) of one head for `rows` rows; the next head's rows are fetched meanwhile.
template <class W>
inline void absorb(const MlaJob& job, const uint8_t* nope_rows, const float* q, size_t rows, float* acc,
                   size_t acc_stride) {
  const size_t cols = job.w.cols, q_stride = job.all_heads * job.query_dim;
  const size_t ahead = (job.nope_dim + job.value_dim) * cols * W::element_bytes;
  for (size_t t = 0; t < rows; ++t) std::memset(acc + t * acc_stride, 0, groups_of(cols) * kGroup * sizeof(float));
  size_t d = 0;
  for (; d + 4 <= job.nope_dim; d += 4)
    absorb_rows<W, 4>(nope_rows + d * cols * W::element_bytes, cols, q + d, q_stride, rows, acc, acc_stride, ahead);
  for (; d < job.nope_dim; ++d)
    absorb_rows<W, 1>(nope_rows + d * cols * W::element_bytes, cols, q + d, q_stride, rows, acc, acc_stride, ahead);
}

// context[i] += over positions in order of cache row * e[i], for N queries and C vectors of columns.
template <int N, int C, bool WHOLE>
inline void context_columns(const float* cache, size_t cache_dim, const float* e, size_t e_stride, size_t begin,
                            size_t end, float* context, size_t context_stride, size_t n) {
  const auto get = [n](const float* p) { return WHOLE ? load(p) : load_n(p, n); };
  f32x16 acc[N][C];
  TWOENDS_UNROLL
  for (int i = 0; i < N; ++i) {
    TWOENDS_UNROLL
    for (int c = 0; c < C; ++c) acc[i][c] = load(context + i * context_stride + c * kLanes);
  }
  for (size_t p = begin; p < end; ++p) {
    const float* row = cache + p * cache_dim;
    prefetch(row + kPositions * cache_dim);
    if (C > 1) prefetch(row + kPositions * cache_dim + kLanes);
    if (C > 2) prefetch(row + kPositions * cache_dim + 2 * kLanes);
    if (C > 3) prefetch(row + kPositions * cache_dim + 3 * kLanes);
    f32x16 value[C];
    TWOENDS_UNROLL
    for (int c = 0; c < C; ++c) value[c] = get(row + c * kLanes);
    TWOENDS_UNROLL
    for (int i = 0; i < N; ++i) {
      const f32x16 weight = set1(e[i * e_stride + p]);
      TWOENDS_UNROLL
      for (int c = 0; c < C; ++c) acc[i][c] = fma(value[c], weight, acc[i][c]);
    }
  }
  TWOENDS_UNROLL
  for (int i = 0; i < N; ++i) {
    TWOENDS_UNROLL
    for (int c = 0; c < C; ++c) store(context + i * context_stride + c * kLanes, acc[i][c]);
  }
}

template <int N>
inline void context_queries(const MlaJob& job, const MlaScratch& m, size_t first, size_t begin, size_t end) {
  const float* e = m.scores + first * m.scores_stride;
  float* context = m.context + first * m.context_stride;
  constexpr int C = kContextVectors;
  const size_t cols = job.w.cols;
  size_t at = 0;
  for (; at + C * kLanes <= cols; at += C * kLanes)
    context_columns<N, C, true>(job.cache + at, job.cache_dim, e, m.scores_stride, begin, end, context + at,
                                m.context_stride, 0);
  for (; at + kLanes <= cols; at += kLanes)
    context_columns<N, 1, true>(job.cache + at, job.cache_dim, e, m.scores_stride, begin, end, context + at,
                                m.context_stride, 0);
  if (at < cols)
    context_columns<N, 1, false>(job.cache + at, job.cache_dim, e, m.scores_stride, begin, end, context + at,
                                 m.context_stride, cols - at);
}

// exp(score * scale - max) in place; gives 1 / their sum, where position p belongs to lane p mod 16.
inline float softmax_weights(float* scores, size_t count, float scale) {
  const size_t pieces = (count + 15) / 16;
  for_vectors(count, 0, pieces, [&](size_t at, size_t n) {
    store_some(scores + at, load_some(scores + at, n) * set1(scale), n);
  });
  exp_below_max(scores, count);
  f32x16 sum = zero();
  for_vectors(count, 0, pieces, [&](size_t at, size_t n) { sum = sum + load_some(scores + at, n); });
  return 1.f / reduce(sum);
}

template <class W>
inline void mla_queries(const MlaJob& job, const MlaScratch& m, size_t head, size_t num_heads, size_t row,
                        size_t num_rows) {
  const size_t latent = job.w.cols, rope = job.query_dim - job.nope_dim;
  const size_t head_bytes = (job.nope_dim + job.value_dim) * latent * W::element_bytes;
  const size_t q_stride = job.all_heads * job.query_dim;
  for (size_t h = 0; h < num_heads; ++h) {
    const float* q = job.q + row * q_stride + (job.first_head + head + h) * job.query_dim;
    float* absorbed = m.query_split + h * num_rows * m.query_stride;
    absorb<W>(job, job.w.data + (head + h) * head_bytes, q, num_rows, absorbed, m.query_stride);
    for (size_t t = 0; t < num_rows; ++t) {
      float* query = m.query + (h * num_rows + t) * m.query_stride;
      join_row(absorbed + t * m.query_stride, latent, query);
      std::memcpy(query + latent, q + t * q_stride + job.nope_dim, rope * sizeof(float));
      split_row(query, job.cache_dim, absorbed + t * m.query_stride);
    }
  }
  const size_t queries = num_heads * num_rows, seen = job.start + row + num_rows;
  const Weights cache = {Format::f32, (const uint8_t*)job.cache, nullptr, seen, job.cache_dim};
  matmul(MatmulJob{cache, m.query_split, queries, m.scores, m.scores_stride}, 0, seen);
}

// The weighted sum of the cache for each query, times the inverse of the sum of its weights; split.
inline void mla_context(const MlaJob& job, const MlaScratch& m, size_t queries, size_t row, size_t num_rows) {
  std::memset(m.context, 0, queries * m.context_stride * sizeof(float));
  const size_t common = job.start + row + 1;
  for (size_t begin = 0; begin < common; begin += kPositions) {
    const size_t end = smaller(begin + kPositions, common);
    size_t i = 0;
    for (; i + kContextQueries <= queries; i += kContextQueries)
      context_queries<kContextQueries>(job, m, i, begin, end);
    for (; i < queries; ++i) context_queries<1>(job, m, i, begin, end);
  }
  for (size_t i = 0; i < queries; ++i)
    if (i % num_rows != 0) context_queries<1>(job, m, i, common, common + i % num_rows);
}

template <class W>
inline void mla_tile(const MlaJob& job, const MlaScratch& m, size_t head, size_t num_heads, size_t row,
                     size_t num_rows) {
  mla_queries<W>(job, m, head, num_heads, row, num_rows);
  const size_t latent = job.w.cols, queries = num_heads * num_rows;
  float inverse[kMlaQueries];
  for (size_t i = 0; i < queries; ++i)
    inverse[i] = softmax_weights(m.scores + i * m.scores_stride, job.start + row + i % num_rows + 1, job.scale);
  mla_context(job, m, queries, row, num_rows);
  for (size_t i = 0; i < queries; ++i) {
    float* context = m.context + i * m.context_stride;
    for (size_t at = 0; at < m.context_stride; at += kLanes)
      store(context + at, load(context + at) * set1(inverse[i]));
    split_row(context, latent, m.context_split + i * m.context_stride);
  }
  const size_t row_bytes = latent * W::element_bytes, out_stride = job.all_heads * job.value_dim;
  const size_t head_bytes = (job.nope_dim + job.value_dim) * row_bytes;
  for (size_t h = 0; h < num_heads; ++h) {
    const uint8_t* values = job.w.data + (head + h) * head_bytes + job.nope_dim * row_bytes;
    const Weights w = {job.w.format, values, nullptr, job.value_dim, latent};
    float* out = job.out + row * out_stride + (job.first_head + head + h) * job.value_dim;
    matmul(MatmulJob{w, m.context_split + h * num_rows * m.context_stride, num_rows, out, out_stride}, 0,
           job.value_dim);
  }
}

inline void mla_heads(MlaJob& job, size_t begin, size_t end, size_t worker) {
  const MlaScratch m(job, worker);
  const size_t head_tiles = (job.num_heads + job.tile_heads - 1) / job.tile_heads;
  for (size_t piece = begin; piece < end; ++piece) {
    const size_t head = piece % head_tiles * job.tile_heads, row = piece / head_tiles * job.tile_rows;
    const size_t heads = smaller(job.tile_heads, job.num_heads - head);
    const size_t rows = smaller(job.tile_rows, job.num_rows - row);
    if (job.w.format == Format::bf16)
      mla_tile<Bf16>(job, m, head, heads, row, rows);
    else
      mla_tile<F32>(job, m, head, heads, row, rows);
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
