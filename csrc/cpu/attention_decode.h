// Attention forward for a few queries against many keys, as in step-by-step decoding.
//
// There are not enough queries to fill vectors with, so here the lanes are features: each key and
// value is read once, as it is stored, for all queries of all heads that share it. What limits this
// is memory: 2 * head_dim elements a key. Few heads are split over the keys, into parts that depend
// on the shape alone and are merged in order.
#pragma once

#include "cpu/attention_tile.h"

namespace fused_attn {
namespace {

template <class T>
class AttentionDecode {
  using A = Acc<T>;
  static constexpr int64_t kRows = kPanel<A>, kLane = kLanes<A>;
  static constexpr int64_t kMinTasks = 16;         // parts stop here
  static constexpr int64_t kFeatures = 4 * kLane;  // outputs are padded to this
  static constexpr int kShare = 4;  // rows that share what is loaded of keys and values

 public:
  // Queries up to which this is faster than panels, which cost the same for one query as for all.
  // Not where a backward follows: it computes the scores anew, and where one key has all the weight
  // their rounding only cancels if lse comes from scores that were rounded alike.
  static bool pays_off(const AttentionParams& p) {
    if (p.lse_low != nullptr) return false;
    const int64_t limit = Product<T>::kPairs && sizeof(T) == 2 ? 6 : 16;
    const bool few = p.seqlen_q > 0 && p.seqlen_q <= min64(limit, kRows);
    return few && p.seqlen_k >= 4 * p.seqlen_q;
  }

  static bool run(const AttentionParams& p) {
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t heads = p.batch * p.num_heads_kv, blocks = div_up(p.seqlen_k, kBlockN);
    const int64_t wide = round_up(p.head_dim_v, kFeatures),
                  group = p.num_heads / max64(p.num_heads_kv, 1);
    const int64_t rows = group * p.seqlen_q, part = rows * (wide + 2);
    const int64_t splits = max64(1, min64(blocks, div_up(kMinTasks, max64(heads, 1))));
    const int64_t per_split = div_up(blocks, splits);
    Arena parts;  // (heads, splits, part)
    parts.template take<A>(heads * splits * part);
    if (!parts.allocate()) return false;
    A* const results = parts.template take<A>(heads * splits * part);
    bool ok = true;
#pragma omp parallel num_threads(clamp_threads(p.num_threads, heads* splits)) reduction(&& : ok)
    {
      AttentionDecode self(p, mask, rows, wide);
      ok = self.allocate();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < heads * splits; ++task) {
        const int64_t head = task / splits, begin = task % splits * per_split * kBlockN;
        const int64_t b = head / p.num_heads_kv, num_keys = key_rows(p, b).count;
        if (!ok) continue;
        self.begin(results + task * part);
        self.keys(b, head % p.num_heads_kv, min64(begin, num_keys),
                  min64(begin + per_split * kBlockN, num_keys));
      }
#pragma omp for schedule(static)
      for (int64_t head = 0; head < heads; ++head) {
        if (!ok) continue;
        self.begin_merge(results + head * splits * part);
        for (int64_t s = 1; s < splits; ++s) self.merge(results + (head * splits + s) * part);
        self.write(head / p.num_heads_kv, head % p.num_heads_kv);
      }
    }
    return ok;
  }

 private:
  AttentionDecode(const AttentionParams& p, const MaskView<A>& mask, int64_t rows, int64_t wide)
      : p_(p),
        mask_(mask),
        units_(p),
        unit_(units_.natural),
        rows_(rows),
        wide_(wide),
        wide_qk_(round_up(p.head_dim, kLane)) {}

  void place() {
    query_ = arena_.template take<A>(rows_ * wide_qk_);
    scores_ = arena_.template take<A>(rows_ * kBlockN);
    kinds_ = arena_.template take<Tile>(rows_ / p_.seqlen_q);
    tile_ = arena_.template take<A>(kBlockN * kRows);
    bias_ = arena_.template take<A>(kBlockN * kRows);
    key_ = arena_.template take<T>(kBlockN * wide_qk_);
    value_ = arena_.template take<T>(kBlockN * wide_);
  }

