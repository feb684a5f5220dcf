// Partial results of the decode kernels for split-KV. Each covers a range of keys and all queries
// of all heads that share them.
#pragma once

#include "cpu/kernels/head_rows.h"
#include "cpu/kernels/mask_rows.h"

namespace fused_attn {
namespace {

constexpr int64_t kDecodeKeys = 64;  // keys per block

// Returns the number of keys per split, a multiple of kDecodeKeys. It must not depend on the batch
// or the number of threads. Reading 128 KiB takes about 10 us, a few times the overhead of a task.
template <class T>
inline int64_t keys_per_split(const AttentionParams& p) {
  constexpr int64_t kSplitBytes = int64_t{128} << 10, kMinKeys = 2 * kDecodeKeys;
  const int64_t bytes = (p.head_dim + p.head_dim_v) * static_cast<int64_t>(sizeof(T));
  return max64(kSplitBytes / max64(bytes, 1) / kMinKeys, 1) * kMinKeys;
}

// Returns the number of keys of sequence b up to the last visible one. Later keys are not read,
// so the KV blocks do not depend on the padding of the batch.
inline int64_t decode_keys(const AttentionParams& p, int64_t b) {
  const int64_t count = key_rows(p, b).count;
  const SequenceBounds bounds = sequence_bounds(p.mask, b, query_rows(p, b).count, count);
  return max64(min64(bounds.key_end, count), 0);
}

// Maximum number of queries for which the kernels for few queries are faster than query tiles with
// any number of keys. Time relative to torch (AMD Zen 3, head_dim 64, float32): 8 queries and 31
// keys take 0.75, in query tiles 0.90; 16 queries and 16 keys take 1.02, in query tiles 0.73.
constexpr int64_t kFewQueries = 8;

// The limit for bfloat16 pairs, which double the rate of query tiles. Time relative to query tiles,
// forward and backward of 128 heads of 512 x 64 (AMD Zen 4): 0.6 for 1 or 2 queries, 0.67 for 4.
// With 8 queries, 32 keys take 1.4 times as long.
constexpr int64_t kFewQueriesOfPairs = 4;

// Returns true if these kernels compute forward and backward for this number of queries. Tiles are
// classified for one query tile, which must hold all queries. With AMX, pairs have a separate
// decode kernel, which has no backward.
template <class T>
inline bool few_queries(int64_t queries) {
#if defined(__AMX_BF16__)
  constexpr int64_t kMost = Product<T>::kPairs ? 0 : kFewQueries;
#else
  constexpr int64_t kMost = Product<T>::kPairs ? kFewQueriesOfPairs : kFewQueries;
#endif
  return queries > 0 && queries <= min64(kMost, kPanel<Acc<T>>);
}

// Returns true for self-attention, which is left to query tiles so that padding does not change the
// kernel of a short sequence and thus its result. Sequences shorter than kShortest take up to 2.5
// times as long in query tiles (AMD Zen 3, 2 x 2, with gradients); 8 x 8 takes 0.9 times as long.
inline bool is_self_attention(const AttentionParams& p, int64_t queries, int64_t keys) {
  constexpr int64_t kShortest = 5;
  return queries == keys && queries >= kShortest && !p.decoding;
}

// Returns true if RowProducts computes the scores of a call with gradients, in the forward and
// wherever they are recomputed.
template <class T>
inline bool has_few_queries(const AttentionParams& p, int64_t queries, int64_t keys) {
  return few_queries<T>(queries) && !is_self_attention(p, queries, keys);
}

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
