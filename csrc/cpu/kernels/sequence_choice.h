// Choice between the kernel for few queries and the query-tile kernel, for each packed sequence.
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

// Runs a call with `few` or `tiles`. Packed sequences are divided between the two by their lengths
// alone, so the result of a sequence is bit-identical in any batch.
//
// is_few(queries, keys): returns true if `few` computes sequences of these lengths. Packed
// sequences of more than 63 queries always use `tiles`. few(p), tiles(p): compute the sequences
// that p.left_out does not exclude, which for `few` all have p.seqlen_q queries.
template <class IsFew, class Few, class Tiles>
bool by_sequence(const AttentionParams& p, const IsFew& is_few, const Few& few,
                 const Tiles& tiles) {
  if (p.cu_seqlens_q == nullptr) return is_few(p.seqlen_q, p.seqlen_k) ? few(p) : tiles(p);
  constexpr int64_t kMost = 63;
  const auto queries_of_few = [&](int64_t b) {  // 0 if `tiles` computes the sequence
    const int64_t queries = query_rows(p, b).count;
    return queries <= kMost && is_few(queries, key_rows(p, b).count) ? queries : 0;
  };
  uint64_t present = 0;  // bit n: some sequence has queries_of_few() == n
  for (int64_t b = 0; b < p.batch; ++b) present |= uint64_t{1} << queries_of_few(b);
  if (present <= 1) return tiles(p);
  Arena arena;
  uint8_t* left_out;
  if (!arena.layout([&] { left_out = arena.template take<uint8_t>(p.batch); })) return false;
  for (int64_t n = 0; n <= kMost; ++n) {
    if ((present >> n & 1) == 0) continue;
    int64_t longest = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      left_out[b] = queries_of_few(b) != n || (p.left_out != nullptr && p.left_out[b] != 0);
      if (left_out[b] == 0) longest = max64(longest, key_rows(p, b).count);
    }
    AttentionParams part = p;
    part.left_out = left_out;
    if (n == 0) {
      if (!tiles(part)) return false;
      continue;
    }
    part.seqlen_q = n;
    part.seqlen_k = longest;
    if (!few(part)) return false;
  }
  return true;
}

}  // namespace
}  // namespace fused_attn
