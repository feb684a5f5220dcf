// Python bindings of the CPU kernels, the module fused_attn._cpu.
#include "bind_attention.h"
#include "bind_norm.h"
#include "cpu/debug.h"

namespace fused_attn {
namespace {

// Reads a call and the keyword fields of the pass, and runs the pass.
template <class Params>
void run(bool (*KernelTable::*entry)(const Params&), const py::handle& call,
         const py::kwargs& kwargs) {
  Params params{};
  Fields fields(kwargs);
  read_call(call, &params);
  read(fields, &params);
  fields.finish();
  Summaries summaries;
  complete(call, &params, &summaries);
  run_entry(entry, params);
}

void activation(const py::kwargs& kwargs) {
  ActivationParams params{};
  Fields fields(kwargs);
  read(fields, &params);
  fields.finish();
  run_entry(&KernelTable::activation, params);
}

// Arguments as in `Backend.rotary`; positions are int64, contiguous.
void rotary(const py::handle& input, const py::handle& cos, const py::handle& sin,
            const py::handle& positions, bool interleaved, bool per_dimension, bool backward,
            const py::handle& out, int64_t num_threads) {
  RotaryParams p{};
  const TensorView x = view_of(input), y = view_of(out);
  check_dense(x, "input", 3);
  check_dense(y, "out", 3);
  const auto read_table = [&](const py::handle& table, const void** data, int64_t* strides) {
    const TensorView view = view_of(table);
    check_dense(view, "cos and sin", view.ndim - 1);
    *data = view.data;
    if (view.ndim == 3) strides[0] = view.broadcast_stride(0);
    strides[1] = view.strides[view.ndim - 2];
    return view;
  };
  const TensorView factors = read_table(cos, &p.cos, p.cos_strides);
  read_table(sin, &p.sin, p.sin_strides);
  const int64_t width = factors.shape[factors.ndim - 1];
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
  p.positions = static_cast<const int64_t*>(view_of(positions).data);
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
  read_call(call, &params.problem);
  fields.pointer("kinds", &params.kinds);
  fields.number("num_threads", &params.problem.num_threads);
  fields.finish();
  Summaries summaries;
  complete(call, &params.problem, &summaries);
  run_entry(&KernelTable::tile_kinds, params);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of fused_attn; call them through fused_attn.backends.cpp.";
  m.attr("SUMMARY_TILE") = py::make_tuple(kSummaryTileM, kSummaryTileN);
  m.attr("FIELDS") = field_names();
  m.def("attention_fwd", &attention_fwd);
  m.def("attention_bwd", &attention_bwd);
  m.def("attention_weights", [](const py::object& call, const py::kwargs& fields) {
    run(&KernelTable::attention_weights, call, fields);
  });
  m.def("attention_weights_bwd", [](const py::object& call, const py::kwargs& fields) {
    run(&KernelTable::attention_bwd, call, fields);
  });
  m.def("norm_fwd", &norm_fwd);
  m.def("norm_bwd", &norm_bwd);
  m.def("set_torch", &set_torch);
  m.def("set_no_mask", &set_no_mask);
  // Takes a fifth of the time of os.environ.get.
  m.def("environment", [](const char* name) { return std::getenv(name); });
  m.def("empty_tensor", &empty_tensor);
  m.def("activation", &activation);
  m.def("rotary", &rotary);
  m.def("tile_summary", &tile_summary);
  m.def("tile_kinds", &tile_kinds);
  m.def("tile_size", [](int64_t dtype) {
    return py::make_tuple(kernels().query_tile(static_cast<DType>(dtype)), kernels().block);
  });
  m.def("multiply_add_peak", [](int64_t threads) { return kernels().multiply_add_peak(threads); });
  m.def("product_peak", [](int64_t dtype, int64_t threads) {
    return kernels().product_peak(static_cast<DType>(dtype), threads);
  });
  m.def("release_workspace", &release_workspace);
  m.def("isa", [] { return kernels().isa; });
  m.def("set_isa", &set_isa, py::arg("isa").none(false));
}

}  // namespace fused_attn
