// Partial results of the decode kernels for split-KV. Each covers a range of keys and all queries
// of all heads that share them.
#pragma once

#include "cpu/kernels/head_rows.h"
#include "cpu/kernels/mask_rows.h"

namespace fused_attn {
namespace {

constexpr int64_t kDecodeKeys = 64;  // keys per block

// Returns the number of keys per split, a multiple of kDecodeKeys. It must not depend on the batch
// or on the number of threads. Reading 128 KiB takes about 10 us, a few times the cost of a task.
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
// any number of keys. AMD Zen 3, head_dim 64, float32: 8 queries and 31 keys take 0.75 of torch's
// time and 0.90 in query tiles; 16 queries and 16 keys take 1.02 and 0.73.
constexpr int64_t kFewQueries = 8;

// The same for bfloat16 in pairs, of which query tiles multiply twice as many at a time. Forward
// and backward of 128 heads of 512 x 64 take 0.6 of the time for 1 or 2 queries and 0.67 for 4;
// with 8 queries, 32 keys take 1.4 times as long (AMD Zen 4).
constexpr int64_t kFewQueriesOfPairs = 4;

// Returns true if a number of queries is small enough for these kernels to compute forward and
// backward. Tiles are classified by one query tile, which must hold them all. With AMX, pairs have
// a decode kernel of their own, without a backward.
template <class T>
inline bool few_queries(int64_t queries) {
#if defined(__AMX_BF16__)
  constexpr int64_t kMost = Product<T>::kPairs ? 0 : kFewQueries;
#else
  constexpr int64_t kMost = Product<T>::kPairs ? kFewQueriesOfPairs : kFewQueries;
#endif
  return queries > 0 && queries <= min64(kMost, kPanel<Acc<T>>);
}

// Returns true if query tiles compute a sequence because it attends to itself. Padding would
// otherwise change the kernel of a short sequence, and with it the bits. Shorter sequences than
// kShortest take up to 2.5 times as long in query tiles (AMD Zen 3, 2 x 2, with gradients), 8 x 8
// takes 0.9 times as long.
inline bool is_self_attention(const AttentionParams& p, int64_t queries, int64_t keys) {
  constexpr int64_t kShortest = 5;
  return queries == keys && queries >= kShortest && !p.decoding;
}

// Returns true if the scores of a call with gradients are those of RowProducts, in the forward and
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
