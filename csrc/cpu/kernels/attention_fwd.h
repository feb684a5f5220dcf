// Attention forward: online softmax over KV blocks, without materializing the scores.
//
// Sources: Milakov and Gimelshein 2018 (online normalizer), Dao 2023 (FlashAttention-2).
#pragma once

#include "cpu/kernels/column_softmax.h"
#include "cpu/kernels/head_prefetch.h"

namespace fused_attn {
namespace {

// Maximum number of query tiles per task (512 queries in float32). They share each packed KV block
// while it is cached. At head_dim 64, their queries (three bfloat16 parts) and outputs occupy 320
// KiB of L2. With 256 queries, 8 heads of 4096 x 64 took 8 % longer (AVX2, AMD Zen 3).
constexpr int64_t kMaxQueryTiles = 512 / kPanel<float>;

template <class T>
class AttentionFwd {
  using A = Acc<T>;
  using P = Product<T>;
  static constexpr int64_t kRows = kPanel<A>;
  static constexpr int kLane = kLanes<A>;

 public:
  static bool run(const AttentionParams& p) {
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t num_query_tiles = div_up(p.seqlen_q, kRows), heads = p.batch * p.num_heads;
    // Use fewer query tiles per task if there are few tasks. This does not change the results.
    int64_t per_task = kMaxQueryTiles;
    while (per_task > 1 && heads * div_up(num_query_tiles, per_task) < 4 * p.num_threads)
      per_task /= 2;
    const int64_t per_head = div_up(num_query_tiles, per_task), tasks = heads * per_head;
    const Tasks kind = is_unmasked(p) ? Tasks::kEqual : tasks_of(operand_bytes<T>(p), heads);
    const int64_t next = run_length(kind, tasks, p.num_threads) > 1 ? 1 : p.num_threads;
    return run_team(p.num_threads, tasks, [&] {
      AttentionFwd self(p, mask);
      const bool ok = self.allocate(min64(per_task, num_query_tiles));
      // Start with the last query tiles: under a causal mask they take longest.
      share_tasks(tasks, kind, [&](int64_t task) {
        const int64_t head = task / per_head, group = per_head - 1 - task % per_head;
        const int64_t b = head / p.num_heads, first = group * per_task;
        const int64_t sequence_query_tiles = div_up(query_rows(p, b).count, kRows);
        const int64_t count = min64(per_task, sequence_query_tiles - first);
        self.prefetch_head(per_head == 1 ? head + next : heads);
        if (ok && count > 0) self.head_query_tiles(b, head % p.num_heads, first, count);
      });
      return ok;
    });
  }

 private:
  using LeftElement = typename P::LeftElement;
  using RightElement = typename P::RightElement;

  struct QueryTile {
    RightElement* query;  // (head_dim, kRows)
    A* out;               // (head_dim_v, kRows), unnormalized
    A* maximum;           // (kRows), in score units
    A* sum;               // (kRows), of the unrounded weights
    A* divisor;           // (kRows), sum of the weights as rounded for PV; may alias `sum`
    bool has_out;         // false before the first visible KV block
  };

  // A score tile: one query tile against the keys of a KV block from `offset` on.
  struct TileOf {
    Tile kind;
    TileAt at;
    int64_t offset;
    QueryTile* query_tile;
  };

  AttentionFwd(const AttentionParams& p, const MaskView<A>& mask)
      : p_(p),
        mask_(mask),
        units_(p),
        unit_(units_.natural),
        guards_(!is_unmasked(p) || p.dropout_p > 0),
        dropout_(p),
        prefetch_(operand_bytes<T>(p), p.batch * p.num_heads, max64(p.seqlen_q, p.seqlen_k),
                  div_up(p.seqlen_q, kRows) * div_up(p.seqlen_k, kBlockN) *
                      (P::groups(min64(p.seqlen_k, kBlockN)) + P::groups(p.head_dim_v))) {}

