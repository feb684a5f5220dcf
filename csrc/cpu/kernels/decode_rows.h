// Decode kernel for vector units: few queries, many keys.
//
// Vector lanes hold features: keys and values are read in place, and each score is a horizontal sum
// (row_products.h). With AVX-512, kMinColumns or more query rows and no backward, lanes hold
// queries in QK^T instead, and the scores are transposed.
#pragma once

#include "cpu/kernels/decode_part.h"
#include "cpu/kernels/row_products.h"

namespace fused_attn {
namespace {

template <class T>
class DecodeRows {
  using A = Acc<T>;
  using Products = RowProducts<T>;
  static constexpr int64_t kLane = kLanes<A>;
  // Vectors of features per broadcast weight. The kShare * kWide accumulators must fit in
  // registers.
  static constexpr int kWide = kVectorBytes == 64 ? 4 : 2;
  static constexpr bool kTransposes = kLane == 16;  // little gain with AVX2
  // Minimum number of query rows for QK^T with queries in lanes, even if many lanes are unused. A
  // block of 64 keys at head_dim 64 in float32 (AVX-512) takes 2.25 us with either layout for 8
  // queries. For 16 queries, it takes 3.0 us with queries in lanes and 4.5 us with features in
  // lanes.
  static constexpr int64_t kMinColumns = 9;

 public:
  // 8 bfloat16 queries take 4.6 ms, in a query tile 6.1 ms (96 heads, 2,048 x 64, AMD Zen 4).
  static constexpr int64_t kMaxQueries = Product<T>::kPairs && sizeof(T) == 2 ? 8 : 16;

  DecodeRows(const AttentionParams& p, const MaskView<A>& mask, const DecodeShape<A>& shape)
      : p_(p),
        mask_(mask),
        shape_(shape),
        units_(p),
        unit_(units_.natural),
        wide_qk_(round_up(p.head_dim, kLane)),
        by_columns_(kTransposes && shape.rows >= kMinColumns && p.lse_residual == nullptr) {}

  bool allocate() {
    return arena_.layout([&] { place(); });
  }

  // Computes the partial result of keys [begin, end) of a key/value head.
  void run(int64_t b, int64_t h_kv, int64_t begin, int64_t end, const DecodePart<A>& part) {
    part_ = part;
    memset(part.out, 0, shape_.rows * shape_.wide * sizeof(A));
    for (int64_t r = 0; r < shape_.rows; ++r) {
      part.maximum[r] = -infinity();
      part.sum[r] = 0;
    }
    const SequenceRows queries = query_rows(p_, b);
    for (int64_t r = 0; r < shape_.rows; ++r) {
      const int64_t h = h_kv * shape_.group + r / p_.seqlen_q, i = r % p_.seqlen_q;
      const T* const head = at_head<T>(p_.query, p_.query_strides, queries, h);
      A* const row = query_ + r * wide_qk_;
      memset(row, 0, wide_qk_ * sizeof(A));  // includes rows past the end of a sequence
      if (i < queries.count) load_row(head + i * p_.query_strides[2], p_.head_dim, row);
    }
    for (int64_t r = 0; by_columns_ && r < shape_.rows; r += kLane) {
      A* const columns = columns_ + r * p_.head_dim;
      memset(columns, 0, kLane * p_.head_dim * sizeof(A));
      transpose(query_ + r * wide_qk_, wide_qk_, min64(kLane, shape_.rows - r), p_.head_dim,
                columns, kLane);
    }
    keys_ = HeadRows<T>(p_, p_.key, p_.key_strides, b, h_kv);
    values_ = HeadRows<T>(p_, p_.value, p_.value_strides, b, h_kv);
    for (int64_t j = begin; j < end; j += kDecodeKeys) {
      block(b, h_kv, j, min64(kDecodeKeys, end - j));
    }
  }

 private:
  static constexpr A infinity() { return static_cast<A>(__builtin_inf()); }

