// Implements the attention functions of api.h, which dispatch a call to the kernels compiled for
// its head dimension.
#include <string>
#include <type_traits>

#include "cuda/api.h"
#include "cuda/attention_passes.h"
#include "philox.h"

namespace fused_attn {
namespace {

// Calls f(integral_constant<int, D>()) with the first compiled head dimension D that is at least
// head_dim and head_dim_v.
template <class F>
void for_head_dim(const AttentionParams& p, F f) {
  const int64_t needed = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
#define FUSED_ATTN_HEAD_DIM(size) \
  if (needed <= size) return f(std::integral_constant<int, size>());
#include "cuda/head_dims.inc"
#undef FUSED_ATTN_HEAD_DIM
  throw LaunchError("no kernel is compiled for head_dim " + std::to_string(needed));
}

// Returns `gpu` with dropout_p converted to the integer threshold and float32 scale that the
// kernels use.
GpuParams with_dropout(const AttentionParams& p, GpuParams gpu) {
  gpu.dropout_threshold = p.dropout_p > 0.0 ? dropout_threshold(p.dropout_p) : 0;
  gpu.dropout_scale = p.dropout_p > 0.0 ? static_cast<float>(dropout_scale(p.dropout_p)) : 1.0f;
  return gpu;
}

}  // namespace

void run_attention_fwd(const AttentionParams& p, const GpuParams& call) {
  const GpuParams gpu = with_dropout(p, call);
  run_id_ranges(p, gpu);
  for_head_dim(p, [&](auto head_dim) { run_attention_fwd<head_dim()>(p, gpu); });
}

void run_attention_decode(const AttentionParams& p, const CacheParams& cache,
                          const GpuParams& call) {
  const GpuParams gpu = with_dropout(p, call);
  run_id_ranges(p, gpu);
  for_head_dim(p, [&](auto head_dim) { run_attention_decode<head_dim()>(p, cache, gpu); });
}

void run_attention_weights(const AttentionWeightsParams& p, const GpuParams& call) {
  const GpuParams gpu = with_dropout(p.fwd, call);
  run_id_ranges(p.fwd, gpu);
  for_head_dim(p.fwd, [&](auto head_dim) { run_attention_weights<head_dim()>(p, gpu); });
}

void run_attention_bwd(const AttentionBwdParams& p, const GpuParams& call) {
  const GpuParams gpu = with_dropout(p.fwd, call);
  run_id_ranges(p.fwd, gpu);
  run_attention_bwd_prepare(p, gpu);
  for_head_dim(p.fwd, [&](auto head_dim) {
    if (gpu.deterministic) run_attention_bwd_dq<head_dim()>(p, gpu);
    run_attention_bwd_dkdv<head_dim()>(p, gpu);
    if (gpu.grad_bias_parts != nullptr) run_attention_bwd_bias<head_dim()>(p, gpu);
  });
  if (!gpu.deterministic) run_attention_bwd_finish(p, gpu);
}

}  // namespace fused_attn
