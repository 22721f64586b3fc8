#include "crc32.h"

#if defined(TWOENDS_X86)
#include <immintrin.h>
#endif

namespace twoends {
namespace {

// Eight tables: a byte of each place in a 64-bit word.
struct Tables {
  uint32_t of[8][256];
  constexpr Tables() : of() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = (rest & 1) != 0 ? rest >> 1 ^ 0xedb88320u : rest >> 1;
      of[0][byte] = rest;
    }
    for (uint32_t byte = 0; byte < 256; ++byte)
      for (int place = 1; place < 8; ++place)
        of[place][byte] = of[place - 1][byte] >> 8 ^ of[0][of[place - 1][byte] & 255];
  }
};
constexpr Tables kTables;

uint32_t by_tables(uint32_t rest, const uint8_t* p, size_t size) {
  for (; size >= 8; size -= 8, p += 8) {
    rest ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    rest = kTables.of[7][rest & 255] ^ kTables.of[6][rest >> 8 & 255] ^ kTables.of[5][rest >> 16 & 255] ^
           kTables.of[4][rest >> 24] ^ kTables.of[3][p[4]] ^ kTables.of[2][p[5]] ^ kTables.of[1][p[6]] ^
           kTables.of[0][p[7]];
  }
  for (; size != 0; --size, ++p) rest = rest >> 8 ^ kTables.of[0][(rest ^ *p) & 255];
  return rest;
}

#if defined(TWOENDS_X86)
// x^(distance) mod the polynomial, bits reversed: the two halves of 128 bits moved on by 512 and by 128 bits.
constexpr long long kBy512[2] = {0x0154442bd4, 0x01c6e41596};
constexpr long long kBy128[2] = {0x01751997d0, 0x00ccaa009e};

__attribute__((target("pclmul,sse4.1"))) __m128i fold(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00), high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Polynomial multiplication without carries (Gopal et al., "Fast CRC computation", 2009): four sums of 128 bits
// over 64 bytes a step, then one; the last 16 bytes have the same remainder as all before.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t rest, const uint8_t* p, size_t size) {
  const auto at = [](const uint8_t* q) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128((const __m128i*)q);
  };
  __m128i by = _mm_set_epi64x(kBy512[1], kBy512[0]);
  __m128i a = _mm_xor_si128(at(p), _mm_cvtsi32_si128((int)rest)), b = at(p + 16), c = at(p + 32), d = at(p + 48);
  for (p += 64, size -= 64; size >= 64; p += 64, size -= 64) {
    a = fold(a, by, at(p));
    b = fold(b, by, at(p + 16));
    c = fold(c, by, at(p + 32));
    d = fold(d, by, at(p + 48));
  }
  by = _mm_set_epi64x(kBy128[1], kBy128[0]);
  a = fold(fold(fold(a, by, b), by, c), by, d);
  for (; size >= 16; p += 16, size -= 16) a = fold(a, by, at(p));
  uint8_t last[16];
  _mm_storeu_si128((__m128i*)last, a);
  return by_tables(by_tables(0, last, sizeof last), p, size);
}
#endif

}  // namespace

uint32_t crc32(const uint8_t* data, size_t size) {
#if defined(TWOENDS_X86)
  __builtin_cpu_init();
  if (size >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
    return ~by_folding(~0u, data, size);
#endif
  return ~by_tables(~0u, data, size);
}

}  // namespace twoends
