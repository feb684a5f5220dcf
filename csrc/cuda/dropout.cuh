// Which weights dropout keeps, of a tile in the layout of mma.
//
// A counter of Philox decides about an octet: eight neighbouring keys of a query. Lanes that hold
// parts of the same ones share the work: each computes one, and hands out what the others need. Two
// fragments have as many as a warp has lanes.
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

// Of a sequence.
struct Dropout {
  uint64_t seed;
  uint32_t threshold;
  uint32_t first_octet, first_query, first_head;  // as counters have them

  // Bit e: whether key e of an octet is kept by a query of a head.
  FUSED_ATTN_DEVICE uint32_t kept_keys(uint32_t octet, uint32_t query, uint32_t head) const {
    return kept_decisions(
        philox4x32(first_octet + octet, first_query + query, first_head + head, 0, seed),
        threshold);
  }

  // Of kCount fragments side by side, (16 queries) x (8 keys from j, a multiple of 8) the first:
  // bits 4 f + e of the four elements that the thread holds of fragment f. i, head: of its two
  // rows.
  template <int kCount>
  FUSED_ATTN_DEVICE uint32_t kept_by_query(Both<int> i, Both<int> head, int j) const {
    // The four lanes of a row hold two keys each of an octet in each fragment: even ones compute
    // row g, odd ones row g + 8, lanes 2 and 3 the second fragment.
    const int t = lane_id() % 4, odd = t % 2, fragment = t / 2 % kCount;
    const uint32_t own =
        kept_keys(j / 8 + fragment, odd ? i.lower : i.upper, odd ? head.lower : head.upper);
    uint32_t kept = 0;
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kCount; ++r) {
      kept |= (shuffle(own, lane_id() - t + r) >> (2 * t) & 3) << (2 * r);
    }
    return kept;
  }

  // Of kCount fragments side by side, (16 keys from j, a multiple of 8) x (8 queries from i) the
  // first.
  template <int kCount>
  FUSED_ATTN_DEVICE uint32_t kept_by_key(int i, int head, int j) const {
    // The eight lanes with the same t hold keys g and g + 8, of two octets, and two queries of each
    // fragment: lane g computes element g % 4 of fragment g / 4.
    const int g = lane_id() / 4, t = lane_id() % 4, element = g % 4, fragment = g / 4 % kCount;
    const uint32_t own =
        kept_keys(j / 8 + element / 2, i + 8 * fragment + 2 * t + element % 2, head);
    uint32_t kept = 0;
    FUSED_ATTN_UNROLL
    for (int e = 0; e < 4 * kCount; ++e) kept |= (shuffle(own, 4 * e + t) >> g & 1) << e;
    return kept;
  }
};

// Cheap enough to be made for each tile: kept, it would take registers.
FUSED_ATTN_DEVICE Dropout dropout_of(const AttentionParams& p, const GpuParams& gpu, int64_t b) {
  const DropoutOffsets offsets = dropout_offsets(p, b);
  return {static_cast<uint64_t>(load_global(gpu.seed_address)), gpu.dropout_threshold,
          static_cast<uint32_t>(offsets.key / kDecisions), static_cast<uint32_t>(offsets.row),
          static_cast<uint32_t>(offsets.head)};
}

}  // namespace fused_attn
