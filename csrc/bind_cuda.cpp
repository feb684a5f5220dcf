// The module fused_attn._cuda: the CUDA kernels, by the fields of params.h.
//
// Calls are enqueued on the stream that they name, and return: nothing here waits for a GPU.
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_fields.h"
#include "cuda/api.h"
#include "cuda/gpu_params.h"
#include "cuda/launch_records.h"
#include "cuda/tile_sizes.h"

// tests/cuda_emulator compiles this file under another name.
#ifndef FUSED_ATTN_CUDA_MODULE
#define FUSED_ATTN_CUDA_MODULE _cuda
#endif

namespace fused_attn {
namespace {

void read(Fields& f, GpuParams* p) {
  f.pointer("stream", &p->stream);
  f.number("tf32", &p->tf32);
  f.number("deterministic", &p->deterministic);
  f.pointer("seed_address", &p->seed);
  f.pointer("query_id_ranges", &p->query_id_ranges);
  f.pointer("key_id_ranges", &p->key_id_ranges);
  f.pointer("row_statistics", &p->row_statistics);
  f.pointer("grad_query_sums", &p->grad_query_sums);
  f.pointer("grad_bias_parts", &p->grad_bias_parts);
  f.number("num_bias_parts", &p->num_bias_parts);
  f.integers("bias_sizes", p->bias_sizes);
  f.pointer("splits", &p->splits);
  f.number("num_splits", &p->num_splits);
}

void read(Fields& f, CacheParams* p) {
  f.pointer("block_table", &p->block_table);
  f.number("block_table_stride", &p->block_table_stride);
  f.number("page_size", &p->page_size);
  f.pointer("cache_lengths", &p->lengths);
  f.tensor("new_key", &p->new_key, p->new_key_strides);
  f.tensor("new_value", &p->new_value, p->new_value_strides);
  f.number("seqlen_new", &p->seqlen_new);
}

// Workspace of norm_bwd.
struct PartialSums {
  float* data;
  int64_t num_parts;
};
void read(Fields& f, PartialSums* p) {
  f.pointer("partial_sums", &p->data);
  f.number("num_parts", &p->num_parts);
}

// ---- what a call was, where it fails ------------------------------------------------------------

std::string name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "dtype " + std::to_string(static_cast<int64_t>(dtype));
}

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
  std::string text = p.is_bool ? "a mask of" : "a float mask of";
  for (const int64_t size : p.sizes) text += " " + std::to_string(size);
  return text;
}

// ---- calls --------------------------------------------------------------------------------------

// Without the GIL.
template <class Params, class Run>
void run_described(const char* name, const Params& params, const Run& run) {
  py::gil_scoped_release release;
  try {
    run();
  } catch (const LaunchError& error) {
    throw LaunchError(std::string(name) + " (" + sizes_of(params) +
                      ") could not start its kernel " + error.what());
  }
}

// Reads each part of a call from the same fields, and hands them all to `entry`.
template <class Params, class... More>
void run(const char* name, void (*entry)(const Params&, const More&...), const py::kwargs& kwargs) {
  Params params{};
  std::tuple<More...> more{};
  Fields fields(kwargs);
  read(fields, &params);
  std::apply([&](More&... parts) { (read(fields, &parts), ...); }, more);
  fields.finish();
  run_described(name, params,
                [&] { std::apply([&](const More&... parts) { entry(params, parts...); }, more); });
}

// A forward whose fields are read once, for calls that differ in their tensors' addresses alone.
class AttentionCall {
 public:
  // mask, sizes: as of ChangingMask; decodes: by attention_decode.
  AttentionCall(const std::string& mask, const std::array<int64_t, 4>& sizes, bool decodes,
                const py::kwargs& kwargs)
      : mask_("", sizes, {}, true), decodes_(decodes) {
    Fields fields(kwargs);
    read(fields, &params_);
    read(fields, &gpu_);
    fields.finish();
    mask_ = ChangingMask(mask, sizes, params_.mask, true);
    const auto ranges = [this](int64_t seqlen, int64_t stride) {
      const int64_t runs = (seqlen + kIdRangeTile - 1) / kIdRangeTile;
      return (stride == 0 ? 1 : params_.batch) * runs * 2 * sizeof(int32_t);
    };
    const MaskParams& m = params_.mask;
    key_ranges_ = aligned(mask_.summary_size);
    const bool documents = m.query_documents != nullptr;
    query_ranges_ = key_ranges_;
    if (documents) query_ranges_ += aligned(ranges(params_.seqlen_k, m.key_documents_stride));
    splits_ = query_ranges_;
    if (documents) splits_ += aligned(ranges(params_.seqlen_q, m.query_documents_stride));
    const int64_t batch = params_.cu_seqlens_q == nullptr ? params_.batch : 1;
    const int64_t rows = batch * params_.num_heads * params_.total_q;
    const int64_t splits = gpu_.num_splits > 1 ? gpu_.num_splits : 0;
    workspace_size_ = splits_ + rows * splits * (2 + params_.head_dim_v) * sizeof(float);
  }

