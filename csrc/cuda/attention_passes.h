// The passes of attention, each compiled for every line of head_dims.inc (sources.cmake).
#pragma once

#include "cuda/gpu_params.h"

namespace fused_attn {

template <int kHeadDim>
void run_attention_fwd(const AttentionParams& p, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_decode(const AttentionParams& p, const CacheParams& cache, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_weights(const AttentionWeightsParams& p, const GpuParams& gpu);
// Computes grad_query. With a bias gradient, also removes the rounding error of out from delta.
template <int kHeadDim>
void run_attention_bwd_dq(const AttentionBwdParams& p, const GpuParams& gpu);
// Computes grad_key and grad_value and, unless deterministic, accumulates grad_query_sums.
template <int kHeadDim>
void run_attention_bwd_dkdv(const AttentionBwdParams& p, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_bwd_bias(const AttentionBwdParams& p, const GpuParams& gpu);

// Runs before these passes: computes row statistics and zeroes grad_query_sums, if used.
void run_attention_bwd_prepare(const AttentionBwdParams& p, const GpuParams& gpu);
// Runs after them: converts grad_query_sums to grad_query.
void run_attention_bwd_finish(const AttentionBwdParams& p, const GpuParams& gpu);

}  // namespace fused_attn
