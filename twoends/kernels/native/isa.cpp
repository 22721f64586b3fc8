// All kernels of one instruction set. Compiled once per set (CMakeLists.txt gives TWOENDS_ISA).
#include "isa.h"

#include "conv_train.h"
#include "kda.h"
#include "kda_tiles_back.h"
#include "mla.h"
#include "moe.h"
#include "norm.h"

namespace twoends {
namespace TWOENDS_ISA {
namespace {

void matmul_pieces(MatmulJob& job, size_t begin, size_t end, size_t worker) { matmul(job, begin, end, worker); }

void products_pieces(ProductsJob& job, size_t begin, size_t end, size_t worker) {
  for (size_t i = 0; i < job.count && begin < end; ++i) {
    if (begin >= job.first[i + 1]) continue;
    const size_t row = begin - job.first[i], stop = smaller(end, job.first[i + 1]);
    const size_t own = smaller(stop - job.first[i], job.jobs[i].w.rows);
    if (row < own) matmul(job.jobs[i], row, own, worker);
    begin = stop;
  }
}

void unpack_pieces(UnpackJob& job, size_t begin, size_t end, size_t worker) {
  uint8_t* lists = job.lists + worker * job.block->lists_bytes(1);
  unpack_rows(*job.block, begin, end, lists, job.out + begin * job.block->cols * 2);
}

void read_pieces(ReadJob& job, size_t begin, size_t end, size_t worker) {
  uint64_t sums[8] = {};
  for (size_t piece = begin; piece < end; ++piece) {
    const uint8_t* p = job.data + piece * 4096;
    for (size_t at = 0; at < 4096; at += sizeof sums) {
      uint64_t words[8];
      std::memcpy(words, p + at, sizeof words);
      TWOENDS_UNROLL
      for (int i = 0; i < 8; ++i) sums[i] ^= words[i];
    }
  }
  for (int i = 0; i < 8; ++i) job.out[worker * 8] ^= sums[i];
}

}  // namespace

Table table() {
  Table t = {};
#define TWOENDS_TEXT2(name) #name
#define TWOENDS_TEXT(name) TWOENDS_TEXT2(name)
  t.name = TWOENDS_TEXT(TWOENDS_ISA);
  t.split = split;
  t.mla_queries = kMlaQueries;
  t.mla_scratch = mla_scratch;
  t.matmul = matmul_pieces;
  t.products = products_pieces;
  t.unpack = unpack_pieces;
  t.rms_norm = rms_norm;
  t.l2_norm = l2_norm;
  t.gated_norm = gated_norm;
  t.short_conv = short_conv;
  t.kda_decay = kda_decay;
  t.kda_steps = kda_steps;
  t.kda_mix = kda_mix;
  t.kda_tiles_scratch = kda_tiles_scratch;
  t.kda_tiles_back_scratch = kda_tiles_back_scratch;
  t.kda_tiles = kda_tiles;
  t.kda_tiles_back = kda_tiles_back;
  t.conv_train = conv_train;
  t.conv_train_back = conv_train_back;
  t.mla_heads = mla_heads;
  t.attnres_mix = attnres_mix;
  t.route = route;
  t.unary = unary;
  t.glu = glu;
  t.glu_rows = glu_rows;
  t.mxfp8 = mxfp8;
  t.fma = fma_each;
  t.combine = combine;
  t.read = read_pieces;
  return t;
}

}  // namespace TWOENDS_ISA
}  // namespace twoends
