// The parts of a packed block: of bf16 rows, or of the scales of an MXFP4 matrix, a strip of rows to one row of the
// block. kernels/pack_levels.py, pack_codec.py and pack_scales.py are the definition of what lies where.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace twoends {

constexpr size_t kUnit = 64;
constexpr int kMostLevels = 3;
// How far behind the bytes at work are those that are fetched meanwhile: decoding keeps the hardware from it.
constexpr size_t kFetchBytes = 2048;

inline uint32_t word_at(const uint8_t* p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

// Codes of the first level lie unit by unit; those of the others row by row, from `starts` on, in groups of eight.
struct PackedLevel {
  const uint8_t *codes, *exponents, *starts;
  int bits;
  uint8_t marker;

  size_t first_group(size_t row) const { return word_at(starts + 4 * row); }
};

struct PackedBlock {
  PackedLevel levels[kMostLevels];
  const uint8_t *low, *escapes, *escape_starts;  // low: bytes that are not coded, of bf16 rows only
  size_t rows, cols, units;
  int num_levels;

  const uint8_t* first_escape(size_t row) const { return escapes + word_at(escape_starts + 4 * row); }
  // Bytes of one list of a row when it is expanded: what vectors write past the end included.
  size_t list_bytes() const { return num_levels == 1 ? 0 : (units + 2) * kUnit; }
  // Row `r` of several that are at work, and what its inner lists take meanwhile.
  size_t lists_bytes(size_t rows_at_once) const { return (rows_at_once + kMostLevels - 2) * list_bytes(); }
};

// Whether starts[0 .. rows] go from 0 to `count` in steps of 0 to `most`.
inline bool in_order(const uint8_t* starts, size_t rows, size_t count, size_t most) {
  size_t before = 0;
  for (size_t row = 0; row <= rows; ++row) {
    const size_t start = word_at(starts + 4 * row);
    if (start < before || start - before > (row == 0 ? 0 : most)) return false;
    before = start;
  }
  return before == count;
}

// What differs between the kinds of blocks.
struct BlockKind {
  char magic[5];
  size_t low_bytes;  // of a unit
  int least_bits, most_bits;
};
constexpr BlockKind kRowsKind = {"TwP2", kUnit, 2, 4}, kScalesKind = {"TwS2", 0, 1, 3};

// Reads the header. False for bytes that are no block of this shape, whole and with its lists in order.
inline bool open_levels(const BlockKind& kind, const uint8_t* data, size_t size, size_t rows, size_t cols,
                        PackedBlock& block) {
  constexpr size_t header = 128, pad = 64, group = 8;
  if (size < header + pad || std::memcmp(data, kind.magic, 4) != 0) return false;
  const int num_levels = data[4];
  if (num_levels < 1 || num_levels > kMostLevels || word_at(data + 8) != rows || word_at(data + 12) != cols)
    return false;
  block.rows = rows, block.cols = cols, block.units = (cols + kUnit - 1) / kUnit, block.num_levels = num_levels;
  const size_t starts_bytes = 4 * (rows + 1), row_values = block.units * kUnit;
  block.low = data + header + (num_levels * starts_bytes + 63) / 64 * 64;
  const uint8_t* at = block.low + rows * block.units * kind.low_bytes;
  for (int k = 0; k < num_levels; ++k) {
    PackedLevel& level = block.levels[k];
    level.bits = data[5 + k], level.marker = data[28 + k], level.exponents = data + 64 + 16 * k;
    if (level.bits < kind.least_bits || level.bits > kind.most_bits) return false;
    const size_t count = k == 0 ? rows * row_values / group : word_at(data + 16 + 4 * (k - 1));
    level.codes = at, at += count * level.bits;
    level.starts = data + header + (k - 1) * starts_bytes;
  }
  const size_t num_escapes = word_at(data + 16 + 4 * (num_levels - 1));
  block.escapes = at, block.escape_starts = data + header + (num_levels - 1) * starts_bytes;
  if (size != (size_t)(at - data) + num_escapes + pad) return false;
  for (int k = 1; k < num_levels; ++k)
    if (!in_order(block.levels[k].starts, rows, word_at(data + 16 + 4 * (k - 1)), row_values / group)) return false;
  return in_order(block.escape_starts, rows, num_escapes, row_values);
}

inline bool open_block(const uint8_t* data, size_t size, size_t rows, size_t cols, PackedBlock& block) {
  return open_levels(kRowsKind, data, size, rows, cols, block);
}

// Rows of a strip whose scales are one row of a block.
inline size_t strip_rows(size_t groups) {
  constexpr size_t values = 1024, multiple = 16;
  return (values + groups * multiple - 1) / (groups * multiple) * multiple;
}

inline bool open_scales(const uint8_t* data, size_t size, size_t rows, size_t groups, PackedBlock& block) {
  if (groups == 0) return false;
  const size_t strip = strip_rows(groups);
  return open_levels(kScalesKind, data, size, (rows + strip - 1) / strip, strip * groups, block);
}

}  // namespace twoends
