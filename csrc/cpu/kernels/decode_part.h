// Partial results of the decode kernels for split-KV. Each covers a range of keys and all queries
// of all heads that share them.
#pragma once

#include "cpu/kernels/attention_common.h"
#include "cpu/kernels/mask_rows.h"

namespace fused_attn {
namespace {

constexpr int64_t kDecodeKeys = 64;  // keys per block

// Partial result over a range of keys. Does not own its memory.
template <class A>
struct DecodePart {
  A* out;      // (rows, wide), not divided by sum
  A* maximum;  // (rows), shift of the scores, in score units; -inf without visible keys
  A* sum;      // (rows), of exp(score - maximum)
};

// Dimensions of a DecodePart.
template <class A>
struct DecodeShape {
  explicit DecodeShape(const AttentionParams& p)
      : group(p.num_heads / max64(p.num_heads_kv, 1)),
        rows(group * p.seqlen_q),
        wide(round_up(p.head_dim_v, 64)) {}

  // Returns the number of elements of a DecodePart.
  int64_t part() const { return rows * (wide + 2); }

  // Returns the DecodePart stored at `numbers`, an array of part() elements.
  DecodePart<A> at(A* numbers) const {
    return {numbers, numbers + rows * wide, numbers + rows * (wide + 1)};
  }

  const int64_t group;  // query heads per key/value head
  const int64_t rows;   // query rows of these heads
  const int64_t wide;   // head_dim_v, padded to a multiple of 64
};

}  // namespace
}  // namespace fused_attn
