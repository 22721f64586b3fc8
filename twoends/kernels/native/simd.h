// The one vector type of all operations. A source that includes this is compiled once per
// instruction set, each time with another TWOENDS_ISA (the namespace) and TWOENDS_USE_ (the header).
// Such sources use nothing of the C++ library that could leave a shared, instruction-specific symbol.
#pragma once

#if defined(TWOENDS_USE_AVX512)
#include "simd_avx512.h"
#elif defined(TWOENDS_USE_AVX2)
#include "simd_avx2.h"
#elif defined(TWOENDS_USE_NEON)
#include "simd_neon.h"
#else
#include "simd_plain.h"
#endif

#define TWOENDS_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define TWOENDS_UNROLL _Pragma("unroll")
#else
#define TWOENDS_UNROLL _Pragma("GCC unroll 16")
#endif

namespace twoends {
namespace TWOENDS_ISA {

constexpr size_t kLanes = 16;
constexpr size_t kGroup = 32;

inline size_t groups_of(size_t cols) { return (cols + kGroup - 1) / kGroup; }
inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

}  // namespace TWOENDS_ISA
}  // namespace twoends