  void place(int64_t query_tiles) {
    const int64_t wide = P::pad_dim(p_.head_dim), wide_v = P::pad_dim(p_.head_dim_v);
    for (int64_t i = 0; i < query_tiles; ++i) {
      query_tiles_[i] = {arena_.template take<RightElement>(P::right_size(wide, kRows)),
                         arena_.template take<A>(wide_v * kRows),
                         arena_.template take<A>(kRows),
                         arena_.template take<A>(kRows),
                         nullptr,
                         false};
      QueryTile& query_tile = query_tiles_[i];
      query_tile.divisor = P::kRoundsWeights ? arena_.template take<A>(kRows) : query_tile.sum;
    }
    scores_ = arena_.template take<A>(kBlockN * kRows);
    weights_ = arena_.template take<RightElement>(P::right_size(kBlockN, kRows));
    bias_ = arena_.template take<A>(kBlockN * kRows);
    stage_ = arena_.template take<T>(max64(kBlockN, kRows) * max64(wide, wide_v));
    scratch_ = arena_.template take<RightElement>(P::scratch_size(wide));
    rows_ = arena_.template take<A>(kRows * p_.head_dim_v);
    key_ = arena_.template take<LeftElement>(P::left_size(kBlockN, wide));
    value_ = arena_.template take<LeftElement>(P::columns_size(kBlockN, wide_v));
  }

  bool allocate(int64_t query_tiles) {
    return arena_.layout([&] { place(query_tiles); });
  }

  // Starts to prefetch a head, counted over all sequences, if it exists.
  void prefetch_head(int64_t head) {
    const int64_t b = head / p_.num_heads, h = head % p_.num_heads;
    if (!prefetch_.begin(b < p_.batch)) return;
    const int64_t h_kv = h / (p_.num_heads / p_.num_heads_kv);
    const SequenceRows queries = query_rows(p_, b), keys = key_rows(p_, b);
    const auto add = [&](const void* data, const int64_t strides[3], const SequenceRows& rows,
                         int64_t of, int64_t dim, bool written) {
      prefetch_.add(at_head<T>(data, strides, rows, of), strides[2], rows.count, dim, written);
    };
    add(p_.query, p_.query_strides, queries, h, p_.head_dim, false);
    add(p_.key, p_.key_strides, keys, h_kv, p_.head_dim, false);
    add(p_.value, p_.value_strides, keys, h_kv, p_.head_dim_v, false);
    if (p_.partial) return;  // out may be wider than T
    add(p_.out, p_.out_strides, queries, h, p_.head_dim_v, true);
  }

  void head_query_tiles(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t h_kv = h / (p_.num_heads / p_.num_heads_kv);
    const SequenceRows keys = key_rows(p_, b);
    queries_ = query_rows(p_, b);
    const T* const query = at_head<T>(p_.query, p_.query_strides, queries_, h);
    const T* const key = at_head<T>(p_.key, p_.key_strides, keys, h_kv);
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv);
    for (int64_t i = 0; i < count; ++i)
      begin_query_tile(query, (first + i) * kRows, query_tiles_[i]);
    for (int64_t j = 0; j < keys.count; j += kBlockN) {
      const int64_t n = min64(kBlockN, keys.count - j);
      int64_t tiles = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (first + i) * kRows;
        const Tile kind = mask_.classify(b, h, row, j, j + n);
        if (kind == Tile::kSkip) continue;
        int64_t lo = j, hi = j + n;
        if (kind == Tile::kPartial) mask_.visible_span(b, h, row, j, j + n, &lo, &hi);
        if (lo >= hi) continue;
        tiles_[tiles++] = {kind, {b, h, row, lo, hi - lo}, lo - j, &query_tiles_[i]};
      }
      if (tiles == 0) continue;
      k_ = P::rows(key + j * p_.key_strides[2], p_.key_strides[2], n, p_.head_dim, stage_, key_);
      v_.load(value + j * p_.value_strides[2], p_.value_strides[2], n, p_.head_dim_v, guards_,
              stage_, value_);
      const int64_t next = j + kBlockN, rows = max64(min64(kBlockN, keys.count - next), 0);
      if (prefetch_.begin_block(rows, tiles * (P::groups(n) + P::groups(p_.head_dim_v)))) {
        prefetch_.add(key + next * p_.key_strides[2], p_.key_strides[2], rows, p_.head_dim);
        prefetch_.add(value + next * p_.value_strides[2], p_.value_strides[2], rows, p_.head_dim_v);
      }
      for (int64_t i = 0; i < tiles; ++i) score_tile(tiles_[i]);
    }
    for (int64_t i = 0; i < count; ++i) end_query_tile(b, h, (first + i) * kRows, query_tiles_[i]);
  }

