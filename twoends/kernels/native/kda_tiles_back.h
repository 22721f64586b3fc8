// The gated delta rule of training, backward: what kda_tiles.h computes, derived by hand, tile by tile from the
// last to the first. Nothing of a tile is kept by the forward pass: it is made again from the state before it.
#pragma once
#include "kda_tiles.h"

namespace twoends {
namespace TWOENDS_ISA {

// Gradients of one tile in scratch, beside what they are made from.
struct KdaTileBack {
  float *out, *out_entering;             // [16, values] of the outputs; of those rows that read the state
  float *correction, *scaled, *leaving;  // [16, values] of the corrections; times beta; of rows that read the state
  float *state_T, *after_T;              // [values, keys] the state, and the gradient of the state behind
  float* correction_T;                   // [values, 16]
  float *q_decayed, *k_decayed, *k_raised, *k_to_end;  // [16, keys]
  float *reads, *coupling;                             // [16, 16]
  float *end;                                          // [keys]

  static size_t floats(size_t keys, size_t values) {
    return 6 * kTile * values + 2 * keys * values + (4 * kTile + 1) * keys + 2 * kTile * kTile;
  }

  void settle(float*& room, size_t keys, size_t values) {
    const auto take = [&room](size_t size) {
      float* at = room;
      room += size;
      return at;
    };
    for (float** row : {&out, &out_entering, &correction, &scaled, &leaving, &correction_T}) *row = take(kTile * values);
    for (float** square : {&state_T, &after_T}) *square = take(keys * values);
    for (float** row : {&q_decayed, &k_decayed, &k_raised, &k_to_end}) *row = take(kTile * keys);
    end = take(keys);
    for (float** square : {&reads, &coupling}) *square = take(kTile * kTile);
  }
};

// Gradients of the corrections, and through their equations of the right-hand sides, in `correction`.
inline void pull_corrections(const KdaTile& tile, KdaTileBack& back, const float* after) {
  const size_t width = tile.values;
  product<false>(kTile, tile.keys, width, {tile.k_to_end, tile.keys, 1}, after, back.correction);
  product<true>(kTile, kTile, width, {tile.reads, 1, kTile}, back.out, back.correction);
  for (size_t i = kTile; i-- > 0;) {
    const f32x16 beta = set1(tile.beta[i]), enters = set1(-tile.enters[i]);
    for (size_t at = 0; at < width; at += kLanes) {
      const size_t here = i * width + at;
      f32x16 sum = load(back.correction + here);
      for (size_t j = i + 1; j < kTile; ++j)
        sum = fma(set1(-tile.coupling[j * kTile + i]), load(back.correction + j * width + at), sum);
      store(back.correction + here, sum);
      store(back.scaled + here, sum * beta);
      store(back.leaving + here, sum * beta * enters);
    }
  }
}

// Gradients of reads and coupling; beta's, for the tile's tokens.
inline void pull_squares(const KdaTile& tile, KdaTileBack& back, float* beta, size_t stride) {
  const size_t width = tile.values;
  transpose(tile.correction, kTile, width, back.correction_T);
  product<false>(kTile, width, kTile, {back.out, width, 1}, back.correction_T, back.reads);
  product<false>(kTile, width, kTile, {back.correction, width, 1}, back.correction_T, back.coupling);
  for (size_t i = 0; i < kTile; ++i) {
    f32x16 sum = zero();
    for (size_t at = 0; at < width; at += kLanes) {
      const size_t here = i * width + at;
      sum = fma(load(back.correction + here), load(tile.v + here) - load(tile.predicted + here), sum);
    }
    for (size_t j = 0; j < kTile; ++j) {
      const size_t here = i * kTile + j;
      if (j > i || !tile.joined[i][j]) back.reads[here] = 0.f;
      if (j >= i || !tile.joined[i][j]) back.coupling[here] = 0.f;
    }
    const f32x16 pulled = negate(load(back.coupling + i * kTile));
    sum = fma(pulled, load(tile.raw + i * kTile), sum);
    store(back.coupling + i * kTile, pulled * set1(tile.beta[i]));
    if (i < tile.tokens) beta[i * stride] = reduce(sum);
  }
}

// Gradients of the decayed and raised keys and queries, and of the decay over the whole tile.
inline void pull_rows(const KdaTile& tile, KdaTileBack& back) {
  const size_t keys = tile.keys, width = tile.values;
  product<false>(kTile, width, keys, {back.out_entering, width, 1}, back.state_T, back.q_decayed);
  product<true>(kTile, kTile, keys, {back.reads, kTile, 1}, tile.k_raised, back.q_decayed);
  product<false>(kTile, width, keys, {back.leaving, width, 1}, back.state_T, back.k_decayed);
  product<true>(kTile, kTile, keys, {back.coupling, kTile, 1}, tile.k_raised, back.k_decayed);
  product<false>(kTile, kTile, keys, {back.reads, 1, kTile}, tile.q_decayed, back.k_raised);
  product<true>(kTile, kTile, keys, {back.coupling, 1, kTile}, tile.k_decayed, back.k_raised);
  product<false>(kTile, width, keys, {tile.correction, width, 1}, back.after_T, back.k_to_end);
  const f32x16 enters = set1(tile.enters[kTile - 1]);
  for (size_t at = 0; at < keys; at += kLanes) {
    const f32x16 decay = load(tile.decay + (kTile - 1) * keys + at);
    f32x16 end = zero();
    for (size_t i = 0; i < width; ++i)
      end = fma(load(back.state_T + i * keys + at), load(back.after_T + i * keys + at), end);
    end = end * enters;
    for (size_t i = 0; i < kTile; ++i) {
      const size_t here = i * keys + at;
      const f32x16 leaving = load(back.k_to_end + here) * set1(tile.leaves[i]);
      store(back.k_raised + here, fma(leaving, decay, load(back.k_raised + here)));
      end = fma(leaving, load(tile.k_raised + here), end);
    }
    store(back.end + at, end);
  }
}

// The rows' own gradients from those of their products with the decays; `g` runs from the last token to the first.
inline void pull_inputs(const KdaTile& tile, const KdaTileBack& back, float* q, float* k, float* g, size_t stride,
                        size_t size) {
  for (size_t at = 0; at < size; at += kLanes) {
    const size_t n = smaller(kLanes, size - at);
    f32x16 behind = zero();
    for (size_t i = kTile; i-- > 0;) {
      const size_t here = i * tile.keys + at;
      const f32x16 decay = load(tile.decay + here), rise = load(tile.rise + here), key = load(tile.k + here);
      const f32x16 d_q = load(back.q_decayed + here), d_k = load(back.k_decayed + here), d_rise = load(back.k_raised + here);
      f32x16 d_decay = fma(d_q, load(tile.q + here), d_k * key);
      if (i == kTile - 1) d_decay = d_decay + load(back.end + at);
      const f32x16 pull = fma(d_decay, decay, negate(d_rise * key * rise));
      behind = i == kTile - 1 || tile.opens[i + 1] ? pull : pull + behind;
      if (i >= tile.tokens) continue;
      store_some(q + i * stride + at, d_q * decay, n);
      store_some(k + i * stride + at, fma(d_k, decay, d_rise * rise), n);
      store_some(g + i * stride + at, behind, n);
    }
  }
}

// One tile: `state` is the one before it, `after` the gradient of the one behind it and then of the one before.
inline void pull_tile(KdaTile& tile, KdaTileBack& back, const KdaTilesJob& job, size_t piece, size_t n,
                      const float* state, float* after) {
  const size_t row = (piece / job.heads * job.tokens + n * kTile) * job.heads + piece % job.heads;
  const size_t keys = job.heads * job.key_dim, values = job.heads * job.value_dim;
  open_tile(tile, job, piece, n);
  correct(tile, state);
  gather_rows(job.d_out + row * job.value_dim, values, job.value_dim, tile.tokens, back.out, tile.values);
  for (size_t i = 0; i < kTile * tile.values; i += kLanes)
    store(back.out_entering + i, load(back.out + i) * set1(tile.enters[i / tile.values]));
  transpose(state, tile.keys, tile.values, back.state_T);
  transpose(after, tile.keys, tile.values, back.after_T);
  pull_corrections(tile, back, after);
  pull_squares(tile, back, job.d_beta + row, job.heads);
  pull_rows(tile, back);
  pull_inputs(tile, back, job.d_q + row * job.key_dim, job.d_k + row * job.key_dim, job.d_g + row * job.key_dim, keys,
              job.key_dim);
  write_rows(back.scaled, tile.values, tile.tokens, job.d_v + row * job.value_dim, values, job.value_dim);
  scale_rows(after, tile.end, tile.keys, tile.values);
  product<true>(tile.keys, kTile, tile.values, {tile.q_decayed, 1, tile.keys}, back.out_entering, after);
  product<true>(tile.keys, kTile, tile.values, {tile.k_decayed, 1, tile.keys}, back.leaving, after);
}

inline size_t kda_tiles_back_scratch(const KdaTilesJob& job) {
  const size_t keys = whole_vectors(job.key_dim), values = whole_vectors(job.value_dim);
  return KdaTile::floats(keys, values) + KdaTileBack::floats(keys, values) + (job.segment + 1) * keys * values;
}

// From the last segment to the first: its states once more, then its tiles backwards.
inline void kda_tiles_back(KdaTilesJob& job, size_t begin, size_t end, size_t worker) {
  KdaTile tile = {};
  KdaTileBack back = {};
  tile.keys = whole_vectors(job.key_dim), tile.values = whole_vectors(job.value_dim);
  const size_t size = tile.keys * tile.values, tiles = (job.tokens + kTile - 1) / kTile;
  float* room = job.scratch + worker * kda_tiles_back_scratch(job);
  tile.settle(room);
  back.settle(room, tile.keys, tile.values);
  float *after = room, *states = room + size;
  for (size_t piece = begin; piece < end; ++piece) {
    read_state(job, nullptr, tile, after);
    for (size_t segment = (tiles - 1) / job.segment + 1; segment-- > 0;) {
      const size_t first = segment * job.segment, stop = smaller(first + job.segment, tiles);
      read_state(job, kept_state(job, piece, segment), tile, states);
      for (size_t n = first; n + 1 < stop; ++n) {
        float* state = states + (n - first) * size;
        std::memcpy(state + size, state, size * sizeof(float));
        open_tile(tile, job, piece, n);
        correct(tile, state + size);
        advance(tile, state + size);
      }
      for (size_t n = stop; n-- > first;) pull_tile(tile, back, job, piece, n, states + (n - first) * size, after);
    }
  }
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
