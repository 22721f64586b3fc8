// Which instruction sets this machine runs, asked at run time.
#include <stdexcept>

#include "isa.h"

namespace twoends {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(TWOENDS_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    names.emplace_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.emplace_back("avx2");
#elif defined(TWOENDS_ARM64)
  names.emplace_back("neon");
#endif
  names.emplace_back("plain");
  return names;
}

Table table_of(const std::string& name) {
  for (const std::string& have : available_isas()) {
    if (have != name) continue;
#if defined(TWOENDS_X86)
    if (name == "avx512") return avx512::table();
    if (name == "avx2") return avx2::table();
#elif defined(TWOENDS_ARM64)
    if (name == "neon") return neon::table();
#endif
    return plain::table();
  }
  throw std::invalid_argument("this machine does not run '" + name + "'");
}

}  // namespace twoends