  void place() {
    query_ = arena_.template take<A>(shape_.rows * wide_qk_);
    columns_ = arena_.template take<A>(round_up(shape_.rows, kLane) * p_.head_dim);
    scores_ = arena_.template take<A>(round_up(shape_.rows, kLane) * kDecodeKeys);
    kinds_ = arena_.template take<Tile>(shape_.group);
    key_ = arena_.template take<T>(kDecodeKeys * wide_qk_);
    key_numbers_ = arena_.template take<A>(kDecodeKeys * p_.head_dim);
    value_ = arena_.template take<T>(kDecodeKeys * shape_.wide);
  }

  // Processes one KV block for all query rows.
  void block(int64_t b, int64_t h_kv, int64_t j, int64_t n) {
    bool any = false;
    for (int64_t g = 0; g < shape_.group; ++g) {
      kinds_[g] = mask_.classify(b, h_kv * shape_.group + g, 0, j, j + n);
      any = any || kinds_[g] != Tile::kSkip;
    }
    if (!any) return;
    const Block<T> key =
        block_of(keys_, j, n, p_.head_dim, by_columns_ ? p_.head_dim : wide_qk_, key_);
    const Block<T> value =
        block_of(values_, j, n, p_.head_dim_v, round_up(p_.head_dim_v, kLane), value_);
    ahead_ = {value, p_.head_dim_v};
    if (by_columns_) {
      score_columns(key, n);
    } else {
      for_rows([&](auto count, int64_t r) { score_rows<count>(key, n, r); });
    }
    bool hides = p_.dropout_p > 0;
    for (int64_t g = 0; g < shape_.group; ++g) {
      hides = hides || kinds_[g] != Tile::kFull;
      weigh({b, h_kv * shape_.group + g, 0, j, n}, kinds_[g], g * p_.seqlen_q);
    }
    ahead_ = {in_place(keys_, j + kDecodeKeys, kDecodeKeys), p_.head_dim};
    // A masked or dropped value may be NaN, and 0 * NaN is NaN.
    if (hides && !all_finite(value, n)) {
      for (int64_t r = 0; r < shape_.rows; ++r) add_visible_values(value, n, r);
      return;
    }
    for_rows([&](auto count, int64_t r) { add_values<count>(value, n, r); });
  }

  // Calls f(count, first) for all query rows (RowProducts::for_rows). Each call prefetches a share
  // of the rows ahead.
  template <class F>
  void for_rows(const F& f) {
    const int64_t shares = shape_.rows / Products::kShare, left = shape_.rows % Products::kShare;
    const int64_t turns = shares + left / 2 + left % 2;
    int64_t turn = 0;
    Products::for_rows(shape_.rows, [&](auto count, int64_t r) {
      ahead_.take_turn(turn++, turns);
      f(count, r);
    });
  }

  // Rows of the keys or values of a block, in chunks of kSumSteps rows that are `stride` apart.
  template <class E>
  struct Block {
    const E* row(int64_t t) const { return chunks[t / kSumSteps] + t % kSumSteps * stride; }

    const E* chunks[kDecodeKeys / kSumSteps];  // null for missing rows
    int64_t stride;
  };
  static_assert(kSumSteps % kLane == 0, "vectors of keys must be in one chunk");

  template <class E>
  static Block<E> chunks_of(const E* rows, int64_t n, int64_t stride) {
    Block<E> block{{}, stride};
    for (int64_t t = 0; t < n; t += kSumSteps) block.chunks[t / kSumSteps] = rows + t * stride;
    return block;
  }

  // Returns the rows [j, j + n) that have an address; none if a chunk may span two pages.
  static Block<T> in_place(const HeadRows<T>& rows, int64_t j, int64_t n) {
    Block<T> block{{}, rows.stride()};
    if (!rows.has_runs(kSumSteps)) return block;
    for (int64_t t = 0; t < n && rows.has_address(j + t); t += kSumSteps) {
      block.chunks[t / kSumSteps] = rows.at(j + t);
    }
    return block;
  }

