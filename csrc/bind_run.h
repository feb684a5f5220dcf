// Runs the CPU kernels on calls that the bindings have read.
#pragma once

#include <new>
#include <vector>

#include "bind_new.h"
#include "cpu/dispatch.h"

namespace fused_attn {
namespace {

template <class Params>
const KernelTable& kernels_for(const Params&) {
  return kernels();
}
const KernelTable& kernels_for(const AttentionWeightsParams& p) { return attention_kernels(p.fwd); }
const KernelTable& kernels_for(const TileKindsParams& p) { return attention_kernels(p.problem); }

// Runs a pass without the GIL. Throws std::bad_alloc if the pass runs out of memory.
template <class Params>
void run_pass(bool (*pass)(const Params&), const Params& params) {
  py::gil_scoped_release release;
  if (!pass(params)) throw std::bad_alloc();
}

// Runs an entry of the kernel table with run_pass().
template <class Params>
void run_entry(bool (*KernelTable::*entry)(const Params&), const Params& params) {
  run_pass(kernels_for(params).*entry, params);
}

// Computes the summary of a mask tensor unless the spec has it, and stores it on the spec, for the
// backward and for other calls with this mask.
void complete_summary(const py::object& spec, const char* name, const TensorView& mask,
                      int64_t num_threads, DenseTensor* tensor) {
  if (!mask.is_present || tensor->summary != nullptr) return;
  SummaryParams p{};
  int64_t sizes[4], step = 1;
  for (int i = 3; i >= 0; --i) {
    p.sizes[i] = mask.shape[i];
    p.strides[i] = mask.strides[i];
    sizes[i] = summary_size(mask, i);
    tensor->summary_strides[i] = mask.shape[i] == 1 ? 0 : step;
    step *= sizes[i];
  }
  const py::object summary = new_dense(sizes, 4, kUInt8, &p.summary);
  p.data = mask.data;
  p.is_bool = !mask.is_float();
  p.dtype = mask.dtype();
  p.num_threads = num_threads;
  tensor->summary = p.summary;
  {
    py::gil_scoped_release release;
    kernels().tile_summary(p);
  }
  if (spec.attr(name).is_none()) spec.attr(name) = summary;  // else another thread was faster
}

// Reads the dropout seed. For an unvalidated call, the seed is drawn here, so that rejected calls
// do not advance the generator.
template <class Params>
void read_seed(const py::handle& call, Params* p) {
  if (p->dropout_p == 0) return;
  const py::object options = FUSED_ATTN_ATTRIBUTE(call, "options");
  py::object seed = FUSED_ATTN_ATTRIBUTE(options, "seed");
  if (seed.is_none()) seed = FUSED_ATTN_ATTRIBUTE(call, "draw_seed")();
  const TensorView view = view_of(seed);
  check_rule<int64_t>(view, "seed", "*1", {});
  p->seed = static_cast<uint64_t>(*static_cast<const int64_t*>(view.data));
}

// Draws or reads the dropout seed, and computes missing tile summaries. Called after read_call.
void read_seed_and_summaries(const py::handle& call, AttentionParams* p) {
  read_seed(call, p);
  if (p->mask.bias.data == nullptr && p->mask.dense.data == nullptr) return;
  const py::object spec = FUSED_ATTN_ATTRIBUTE(call, "mask");
  complete_summary(spec, "bias_summary", view_of(FUSED_ATTN_ATTRIBUTE(spec, "bias")),
                   p->num_threads, &p->mask.bias);
  complete_summary(spec, "dense_summary", view_of(FUSED_ATTN_ATTRIBUTE(spec, "dense")),
                   p->num_threads, &p->mask.dense);
}

}  // namespace
}  // namespace fused_attn