  int64_t workspace_size() const { return workspace_size_; }

  void run(uintptr_t query, uintptr_t key, uintptr_t value, uintptr_t out, uintptr_t mask,
           uintptr_t workspace, uintptr_t stream, bool tf32) const {
    AttentionParams params = params_;
    GpuParams gpu = gpu_;
    gpu.stream = reinterpret_cast<void*>(stream);
    gpu.tf32 = tf32;
    if (params.mask.query_documents != nullptr) {
      gpu.query_id_ranges = reinterpret_cast<int32_t*>(workspace + query_ranges_);
      gpu.key_id_ranges = reinterpret_cast<int32_t*>(workspace + key_ranges_);
    }
    if (gpu.num_splits > 1) gpu.splits = reinterpret_cast<float*>(workspace + splits_);
    const SummaryParams of_mask =
        mask_.set(&params.mask, mask, reinterpret_cast<uint8_t*>(workspace));
    params.query = reinterpret_cast<const void*>(query);
    params.key = reinterpret_cast<const void*>(key);
    params.value = reinterpret_cast<const void*>(value);
    params.out = reinterpret_cast<void*>(out);
    run_described(decodes_ ? "attention_decode" : "attention_fwd", params, [&] {
      if (mask_.summary_size > 0) run_tile_summary(of_mask, gpu);
      if (decodes_) return run_attention_decode(params, {}, gpu);
      run_attention_fwd(params, gpu);
    });
  }

 private:
  static int64_t aligned(int64_t size) { return (size + 15) / 16 * 16; }

  AttentionParams params_{};
  GpuParams gpu_{};
  ChangingMask mask_;
  bool decodes_;
  // Parts of a call's workspace, whose beginning is the summary of its mask.
  int64_t key_ranges_, query_ranges_, splits_, workspace_size_;
};

// What the calls of a function would start: (kernel, blocks, threads, shared memory) each.
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
  m.attr("ID_RANGE_TILE") = kIdRangeTile;
  m.attr("STATISTICS_TILE") = kStatisticsTile;
  m.attr("MAX_ADDED_HEAD_DIM") = kMaxAddedHeadDim;
#define FUSED_ATTN_DEFINE(name, entry) \
  m.def(name, [](const py::kwargs& fields) { run(name, &entry, fields); })
  FUSED_ATTN_DEFINE("attention_fwd", run_attention_fwd);
  FUSED_ATTN_DEFINE("attention_bwd", run_attention_bwd);
  FUSED_ATTN_DEFINE("attention_decode", run_attention_decode);
  FUSED_ATTN_DEFINE("attention_weights", run_attention_weights);
  FUSED_ATTN_DEFINE("tile_summary", run_tile_summary);
  FUSED_ATTN_DEFINE("id_ranges", run_id_ranges);
  FUSED_ATTN_DEFINE("norm_fwd", run_norm_fwd);
  FUSED_ATTN_DEFINE("norm_bwd", norm_bwd);
#undef FUSED_ATTN_DEFINE
  py::class_<AttentionCall>(m, "AttentionCall")
      .def(py::init<const std::string&, const std::array<int64_t, 4>&, bool, const py::kwargs&>())
      .def_property_readonly("workspace_size", &AttentionCall::workspace_size)
      .def("run", &AttentionCall::run);
  m.def("launches_of", &launches_of);
  m.def("norm_bwd_parts", &norm_bwd_parts);
  m.def("score_tile", &score_tile);
}

}  // namespace fused_attn