  bool allocate() {
    place();
    if (!arena_.allocate()) return false;
    place();
    return true;
  }

  // A part's result: out (rows, wide), maximum (rows) in the units of the scores, sum (rows).
  void begin_merge(A* result) {
    out_ = result;
    maximum_ = result + rows_ * wide_;
    sum_ = maximum_ + rows_;
  }

  void begin(A* result) {
    begin_merge(result);
    memset(out_, 0, rows_ * wide_ * sizeof(A));
    for (int64_t r = 0; r < rows_; ++r) {
      maximum_[r] = -static_cast<A>(__builtin_inf());
      sum_[r] = 0;
    }
  }

  void keys(int64_t b, int64_t h_kv, int64_t begin, int64_t end) {
    const SequenceRows queries = query_rows(p_, b);
    const int64_t group = rows_ / p_.seqlen_q;
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t h = h_kv * group + r / p_.seqlen_q, i = r % p_.seqlen_q;
      const T* const head = at_head<T>(p_.query, p_.query_strides, queries, h);
      A* const row = query_ + r * wide_qk_;
      memset(row, 0, wide_qk_ * sizeof(A));  // also rows that a shorter sequence lacks
      if (i < queries.count) load_row(head + i * p_.query_strides[2], p_.head_dim, row);
    }
    for (int64_t j = begin; j < end; j += kBlockN) block(b, h_kv, j, min64(kBlockN, end - j));
  }

  // All rows against one block of keys.
  void block(int64_t b, int64_t h_kv, int64_t j, int64_t n) {
    const SequenceRows keys = key_rows(p_, b);
    const int64_t group = rows_ / p_.seqlen_q;
    const T *key, *value;
    int64_t key_stride = p_.key_strides[2], value_stride = p_.value_strides[2];
    bool any = false;
    for (int64_t g = 0; g < group; ++g) {
      const Tile kind = mask_.classify(b, h_kv * group + g, 0, j, j + n);
      kinds_[g] = kind;
      any = any || kind != Tile::kSkip;
    }
    if (!any) return;
    key = whole_vectors(at_head<T>(p_.key, p_.key_strides, keys, h_kv) + j * key_stride, n,
                        p_.head_dim, wide_qk_, key_, &key_stride);
    value = whole_vectors(at_head<T>(p_.value, p_.value_strides, keys, h_kv) + j * value_stride, n,
                          p_.head_dim_v, round_up(p_.head_dim_v, kLane), value_, &value_stride);
    next_ = {value, value_stride, p_.head_dim_v};
    int64_t r = 0;
    for (; r + kShare <= rows_; r += kShare) score_rows<kShare>(key, key_stride, n, r);
    for (; r < rows_; ++r) score_rows<1>(key, key_stride, n, r);
    bool partial = false;
    for (int64_t g = 0; g < group; ++g) {
      partial = partial || kinds_[g] != Tile::kFull;
      weigh({b, h_kv * group + g, 0, j, n}, kinds_[g], g * p_.seqlen_q);
    }
    next_ = {key + kBlockN * key_stride, key_stride, p_.head_dim};
    for (r = 0; r + kShare <= rows_; r += kShare) {
      add_values<kShare>(partial, value, value_stride, n, r);
    }
    for (; r < rows_; ++r) add_values<1>(partial, value, value_stride, n, r);
  }

  // Scores of one head's rows, `first` and further, to weights.
  void weigh(const TileAt& at, Tile kind, int64_t first) {
    A* const scores = scores_ + first * kBlockN;
    if (kind == Tile::kSkip) {
      memset(scores, 0, p_.seqlen_q * kBlockN * sizeof(A));
      return;
    }
    if (kind == Tile::kPartial || units_.scaled) mask_rows(kind, at, scores);
    uint32_t keep[kBlockN + 4];
    for (int64_t t = 0; p_.dropout_p > 0 && t < at.n; t += 4) dropout_words(p_, at, t, keep + t);
    for (int64_t i = 0; i < p_.seqlen_q; ++i) {
      A* const weights = scores + i * kBlockN;
      softmax_row(at.n, weights, out_ + (first + i) * wide_, &maximum_[first + i],
                  &sum_[first + i]);
      for (int64_t t = 0; p_.dropout_p > 0 && t < at.n; ++t) {
        if ((keep[t] >> i & 1) == 0) weights[t] = 0;
      }
    }
  }