  void begin_query_tile(const T* query, int64_t i, QueryTile& query_tile) {
    const int64_t stride = p_.query_strides[2], wide = P::pad_dim(p_.head_dim);
    const T* rows = query + i * stride;
    // Full tiles are packed without staging. PairProduct reads words of two features, so the stride
    // must be even.
    const bool whole = queries_.count - i >= kRows && wide == p_.head_dim && stride % 2 == 0;
    if (!whole) {
      copy_rows(rows, stride, min64(kRows, queries_.count - i), p_.head_dim, stage_, kRows, wide);
      rows = stage_;
    }
    P::right_columns(rows, whole ? stride : wide, p_.head_dim, scratch_, query_tile.query);
    query_tile.has_out = false;
    for (int64_t l = 0; l < kRows; ++l) {
      query_tile.maximum[l] = -static_cast<A>(__builtin_inf());
      query_tile.sum[l] = query_tile.divisor[l] = 0;
    }
  }

  // Computes the scores and weights of a tile, and accumulates the weighted values.
  void score_tile(const TileOf& tile) {
    const QueryTile& query_tile = *tile.query_tile;
    alignas(64) A highest[kRows], alpha[kRows];
    for (A& x : highest) x = -static_cast<A>(__builtin_inf());
    multiply_query(tile, highest);
    const bool rescale = update_maxima(highest, unit_, query_tile.maximum, alpha);
    uint32_t keep[kBlockN];
    const int64_t steps = P::pad_steps(tile.at.n);
    const bool drops = p_.dropout_p > 0;
    if (drops) dropout_.keep(tile.at, steps, keep);
    const bool nonfinite = v_.count > 0, in_place = ColumnSoftmax<T>::kInPlace && !nonfinite;
    RightElement* const weights = in_place ? reinterpret_cast<RightElement*>(scores_) : weights_;
    ColumnSoftmax<T> softmax{steps, scores_, weights, nonfinite, unit_};
    softmax.run(query_tile.maximum, drops ? keep : nullptr);
    for (int v = 0; v < 2; ++v) {
      const Vec<A> factor = load(alpha + v * kLane);
      add_scaled(factor, softmax.sum[v], query_tile.sum + v * kLane);
      if constexpr (P::kRoundsWeights) {
        add_scaled(factor, softmax.rounded_sum[v], query_tile.divisor + v * kLane);
      }
    }
    multiply_value(tile, weights, rescale ? alpha : nullptr);
    tile.query_tile->has_out = true;
    if (nonfinite) {
      v_.add_nonfinite(tile.offset, tile.offset + tile.at.n, p_.head_dim_v, scores_,
                       query_tile.out);
    }
  }

  static void add_scaled(Vec<A> factor, Vec<A> sum, A* total) {
    store(total, load(total) * factor + sum);
  }

  // Computes the masked scores of a tile and raises `highest` to the maxima of its columns.
  void multiply_query(const TileOf& tile, A* highest) {
    const int64_t n = tile.at.n, steps = P::pad_steps(n);
    const typename P::Left key = k_.from_row(tile.offset);
    const typename P::Right query = P::columns_view(tile.query_tile->query, p_.head_dim);
    const bool finished = tile.kind == Tile::kFull && !units_.scaled && steps == n;
    if constexpr (P::kFindsMaxima) {
      if (finished) {
        return P::template multiply<Layout::kRowMajor, Into::kStoreMaximum>(
            n, p_.head_dim, key, query, scores_, kRows, highest, prefetch_);
      }
    }
    P::template multiply<Layout::kRowMajor, Into::kStore>(n, p_.head_dim, key, query, scores_,
                                                          kRows, nullptr, prefetch_);
    if (!finished) {
      finish_scores<T>(p_, mask_, units_, tile.kind, tile.at, scores_, nullptr, bias_);
    }
    raise_maxima(scores_, steps, highest);
  }

