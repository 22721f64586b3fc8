// The Python side: shapes are checked here, the interpreter lock is released for all but the smallest calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>

#include "bind.h"
#include "crc32.h"

using namespace nanobind::literals;

namespace twoends {
namespace {

using Bytes = Array<const uint8_t, 1>;
using In = Array<const float>;
using In1 = Array<const float, 1>;
using In2 = Array<const float, 2>;
using In3 = Array<const float, 3>;
using Out = Array<float>;
using Out2 = Array<float, 2>;
using Out3 = Array<float, 3>;

Format format_of(const std::string& name) {
  if (name == "bf16") return Format::bf16;
  if (name == "f32") return Format::f32;
  if (name == "mxfp4") return Format::mxfp4;
  if (name == "packed") return Format::packed;
  throw std::invalid_argument("a matrix is bf16, f32, mxfp4 or packed");
}

Bytes bytes_of(const nb::object& array) { return nb::cast<Bytes>(array, false); }

// `block` is where a packed matrix's parts are kept as long as the weights are used.
Weights weights_of(const std::string& format_name, const Bytes& data, const std::optional<Bytes>& scale, size_t rows,
                   size_t cols, PackedBlock& block) {
  const Format format = format_of(format_name);
  if (format == Format::packed) {
    require(!scale.has_value(), "a packed matrix has no scales");
    require(open_block(data.data(), data.size(), rows, cols, block), "the bytes are no packed block of rows x cols");
    return {format, data.data(), nullptr, rows, cols, &block};
  }
  const bool packed = format == Format::mxfp4;
  require(!packed || cols % 32 == 0, "an mxfp4 matrix needs columns in groups of 32");
  const size_t half_bytes = format == Format::f32 ? 8 : format == Format::bf16 ? 4 : 1;
  require(data.size() == rows * cols * half_bytes / 2, "the bytes do not match rows x cols");
  require(scale.has_value() == packed, "an mxfp4 matrix has scales, and no other has");
  if (packed && scale->size() != rows * cols / 32) {
    require(open_scales(scale->data(), scale->size(), rows, cols / 32, block),
            "the scale bytes are neither rows x cols / 32 nor a packed block of them");
    return {format, data.data(), nullptr, rows, cols, nullptr, &block};
  }
  return {format, data.data(), packed ? scale->data() : nullptr, rows, cols};
}

void matmul(Kernels& k, const std::string& format, const Bytes& data, const std::optional<Bytes>& scale, size_t rows,
            size_t cols, const In2& x_TX, const Out2& out_TY, size_t first_row) {
  PackedBlock block;
  const Weights w = weights_of(format, data, scale, rows, cols, block);
  const size_t num_x = x_TX.shape(0);
  require(x_TX.shape(1) == cols, "x_TX must have the matrix's columns");
  require(out_TY.shape(0) == num_x && first_row + rows <= out_TY.shape(1), "out_TY has no room for these rows");
  compute(rows * cols * num_x, [&] {
    k.matmul(w, x_TX.data(), num_x, out_TY.data() + first_row, out_TY.shape(1));
  });
}

// A twoends.kernels.ops.Matrix.
Weights weights_of(nb::handle matrix, PackedBlock& block) {
  const nb::object scale = matrix.attr("scale");
  return weights_of(nb::cast<std::string>(matrix.attr("format")), bytes_of(matrix.attr("data")),
                    scale.is_none() ? std::nullopt : std::optional<Bytes>(bytes_of(scale)),
                    nb::cast<size_t>(matrix.attr("rows")), nb::cast<size_t>(matrix.attr("cols")), block);
}

// Parts: (Matrix, out_TY, first_row).
void products(Kernels& k, const In2& x_TX, const nb::list& parts) {
  const size_t num_x = x_TX.shape(0), count = nb::len(parts);
  std::vector<PackedBlock> blocks(count);
  std::vector<Product> products(count);
  size_t work = 0;
  for (size_t i = 0; i < count; ++i) {
    const nb::tuple part = nb::cast<nb::tuple>(parts[i]);
    const Out2 out_TY = nb::cast<Out2>(part[1], false);
    const size_t first_row = nb::cast<size_t>(part[2]);
    const Weights w = weights_of(part[0], blocks[i]);
    require(x_TX.shape(1) == w.cols, "x_TX must have the matrix's columns");
    require(out_TY.shape(0) == num_x && first_row + w.rows <= out_TY.shape(1), "out_TY has no room for these rows");
    products[i] = {w, out_TY.data() + first_row, out_TY.shape(1)};
    work += w.rows * w.cols * num_x;
  }
  compute(work, [&] { k.products(products, x_TX.data(), num_x); });
}

// Experts: (id, ExpertWeights).
void experts(Kernels& k, const nb::list& group, const In2& z_TZ, const Array<const int32_t, 2>& ids_TS,
             std::optional<double> beta, std::optional<double> linear, bool to_mxfp8, const Out3& out_TSZ) {
  const size_t count = nb::len(group), tokens = z_TZ.shape(0), dim = z_TZ.shape(1), ranks = ids_TS.shape(1);
  require(ids_TS.shape(0) == tokens && out_TSZ.shape(0) == tokens && out_TSZ.shape(1) == ranks &&
              out_TSZ.shape(2) == dim,
          "z_TZ, ids_TS and out_TSZ differ");
  std::vector<PackedBlock> blocks(3 * count);
  std::vector<Expert> experts(count);
  size_t work = 0;
  for (size_t i = 0; i < count; ++i) {
    const nb::tuple pair = nb::cast<nb::tuple>(group[i]);
    Expert& e = experts[i];
    e = {nb::cast<int32_t>(pair[0]), weights_of(pair[1].attr("w1"), blocks[3 * i]),
         weights_of(pair[1].attr("w2"), blocks[3 * i + 1]), weights_of(pair[1].attr("w3"), blocks[3 * i + 2])};
    require(e.w1.cols == dim && e.w3.cols == dim && e.w1.rows == e.w3.rows && e.w2.cols == e.w1.rows &&
                e.w2.rows == dim && e.w1.rows == experts[0].w1.rows,
            "an expert's matrices do not fit z_TZ or one another");
    require(!to_mxfp8 || (dim % 32 == 0 && e.w1.rows % 32 == 0), "MXFP8 needs widths in groups of 32");
    work += 3 * e.w1.rows * dim;
  }
  GluJob glu = {};
  glu.function = !beta ? Glu::silu : linear ? Glu::situ_linear : Glu::situ;
  glu.beta = (float)beta.value_or(1.0), glu.linear_beta = (float)linear.value_or(1.0);
  const ExpertsJob job = {z_TZ.data(), ids_TS.data(), out_TSZ.data(), tokens, ranks, dim, glu, to_mxfp8};
  compute(work, [&] { k.experts(experts, job); });
}

size_t last_dim(const In& x) {
  require(x.ndim() >= 1, "at least one dimension");
  return x.shape(x.ndim() - 1);
}

void rms_norm(Kernels& k, const In& x, const In1& w_D, double eps, const Out& out) {
  const size_t dim = last_dim(x);
  require(w_D.size() == dim && out.size() == x.size(), "x, w and out differ in size");
  compute(x.size(), [&] { k.rms_norm({x.data(), w_D.data(), nullptr, out.data(), dim, eps, 1.f}, x.size()); });
}

void l2_norm(Kernels& k, const In& x, double scale, const Out& out) {
  const size_t dim = last_dim(x);
  require(out.size() == x.size(), "x and out differ in size");
  compute(x.size(), [&] { k.l2_norm({x.data(), nullptr, nullptr, out.data(), dim, 1e-6, (float)scale}, x.size()); });
}

void gated_head_norm(Kernels& k, const In& o, const In1& w_V, const In& gate, double eps, const Out& out) {
  const size_t dim = last_dim(o);
  require(w_V.size() == dim && gate.size() == o.size() && out.size() == o.size(), "o, w, gate and out differ in size");
  compute(elementary(o.size()),
          [&] { k.gated_norm({o.data(), w_V.data(), gate.data(), out.data(), dim, eps, 1.f}, o.size()); });
}

void short_conv(Kernels& k, const In2& u_TP, const In2& w_P4, const Out2& tail_3P, const Out2& out_TP) {
  const size_t tokens = u_TP.shape(0), channels = u_TP.shape(1);
  require(w_P4.shape(0) == channels && w_P4.shape(1) == 4, "w_P4 must have four taps for each channel");
  require(tail_3P.shape(0) == 3 && tail_3P.shape(1) == channels, "tail_3P must hold three inputs of each channel");
  require(out_TP.size() == u_TP.size(), "u and out differ in size");
  compute(elementary(u_TP.size()),
          [&] { k.short_conv({u_TP.data(), w_P4.data(), tail_3P.data(), out_TP.data(), tokens, channels}); });
}

void kda_decay(Kernels& k, const In3& z_THK, const In2& dt_HK, const In1& a_H, std::optional<double> bound,
               const Out3& out_THK) {
  const size_t heads = z_THK.shape(1), key_dim = z_THK.shape(2);
  require(dt_HK.shape(0) == heads && dt_HK.shape(1) == key_dim && a_H.size() == heads, "z, dt_bias and a_log differ");
  require(out_THK.size() == z_THK.size(), "z and out differ in size");
  const DecayJob job = {z_THK.data(), dt_HK.data(), a_H.data(),       out_THK.data(),
                        heads,        key_dim,      bound.has_value(), (float)bound.value_or(0.0)};
  compute(elementary(z_THK.size()), [&] { k.kda_decay(job, z_THK.shape(0) * heads); });
}

void kda_steps(Kernels& k, const In3& q_THK, const In3& k_THK, const In3& v_THV, const In3& alpha_THK,
               const In2& beta_TH, const Out3& state_HKV, const Out3& out_THV) {
  const size_t tokens = v_THV.shape(0), heads = v_THV.shape(1), value_dim = v_THV.shape(2), key_dim = k_THK.shape(2);
  const auto is_keys = [&](const In3& a) {
    return a.shape(0) == tokens && a.shape(1) == heads && a.shape(2) == key_dim;
  };
  require(is_keys(q_THK) && is_keys(k_THK) && is_keys(alpha_THK), "q, k and alpha differ in shape");
  require(beta_TH.shape(0) == tokens && beta_TH.shape(1) == heads, "beta_TH differs from v_THV");
  require(state_HKV.shape(0) == heads && state_HKV.shape(1) == key_dim && state_HKV.shape(2) == value_dim,
          "state_HKV differs from k and v");
  require(out_THV.size() == v_THV.size(), "v and out differ in size");
  const KdaJob job = {q_THK.data(),     k_THK.data(),   v_THV.data(), alpha_THK.data(), beta_TH.data(),
                      state_HKV.data(), out_THV.data(), tokens,       heads,            key_dim,
                      value_dim,        0,              nullptr};
  compute(tokens * heads * key_dim * value_dim * 4, [&] { k.kda_steps(job); });
}

// Inputs and outputs as in kernels/ops.py, KdaInputs, KdaState and KdaOutput.
void kda_mix(Kernels& k, const In2& q_TP, const In2& k_TP, const In2& v_TP, const In3& decay_THK, const In2& logit_TH,
             const In3& gate_THV, const In2& q_conv, const In2& k_conv, const In2& v_conv, const In2& dt_HK,
             const In1& a_H, const In1& norm_V, std::optional<double> bound, double eps, const Out3& state_HKV,
             const Out2& q_tail, const Out2& k_tail, const Out2& v_tail, const Out3& y_THV, const Out3& k_THK,
             const Out3& v_THV, const Out3& alpha_THK, const Out2& beta_TH) {
  const size_t tokens = decay_THK.shape(0), heads = decay_THK.shape(1), key_dim = decay_THK.shape(2);
  const size_t value_dim = gate_THV.shape(2), keys = heads * key_dim, values = heads * value_dim;
  const auto are_rows = [&](const auto& a, size_t width) { return a.shape(0) == tokens && a.size() == tokens * width; };
  const auto fits = [](const auto& conv, const auto& tail, size_t channels) {
    return conv.shape(0) == channels && conv.shape(1) == 4 && tail.shape(0) == 3 && tail.shape(1) == channels;
  };
  require(are_rows(q_TP, keys) && are_rows(k_TP, keys) && are_rows(v_TP, values) && are_rows(gate_THV, values) &&
              are_rows(logit_TH, heads) && gate_THV.shape(1) == heads,
          "the inputs differ in shape");
  require(fits(q_conv, q_tail, keys) && fits(k_conv, k_tail, keys) && fits(v_conv, v_tail, values),
          "a convolution needs four taps and three earlier inputs of each channel");
  require(dt_HK.shape(0) == heads && dt_HK.shape(1) == key_dim && a_H.size() == heads && norm_V.size() == value_dim,
          "dt_bias, a_log or the norm differ from the inputs");
  require(state_HKV.shape(0) == heads && state_HKV.shape(1) == key_dim && state_HKV.shape(2) == value_dim,
          "state_HKV differs from the inputs");
  require(are_rows(y_THV, values) && are_rows(v_THV, values) && are_rows(k_THK, keys) && are_rows(alpha_THK, keys) &&
              are_rows(beta_TH, heads),
          "an output differs from the inputs");
  const Scratch scratch = scratch_of(tokens * (keys + values));
  float *q = scratch.get(), *o = q + tokens * keys;
  KdaMixJob job = {};
  job.q_conv = {q_TP.data(), q_conv.data(), q_tail.data(), q, tokens, keys};
  job.k_conv = {k_TP.data(), k_conv.data(), k_tail.data(), k_THK.data(), tokens, keys};
  job.v_conv = {v_TP.data(), v_conv.data(), v_tail.data(), v_THV.data(), tokens, values};
  job.q_norm = {q, nullptr, nullptr, q, key_dim, 1e-6, (float)std::pow((double)key_dim, -0.5)};
  job.k_norm = {k_THK.data(), nullptr, nullptr, k_THK.data(), key_dim, 1e-6, 1.f};
  job.out_norm = {o, norm_V.data(), gate_THV.data(), y_THV.data(), value_dim, eps, 1.f};
  job.decay = {decay_THK.data(), dt_HK.data(), a_H.data(),       alpha_THK.data(),
               heads,            key_dim,      bound.has_value(), (float)bound.value_or(0.0)};
  job.beta_logits = logit_TH.data(), job.beta = beta_TH.data();
  job.steps = {q, k_THK.data(), v_THV.data(), alpha_THK.data(), beta_TH.data(), state_HKV.data(), o, tokens, heads,
               key_dim, value_dim, 0, nullptr};
  compute(tokens * heads * key_dim * (value_dim * 4 + 128), [&] { k.kda_mix(job); });
}

void mla_heads(Kernels& k, const std::string& format, const Bytes& data, size_t rows, size_t latent,
               const In3& q_THQ, const In2& cache_CM, size_t start, size_t first_head, size_t num_heads, double scale,
               const Out3& out_THV) {
  PackedBlock block;
  const Weights w = weights_of(format, data, std::nullopt, rows, latent, block);
  const size_t num_rows = q_THQ.shape(0), heads = q_THQ.shape(1), value_dim = out_THV.shape(2);
  require(num_heads > 0 && rows % num_heads == 0 && rows / num_heads > value_dim, "kv_b's rows do not fit the heads");
  const size_t nope_dim = rows / num_heads - value_dim, query_dim = q_THQ.shape(2);
  require(query_dim >= nope_dim && cache_CM.shape(1) == latent + query_dim - nope_dim,
          "q_THQ, cache_CM and kv_b differ in dimensions");
  require(cache_CM.shape(0) == start + num_rows, "cache_CM must hold start + T positions");
  require(out_THV.shape(0) == num_rows && out_THV.shape(1) == heads && first_head + num_heads <= heads,
          "out_THV differs from q_THQ");
  MlaJob job = {};
  job.w = w;
  job.q = q_THQ.data(), job.cache = cache_CM.data(), job.out = out_THV.data();
  job.num_rows = num_rows, job.start = start, job.first_head = first_head, job.num_heads = num_heads;
  job.all_heads = heads, job.nope_dim = nope_dim, job.value_dim = value_dim, job.query_dim = query_dim;
  job.cache_dim = cache_CM.shape(1), job.scale = (float)scale;
  compute(num_rows * num_heads * (start + num_rows + nope_dim + value_dim) * latent, [&] { k.mla_heads(job); });
}

void attnres_mix(Kernels& k, const In3& sources_NTD, const In1& f_D, double eps, const Out2& out_TD) {
  const size_t sources = sources_NTD.shape(0), tokens = sources_NTD.shape(1), dim = sources_NTD.shape(2);
  require(sources > 0 && f_D.size() == dim && out_TD.size() == tokens * dim, "sources, f and out differ in size");
  compute(sources_NTD.size() * 3,
          [&] { k.attnres_mix(sources_NTD.data(), f_D.data(), out_TD.data(), sources, tokens, dim, eps); });
}

// The first row whose scores are not finite, or -1.
long route(Kernels& k, const In2& logits_TE, const In1& bias_E, bool renormalize, double scaling,
           const Array<int32_t, 2>& ids_TS, const Out2& weights_TS) {
  const size_t tokens = logits_TE.shape(0), experts = logits_TE.shape(1), chosen = ids_TS.shape(1);
  require(bias_E.size() == experts && chosen <= experts && chosen > 0, "bias, logits and the number chosen differ");
  require(ids_TS.shape(0) == tokens && weights_TS.shape(0) == tokens && weights_TS.shape(1) == chosen,
          "ids_TS and weights_TS differ from logits_TE");
  RouteJob job = {logits_TE.data(), bias_E.data(), ids_TS.data(), weights_TS.data(), nullptr, tokens,
                  experts,          chosen,        renormalize,   (float)scaling,    tokens};
  compute(elementary(logits_TE.size()), [&] { k.route(job); });
  return job.bad_row == tokens ? -1 : (long)job.bad_row;
}

template <Unary function>
void unary(Kernels& k, const In& x, const Out& out) {
  require(out.size() == x.size(), "x and out differ in size");
  compute(elementary(x.size()), [&] { k.unary({function, x.data(), out.data(), x.size()}); });
}

void glu(Kernels& k, Glu function, const In& gate, const In& up, double beta, double linear_beta, const Out& out) {
  require(gate.size() == up.size() && gate.size() == out.size(), "the two inputs and out differ in size");
  const GluJob job = {function, gate.data(), up.data(), out.data(), gate.size(), (float)beta, (float)linear_beta};
  compute(elementary(gate.size()), [&] { k.glu(job); });
}

void mxfp8(Kernels& k, const In& x, const Out& out) {
  require(last_dim(x) % 32 == 0 && out.size() == x.size(), "MXFP8 needs rows in groups of 32, x and out alike");
  compute(16 * x.size(), [&] { k.mxfp8({x.data(), out.data()}, x.size()); });
}

void combine(Kernels& k, const In3& y_TSZ, const In2& weights_TS, const Out2& out_TZ) {
  const size_t tokens = y_TSZ.shape(0), ranks = y_TSZ.shape(1), dim = y_TSZ.shape(2);
  require(weights_TS.shape(0) == tokens && weights_TS.shape(1) == ranks && out_TZ.size() == tokens * dim,
          "y, weights and out differ in size");
  compute(y_TSZ.size(), [&] { k.combine({y_TSZ.data(), weights_TS.data(), out_TZ.data(), ranks, dim}, tokens); });
}

void fma_each(Kernels& k, const In1& a, const In1& b, const In1& c, const Array<float, 1>& out) {
  require(a.size() == b.size() && a.size() == c.size() && a.size() == out.size(), "a, b, c and out differ in size");
  compute(a.size(), [&] { k.fma({a.data(), b.data(), c.data(), out.data(), a.size()}); });
}

uint64_t read_all(Kernels& k, const Bytes& data) {
  uint64_t sum = 0;
  const nb::gil_scoped_release unlocked;
  sum = k.read(data.data(), data.size());
  return sum;
}

uint32_t checksum(const Bytes& data) {
  const nb::gil_scoped_release unlocked;
  return crc32(data.data(), data.size());
}

}  // namespace
}  // namespace twoends