  // Rows of which whole vectors can be read: in place, or copied to buffer.
  static const T* whole_vectors(const T* src, int64_t n, int64_t dim, int64_t wide, T* buffer,
                                int64_t* stride) {
    if (dim == wide) return src;
    copy_rows(src, *stride, n, dim, buffer, n, wide);
    *stride = wide;
    return buffer;
  }

  // Scores of kCount queries, kLane keys at a time; what is missing of the last ones is 0.
  template <int kCount>
  void score_rows(const T* key, int64_t stride, int64_t n, int64_t first) {
    const A* const query = query_ + first * wide_qk_;
    for (int64_t t = 0; t < n; t += kLane) {
      Vec<A> products[kCount][kLane];
      for (int64_t l = 0; l < kLane; ++l) {
        Vec<A> sum[2][kCount] = {};
        const T* const row = key + min64(t + l, n - 1) * stride;
        if (first == 0) next_.prefetch(t + l);
        int64_t d = 0;
        for (; d + 2 * kLane <= wide_qk_; d += 2 * kLane) {
          for (int half = 0; half < 2; ++half) {
            const Vec<A> x = load_as<T>(row + d + half * kLane);
            for (int i = 0; i < kCount; ++i) {
              sum[half][i] += x * load(query + i * wide_qk_ + d + half * kLane);
            }
          }
        }
        for (int i = 0; i < kCount; ++i) {
          if (d < wide_qk_) sum[0][i] += load_as<T>(row + d) * load(query + i * wide_qk_ + d);
          products[i][l] = sum[0][i] + sum[1][i];
        }
      }
      for (int i = 0; i < kCount; ++i) {
        store(scores_ + (first + i) * kBlockN + t, lane_sums<A>(products[i]));
      }
    }
  }

  // Scores of one head's rows, masked as a tile.
  void mask_rows(Tile kind, const TileAt& at, A* scores) {
    memset(tile_, 0, kBlockN * kRows * sizeof(A));
    transpose(scores, kBlockN, p_.seqlen_q, at.n, tile_, kRows);
    finish_scores<T>(p_, mask_, units_, kind, at, tile_, nullptr, bias_);
    transpose(tile_, kRows, at.n, p_.seqlen_q, scores, kBlockN);
  }

  // Scores to weights; maximum, sum and out are brought up to date.
  void softmax_row(int64_t n, A* scores, A* out, A* maximum, A* sum) const {
    const A infinity = static_cast<A>(__builtin_inf());
    for (int64_t t = n; t < round_up(n, kLane); ++t) scores[t] = -infinity;
    Vec<A> highest = broadcast<A>(-infinity), total{};
    for (int64_t t = 0; t < n; t += kLane) highest = max<A>(highest, load(scores + t));
    A top = *maximum;
    for (int64_t l = 0; l < kLane; ++l) top = highest[l] > top ? highest[l] : top;
    const A shift = top == -infinity ? A(0) : top;
    for (int64_t t = 0; t < n; t += kLane) {
      const Vec<A> weight = exp_nonpositive<A>(load(scores + t) - shift, unit_);
      store(scores + t, weight);
      total += weight;
    }
    const A alpha = rescale(top, maximum, out);
    *sum = *sum * alpha + horizontal_sum<A>(total);
  }

  // Raises the maximum of what is in out so far; what that is multiplied by.
  A rescale(A top, A* maximum, A* out) const {
    if (top == *maximum) return 1;
    const Vec<A> alpha = exp_nonpositive<A>(broadcast<A>(*maximum - top), unit_);
    for (int64_t d = 0; d < wide_; d += kLane) store(out + d, load(out + d) * alpha);
    *maximum = top;
    return alpha[0];
  }

