// Host entry points of the module fused_attn._cuda. The run_ functions enqueue kernels on
// gpu.stream and do not wait for them. They throw LaunchError if a kernel cannot be started.
#pragma once

#include <stdexcept>

#include "cuda/gpu_params.h"

namespace fused_attn {

// Thrown if a kernel could not be started. bind_cuda.cpp appends the sizes of the call to the
// message.
struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns the reason why the kernels cannot run on the current GPU, or null if they can.
const char* launch_obstacle();
void run_attention_fwd(const AttentionParams& params, const GpuParams& gpu);
void run_attention_bwd(const AttentionBwdParams& params, const GpuParams& gpu);
void run_attention_decode(const AttentionParams& params, const CacheParams& cache,
                          const GpuParams& gpu);
void run_attention_weights(const AttentionWeightsParams& params, const GpuParams& gpu);
void run_tile_summary(const SummaryParams& params, const GpuParams& gpu);
// Fills gpu.query_id_ranges and gpu.key_id_ranges. Does nothing if there is no document mask.
void run_id_ranges(const AttentionParams& params, const GpuParams& gpu);
void run_norm_fwd(const NormParams& params, const GpuParams& gpu);
// partial_sums: float workspace of shape (2, num_parts, columns). Used only if grad_weight or
// grad_bias is requested.
void run_norm_bwd(const NormBwdParams& params, float* partial_sums, int64_t num_parts,
                  const GpuParams& gpu);
// Returns the num_parts of run_norm_bwd that fills a GPU with num_multiprocessors. The summation
// order depends on num_parts and on the shape.
int64_t norm_bwd_parts(int64_t rows, int64_t columns, int64_t num_multiprocessors);

}  // namespace fused_attn
