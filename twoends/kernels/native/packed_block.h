// The parts of a packed block of bf16 rows. kernels/pack_codec.py is the definition of what lies where.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace twoends {

constexpr size_t kUnit = 64;

struct PackedBlock {
  const uint8_t *starts, *low, *codes, *escapes, *exponents;
  size_t rows, cols, units;
  int bits;
  uint8_t marker;

  static uint32_t word(const uint8_t* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
  }
  const uint8_t* first_escape(size_t row) const { return escapes + word(starts + 4 * row); }
};

// Reads the header. False for bytes that are no block of this shape, whole and with its escapes in order.
inline bool open_block(const uint8_t* data, size_t size, size_t rows, size_t cols, PackedBlock& block) {
  constexpr size_t header = 64, pad = 64;
  if (size < header + pad || std::memcmp(data, "TwP1", 4) != 0) return false;
  block.bits = data[4], block.marker = data[5], block.exponents = data + 16;
  if ((block.bits != 3 && block.bits != 4) || PackedBlock::word(data + 8) != rows || PackedBlock::word(data + 12) != cols)
    return false;
  block.rows = rows, block.cols = cols, block.units = (cols + kUnit - 1) / kUnit;
  block.starts = data + header;
  block.low = block.starts + (4 * (rows + 1) + 63) / 64 * 64;
  block.codes = block.low + rows * block.units * kUnit;
  block.escapes = block.codes + rows * block.units * 8 * block.bits;
  const size_t count = PackedBlock::word(data + 32);
  if (size != (size_t)(block.escapes - data) + count + pad) return false;
  size_t before = 0;
  for (size_t row = 0; row <= rows; ++row) {
    const size_t start = PackedBlock::word(block.starts + 4 * row);
    if (start < before || start > count || (row == 0 && start != 0)) return false;
    before = start;
  }
  return before == count;
}

}  // namespace twoends
