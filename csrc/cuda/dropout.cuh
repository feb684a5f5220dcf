// Which weights dropout keeps, of a tile in the layout of mma.
//
// Philox gives four neighbouring keys of a query their words. Lanes that hold parts of such a group
// share the work: each computes one group, and hands out what the others need.
#pragma once

#include "cuda/gpu_params.h"
#include "cuda/intrinsics.cuh"
#include "philox.h"

namespace fused_attn {

// Of the rows g and g + 8 of a fragment.
template <class V>
struct Both {
  V upper, lower;
};

struct Dropout {
  uint64_t seed;
  uint32_t threshold;

  // Bit e: whether word e of (quad, query) of a head is kept.
  FUSED_ATTN_DEVICE uint32_t kept_words(uint32_t quad, uint32_t query, uint32_t head) const {
    const Philox4 random = philox4x32(quad, query, head, 0, seed);
    uint32_t kept = 0;
    FUSED_ATTN_UNROLL
    for (int e = 0; e < 4; ++e) kept |= (random.word[e] >> 8) >= threshold ? 1u << e : 0u;
    return kept;
  }

  // Of the fragment (16 queries) x (8 keys from j, a multiple of 4): bits e of the four elements
  // that the thread holds. i, head: of its two rows.
  FUSED_ATTN_DEVICE uint32_t kept_by_query(Both<int> i, Both<uint32_t> head, int j) const {
    // Lanes 2 s and 2 s + 1 of a row hold keys 4 s to 4 s + 3: the first computes row g, the second
    // row g + 8.
    const int t = lane_id() % 4, odd = t % 2;
    const uint32_t own =
        kept_words(j / 4 + t / 2, odd ? i.lower : i.upper, odd ? head.lower : head.upper);
    const uint32_t other = shuffle_xor(own, 1);
    const uint32_t first = odd ? other : own, second = odd ? own : other;
    return (first >> (2 * odd) & 3) | (second >> (2 * odd) & 3) << 2;
  }

  // Of the fragment (16 keys from j) x (8 queries from i).
  FUSED_ATTN_DEVICE uint32_t kept_by_key(int i, uint32_t head, int j) const {
    // The four lanes with the same g / 4 and t share two groups of keys, g and g + 8, and two
    // queries: each computes one of these four.
    const int g = lane_id() / 4, t = lane_id() % 4, part = g % 4;
    const uint32_t own = kept_words(j / 4 + g / 4 + part / 2 * 2, i + 2 * t + part % 2, head);
    const int first = g / 4 * 16 + t;  // the lane of part 0
    uint32_t kept = 0;
    FUSED_ATTN_UNROLL
    for (int word = 0; word < 4; ++word) {
      const uint32_t votes = ballot(own >> word & 1);
      if (word != part) continue;
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 4; ++e) kept |= (votes >> (first + 4 * e) & 1) << e;
    }
    return kept;
  }
};

// Cheap enough to be made for each tile: kept, it would take registers.
FUSED_ATTN_DEVICE Dropout dropout_of(const AttentionParams& p, const GpuParams& gpu) {
  const bool drops = p.dropout_p > 0.0;
  return {drops ? static_cast<uint64_t>(load_global(gpu.seed_address)) : 0, gpu.dropout_threshold};
}

}  // namespace fused_attn