  // Returns the block [j, j + n) with `wide` elements per row, in place if possible, else as a
  // zero-padded copy in `buffer`.
  Block<T> block_of(const HeadRows<T>& rows, int64_t j, int64_t n, int64_t dim, int64_t wide,
                    T* buffer) const {
    if (dim == wide && rows.is_run(j, n)) return chunks_of(rows.at(j), n, rows.stride());
    if (dim == wide && rows.has_runs(kSumSteps)) return in_place(rows, j, n);
    rows.copy(j, n, dim, buffer, n, wide);
    return chunks_of(static_cast<const T*>(buffer), n, wide);
  }

  bool all_finite(const Block<T>& value, int64_t n) const {
    for (int64_t t = 0; t < n; t += kSumSteps) {
      const int64_t count = min64(kSumSteps, n - t);
      if (!rows_finite(value.row(t), value.stride, count, p_.head_dim_v)) return false;
    }
    return true;
  }

  // Computes QK^T of kCount query rows.
  template <int kCount>
  void score_rows(const Block<T>& key, int64_t n, int64_t first) {
    Products::template multiply<kCount>([&](int64_t t) { return key.row(t); }, key.stride, n,
                                        wide_qk_, query_ + first * wide_qk_, wide_qk_,
                                        scores_ + first * kDecodeKeys, kDecodeKeys,
                                        [&](int64_t t) { ahead_.prefetch(t); });
  }

  // Computes QK^T of all query rows in tiles of kLane queries x kLane keys, with queries in lanes.
  void score_columns(const Block<T>& key, int64_t n) {
    if constexpr (kTransposes) {
      const Block<A> numbers = number_rows(key, n);
      for (int64_t r = 0; r < shape_.rows; r += kLane) {
        ahead_.take_turn(r / kLane, div_up(shape_.rows, kLane));
        for (int64_t t = 0; t < n; t += kLane) {
          Vec<A> sums[kLane];
          multiply_columns(numbers.row(t), numbers.stride, columns_ + r * p_.head_dim, t, sums);
          transpose_tile(sums, kLane, scores_ + r * kDecodeKeys + t, kDecodeKeys);
        }
      }
    }
  }

  static constexpr int kHalf = 8;

