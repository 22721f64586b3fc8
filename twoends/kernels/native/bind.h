// What the bindings share: arrays as they are (nothing is converted), and the interpreter lock.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "kernels.h"

namespace twoends {

namespace nb = nanobind;

template <class T, size_t... N>
using Array = nb::ndarray<T, nb::ndim<N>..., nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// The interpreter lock costs more than the work of a small call, and getting it back may take milliseconds.
template <class Body>
void compute(size_t work, Body body) {
  if (is_small(work)) {
    body();
  } else {
    const nb::gil_scoped_release unlocked;
    body();
  }
}

// The kernels of training, as methods of Kernels.
void bind_training(nb::class_<Kernels>& kernels);

}  // namespace twoends
