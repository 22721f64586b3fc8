// The checksum of zlib (CRC-32 of ISO 3309), fast enough to be computed of every block that is read.
#pragma once
#include <cstddef>
#include <cstdint>

namespace twoends {

uint32_t crc32(const uint8_t* data, size_t size);

}  // namespace twoends
