// The gated delta rule of training, forward: tiles of 16 tokens, as train/delta_rule.py has it in torch.
//
// With decays counted from the tile's first token (or the document's), k' = k decay, k" = k / decay and
// q' = q decay, the corrections C of a tile solve (I + beta tril(k' k"^T, -1)) C = beta (v - k' S), its outputs
// are q' S + tril(q' k"^T) C, and the state behind it is decay_end (S + k"^T C).
#pragma once
#include "elementary.h"
#include "lanes.h"
#include "tile_math.h"

namespace twoends {
namespace TWOENDS_ISA {

inline size_t whole_vectors(size_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// One tile of one head in scratch. `keys` and `values` are the widths of its rows, in whole vectors.
struct KdaTile {
  size_t keys, values, tokens;
  float beta[kTile], enters[kTile], leaves[kTile];  // enters, leaves: 1 where the state before or behind is seen
  bool opens[kTile], joined[kTile][kTile];
  float *q, *k, *v, *decay, *rise;
  float *k_decayed, *k_raised, *q_decayed, *k_entering, *q_entering, *k_to_end, *raised_T;
  float *raw, *coupling, *reads;        // [16, 16]; raw is the coupling without beta
  float *predicted, *correction, *end;  // end [keys]: decay from the state before to the one behind

  static size_t floats(size_t keys, size_t values) {
    return (11 * kTile + 1) * keys + 3 * kTile * values + 3 * kTile * kTile;
  }

  // Takes its floats from `room` and moves it on.
  void settle(float*& room) {
    const auto take = [&room](size_t size) {
      float* at = room;
      room += size;
      return at;
    };
    for (float** row : {&q, &k, &decay, &rise, &k_decayed, &k_raised, &q_decayed, &k_entering, &q_entering, &k_to_end,
                        &raised_T})
      *row = take(kTile * keys);
    end = take(keys);
    for (float** row : {&v, &predicted, &correction}) *row = take(kTile * values);
    for (float** square : {&raw, &coupling, &reads}) *square = take(kTile * kTile);
  }
};

// Which rows see what: by documents, or all of it.
inline void mark_documents(KdaTile& tile, const int64_t* documents, size_t first, size_t tokens) {
  int64_t of[kTile];
  for (size_t i = 0; i < kTile; ++i)  // rows behind the last token join its document; their keys are zero
    of[i] = documents == nullptr ? 0 : documents[smaller(first + i, tokens - 1)];
  const bool begins = first == 0;
  const int64_t before = begins || documents == nullptr ? 0 : documents[first - 1];
  for (size_t i = 0; i < kTile; ++i) {
    tile.opens[i] = i != 0 && of[i] != of[i - 1];
    tile.enters[i] = !begins && of[i] == before ? 1.f : 0.f;
    tile.leaves[i] = of[i] == of[kTile - 1] ? 1.f : 0.f;
    for (size_t j = 0; j < kTile; ++j) tile.joined[i][j] = of[i] == of[j];
  }
}

// `size` floats of each token's row into rows of `width`, zeros behind them and behind the last token.
inline void gather_rows(const float* from, size_t stride, size_t size, size_t tokens, float* to, size_t width) {
  for (size_t i = 0; i < kTile; ++i)
    for (size_t at = 0; at < width; at += kLanes)
      store(to + i * width + at, i < tokens ? load_some(from + i * stride + at, smaller(kLanes, size - at)) : zero());
}

// Reads tile number `n` of head `piece` (row * heads + head) and makes all that depends on no state.
inline void open_tile(KdaTile& tile, const KdaTilesJob& job, size_t piece, size_t n) {
  const size_t row = piece / job.heads, head = piece % job.heads, first = n * kTile, width = tile.keys;
  const size_t at_token = (row * job.tokens + first) * job.heads + head;
  tile.tokens = smaller(kTile, job.tokens - first);
  mark_documents(tile, job.documents == nullptr ? nullptr : job.documents + row * job.tokens, first, job.tokens);
  const size_t keys = job.heads * job.key_dim, values = job.heads * job.value_dim;
  gather_rows(job.q + at_token * job.key_dim, keys, job.key_dim, tile.tokens, tile.q, width);
  gather_rows(job.k + at_token * job.key_dim, keys, job.key_dim, tile.tokens, tile.k, width);
  gather_rows(job.g + at_token * job.key_dim, keys, job.key_dim, tile.tokens, tile.decay, width);
  gather_rows(job.v + at_token * job.value_dim, values, job.value_dim, tile.tokens, tile.v, tile.values);
  for (size_t i = 0; i < kTile; ++i) tile.beta[i] = i < tile.tokens ? job.beta[at_token + i * job.heads] : 0.f;
  const f32x16 one = set1(1.f);
  for (size_t at = 0; at < width; at += kLanes) {
    f32x16 decay = one;
    for (size_t i = 0; i < kTile; ++i) {
      const size_t here = i * width + at;
      const f32x16 step = exp(load(tile.decay + here));
      // A running product: the exponential of a running sum near -80 would be off by 4e-6.
      decay = tile.opens[i] ? step : step * decay;
      const f32x16 rise = one / decay, enters = set1(tile.enters[i]);
      const f32x16 k = load(tile.k + here), k_decayed = k * decay, q_decayed = load(tile.q + here) * decay;
      store(tile.decay + here, decay);
      store(tile.rise + here, rise);
      store(tile.k_decayed + here, k_decayed);
      store(tile.q_decayed + here, q_decayed);
      store(tile.k_entering + here, k_decayed * enters);
      store(tile.q_entering + here, q_decayed * enters);
      store(tile.k_raised + here, k * rise);
    }
    for (size_t i = 0; i < kTile; ++i) {
      const size_t here = i * width + at;
      store(tile.k_to_end + here, load(tile.k_raised + here) * decay * set1(tile.leaves[i]));
    }
    store(tile.end + at, decay * set1(tile.enters[kTile - 1]));
  }
  transpose(tile.k_raised, kTile, width, tile.raised_T);
  product<false>(kTile, width, kTile, {tile.k_decayed, width, 1}, tile.raised_T, tile.raw);
  product<false>(kTile, width, kTile, {tile.q_decayed, width, 1}, tile.raised_T, tile.reads);
  for (size_t i = 0; i < kTile; ++i) {
    for (size_t j = 0; j < kTile; ++j) {
      const size_t here = i * kTile + j;
      if (j >= i || !tile.joined[i][j]) tile.raw[here] = 0.f;
      if (j > i || !tile.joined[i][j]) tile.reads[here] = 0.f;
      tile.coupling[here] = tile.beta[i] * tile.raw[here];
    }
  }
}

// What the state predicts, and the corrections, row after row.
inline void correct(KdaTile& tile, const float* state) {
  const size_t width = tile.values;
  product<false>(kTile, tile.keys, width, {tile.k_entering, tile.keys, 1}, state, tile.predicted);
  for (size_t i = 0; i < kTile; ++i) {
    const f32x16 beta = set1(tile.beta[i]);
    for (size_t at = 0; at < width; at += kLanes) {
      const size_t here = i * width + at;
      f32x16 sum = beta * (load(tile.v + here) - load(tile.predicted + here));
      for (size_t j = 0; j < i; ++j)
        sum = fma(set1(-tile.coupling[i * kTile + j]), load(tile.correction + j * width + at), sum);
      store(tile.correction + here, sum);
    }
  }
}

// rows of m scaled by s, in place.
inline void scale_rows(float* m, const float* s, size_t rows, size_t width) {
  for (size_t i = 0; i < rows; ++i)
    for (size_t at = 0; at < width; at += kLanes) store(m + i * width + at, load(m + i * width + at) * set1(s[i]));
}

// The state behind the tile.
inline void advance(const KdaTile& tile, float* state) {
  scale_rows(state, tile.end, tile.keys, tile.values);
  product<true>(tile.keys, kTile, tile.values, {tile.k_to_end, 1, tile.keys}, tile.correction, state);
}

// Between a state [key_dim, value_dim] as callers have it and one in whole vectors; null stands for zeros.
inline void read_state(const KdaTilesJob& job, const float* from, const KdaTile& tile, float* state) {
  for (size_t i = 0; i < tile.keys; ++i) {
    const bool is_there = from != nullptr && i < job.key_dim;
    for (size_t at = 0; at < tile.values; at += kLanes)
      store(state + i * tile.values + at,
            is_there ? load_some(from + i * job.value_dim + at, smaller(kLanes, job.value_dim - at)) : zero());
  }
}

inline void write_rows(const float* from, size_t width, size_t rows, float* to, size_t stride, size_t size) {
  for (size_t i = 0; i < rows; ++i)
    for (size_t at = 0; at < size; at += kLanes)
      store_some(to + i * stride + at, load(from + i * width + at), smaller(kLanes, size - at));
}

// The state that the forward pass kept at the beginning of a segment; the first begins with zeros.
inline float* kept_state(const KdaTilesJob& job, size_t piece, size_t segment) {
  if (segment == 0) return nullptr;
  const size_t segments = (job.tokens + job.segment * kTile - 1) / (job.segment * kTile);
  return job.states + (piece * (segments - 1) + segment - 1) * job.key_dim * job.value_dim;
}

inline size_t kda_tiles_scratch(const KdaTilesJob& job) {
  const size_t keys = whole_vectors(job.key_dim), values = whole_vectors(job.value_dim);
  return KdaTile::floats(keys, values) + (keys + kTile) * values;
}

inline void kda_tiles(KdaTilesJob& job, size_t begin, size_t end, size_t worker) {
  KdaTile tile = {};
  tile.keys = whole_vectors(job.key_dim), tile.values = whole_vectors(job.value_dim);
  float* room = job.scratch + worker * kda_tiles_scratch(job);
  tile.settle(room);
  float *state = room, *out = room + tile.keys * tile.values;
  const size_t stride = job.heads * job.value_dim;
  for (size_t piece = begin; piece < end; ++piece) {
    read_state(job, nullptr, tile, state);
    for (size_t n = 0; n * kTile < job.tokens; ++n) {
      if (n != 0 && n % job.segment == 0 && job.states != nullptr)
        write_rows(state, tile.values, job.key_dim, kept_state(job, piece, n / job.segment), job.value_dim,
                   job.value_dim);
      open_tile(tile, job, piece, n);
      correct(tile, state);
      product<false>(kTile, tile.keys, tile.values, {tile.q_entering, tile.keys, 1}, state, out);
      product<true>(kTile, kTile, tile.values, {tile.reads, kTile, 1}, tile.correction, out);
      const size_t row = (piece / job.heads * job.tokens + n * kTile) * job.heads + piece % job.heads;
      write_rows(out, tile.values, tile.tokens, job.out + row * job.value_dim, stride, job.value_dim);
      advance(tile, state);
    }
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
