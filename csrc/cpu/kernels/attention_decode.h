// Attention forward for few queries and many keys, as in autoregressive decoding.
//
// Decoding is memory-bound: it reads 2 * head_dim elements per key. Each key and value is therefore
// read once, in place (contiguous or paged, head_rows.h), for all queries of all heads that share
// it. decode_tiles.h does this with AMX if there are enough query rows, decode_rows.h in all other
// cases. The keys are split (split-KV). Splits have a fixed number of keys and are merged in a
// fixed order, so the result of a sequence is bit-identical in any batch and with any number of
// threads.
#pragma once

#include <type_traits>

#include "cpu/kernels/decode_rows.h"
#include "cpu/kernels/decode_tiles.h"

namespace fused_attn {
namespace {

// Runs a decode kernel on every split and merges the partial results.
template <class T>
class AttentionDecode {
  using A = Acc<T>;
  static constexpr int64_t kLane = kLanes<A>;
  static constexpr int64_t kTasksPerThread = 8;

 public:
  // Returns true if this kernel is faster for these lengths than the query-tile kernels, which take
  // as long for one query as for a full tile. Before a backward, the scores must round as they do
  // there; otherwise rounding errors do not cancel in rows where one key has all the weight. In
  // decoding, `keys` is the maximum of the batch and must not affect the choice.
  static bool pays_off(const AttentionParams& p, int64_t queries, int64_t keys) {
    if (has_few_queries<T>(p, queries, keys)) return true;
    if (queries == 0 || is_self_attention(p, queries, keys)) return false;
    if (p.lse_residual != nullptr) return false;
    const bool few = queries <= min64(kMaxQueries, kPanel<A>);
    if (few && (p.decoding || keys >= 4 * queries)) return true;
    // With many keys, AMX query tiles stall on memory, whereas this kernel reads at an even rate.
    // Without AMX, query tiles prefetch the next KV block: 24 queries, 96 heads and 2,048 keys with
    // head_dim 64 in float32 take 11.5 ms in query tiles and 12.5 ms in this kernel (AMD Zen 4).
    const int64_t rows = queries * (p.num_heads / max64(p.num_heads_kv, 1));
    return kTiles && rows <= kPanel<A> && (p.decoding || keys >= kLongKeys);
  }

  static bool run(const AttentionParams& p) { return run_by<DecodeRows<T>>(p); }

#if defined(__AMX_BF16__)
  static bool supports_tiles(const AttentionParams& p) {
    if constexpr (kTiles) return DecodeShape<A>(p).rows >= DecodeTiles<T>::kMinRows;
    return false;
  }

  static bool run_tiles(const AttentionParams& p) {
    if constexpr (kTiles) return run_by<DecodeTiles<T>>(p);
    return run(p);
  }
#endif

 private:
#if defined(__AMX_BF16__)
  static constexpr bool kTiles = sizeof(T) == 2;
#else
  static constexpr bool kTiles = false;
#endif
  static constexpr int64_t kMaxQueries = kTiles ? 16 : DecodeRows<T>::kMaxQueries;
  static constexpr int64_t kLongKeys = 512;
  static_assert(kMaxPagedQueries <= kMaxQueries && kMaxPagedQueries <= kPanel<A>,
                "paged and contiguous caches must have the same kernel");

