// Split-KV parts for the decode kernels: all queries of all heads that share keys and values,
// against a range of keys.
#pragma once

#include "cpu/kernels/attention_common.h"
#include "cpu/kernels/mask_rows.h"

namespace fused_attn {
namespace {

constexpr int64_t kDecodeKeys = 64;  // keys per block

// Partial result over a range of keys; out is not divided by sum.
template <class A>
struct DecodePart {
  A* out;      // (rows, wide)
  A* maximum;  // (rows), in score units: subtracted from the scores; -inf without visible keys
  A* sum;      // (rows)
};

template <class A>
struct DecodeShape {
  explicit DecodeShape(const AttentionParams& p)
      : group(p.num_heads / max64(p.num_heads_kv, 1)),
        rows(group * p.seqlen_q),
        wide(round_up(p.head_dim_v, 64)) {}

  // Returns the number of elements of a DecodePart.
  int64_t part() const { return rows * (wide + 2); }

  DecodePart<A> at(A* numbers) const {
    return {numbers, numbers + rows * wide, numbers + rows * (wide + 1)};
  }

  const int64_t group;  // heads that share keys and values
  const int64_t rows;   // queries of these heads
  const int64_t wide;   // head_dim_v, padded
};

}  // namespace
}  // namespace fused_attn
