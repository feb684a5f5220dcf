// Distribution of query rows over blocks and lanes, used by attention_bwd_prepare.cu and
// attention_bwd_finish.cu. Each block owns a tile of up to kStatisticsTile query rows of one head.
#pragma once

#include "cuda/attention_bwd_tile.cuh"

namespace fused_attn {

constexpr int kRowPassThreads = 128;
// Number of lanes that share a row. Each lane reads 16 bytes at a time, so together they read 64
// 16-bit elements.
constexpr int kRowLanes = 8;
constexpr int kRowStep = kRowPassThreads / kRowLanes;

// Returns the number of blocks that cover all query rows of a call.
inline int64_t statistics_blocks(const AttentionParams& p) {
  return statistics_tiles(p.seqlen_q) * p.batch * p.num_heads;
}

}  // namespace fused_attn
