// Launch functions of the attention kernels. Each template is instantiated once for every head
// dimension in head_dims.inc, in a generated source file (sources.cmake).
#pragma once

#include "cuda/gpu_params.h"

namespace fused_attn {

template <int kHeadDim>
void run_attention_fwd(const AttentionParams& p, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_decode(const AttentionParams& p, const CacheParams& cache, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_weights(const AttentionWeightsParams& p, const GpuParams& gpu);
// Computes grad_query. If the bias gradient is requested, also removes the rounding error of out
// from delta.
template <int kHeadDim>
void run_attention_bwd_dq(const AttentionBwdParams& p, const GpuParams& gpu);
// Computes grad_key and grad_value. Unless gpu.deterministic is set, also accumulates
// grad_query_sums.
template <int kHeadDim>
void run_attention_bwd_dkdv(const AttentionBwdParams& p, const GpuParams& gpu);
// Computes grad_bias_parts.
template <int kHeadDim>
void run_attention_bwd_bias(const AttentionBwdParams& p, const GpuParams& gpu);

// Runs before the other backward passes. Computes the row statistics, and zeroes grad_query_sums
// unless it is null.
void run_attention_bwd_prepare(const AttentionBwdParams& p, const GpuParams& gpu);
// Runs after the other backward passes. Converts grad_query_sums to grad_query.
void run_attention_bwd_finish(const AttentionBwdParams& p, const GpuParams& gpu);

}  // namespace fused_attn
