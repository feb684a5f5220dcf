// What the kernels of the backward share.
//
// With P = exp(S - lse), Z what dropout keeps (1 or 0), c = dropout_scale(dropout_p) and
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

// What the backward knows of the queries of a head, by row of the sequence, up to a whole tile.
struct RowStatistics {
  float* lse;     // an exponent as of Units; inf for rows that see nothing, whose P is 0 then
  float* factor;  // exp of what rounding took from it; does not show in the plain case
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

// Elements of a row of grad_query_sums: whole groups of 8, of which a lane adds 2 at a time.
FUSED_ATTN_HOST_DEVICE int64_t grad_query_sums_stride(int64_t head_dim) {
  return (head_dim + 7) / 8 * 8;
}

}  // namespace fused_attn
