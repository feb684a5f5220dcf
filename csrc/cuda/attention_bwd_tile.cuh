// Definitions shared by the kernels of the backward.
//
// With P = exp(S - lse), Z the dropout mask (1: kept, 0: dropped), c = dropout_scale(dropout_p) and
// delta = rowsum(dO * O) - dlse:
//   dV = c (P Z)^T dO,  dS = P (c Z (dO V^T) - delta),  dK = scale dS^T Q,  dQ = scale dS K.
// (Dao et al. 2022, FlashAttention, appendix B.4; Dao 2023, FlashAttention-2, section 3.1.)
#pragma once

#include "cuda/attention_tile.cuh"

namespace fused_attn {

struct AttentionBwdArgs {
  AttentionBwdParams params;
  GpuParams gpu;
};

// Statistics of the query rows of a head, padded to a multiple of kStatisticsTile rows.
struct RowStatistics {
  float* lse;     // an exponent as of Units; inf for fully masked rows, which makes their P 0
  float* factor;  // exp of the rounding error of lse; negligible and unused in the plain case
  float* delta;
};

FUSED_ATTN_HOST_DEVICE int64_t statistics_tiles(int64_t rows) {
  return (rows + kStatisticsTile - 1) / kStatisticsTile;
}

FUSED_ATTN_DEVICE RowStatistics row_statistics(const AttentionParams& p, const GpuParams& gpu,
                                               int64_t b, int64_t h) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t tiles =
      packed ? p.total_q / kStatisticsTile + p.batch + 1 : p.batch * statistics_tiles(p.seqlen_q);
  const int64_t first =
      packed ? p.cu_seqlens_q[b] / kStatisticsTile + b : b * statistics_tiles(p.seqlen_q);
  float* const lse = gpu.row_statistics + (h * tiles + first) * kStatisticsTile;
  const int64_t array = p.num_heads * tiles * kStatisticsTile;
  return {lse, lse + array, lse + 2 * array};
}

// Returns the elements of a row of grad_query_sums, a multiple of 8: a lane adds 2 of each group of
// 8 at a time.
FUSED_ATTN_HOST_DEVICE int64_t grad_query_sums_stride(int64_t head_dim) {
  return (head_dim + 7) / 8 * 8;
}

}  // namespace fused_attn