  // Computes QK^T of one tile. Accumulates partial sums of kSumSteps features, which limits the
  // rounding error.
  __attribute__((noinline)) void multiply_columns(const A* key, int64_t stride, const A* query,
                                                  int64_t t, Vec<A>* sums) const {
    const int64_t parts = div_up(p_.head_dim, kSumSteps);
    // Keys 0 to 7 and keys 8 to 15 have separate base pointers and share eight offsets, because 16
    // pointers would not fit in registers.
    const A *low = key, *high = key + kHalf * stride;
    int64_t apart[kHalf];
    for (int l = 0; l < kHalf; ++l) {
      apart[l] = l * stride;
      asm("" : "+r"(apart[l]));
    }
    for (int64_t l = 0; l < kLane; ++l) sums[l] = Vec<A>{};
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t l = part * kLane / parts; l < (part + 1) * kLane / parts; ++l) {
        ahead_.prefetch(t + l);
      }
      const int64_t end = min64((part + 1) * kSumSteps, p_.head_dim);
      Vec<A> sum[kLane] = {};
      for (int64_t d = part * kSumSteps; d < end; ++d) {
        const Vec<A> x = load(query + d * kLane);
#pragma GCC unroll 8
        for (int l = 0; l < kHalf; ++l) sum[l] += x * low[apart[l]];
#pragma GCC unroll 8
        for (int l = kHalf; l < 2 * kHalf; ++l) sum[l] += x * high[apart[l - kHalf]];
        ++low;
        ++high;
      }
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLane; ++l) sums[l] += sum[l];
    }
  }

  // Returns the keys as A, zero-padded to a multiple of kLane keys: in place if possible, else in
  // key_numbers_.
  Block<A> number_rows(const Block<T>& key, int64_t n) {
    if constexpr (std::is_same_v<T, A>) {
      if (n % kLane == 0) return key;
    }
    const int64_t dim = p_.head_dim, high = round_up(n, kLane);
    for (int64_t t = 0; t < n; ++t) load_row(key.row(t), dim, key_numbers_ + t * dim);
    memset(key_numbers_ + n * dim, 0, (high - n) * dim * sizeof(A));
    return chunks_of(static_cast<const A*>(key_numbers_), high, dim);
  }

  // Converts the scores of one head to weights: applies scale, mask, softmax and dropout.
  //
  // first: index of the first query row of the head.
  void weigh(const TileAt& at, Tile kind, int64_t first) {
    A* const scores = scores_ + first * kDecodeKeys;
    if (kind == Tile::kSkip) {
      memset(scores, 0, p_.seqlen_q * kDecodeKeys * sizeof(A));
      return;
    }
    if (kind == Tile::kPartial) block_mask_.load(p_, at.b, at.h, at.j, at.n);
    for (int64_t i = 0; i < p_.seqlen_q; ++i) {
      A* const row = scores + i * kDecodeKeys;
      if (units_.scaled) scale_row(row);
      if (kind == Tile::kPartial) block_mask_.apply(i, row, kLane);
      softmax_row(at.n, row, part_.out + (first + i) * shape_.wide, &part_.maximum[first + i],
                  &part_.sum[first + i]);
      if (p_.dropout_p > 0) drop(at, i, row);
    }
  }

  // Zeroes the dropped weights of query i.
  void drop(const TileAt& at, int64_t i, A* row) const {
    const PhiloxKeys keys(p_.seed);
    const DropoutAt first = dropout_at(p_, at);
    for (int64_t t = 0; t < at.n; t += DropoutColumns<>::kColumns) {
      const DropoutColumns<> columns(&keys, dropout_threshold(p_.dropout_p), first.key + t,
                                     first.head, 0);
      const uint64_t keep = columns.keep(first.query + static_cast<uint32_t>(i));
      for (int64_t c = 0; c < DropoutColumns<>::kColumns; ++c) {
        if ((keep >> c & 1) == 0) row[t + c] = 0;
      }
    }
  }

  // Applies the scale and softcap to a row of scores in place.
  void scale_row(A* scores) const {
    const bool capped = p_.softcap > 0;
    const A inner = static_cast<A>(capped ? p_.scale / p_.softcap : p_.scale);
    const A cap = static_cast<A>(p_.softcap);
    for (int64_t t = 0; t < kDecodeKeys; t += kLane) {
      const Vec<A> score = load(scores + t) * inner;
      store(scores + t, capped ? tanh<A>(score) * cap : score);
    }
  }

  // Replaces a row of n scores by exp(score - maximum). Updates the running maximum and sum. If the
  // maximum increased, rescales `out` to it.
  void softmax_row(int64_t n, A* scores, A* out, A* maximum, A* sum) const {
    for (int64_t t = n; t < round_up(n, kLane); ++t) scores[t] = -infinity();
    Vec<A> highest = broadcast<A>(-infinity()), total{};
    for (int64_t t = 0; t < n; t += kLane) highest = max<A>(highest, load(scores + t));
    A top = *maximum;
    for (int64_t l = 0; l < kLane; ++l) top = highest[l] > top ? highest[l] : top;
    const A shift = top == -infinity() ? A(0) : top;
    for (int64_t t = 0; t < n; t += kLane) {
      const Vec<A> weight = exp_nonpositive<A>(load(scores + t) - shift, unit_);
      store(scores + t, weight);
      total += weight;
    }
    if (top != *maximum) rescale(top, out, maximum, sum);
    *sum += horizontal_sum<A>(total);
  }

  // Rescales `out` and `sum` from the old maximum to the new maximum `top`, and stores `top`.
  void rescale(A top, A* out, A* maximum, A* sum) const {
    const Vec<A> alpha = exp_nonpositive<A>(broadcast<A>(*maximum - top), unit_);
    for (int64_t d = 0; d < shape_.wide; d += kLane) store(out + d, load(out + d) * alpha);
    *maximum = top;
    *sum *= alpha[0];
  }

  // Accumulates PV of kCount query rows into out, with partial sums of kSumSteps keys, which limit
  // the rounding error.
  template <int kCount>
  void add_values(const Block<T>& value, int64_t n, int64_t first) {
    A* const out = part_.out + first * shape_.wide;
    const int64_t vectors = div_up(p_.head_dim_v, kLane);
    for (int64_t t = 0; t < n; t += kSumSteps) {
      const int64_t count = min64(kSumSteps, n - t);
      int64_t c = 0;
      for (; c + kWide <= vectors; c += kWide) {
        add_features<kCount, kWide>(value, t, count, first, c, out);
      }
      for (; c < vectors; ++c) add_features<kCount, 1>(value, t, count, first, c, out);
    }
  }

  // Accumulates PV of one chunk into kVectors vectors of features, beginning with vector c. The
  // chunk has `count` keys, beginning with key t.
  template <int kCount, int kVectors>
  void add_features(const Block<T>& value, int64_t t, int64_t count, int64_t first, int64_t c,
                    A* out) const {
    const T* const rows = value.row(t) + c * kLane;
    const A* const weights = scores_ + first * kDecodeKeys + t;
    out += c * kLane;
    Vec<A> sum[kCount][kVectors] = {};
    for (int64_t l = 0; l < count; ++l) {
      if (c == 0) ahead_.prefetch(t + l);
      Vec<A> x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load_as<T>(rows + l * value.stride + v * kLane);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const A weight = weights[i * kDecodeKeys + l];
        for (int v = 0; v < kVectors; ++v) sum[i][v] += x[v] * weight;
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        A* const at = out + i * shape_.wide + v * kLane;
        store(at, load(at) + sum[i][v]);
      }
    }
  }

  // Accumulates PV of one query row into out, skipping keys with weight 0.
  void add_visible_values(const Block<T>& value, int64_t n, int64_t row) {
    A* const out = part_.out + row * shape_.wide;
    for (int64_t t = 0; t < n; ++t) {
      const A weight = scores_[row * kDecodeKeys + t];
      if (weight == 0) continue;
      for (int64_t d = 0; d < p_.head_dim_v; d += kLane) {
        store(out + d, load(out + d) + load_as<T>(value.row(t) + d) * weight);
      }
    }
  }

  // Prefetches the keys or values of the next phase. The hardware prefetcher alone leaves memory
  // idle, because it restarts at each block and page. The rows are traversed in several passes, and
  // each pass prefetches some cache lines of every row.
  class Ahead {
   public:
    Ahead() = default;
    Ahead(const Block<T>& rows, int64_t dim) : rows_(rows), dim_(dim) {}

    void take_turn(int64_t turn, int64_t turns) {
      const int64_t lines = div_up(dim_, kLine);
      begin_ = turn * lines / turns * kLine;
      end_ = (turn + 1) * lines / turns * kLine;
    }

    void prefetch(int64_t t) const {
      if (rows_.chunks[t / kSumSteps] == nullptr) return;
      const T* const row = rows_.row(t);
      for (int64_t d = begin_; d < end_; d += kLine) __builtin_prefetch(row + d, 0, 2);
    }

   private:
    static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    Block<T> rows_{};
    int64_t dim_ = 0, begin_ = 0, end_ = 0;
  };

  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const DecodeShape<A>& shape_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;  // unit of the scores
  const int64_t wide_qk_;  // head_dim, padded to full vectors
  BlockMask<A, kDecodeKeys> block_mask_;
  const bool by_columns_;  // compute QK^T with queries in lanes
  Ahead ahead_;
  HeadRows<T> keys_, values_;  // of the current key/value head
  DecodePart<A> part_{};
  Arena arena_;
  A* query_;         // (rows, wide_qk)
  A* columns_;       // (rows / kLane, head_dim, kLane): query_, transposed
  A* scores_;        // (rows, kDecodeKeys)
  Tile* kinds_;      // (group), of the current block
  T *key_, *value_;  // (kDecodeKeys, wide_qk), (kDecodeKeys, wide)
  A* key_numbers_;   // (kDecodeKeys, head_dim)
};

}  // namespace
}  // namespace fused_attn
