// Distribution of query rows over blocks and lanes in attention_bwd_prepare.cu and
// attention_bwd_finish.cu.
#pragma once

#include "cuda/attention_bwd_tile.cuh"

namespace fused_attn {

constexpr int kRowPassThreads = 128;
// Lanes that share a row: each reads 16 bytes of it at a time, together 64 16-bit elements.
constexpr int kRowLanes = 8;
constexpr int kRowStep = kRowPassThreads / kRowLanes;

// Returns the block's kStatisticsTile rows of a head of a sequence. The last tile may extend past
// the end.
FUSED_ATTN_DEVICE OwnedTile owned_statistics(const AttentionParams& p) {
  const int64_t tiles = statistics_tiles(p.seqlen_q);
  const int64_t m = block_id() % tiles, bh = block_id() / tiles;
  OwnedTile own{static_cast<int>(bh / p.num_heads), static_cast<int>(bh % p.num_heads),
                static_cast<int>(m * kStatisticsTile), 0};
  own.count = static_cast<int>(min64(kStatisticsTile, query_rows(p, own.b).count - own.begin));
  return own;
}

inline int64_t statistics_blocks(const AttentionParams& p) {
  return statistics_tiles(p.seqlen_q) * p.batch * p.num_heads;
}

}  // namespace fused_attn
