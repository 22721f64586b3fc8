// The kernels of each instruction set that this build has, and which of them this machine can run.
#pragma once
#include <string>
#include <vector>

#include "jobs.h"

namespace twoends {

#if defined(TWOENDS_X86)
namespace avx512 {
Table table();
}
namespace avx2 {
Table table();
}
#elif defined(TWOENDS_ARM64)
namespace neon {
Table table();
}
#endif
namespace plain {
Table table();
}

// Names of the sets that were built and that this machine runs, the fastest first.
std::vector<std::string> available_isas();

// Throws std::invalid_argument when `name` is not available here.
Table table_of(const std::string& name);

}  // namespace twoends
