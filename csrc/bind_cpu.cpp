// The module fused_attn._cpu: the CPU kernels.
#include "bind_at_once.h"
#include "bind_fields.h"
#include "bind_norm_at_once.h"
#include "bind_run.h"
#include "cpu/debug.h"
#include "cpu/workspace_pool.h"

namespace fused_attn {
namespace {

uint64_t seed_of(const py::handle& call) {
  const TensorView seed = view_of(FUSED_ATTN_ATTRIBUTE(call, "seed"));
  return seed.data == nullptr ? 0 : static_cast<uint64_t>(*static_cast<const int64_t*>(seed.data));
}

// What of a call is looked at on the CPU alone.
void complete(const py::handle& call, AttentionParams* p, Summaries* summaries) {
  p->seed = seed_of(call);
  complete_mask(FUSED_ATTN_ATTRIBUTE(call, "mask"), p, summaries);
}
void complete(const py::handle& call, AttentionBwdParams* p, Summaries* s) {
  complete(call, &p->fwd, s);
}
void complete(const py::handle& call, AttentionWeightsParams* p, Summaries* s) {
  complete(call, &p->fwd, s);
}
void complete(const py::handle& call, NormParams* p, Summaries*) { p->seed = seed_of(call); }
void complete(const py::handle& call, NormBwdParams* p, Summaries*) { p->fwd.seed = seed_of(call); }

// A call, and the fields that a pass adds to it.
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
  m.attr("CALL_FIELDS") = call_fields();
#define FUSED_ATTN_PASS(name)                                         \
  m.def(#name, [](const py::object& call, const py::kwargs& fields) { \
    run(&KernelTable::name, call, fields);                            \
  })
  FUSED_ATTN_PASS(attention_fwd);
  FUSED_ATTN_PASS(attention_bwd);
  FUSED_ATTN_PASS(attention_weights);
  FUSED_ATTN_PASS(norm_fwd);
  FUSED_ATTN_PASS(norm_bwd);
#undef FUSED_ATTN_PASS
  m.def("attention", &attention);
  m.def("attention_gradients", &attention_gradients);
  m.def("norm", &norm);
  m.def("norm_gradients", &norm_gradients);
  m.def("set_torch", &set_torch);
  m.def("empty_tensor", &empty_tensor);
  m.def("activation", &activation);
  m.def("tile_summary", &tile_summary);
  m.def("tile_kinds", &tile_kinds);
  m.def("tile_size", [](int64_t dtype) {
    return py::make_tuple(kernels().panel(static_cast<DType>(dtype)), kernels().block);
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
