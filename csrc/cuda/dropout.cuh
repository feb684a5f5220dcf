// Dropout decisions for a tile in the register layout of mma.
//
// One Philox counter decides an octet: eight adjacent keys of a query. Lanes that hold parts of the
// same octets share the work: each lane computes one octet and shuffles the bits to the others. Two
// fragments contain 32 octets, one per lane.
#pragma once

#include "cuda/gpu_params.h"
#include "cuda/intrinsics.cuh"
#include "philox.h"

namespace fused_attn {

// Values for rows g and g + 8 of a fragment.
template <class V>
struct Both {
  V upper, lower;
};

// Dropout of one sequence.
struct Dropout {
  uint64_t seed;
  uint32_t threshold;
  uint32_t first_octet, first_query, first_head;  // global offsets, as in the counters

  // Returns the keep mask of an octet for a query of a head: bit e is set if its key e is kept.
  FUSED_ATTN_DEVICE uint32_t kept_keys(uint32_t octet, uint32_t query, uint32_t head) const {
    return kept_decisions(
        philox4x32(first_octet + octet, first_query + query, first_head + head, 0, seed),
        threshold);
  }

  // Returns the keep bits for kCount adjacent fragments of 16 queries x 8 keys: bit 4 f + e for the
  // thread's element e of fragment f. j: first key, a multiple of 8; i, head: query and head of the
  // thread's two rows.
  template <int kCount>
  FUSED_ATTN_DEVICE uint32_t kept_by_query(Both<int> i, Both<int> head, int j) const {
    // In each fragment, the four lanes of a quad hold two of the octet's eight keys each. To draw
    // each mask only once, even lanes compute row g and odd lanes row g + 8: lanes 0 and 1 for the
    // first fragment, lanes 2 and 3 for the second.
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

  // As kept_by_query, for kCount adjacent fragments of 16 keys x 8 queries. j: first key, a
  // multiple of 8; i: first query.
  template <int kCount>
  FUSED_ATTN_DEVICE uint32_t kept_by_key(int i, int head, int j) const {
    // The eight lanes with the same t hold keys g and g + 8, in two octets, and two queries of each
    // fragment. Lane g computes the octet of element g % 4 of fragment g / 4.
    const int g = lane_id() / 4, t = lane_id() % 4, element = g % 4, fragment = g / 4 % kCount;
    const uint32_t own =
        kept_keys(j / 8 + element / 2, i + 8 * fragment + 2 * t + element % 2, head);
    uint32_t kept = 0;
    FUSED_ATTN_UNROLL
    for (int e = 0; e < 4 * kCount; ++e) kept |= (shuffle(own, 4 * e + t) >> g & 1) << e;
    return kept;
  }
};

// Cheap enough to recompute for each tile: held across tiles, it would take registers.
FUSED_ATTN_DEVICE Dropout dropout_of(const AttentionParams& p, const GpuParams& gpu, int64_t b) {
  const DropoutOffsets offsets = dropout_offsets(p, b);
  return {static_cast<uint64_t>(load_global(gpu.seed_address)), gpu.dropout_threshold,
          static_cast<uint32_t>(offsets.key / kDecisions), static_cast<uint32_t>(offsets.row),
          static_cast<uint32_t>(offsets.head)};
}

}  // namespace fused_attn
