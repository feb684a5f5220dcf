// Dropout decisions for a score tile in the register layout of mma.m16n8.
//
// One Philox counter decides an octet, which is eight adjacent keys of a query. Lanes that hold
// parts of the same octets share the work: each lane computes one octet and shuffles the bits to
// the others. Two fragments contain 32 octets, one per lane.
#pragma once

#include "cuda/gpu_params.h"
#include "cuda/intrinsics.cuh"
#include "philox.h"

namespace fused_attn {

// Values of the two rows of a fragment that a thread holds: g (upper) and g + 8 (lower), with
// g = lane / 4.
template <class V>
struct Both {
  V upper, lower;
};

// Dropout parameters of one sequence.
struct Dropout {
  uint64_t seed;
  uint32_t threshold;
  uint32_t first_octet, first_query, first_head;  // global offsets, added to form the counter

  // Returns the keep mask of an octet for one query of one head. Bit e is set if the weight of the
  // octet's e-th key is kept.
  FUSED_ATTN_DEVICE uint32_t kept_keys(uint32_t octet, uint32_t query, uint32_t head) const {
    return kept_decisions(
        philox4x32(first_octet + octet, first_query + query, first_head + head, 0, seed),
        threshold);
  }

  // Returns the keep bits of the thread's elements in kCount adjacent fragments of 16 queries x 8
  // keys. Bit 4 f + e is element e of fragment f. j: first key, a multiple of 8. i, head: query and
  // head of the thread's two rows.
  template <int kCount>
  FUSED_ATTN_DEVICE uint32_t kept_by_query(Both<int> i, Both<int> head, int j) const {
    // In each fragment, each of the four lanes of a quad holds two of the octet's eight keys. To
    // draw each mask only once, even lanes compute row g and odd lanes row g + 8. Lanes 0 and 1 of
    // the quad do so for the first fragment, lanes 2 and 3 for the second.
    const int t = lane_id() % 4, odd = t % 2, fragment = t / 2 % kCount;
    const uint32_t own =
        kept_keys(j / 8 + fragment, odd ? i.lower : i.upper, odd ? head.lower : head.upper);
    uint32_t keep_mask = 0;
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kCount; ++r) {
      keep_mask |= (shuffle(own, lane_id() - t + r) >> (2 * t) & 3) << (2 * r);
    }
    return keep_mask;
  }

  // Like kept_by_query, but for kCount adjacent fragments of 16 keys x 8 queries of one head. j:
  // first key, a multiple of 8. i: first query.
  template <int kCount>
  FUSED_ATTN_DEVICE uint32_t kept_by_key(int i, int head, int j) const {
    // The eight lanes with the same t hold two octets (keys 0 to 7 and 8 to 15) for two queries of
    // each fragment. Of these lanes, lane g computes the octet of element g % 4 of fragment g / 4.
    const int g = lane_id() / 4, t = lane_id() % 4, element = g % 4, fragment = g / 4 % kCount;
    const uint32_t own =
        kept_keys(j / 8 + element / 2, i + 8 * fragment + 2 * t + element % 2, head);
    uint32_t keep_mask = 0;
    FUSED_ATTN_UNROLL
    for (int e = 0; e < 4 * kCount; ++e) keep_mask |= (shuffle(own, 4 * e + t) >> g & 1) << e;
    return keep_mask;
  }
};

// Returns the dropout parameters of sequence b. Recomputing them for each tile is cheap. Kept live
// across tiles, they would occupy registers.
FUSED_ATTN_DEVICE Dropout dropout_of(const AttentionParams& p, const GpuParams& gpu, int64_t b) {
  const DropoutOffsets offsets = dropout_offsets(p, b);
  return {static_cast<uint64_t>(load_global(gpu.seed_address)), gpu.dropout_threshold,
          static_cast<uint32_t>(offsets.key / kDecisions), static_cast<uint32_t>(offsets.row),
          static_cast<uint32_t>(offsets.head)};
}

}  // namespace fused_attn
