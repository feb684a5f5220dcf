// Python bindings of the CUDA kernels, the module fused_attn._cuda.
//
// Each call enqueues its kernels on the stream given in its fields and returns without waiting for
// the GPU.
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_calls.h"
#include "cuda/api.h"
#include "cuda/gpu_params.h"
#include "cuda/launch_records.h"
#include "cuda/tile_sizes.h"

// tests/cuda_emulator compiles this file under another module name.
#ifndef FUSED_ATTN_CUDA_MODULE
#define FUSED_ATTN_CUDA_MODULE _cuda
#endif

namespace fused_attn {
namespace {

#include "fields/read.inc"

void read(Fields& fields, GpuParams* p) {
#include "fields/gpu.inc"
}

void read(Fields& fields, CacheParams* p) {
#include "fields/cache.inc"
  check_that(p->block_table == nullptr || p->page_size == fields.sizes.at('S'), "wrong page_size");
}

#include "fields/end.inc"

// Workspace of norm_bwd: float (2, num_parts, columns), partial sums of the gradients of weight and
// bias.
struct PartialSums {
  float* data;
  int64_t num_parts;
};
void read(Fields& fields, PartialSums* p) {
  fields.size("num_parts", &p->num_parts, 'A');
  fields.pointer("partial_sums", &p->data, "2AC");
}

// key_mask, which does not depend on the query, has a tile summary on GPUs. These overloads read it
// for attention passes, and do nothing for passes without a mask.
template <class Params>
void read_key_mask_summary(const py::handle&, Fields&, Params*) {}
void read_key_mask_summary(const py::handle& call, Fields& fields, AttentionParams* p) {
  const py::object spec = FUSED_ATTN_ATTRIBUTE(call, "mask");
  read_summary(view_of(FUSED_ATTN_ATTRIBUTE(spec, "key_mask")),
               view_of(fields.find("key_mask_summary")), &p->mask.key_mask);
}
void read_key_mask_summary(const py::handle& call, Fields& fields, AttentionBwdParams* p) {
  read_key_mask_summary(call, fields, &p->fwd);
}
void read_key_mask_summary(const py::handle& call, Fields& fields, AttentionWeightsParams* p) {
  read_key_mask_summary(call, fields, &p->fwd);
}

// The sizes of a call, for error messages.

std::string sizes_of(const AttentionParams& p) {
  std::string text;
  for (const auto& [name, size] : {std::pair<const char*, int64_t>{"batch", p.batch},
                                   {"num_heads", p.num_heads},
                                   {"num_heads_kv", p.num_heads_kv},
                                   {"seqlen_q", p.seqlen_q},
                                   {"seqlen_k", p.seqlen_k},
                                   {"head_dim", p.head_dim},
                                   {"head_dim_v", p.head_dim_v}}) {
    text += std::string(name) + " " + std::to_string(size) + ", ";
  }
  return text + name_of(p.dtype);
}
std::string sizes_of(const AttentionBwdParams& p) { return sizes_of(p.fwd); }
std::string sizes_of(const AttentionWeightsParams& p) { return sizes_of(p.fwd); }
std::string sizes_of(const NormParams& p) {
  return "rows " + std::to_string(p.rows) + ", columns " + std::to_string(p.columns) + ", " +
         name_of(p.dtype);
}
std::string sizes_of(const NormBwdParams& p) { return sizes_of(p.fwd); }
std::string sizes_of(const SummaryParams& p) {
  std::string text = p.is_bool ? "a bool mask of shape" : "a float mask of shape";
  for (const int64_t size : p.sizes) text += " " + std::to_string(size);
  return text;
}

Sizes read_call(const py::handle&, SummaryParams*) { return {}; }

// Adds the sizes of workspaces: E head_dim rounded up to 8, F rows of row_statistics, L and M rows
// and columns of grad_bias_parts, C x U and A x Z batch and id ranges of query_documents and
// key_documents, Y 2 + head_dim_v. The fields add A number of bias parts, O max_pages, R
// seqlen_new, X num_splits.
template <class Params>
void set_gpu_sizes(const Params&, Sizes*) {}
void set_gpu_sizes(const AttentionParams& p, Sizes* sizes) {
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  const int tile = score_tile(p.dtype == DType::kFloat32 ? 4 : 2);
  Sizes& s = *sizes;
  s['C'] = p.mask.query_documents_stride == 0 ? std::min<int64_t>(p.batch, 1) : p.batch;
  s['A'] = p.mask.key_documents_stride == 0 ? std::min<int64_t>(p.batch, 1) : p.batch;
  s['U'] = tiles(p.seqlen_q, kIdRangeTile);
  s['Z'] = tiles(p.seqlen_k, kIdRangeTile);
  s['E'] = tiles(p.head_dim, 8) * 8;
  s['F'] =
      kStatisticsTile * (p.cu_seqlens_q == nullptr ? p.batch * tiles(p.seqlen_q, kStatisticsTile)
                                                   : p.total_q / kStatisticsTile + p.batch + 1);
  s['Y'] = 2 + p.head_dim_v;
  s['L'] = s['L'] > 1 ? p.seqlen_q : tiles(p.seqlen_q, tile);
  s['M'] = s['M'] > 1 ? p.seqlen_k : tiles(p.seqlen_k, tile);
}
void set_gpu_sizes(const AttentionBwdParams& p, Sizes* sizes) { set_gpu_sizes(p.fwd, sizes); }
void set_gpu_sizes(const AttentionWeightsParams& p, Sizes* sizes) { set_gpu_sizes(p.fwd, sizes); }

// check() throws std::invalid_argument if tensors are missing that only some calls of a pass need.
void check(const SummaryParams&, const GpuParams&) {}
void check(const AttentionParams& p, const GpuParams& gpu) {
  check_that(p.mask.query_documents == nullptr ||
                 (gpu.query_id_ranges != nullptr && gpu.key_id_ranges != nullptr),
             "the ranges of document ids are missing");
  check_that(!(p.dropout_p > 0) || gpu.seed_address != nullptr, "seed_address is missing");
}
void check(const AttentionWeightsParams& p, const GpuParams& gpu) { check(p.fwd, gpu); }
void check(const AttentionParams& p, const CacheParams& cache, const GpuParams& gpu) {
  check(p, gpu);
  check_that(gpu.num_splits == 1 || (gpu.num_splits > 1 && gpu.splits != nullptr),
             "num_splits must be 1, or splits a workspace");
  check_that(
      cache.block_table == nullptr || p.seqlen_k <= cache.block_table_stride * cache.page_size,
      "block_table must have pages for seqlen_k keys");
  check_that(cache.seqlen_new == 0 || (cache.cache_lengths != nullptr && cache.new_key != nullptr &&
                                       cache.new_value != nullptr),
             "seqlen_new needs cache_lengths, new_key and new_value");
}
void check(const AttentionBwdParams& p, const GpuParams& gpu) {
  check(p.fwd, gpu);
  check_that(gpu.row_statistics != nullptr, "row_statistics is missing");
  check_that(gpu.deterministic || gpu.grad_query_sums != nullptr, "grad_query_sums is missing");
}
void check(const NormParams& p, const GpuParams& gpu) {
  check_that(p.out != nullptr || p.rows * p.columns == 0, "out is missing");
  check_that(!(p.dropout_p > 0) || gpu.seed_address != nullptr, "seed_address is missing");
}
void check(const NormBwdParams& p, const PartialSums& sums, const GpuParams& gpu) {
  check_that(!(p.fwd.dropout_p > 0) || gpu.seed_address != nullptr, "seed_address is missing");
  check_that(p.fwd.rstd != nullptr && (p.fwd.rms || p.fwd.mean != nullptr),
             "mean or rstd is missing");
  check_that((p.grad_weight == nullptr && p.grad_bias == nullptr) || sums.data != nullptr,
             "partial_sums is missing");
  check_that(!(p.fwd.dropout_p > 0) || p.grad_input != nullptr, "grad_input is missing");
}

// Reads the call and the keyword fields of the pass, and calls `entry` with the resulting structs
// and without the GIL. Adds the name and sizes of the call to launch errors.
template <class Params, class... More>
void run(const char* name, void (*entry)(const Params&, const More&...), const py::handle& call,
         const py::kwargs& kwargs) {
  Params params{};
  std::tuple<More...> more{};
  Fields fields(kwargs);
  call_device = {};
  int32_t index = -1;  // without a device, the kernels are emulated on the CPU
  fields.number("device", &index);
  if (index >= 0) call_device = {kDLCuda, index};
  if constexpr ((std::is_same_v<More, CacheParams> || ...)) {
    KeyRows rows;
    if (fields.has("seqlen_k")) fields.number("seqlen_k", &(rows.seqlen_k = 0));
    rows.paged = fields.has("block_table");
    fields.sizes = read_call(call, &params, rows);
  } else {
    fields.sizes = read_call(call, &params);
  }
  if (std::strcmp(name, "id_ranges") == 0) fields.sizes['N'] = 0;  // no output is required
  read_key_mask_summary(call, fields, &params);
  read(fields, &params);
  set_gpu_sizes(params, &fields.sizes);
  std::apply([&](More&... parts) { (read(fields, &parts), ...); }, more);
  fields.finish();
  std::apply([&](More&... parts) { check(params, parts...); }, more);
  py::gil_scoped_release release;
  try {
    std::apply([&](const More&... parts) { entry(params, parts...); }, more);
  } catch (const LaunchError& error) {
    throw LaunchError(std::string(name) + " (" + sizes_of(params) + ") failed: " + error.what());
  }
}

// Calls `calls` with recording enabled. Returns one tuple (kernel, blocks, threads, shared memory
// size) per launch.
py::list launches_of(const py::function& calls) {
  std::vector<LaunchRecord> records;
  struct Recording {
    explicit Recording(std::vector<LaunchRecord>* list) { launch_records = list; }
    ~Recording() { launch_records = nullptr; }
  };
  {
    const Recording recording(&records);
    calls();
  }
  py::list result;
  for (const LaunchRecord& r : records) {
    result.append(py::make_tuple(r.kernel, r.blocks, r.threads, r.shared_size));
  }
  return result;
}

void norm_bwd(const NormBwdParams& params, const PartialSums& sums, const GpuParams& gpu) {
  run_norm_bwd(params, sums.data, sums.num_parts, gpu);
}

}  // namespace

PYBIND11_MODULE(FUSED_ATTN_CUDA_MODULE, m) {
  m.doc() = "CUDA kernels of fused_attn; call them through fused_attn.backends.cuda.";
  m.attr("SUMMARY_TILE") = py::make_tuple(kSummaryTileM, kSummaryTileN);
  m.attr("FIELDS") = field_names();
  m.attr("ID_RANGE_TILE") = kIdRangeTile;
  m.attr("STATISTICS_TILE") = kStatisticsTile;
  m.attr("MAX_ADDED_HEAD_DIM") = kMaxAddedHeadDim;
#define FUSED_ATTN_DEFINE(name, entry)                                                           \
  m.def(                                                                                         \
      name,                                                                                      \
      [](const py::object& call, const py::kwargs& fields) { run(name, &entry, call, fields); }, \
      py::call_guard<CallScope>())
  FUSED_ATTN_DEFINE("attention_fwd", run_attention_fwd);
  FUSED_ATTN_DEFINE("attention_bwd", run_attention_bwd);
  FUSED_ATTN_DEFINE("attention_decode", run_attention_decode);
  FUSED_ATTN_DEFINE("attention_weights", run_attention_weights);
  FUSED_ATTN_DEFINE("tile_summary", run_tile_summary);
  FUSED_ATTN_DEFINE("id_ranges", run_id_ranges);
  FUSED_ATTN_DEFINE("norm_fwd", run_norm_fwd);
  FUSED_ATTN_DEFINE("norm_bwd", norm_bwd);
#undef FUSED_ATTN_DEFINE
  m.def("set_exchange_api", &set_exchange_api);
  m.def("launch_obstacle", &launch_obstacle);
  m.def("launches_of", &launches_of);
  m.def("norm_bwd_parts", &norm_bwd_parts);
  m.def("score_tile", &score_tile);
}

}  // namespace fused_attn
