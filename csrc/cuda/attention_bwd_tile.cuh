// Definitions shared by the backward kernels.
//
// Let P = exp(S - lse), Z the dropout mask (1: kept, 0: dropped), c = dropout_scale(dropout_p) and
// delta = rowsum(dO * O) - dlse. Then
//   dV = c (P Z)^T dO,  dS = P (c Z (dO V^T) - delta),  dK = scale dS^T Q,  dQ = scale dS K.
//
// Sources: Dao et al. 2022, FlashAttention, appendix B.4; Dao 2023, FlashAttention-2, section 3.1.
#pragma once

#include "cuda/attention_tile.cuh"

namespace fused_attn {

struct AttentionBwdArgs {
  AttentionBwdParams params;
  GpuParams gpu;
};

// Pointers to the statistics of the query rows of one head, in the workspace row_statistics. Each
// array is padded to a multiple of kStatisticsTile rows.
struct RowStatistics {
  float* lse;     // in the units of Units::exponent; inf for fully masked rows, so that P is 0
  float* factor;  // exp of the rounding error of lse; negligible and not read in the plain case
  float* delta;   // rowsum(dO * O) - dlse
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

// Returns the row stride of grad_query_sums in elements: head_dim rounded up to a multiple of 8,
// the number of columns of an MMA fragment.
FUSED_ATTN_HOST_DEVICE int64_t grad_query_sums_stride(int64_t head_dim) {
  return (head_dim + 7) / 8 * 8;
}

}  // namespace fused_attn
