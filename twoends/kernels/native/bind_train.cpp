// The Python side of training's kernels; shapes are checked here.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bind.h"

namespace twoends {
namespace {

using Rows = Array<const float, 4>;
using RowsOut = Array<float, 4>;
using Flat = Array<const float, 3>;
using FlatOut = Array<float, 3>;
using Documents = std::optional<Array<const int64_t, 2>>;
using States = std::optional<RowsOut>;

template <class A, class B>
bool same_shape(const A& a, const B& b) {
  for (size_t i = 0; i < a.ndim(); ++i)
    if (a.shape(i) != b.shape(i)) return false;
  return a.ndim() == b.ndim();
}

// The inputs of both passes, checked; `states` may be missing where nothing is kept or nothing was.
KdaTilesJob job_of(const Rows& q, const Rows& k, const Rows& v, const Rows& g, const Flat& beta,
                   const Documents& documents, const States& states, size_t segment) {
  const size_t batch = q.shape(0), tokens = q.shape(1), heads = q.shape(2);
  require(same_shape(q, k) && same_shape(q, g), "q, k and g differ in shape");
  require(v.shape(0) == batch && v.shape(1) == tokens && v.shape(2) == heads && beta.shape(0) == batch &&
              beta.shape(1) == tokens && beta.shape(2) == heads,
          "v or beta differs from q in rows, tokens or heads");
  require(q.size() > 0 && v.size() > 0 && segment > 0, "nothing to do");
  require(!documents || (documents->shape(0) == batch && documents->shape(1) == tokens), "documents must be [B,T]");
  KdaTilesJob job = {};
  job.q = q.data(), job.k = k.data(), job.v = v.data(), job.g = g.data(), job.beta = beta.data();
  job.documents = documents ? documents->data() : nullptr;
  job.tokens = tokens, job.heads = heads, job.key_dim = q.shape(3), job.value_dim = v.shape(3), job.segment = segment;
  if (states) {
    require(states->shape(0) == batch * heads && states->shape(1) == (tokens - 1) / (segment * 16) &&
                states->shape(2) == job.key_dim && states->shape(3) == job.value_dim,
            "states must be [B*H, segments - 1, K, V]");
    job.states = states->data();
  }
  return job;
}

void kda_tiles(Kernels& kernels, const Rows& q, const Rows& k, const Rows& v, const Rows& g, const Flat& beta,
               const Documents& documents, size_t segment, const States& states, const RowsOut& out) {
  KdaTilesJob job = job_of(q, k, v, g, beta, documents, states, segment);
  require(same_shape(v, out), "out differs from v in shape");
  job.out = out.data();
  compute(q.size() * job.value_dim, [&] { kernels.kda_tiles(job, q.shape(0) * q.shape(2)); });
}

void kda_tiles_back(Kernels& kernels, const Rows& q, const Rows& k, const Rows& v, const Rows& g, const Flat& beta,
                    const Documents& documents, size_t segment, const States& states, const Rows& d_out,
                    const RowsOut& d_q, const RowsOut& d_k, const RowsOut& d_v, const RowsOut& d_g,
                    const FlatOut& d_beta) {
  KdaTilesJob job = job_of(q, k, v, g, beta, documents, states, segment);
  require(states || job.tokens <= segment * 16, "the states that the forward pass kept are missing");
  require(same_shape(v, d_out) && same_shape(v, d_v), "a gradient differs from v in shape");
  require(same_shape(q, d_q) && same_shape(q, d_k) && same_shape(q, d_g) && same_shape(beta, d_beta),
          "a gradient differs from its input in shape");
  job.d_out = d_out.data(), job.d_q = d_q.data(), job.d_k = d_k.data(), job.d_v = d_v.data(), job.d_g = d_g.data();
  job.d_beta = d_beta.data();
  compute(q.size() * job.value_dim, [&] { kernels.kda_tiles_back(job, q.shape(0) * q.shape(2)); });
}

ConvTrainJob job_of(const Flat& x, const Array<const float, 2>& w, const Documents& documents) {
  require(w.shape(0) == x.shape(2) && w.shape(1) == 4, "filters must be [P,4]");
  require(!documents || (documents->shape(0) == x.shape(0) && documents->shape(1) == x.shape(1)),
          "documents must be [B,T]");
  ConvTrainJob job = {};
  job.x = x.data(), job.w = w.data(), job.documents = documents ? documents->data() : nullptr;
  job.tokens = x.shape(1), job.channels = x.shape(2);
  return job;
}

void conv_train(Kernels& kernels, const Flat& x, const Array<const float, 2>& w, const Documents& documents,
                const FlatOut& out) {
  ConvTrainJob job = job_of(x, w, documents);
  require(same_shape(x, out), "out differs from x in shape");
  job.out = out.data();
  compute(elementary(x.size()), [&] { kernels.conv_train(job, x.shape(0)); });
}

void conv_train_back(Kernels& kernels, const Flat& x, const Array<const float, 2>& w, const Documents& documents,
                     const Flat& d_out, const FlatOut& d_x, const FlatOut& d_w) {
  ConvTrainJob job = job_of(x, w, documents);
  require(same_shape(x, d_out) && same_shape(x, d_x), "a gradient differs from x in shape");
  require(d_w.shape(0) == x.shape(0) && d_w.shape(1) == 4 && d_w.shape(2) == x.shape(2), "d_w must be [B,4,P]");
  job.d_out = d_out.data(), job.d_x = d_x.data(), job.d_w = d_w.data();
  compute(elementary(x.size()), [&] { kernels.conv_train_back(job, x.shape(0)); });
}

}  // namespace

void bind_training(nb::class_<Kernels>& kernels) {
  const auto array = nb::arg().noconvert();
  const auto optional_array = nb::arg().noconvert().none();
  const auto value = nb::arg();
  kernels.def("kda_tiles", &kda_tiles, array, array, array, array, array, optional_array, value, optional_array, array)
      .def("kda_tiles_back", &kda_tiles_back, array, array, array, array, array, optional_array, value, optional_array,
           array, array, array, array, array, array)
      .def("conv_train", &conv_train, array, array, optional_array, array)
      .def("conv_train_back", &conv_train_back, array, array, optional_array, array, array, array);
}

}  // namespace twoends
