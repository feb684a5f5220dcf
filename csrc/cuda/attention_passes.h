// The passes of attention, each compiled for the lines of head_dims.inc (sources.cmake).
#pragma once

#include "cuda/gpu_params.h"

namespace fused_attn {

template <int kHeadDim>
void run_attention_fwd(const AttentionParams& p, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_decode(const AttentionParams& p, const CacheParams& cache, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_weights(const AttentionWeightsParams& p, const GpuParams& gpu);
// grad_query, and delta corrected by what the rounding of out put into it.
template <int kHeadDim>
void run_attention_bwd_dq(const AttentionBwdParams& p, const GpuParams& gpu);
// grad_key and grad_value, and unless deterministic grad_query_sums.
template <int kHeadDim>
void run_attention_bwd_dkdv(const AttentionBwdParams& p, const GpuParams& gpu);
template <int kHeadDim>
void run_attention_bwd_bias(const AttentionBwdParams& p, const GpuParams& gpu);

// Before these passes of the backward: row statistics; grad_query_sums, if they are used, become 0.
void run_attention_bwd_prepare(const AttentionBwdParams& p, const GpuParams& gpu);
// After them: grad_query of grad_query_sums.
void run_attention_bwd_finish(const AttentionBwdParams& p, const GpuParams& gpu);

}  // namespace fused_attn
