// Distribution of query rows over blocks and lanes, used by attention_bwd_prepare.cu and
// attention_bwd_finish.cu.
#pragma once

#include "cuda/attention_bwd_tile.cuh"

namespace fused_attn {

constexpr int kRowPassThreads = 128;
// Number of lanes that share a row. Each lane reads 16 bytes at a time, so together they read 64
// 16-bit elements.
constexpr int kRowLanes = 8;
constexpr int kRowStep = kRowPassThreads / kRowLanes;

// Returns the block's tile of up to kStatisticsTile query rows of one head. `count` is 0 or
// negative if the tile begins past the end of a packed sequence.
FUSED_ATTN_DEVICE OwnedTile owned_statistics(const AttentionParams& p) {
  const int64_t tiles = statistics_tiles(p.seqlen_q);
  const int64_t m = block_id() % tiles, bh = block_id() / tiles;
  OwnedTile own{static_cast<int>(bh / p.num_heads), static_cast<int>(bh % p.num_heads),
                static_cast<int>(m * kStatisticsTile), 0};
  own.count = static_cast<int>(min64(kStatisticsTile, query_rows(p, own.b).count - own.begin));
  return own;
}

// Returns the number of blocks that cover all query rows of a call.
inline int64_t statistics_blocks(const AttentionParams& p) {
  return statistics_tiles(p.seqlen_q) * p.batch * p.num_heads;
}

}  // namespace fused_attn