NB_MODULE(_native, m) {
  using namespace twoends;
  m.attr("INTERFACE") = 6;
  // Kernels live as long as the process: what still holds them at its end is no leak.
  nb::set_leak_warnings(false);
  m.attr("BUILT_BY") = TWOENDS_BUILT_BY;
  m.def("available_isas", &available_isas);
  m.def("crc32", &checksum, nb::arg().noconvert());
  // Nothing is converted in silence: an array of another type or order is refused.
  const auto array = nb::arg().noconvert();
  const auto optional_array = nb::arg().noconvert().none();
  const auto value = nb::arg();
  const auto optional_value = nb::arg().none();
  nb::class_<Kernels> kernels(m, "Kernels");
  kernels.def(nb::init<const std::string&, size_t>(), "isa"_a, "threads"_a)
      .def_prop_ro("isa", [](const Kernels& k) { return std::string(k.isa()); })
      .def_prop_ro("threads", &Kernels::threads)
      .def("matmul", &matmul, value, array, optional_array, value, value,
           array, array, value)
      .def("products", &products, array, value)
      .def("experts", &experts, value, array, array, optional_value, optional_value, value, array)
      .def("kda_mix", &kda_mix, array, array, array, array, array, array, array, array, array, array, array, array,
           optional_value, value, array, array, array, array, array, array, array, array, array)
      .def("rms_norm", &rms_norm, array, array, value, array)
      .def("l2_norm", &l2_norm, array, value, array)
      .def("gated_head_norm", &gated_head_norm, array, array, array,
           value, array)
      .def("short_conv", &short_conv, array, array, array,
           array)
      .def("kda_decay", &kda_decay, array, array, array,
           optional_value, array)
      .def("kda_steps", &kda_steps, array, array, array,
           array, array, array, array)
      .def("mla_heads", &mla_heads, value, array, value, value, array,
           array, value, value, value, value, array)
      .def("attnres_mix", &attnres_mix, array, array, value,
           array)
      .def("route", &route, array, array, value, value,
           array, array)
      .def("exp", &unary<Unary::exp>, array, array)
      .def("sigmoid", &unary<Unary::sigmoid>, array, array)
      .def("tanh", &unary<Unary::tanh>, array, array)
      .def("softplus", &unary<Unary::softplus>, array, array)
      .def("silu", &unary<Unary::silu>, array, array)
      .def("sigmoid_gate",
           [](Kernels& k, const In& o, const In& gate, const Out& out) {
             glu(k, Glu::sigmoid_gate, gate, o, 1.0, 1.0, out);
           },
           array, array, array)
      .def("silu_glu",
           [](Kernels& k, const In& gate, const In& up, const Out& out) { glu(k, Glu::silu, gate, up, 1.0, 1.0, out); },
           array, array, array)
      .def("situ_glu",
           [](Kernels& k, const In& gate, const In& up, double beta, std::optional<double> linear, const Out& out) {
             glu(k, linear ? Glu::situ_linear : Glu::situ, gate, up, beta, linear.value_or(1.0), out);
           },
           array, array, value, optional_value, array)
      .def("mxfp8", &mxfp8, array, array)
      .def("combine", &combine, array, array, array)
      .def("fma", &fma_each, array, array, array, array)
      .def("read", &read_all, array);
  bind_training(kernels);
}