  // Accumulates the weighted values of a tile into out.
  //
  // factors: rescale the accumulated out; null if all factors are 1.
  void multiply_value(const TileOf& tile, const RightElement* weights, A* factors) {
    const typename P::Left value = v_.left.group_from_key(tile.offset);
    const typename P::Right right = P::right_view(weights, ColumnSoftmax<T>::kPart);
    A* const out = tile.query_tile->out;
    const int64_t m = p_.head_dim_v, n = tile.at.n;
    constexpr Layout kLayout = P::kGroups;
    if (!tile.query_tile->has_out) {
      P::template multiply<kLayout, Into::kStore>(m, n, value, right, out, kRows, nullptr,
                                                  prefetch_);
    } else if (factors != nullptr) {
      P::template multiply<kLayout, Into::kScale>(m, n, value, right, out, kRows, factors,
                                                  prefetch_);
    } else {
      P::template multiply<kLayout, Into::kAdd>(m, n, value, right, out, kRows, nullptr, prefetch_);
    }
  }

  void end_query_tile(int64_t b, int64_t h, int64_t i, const QueryTile& query_tile) {
    if (!query_tile.has_out) memset(query_tile.out, 0, p_.head_dim_v * kRows * sizeof(A));
    const int64_t rows = min64(kRows, queries_.count - i);
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int v = 0; v < 2; ++v) {
      // Normalize by the sum of the rounded weights in 16-bit types. The backward computes delta
      // from out, and delta is accurate only if the weights of PV sum to 1. If one key dominates a
      // row, a sum of 1.002 would hide the contributions of all other keys.
      const Vec<A> sum = load(query_tile.divisor + v * kLanes<A>);
      const Vec<A> divisor = sum == 0 ? broadcast<A>(1) : sum;  // fully masked rows stay 0
      const Vec<A> factor = scale / divisor;
      for (int64_t d = 0; d < p_.head_dim_v; ++d) {
        A* const at = query_tile.out + d * kRows + v * kLane;
        // float64 uses a division, which takes 16 cycles but saves one rounding.
        store(at, sizeof(A) == 8 ? load(at) / divisor * scale : load(at) * factor);
      }
    }
    const ResultRows<T> out(p_, p_.out, p_.out_strides, queries_, h);
    write_query_tile<T>(query_tile.out, p_.head_dim_v, rows, rows_, out, i);
    // For 16-bit T, rows_ holds the unrounded rows.
    write_out_residual<T>(p_, queries_, h, i, rows, rows_, p_.head_dim_v);
    const int64_t at = lse_begin(p_, b, h) + i;
    for (int64_t l = 0; l < rows; ++l) {
      write_lse(p_, units_.natural, at + l, query_tile.maximum[l], query_tile.sum[l]);
    }
  }

  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;  // unit of the scores
  const bool guards_;      // a weight may be 0, so KeyColumns must zero non-finite rows
  const ColumnDropout<A> dropout_;
  HeadPrefetch prefetch_;
  Arena arena_;
  typename P::Registers registers_;
  SequenceRows queries_{};  // query rows of the current sequence
  KeyColumns<T, true> v_;
  typename P::Left k_;
  QueryTile query_tiles_[kMaxQueryTiles];
  TileOf tiles_[kMaxQueryTiles];
  A* scores_;              // (kBlockN, kRows)
  RightElement* weights_;  // (kBlockN, kRows)
  A* bias_;                // (kBlockN, kRows)
  T* stage_;               // (kBlockN, max(head_dim, head_dim_v)), padded
  RightElement* scratch_;
  A* rows_;             // (kRows, head_dim_v)
  LeftElement* key_;    // (kBlockN, head_dim)
  LeftElement* value_;  // (head_dim_v, kBlockN), or pairs of keys
};

}  // namespace
}  // namespace fused_attn