  template <class Kernel>
  static bool run_by(const AttentionParams& p) {
    MaskView<A> mask;
    if (!mask.init(p, kDecodeKeys)) return false;
    const DecodeShape<A> shape(p);
    int64_t longest = 0;  // may be far below seqlen_k, the capacity of a cache
    for (int64_t b = 0; b < p.batch; ++b) longest = max64(longest, decode_keys(p, b));
    const int64_t per_split = keys_per_split<T>(p), splits = max64(div_up(longest, per_split), 1);
    const int64_t heads = p.batch * p.num_heads_kv, count = heads * splits;
    // A task is a run of consecutive splits, because the kernel prefetches the keys that follow.
    const int64_t per_task = max64(count / (kTasksPerThread * max64(p.num_threads, 1)), 1);
    const int64_t tasks = div_up(count, per_task);
    Arena parts;  // partial results: (heads, splits, part)
    A* results;
    if (!parts.layout([&] { results = parts.template take<A>(count * shape.part()); }))
      return false;
    return run_team(p.num_threads, tasks, [&] {
      Kernel kernel(p, mask, shape);
      const bool ok = kernel.allocate();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < tasks; ++task) {
        if (!ok) continue;
        for (int64_t at = task * per_task; at < min64((task + 1) * per_task, count); ++at) {
          const int64_t head = at / splits, begin = at % splits * per_split;
          const int64_t b = head / p.num_heads_kv, num_keys = decode_keys(p, b);
          if (query_rows(p, b).count == 0) continue;
          kernel.run(b, head % p.num_heads_kv, min64(begin, num_keys),
                     min64(begin + per_split, num_keys), shape.at(results + at * shape.part()));
        }
      }
#pragma omp for schedule(static) nowait
      for (int64_t head = 0; head < heads; ++head) {
        if (!ok || query_rows(p, head / p.num_heads_kv).count == 0) continue;
        const AttentionDecode self(p, shape);
        const DecodePart<A> first = shape.at(results + head * splits * shape.part());
        for (int64_t s = 1; s < splits; ++s) {
          self.merge(shape.at(results + (head * splits + s) * shape.part()), first);
        }
        self.write(head / p.num_heads_kv, head % p.num_heads_kv, first);
      }
      return ok;
    });
  }

  AttentionDecode(const AttentionParams& p, const DecodeShape<A>& shape)
      : p_(p), shape_(shape), units_(p), unit_(units_.natural) {}

  // Merges the partial result `from` into `to`, after rescaling both to the larger maximum.
  void merge(const DecodePart<A>& from, const DecodePart<A>& to) const {
    for (int64_t r = 0; r < shape_.rows; ++r) {
      if (from.sum[r] == 0) continue;
      const A top = from.maximum[r] > to.maximum[r] ? from.maximum[r] : to.maximum[r];
      const Vec<A> factor = exp_nonpositive<A>(broadcast<A>(from.maximum[r] - top), unit_);
      const Vec<A> own = exp_nonpositive<A>(broadcast<A>(to.maximum[r] - top), unit_);
      A* const out = to.out + r * shape_.wide;
      for (int64_t d = 0; d < shape_.wide; d += kLane) {
        store(out + d, load(out + d) * own + load(from.out + r * shape_.wide + d) * factor);
      }
      to.sum[r] = to.sum[r] * own[0] + from.sum[r] * factor[0];
      to.maximum[r] = top;
    }
  }

  void write(int64_t b, int64_t h_kv, const DecodePart<A>& part) const {
    const SequenceRows queries = query_rows(p_, b);
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int64_t r = 0; r < shape_.rows; ++r) {
      const int64_t h = h_kv * shape_.group + r / p_.seqlen_q, i = r % p_.seqlen_q;
      if (i >= queries.count) continue;
      A* const row = part.out + r * shape_.wide;
      const A sum = part.sum[r] == 0 ? A(1) : part.sum[r];  // fully masked rows stay 0
      const A factor = scale / sum;
      for (int64_t d = 0; d < shape_.wide; d += kLane) {
        // float64 uses a division, which is slower but saves one rounding.
        store(row + d, sizeof(A) == 8 ? load(row + d) / sum * scale : load(row + d) * factor);
      }
      ResultRows<T>(p_, p_.out, p_.out_strides, queries, h).store(i, row, p_.head_dim_v);
      write_out_residual<T>(p_, queries, h, i, 1, row, 0);
      write_lse(p_, units_.natural, lse_begin(p_, b, h) + i, part.maximum[r], part.sum[r]);
    }
  }

  const AttentionParams& p_;
  const DecodeShape<A>& shape_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;  // unit of the scores
};

}  // namespace
}  // namespace fused_attn
