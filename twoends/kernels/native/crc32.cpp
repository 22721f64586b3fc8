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
// What moves 128 bits on by `distance` bits: x^(distance + 32) for the first half and x^(distance - 32) for the
// second, modulo the polynomial, their bits reversed (and so one place higher).
constexpr long long power(int exponent) {
  uint32_t rest = 1;
  for (int i = 0; i < exponent; ++i) rest = rest << 1 ^ ((rest >> 31) != 0 ? 0x04c11db7u : 0);
  uint32_t reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (rest >> bit & 1) << (31 - bit);
  return (long long)reversed << 1;
}
struct Distance {
  long long first, second;
  constexpr explicit Distance(int bits) : first(power(bits + 32)), second(power(bits - 32)) {}
};
constexpr Distance k128(128), k512(512), k2048(2048);

__attribute__((target("pclmul,sse4.1"))) __m128i fold(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00), high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Sixteen bytes at a time into `sum`, whose remainder is that of all bytes before; then the rest.
__attribute__((target("pclmul,sse4.1"))) uint32_t finish(__m128i sum, const uint8_t* p, size_t size) {
  const __m128i by = _mm_set_epi64x(k128.second, k128.first);
  for (; size >= 16; p += 16, size -= 16) sum = fold(sum, by, _mm_loadu_si128((const __m128i*)p));
  uint8_t last[16];
  _mm_storeu_si128((__m128i*)last, sum);
  return by_tables(by_tables(0, last, sizeof last), p, size);
}

// Polynomial multiplication without carries (Gopal et al., "Fast CRC computation", 2009): four sums of 128 bits
// over 64 bytes a step, which then become one.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t rest, const uint8_t* p, size_t size) {
  const __m128i by = _mm_set_epi64x(k512.second, k512.first), near = _mm_set_epi64x(k128.second, k128.first);
  const __m128i* at = (const __m128i*)p;
  __m128i a = _mm_xor_si128(_mm_loadu_si128(at), _mm_cvtsi32_si128((int)rest)), b = _mm_loadu_si128(at + 1);
  __m128i c = _mm_loadu_si128(at + 2), d = _mm_loadu_si128(at + 3);
  for (at += 4, size -= 64; size >= 64; at += 4, size -= 64) {
    a = fold(a, by, _mm_loadu_si128(at));
    b = fold(b, by, _mm_loadu_si128(at + 1));
    c = fold(c, by, _mm_loadu_si128(at + 2));
    d = fold(d, by, _mm_loadu_si128(at + 3));
  }
  return finish(fold(fold(fold(a, near, b), near, c), near, d), (const uint8_t*)at, size);
}

#define TWOENDS_WIDE __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.1")))
TWOENDS_WIDE __m512i fold(__m512i sum, __m512i by, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by, 0x00), _mm512_clmulepi64_epi128(sum, by, 0x11),
                                   next, 0x96);
}

// The same with four sums of 512 bits, 256 bytes a step.
TWOENDS_WIDE uint32_t by_wide_folding(uint32_t rest, const uint8_t* p, size_t size) {
  const __m512i by = _mm512_broadcast_i32x4(_mm_set_epi64x(k2048.second, k2048.first));
  const __m512i middle = _mm512_broadcast_i32x4(_mm_set_epi64x(k512.second, k512.first));
  const __m128i near = _mm_set_epi64x(k128.second, k128.first);
  const __m512i start = _mm512_castsi128_si512(_mm_cvtsi32_si128((int)rest));
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_maskz_mov_epi32(1, start));
  __m512i b = _mm512_loadu_si512(p + 64), c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);
  for (p += 256, size -= 256; size >= 256; p += 256, size -= 256) {
    a = fold(a, by, _mm512_loadu_si512(p));
    b = fold(b, by, _mm512_loadu_si512(p + 64));
    c = fold(c, by, _mm512_loadu_si512(p + 128));
    d = fold(d, by, _mm512_loadu_si512(p + 192));
  }
  a = fold(fold(fold(a, middle, b), middle, c), middle, d);
  __m128i sum = fold(_mm512_castsi512_si128(a), near, _mm512_extracti32x4_epi32(a, 1));
  sum = fold(fold(sum, near, _mm512_extracti32x4_epi32(a, 2)), near, _mm512_extracti32x4_epi32(a, 3));
  return finish(sum, p, size);
}
#undef TWOENDS_WIDE
#endif

}  // namespace

uint32_t crc32(const uint8_t* data, size_t size) {
#if defined(TWOENDS_X86)
  __builtin_cpu_init();
  if (size >= 256 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return ~by_wide_folding(~0u, data, size);
  if (size >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
    return ~by_folding(~0u, data, size);
#endif
  return ~by_tables(~0u, data, size);
}

}  // namespace twoends