  // out += weights * value for kCount rows, in parts of kSumSteps keys.
  template <int kCount>
  void add_values(bool guard, const T* value, int64_t stride, int64_t n, int64_t first) {
    constexpr int kWide = kCount == 1 ? 4 : 2;
    const A* const weights = scores_ + first * kBlockN;
    A* const out = out_ + first * wide_;
    const int64_t vectors = div_up(p_.head_dim_v, kLane);
    for (int64_t begin = 0; begin < n; begin += kSumSteps) {
      const int64_t end = min64(begin + kSumSteps, n);
      int64_t c = 0;
      for (; c + kWide <= vectors; c += kWide) {
        add_features<kCount, kWide>(guard, value + c * kLane, stride, begin, end, weights,
                                    out + c * kLane);
      }
      for (; c < vectors; ++c) {
        add_features<kCount, 1>(guard, value + c * kLane, stride, begin, end, weights,
                                out + c * kLane);
      }
    }
  }

  template <int kCount, int kVectors>
  void add_features(bool guard, const T* value, int64_t stride, int64_t begin, int64_t end,
                    const A* weights, A* out) const {
    Vec<A> sum[kCount][kVectors] = {};
    for (int64_t t = begin; t < end; ++t) {
      if (out == out_) next_.prefetch(t);
      Vec<A> x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load_as<T>(value + t * stride + v * kLane);
      for (int i = 0; i < kCount; ++i) {
        const A weight = weights[i * kBlockN + t];
        // An invisible key may hold NaN, and 0 * NaN is no 0.
        if (guard && weight == 0) continue;
        for (int v = 0; v < kVectors; ++v) sum[i][v] += x[v] * weight;
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        A* const at = out + i * wide_ + v * kLane;
        store(at, load(at) + sum[i][v]);
      }
    }
  }

  // Adds another part's result to this one.
  void merge(const A* other) {
    const A* const maximum = other + rows_ * wide_;
    const A* const sum = maximum + rows_;
    for (int64_t r = 0; r < rows_; ++r) {
      if (sum[r] == 0) continue;
      A* const out = out_ + r * wide_;
      const A top = maximum[r] > maximum_[r] ? maximum[r] : maximum_[r];
      sum_[r] *= rescale(top, &maximum_[r], out);
      const Vec<A> factor = exp_nonpositive<A>(broadcast<A>(maximum[r] - top), unit_);
      for (int64_t d = 0; d < wide_; d += kLane) {
        store(out + d, load(out + d) + load(other + r * wide_ + d) * factor);
      }
      sum_[r] += sum[r] * factor[0];
    }
  }

  void write(int64_t b, int64_t h_kv) {
    const SequenceRows queries = query_rows(p_, b);
    const int64_t group = rows_ / p_.seqlen_q;
    const A kept = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t h = h_kv * group + r / p_.seqlen_q, i = r % p_.seqlen_q;
      if (i >= queries.count) continue;
      A* const row = out_ + r * wide_;
      const A factor = sum_[r] == 0 ? A(0) : kept / sum_[r];  // rows that saw nothing are 0
      for (int64_t d = 0; d < wide_; d += kLane) store(row + d, load(row + d) * factor);
      T* const out = const_cast<T*>(at_head<T>(p_.out, p_.out_strides, queries, h));
      store_row(row, p_.head_dim_v, out + i * p_.out_strides[2]);
      write_lse(p_, units_.natural, lse_begin(p_, b, h) + i, maximum_[r], sum_[r]);
    }
  }

  // Rows that are wanted after those at hand: memory is to be busy all the time, but the CPU's own
  // prefetching starts anew with each block of keys or values.
  struct Ahead {
    const T* rows;
    int64_t stride, dim;
    void prefetch(int64_t t) const {
      const T* const row = rows + t * stride;
      for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
    }
  };

  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;                // of a score
  const int64_t rows_, wide_, wide_qk_;  // queries of a key/value head, padded head dimensions
  Ahead next_{};
  Arena arena_;
  A* query_;                  // (rows, wide_qk)
  A* scores_;                 // (rows, kBlockN)
  Tile* kinds_;               // (heads that share the keys)
  A *tile_, *bias_;           // (kBlockN, panel)
  T *key_, *value_;           // (kBlockN, wide_qk), (kBlockN, wide)
  A *out_, *maximum_, *sum_;  // of the part at hand
};

}  // namespace
}  // namespace fused_attn
