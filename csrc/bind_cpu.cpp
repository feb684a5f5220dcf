// Python bindings of the CPU kernels, the module fused_attn._cpu.
#include "bind_attention.h"
#include "bind_norm.h"
#include "cpu/debug.h"

namespace fused_attn {
namespace {

// Reads an attention call and the keyword fields of the pass, and runs the pass.
template <class Params>
void run(bool (*KernelTable::*entry)(const Params&), const py::handle& call,
         const py::kwargs& kwargs) {
  Params params{};
  Fields fields(kwargs);
  fields.sizes = read_call(call, &params);
  read(fields, &params);
  fields.finish();
  read_seed_and_summaries(call, &params.fwd);
  run_entry(entry, params);
}

void activation(const py::kwargs& kwargs) {
  ActivationParams params{};
  Fields fields(kwargs);
  read(fields, &params);
  fields.finish();
  run_entry(&KernelTable::activation, params);
}

// Checks the arguments, as in Backend.rotary, and runs the kernel. positions: int64, contiguous.
void rotary(const py::handle& input, const py::handle& cos, const py::handle& sin,
            const py::handle& positions, bool interleaved, bool per_dimension, bool backward,
            const py::handle& out, int64_t num_threads) {
  RotaryParams p{};
  const TensorView x = view_of(input), y = view_of(out);
  Sizes sizes;
  check_that(x.ndim == 4 && x.is_float() && x.numel() > 0, "input must have 4 dimensions");
  sizes.set("BHQD", x);
  sizes.dtype = x.dtype();
  check_rule<void>(y, "out", "!x:BHQD", sizes);
  check_dense(x, "input", 3);
  check_dense(y, "out", 3);
  const TensorView factors = view_of(cos), of_sin = view_of(sin);
  const bool shared = factors.ndim == 2;
  check_that(shared || factors.ndim == 3, "cos must have 2 or 3 dimensions");
  const int64_t rows = factors.shape[factors.ndim - 2], width = factors.shape[factors.ndim - 1];
  sizes['R'] = rows;
  sizes['C'] = width;
  const auto read_table = [&](const TensorView& view, const char* name, const void** data,
                              int64_t* strides) {
    const bool own = view.is_float() && view.dtype() == x.dtype();
    const std::string rule = std::string(own ? "!x:" : "!s:") + (shared ? "RC" : "bRC");
    check_rule<void>(view, name, rule.c_str(), sizes);
    check_dense(view, name, view.ndim - 1);
    *data = view.data;
    if (!shared) strides[0] = view.broadcast_stride(0);
    strides[1] = view.strides[view.ndim - 2];
  };
  read_table(factors, "cos", &p.cos, p.cos_strides);
  read_table(of_sin, "sin", &p.sin, p.sin_strides);
  check_that(of_sin.dtype() == factors.dtype(), "cos and sin must have one dtype");
  p.dtype = x.dtype();
  p.table_dtype = factors.dtype();
  p.batch = x.shape[0];
  p.num_heads = x.shape[1];
  p.seqlen = x.shape[2];
  p.head_dim = x.shape[3];
  p.per_dimension = per_dimension;
  p.pairs = per_dimension ? width / 2 : width;
  p.interleaved = interleaved;
  p.backward = backward;
  p.input = x.data;
  p.out = y.data;
  std::copy(x.strides, x.strides + 3, p.input_strides);
  std::copy(y.strides, y.strides + 3, p.out_strides);
  check_within(2 * p.pairs, "rotary_dim", 0, p.head_dim);
  if (const TensorView view = view_of(positions); view.is_present) {
    check_rule<int64_t>(view, "positions", "BQ", sizes);
    check_dense(view, "positions", 0);
    p.positions = static_cast<const int64_t*>(view.data);
  }
  for (int64_t i = 0; p.positions != nullptr && i < p.batch * p.seqlen; ++i) {
    check_within(p.positions[i], "positions", 0, rows - 1);
  }
  check_that(p.positions != nullptr || p.seqlen <= rows, "cos and sin must have a row per token");
  check_within(num_threads, "num_threads", 0, kUnlimited);
  p.num_threads = num_threads;
  run_entry(&KernelTable::rotary, p);
}

void tile_summary(const py::kwargs& kwargs) {
  SummaryParams params{};
  Fields fields(kwargs);
  read(fields, &params);
  fields.finish();
  py::gil_scoped_release release;
  kernels().tile_summary(params);
}

void tile_kinds(const py::handle& call, const py::kwargs& kwargs) {
  TileKindsParams params{};
  Fields fields(kwargs);
  fields.sizes = read_call(call, &params.problem);
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  const KernelTable& table = kernels_for(params);
  fields.sizes['L'] = tiles(params.problem.seqlen_q, table.query_tile(params.problem.dtype));
  fields.sizes['M'] = tiles(params.problem.seqlen_k, table.block);
  fields.pointer("kinds", &params.kinds, "!BHLM");
  fields.number("num_threads", &params.problem.num_threads);
  fields.finish();
  read_seed_and_summaries(call, &params.problem);
  run_entry(&KernelTable::tile_kinds, params);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of fused_attn; call them through fused_attn.backends.cpp.";
  m.attr("SUMMARY_TILE") = py::make_tuple(kSummaryTileM, kSummaryTileN);
  m.attr("FIELDS") = field_names();
  constexpr py::call_guard<CallScope> kScope;
  m.def("attention_fwd", &attention_fwd, kScope);
  m.def("attention_bwd", &attention_bwd, kScope);
  m.def("attention_decode", &attention_decode, kScope);
  m.def(
      "attention_weights",
      [](const py::object& call, const py::kwargs& fields) {
        run(&KernelTable::attention_weights, call, fields);
      },
      kScope);
  m.def(
      "attention_weights_bwd",
      [](const py::object& call, const py::kwargs& fields) {
        run(&KernelTable::attention_bwd, call, fields);
      },
      kScope);
  m.def("norm_fwd", &norm_fwd, kScope);
  m.def("norm_bwd", &norm_bwd, kScope);
  m.def("set_torch", &set_torch);
  m.def("set_no_mask", &set_no_mask);
  // Takes a fifth of the time of os.environ.get.
  m.def("environment", [](const char* name) { return std::getenv(name); });
  m.def("empty_tensor", &empty_tensor);
  m.def("activation", &activation, kScope);
  m.def("rotary", &rotary, kScope);
  m.def("tile_summary", &tile_summary, kScope);
  m.def("tile_kinds", &tile_kinds, kScope);
  m.def("tile_size", [](int64_t dtype) {
    check_within(dtype, "dtype", 0, 3);
    return py::make_tuple(kernels().query_tile(static_cast<DType>(dtype)), kernels().block);
  });
  m.def("multiply_add_peak", [](int64_t threads) {
    check_within(threads, "threads", 1, kUnlimited);
    return kernels().multiply_add_peak(threads);
  });
  m.def("product_peak", [](int64_t dtype, int64_t threads) {
    check_within(dtype, "dtype", 0, 3);
    check_within(threads, "threads", 1, kUnlimited);
    return kernels().product_peak(static_cast<DType>(dtype), threads);
  });
  m.def("release_workspace", &release_workspace);
  m.def("isa", [] { return kernels().isa; });
  m.def("set_isa", &set_isa, py::arg("isa").none(false));
}

}  // namespace fused_attn
