// List of the tiles that a block processes. The threads of the block classify tiles in parallel
// (block_ranges.h), using the mask bounds and summaries, and list the visible ones. The loops over
// tiles then skip fully masked tiles.
#pragma once

#include "block_ranges.h"
#include "cuda/gpu_params.h"
#include "cuda/intrinsics.cuh"

namespace fused_attn {

// One head of a sequence: batch and head index, sequence lengths and mask bounds.
struct Sequence {
  int b, h, seqlen_q, seqlen_k;
  SequenceBounds bounds;
};

FUSED_ATTN_DEVICE Sequence sequence_of(const AttentionParams& p, int b, int h) {
  return {b, h, static_cast<int>(query_rows(p, b).count), static_cast<int>(key_rows(p, b).count),
          sequence_bounds(p.mask, b, p.seqlen_q, p.seqlen_k)};
}

// Returns true if any mask other than the bounds applies.
FUSED_ATTN_DEVICE bool has_listed_masks(const MaskParams& mask) {
  return mask.query_documents != nullptr || mask.key_mask.data != nullptr ||
         mask.dense.data != nullptr || mask.bias.data != nullptr;
}

// Returns the smallest and largest document id of positions [begin, end) of sequence b. Each range
// covers kIdRangeTile positions, so the result may include positions next to the interval. stride:
// batch stride of the ids; if 0, all sequences share the ranges.
FUSED_ATTN_DEVICE IdRange id_range_of(const int32_t* ranges, int64_t stride, int64_t seqlen,
                                      int64_t b, int64_t begin, int64_t end) {
  const int64_t count = (seqlen + kIdRangeTile - 1) / kIdRangeTile;
  ranges += stride == 0 ? 0 : b * count * 2;
  IdRange all{INT32_MAX, INT32_MIN};
  FUSED_ATTN_ROLLED
  for (int64_t i = begin / kIdRangeTile; i * kIdRangeTile < end; ++i) {
    all.min = min64(all.min, ranges[2 * i]);
    all.max = max64(all.max, ranges[2 * i + 1]);
  }
  return all;
}

// Classifies the tile of queries [i_begin, i_end) and keys [j_begin, j_end) as skipped, partial or
// full. A tile that extends past the end of the sequence is partial, unless the caller clamps the
// range.
FUSED_ATTN_DEVICE Tile classify(const AttentionParams& p, const GpuParams& gpu, const Sequence& s,
                                int64_t i_begin, int64_t i_end, int64_t j_begin, int64_t j_end) {
  Tile kind = classify_bounds(s.bounds, i_begin, i_end, j_begin, j_end);
  if (kind == Tile::kSkip || !has_listed_masks(p.mask)) return kind;
  const MaskParams& mask = p.mask;
  i_end = min64(i_end, s.seqlen_q);
  j_end = min64(j_end, s.seqlen_k);
  if (mask.query_documents != nullptr) {
    kind = combine(kind,
                   classify_documents(id_range_of(gpu.query_id_ranges, mask.query_documents_stride,
                                                  p.seqlen_q, s.b, i_begin, i_end),
                                      id_range_of(gpu.key_id_ranges, mask.key_documents_stride,
                                                  p.seqlen_k, s.b, j_begin, j_end)));
  }
  kind = combine(kind, classify_dense(mask.key_mask, s.b, s.h, i_begin, i_end, j_begin, j_end));
  kind = combine(kind, classify_dense(mask.dense, s.b, s.h, i_begin, i_end, j_begin, j_end));
  return combine(kind, classify_dense(mask.bias, s.b, s.h, i_begin, i_end, j_begin, j_end));
}

// List of up to kCapacity tiles in shared memory. Full tiles are stored from slot 0 on, partial
// tiles from slot kCapacity on, both in ascending order.
struct TileList {
  static constexpr int kCapacity = 512;  // 32,768 positions with tiles of 64; 2.6 KB
  static constexpr int kBytes = kCapacity * 5 + 16;

  uint32_t base;  // shared-memory address
  int first, num_full, num_all;

  // Classifies tiles [begin, begin + count) and lists the visible ones. count: at most kCapacity.
  // kind(tile): returns the class of a tile. All threads of the block must call it.
  template <class Kind>
  FUSED_ATTN_DEVICE void build(int begin, int count, int num_threads, Kind kind) {
    first = begin;
    const uint32_t kinds = base + kCapacity * 4, counts = kinds + kCapacity;
    sync_block();  // the new list overwrites the previous one
    FUSED_ATTN_ROLLED
    for (int n = thread_id(); n < count; n += num_threads) {
      store_shared(kinds + n, static_cast<uint8_t>(kind(first + n)));
    }
    sync_block();
    if (warp_id() == 0) {
      const uint32_t before = (1u << lane_id()) - 1;
      int full = 0, partial = 0;
      FUSED_ATTN_ROLLED
      for (int n = 0; n < count; n += 32) {
        const int own = n + lane_id();
        const Tile mine =
            own < count ? static_cast<Tile>(load_shared<uint8_t>(kinds + own)) : Tile::kSkip;
        const uint32_t fulls = ballot(mine == Tile::kFull);
        const uint32_t partials = ballot(mine == Tile::kPartial);
        if (mine == Tile::kFull) put(full + count_bits(fulls & before), own);
        if (mine == Tile::kPartial) put(kCapacity + partial + count_bits(partials & before), own);
        full += count_bits(fulls);
        partial += count_bits(partials);
      }
      if (lane_id() == 0) {
        store_shared(counts, full);
        store_shared(counts + 4, full + partial);
      }
    }
    sync_block();
    num_full = load_shared<int>(counts);
    num_all = load_shared<int>(counts + 4);
  }

  // Returns the index of the t-th listed tile. Full tiles come first.
  FUSED_ATTN_DEVICE int tile(int t) const {
    const int slot = t < num_full ? t : t - num_full + kCapacity;
    return first + load_shared<uint16_t>(base + slot * 2);
  }

 private:
  FUSED_ATTN_DEVICE void put(int slot, int n) {
    store_shared(base + slot * 2, static_cast<uint16_t>(n));
  }
};

}  // namespace fused_attn
