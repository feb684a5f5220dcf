// Attention backward for few queries and many keys. attention_bwd.h lists the formulas.
//
// A query tile would be mostly empty. This kernel reads each block of K and V once for all queries
// of all heads that share it, and writes its rows of dK and dV once. The lower bound is the time of
// these reads and writes.
#pragma once

#include "cpu/kernels/decode_part.h"
#include "cpu/kernels/row_products.h"

namespace fused_attn {
namespace {

template <class T>
class AttentionBwdRows {
  using A = Acc<T>;
  using Products = RowProducts<T>;
  static constexpr int64_t kLane = kLanes<A>;
  static constexpr int64_t kTasksPerThread = 8;
  static constexpr int kShare = 4;  // keys that share each load of a row of dO or Q

 public:
  // Returns true if this kernel is faster than the query-tile kernels. It does not support a
  // gradient of the weights.
  static bool pays_off(const AttentionBwdParams& bwd, int64_t queries, int64_t keys) {
    return bwd.grad_weights == nullptr && has_few_queries<T>(bwd.fwd, queries, keys);
  }

  static bool run(const AttentionBwdParams& bwd) {
    const AttentionParams& p = bwd.fwd;
    MaskView<A> mask;
    if (!mask.init(p, kDecodeKeys)) return false;
    const DecodeShape<A> shape(p);
    const int64_t per_split = keys_per_split<T>(p),
                  splits = max64(div_up(p.seqlen_k, per_split), 1);
    const int64_t heads = p.batch * p.num_heads_kv, count = heads * splits;
    const int64_t per_task = max64(count / (kTasksPerThread * max64(p.num_threads, 1)), 1);
    const int64_t tasks = div_up(count, per_task);
    const int64_t part = shape.rows * round_up(p.head_dim, kLane);
    Arena parts;  // dQ of each split: (heads, splits, rows, head_dim)
    A* grad_query;
    if (!parts.layout([&] { grad_query = parts.template take<A>(count * part); })) return false;
    return run_team(p.num_threads, tasks, [&] {
      AttentionBwdRows self(bwd, mask, shape);
      const bool ok = self.allocate();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < tasks; ++task) {
        if (!ok) continue;
        for (int64_t at = task * per_task; at < min64((task + 1) * per_task, count); ++at) {
          const int64_t head = at / splits, b = head / p.num_heads_kv;
          const int64_t begin = at % splits * per_split, num_keys = key_rows(p, b).count;
          self.keys(b, head % p.num_heads_kv, min64(begin, num_keys),
                    min64(begin + per_split, num_keys), grad_query + at * part);
        }
      }
#pragma omp for schedule(static) nowait
      for (int64_t head = 0; head < heads; ++head) {
        if (!ok) continue;
        A* const first = grad_query + head * splits * part;
        for (int64_t s = 1; s < splits; ++s) {
          for (int64_t e = 0; e < part; ++e) first[e] += first[s * part + e];
        }
        self.write_grad_query(head / p.num_heads_kv, head % p.num_heads_kv, first);
      }
      return ok;
    });
  }

 private:
  AttentionBwdRows(const AttentionBwdParams& bwd, const MaskView<A>& mask,
                   const DecodeShape<A>& shape)
      : bwd_(bwd),
        p_(bwd.fwd),
        mask_(mask),
        shape_(shape),
        units_(p_),
        unit_(units_.natural),
        wide_(round_up(p_.head_dim, kLane)),
        wide_v_(round_up(p_.head_dim_v, kLane)) {}

  bool allocate() {
    return arena_.layout([&] { place(); });
  }

  void place() {
    query_ = arena_.template take<A>(shape_.rows * wide_);
    grad_out_ = arena_.template take<A>(shape_.rows * wide_v_);
    for (A** const numbers : {&lse_, &lse_lost_, &delta_, &grad_lse_}) {
      *numbers = arena_.template take<A>(shape_.rows);
    }
    for (A** const tile : {&weights_, &grads_}) {
      *tile = arena_.template take<A>(shape_.rows * kDecodeKeys);
    }
    kinds_ = arena_.template take<Tile>(shape_.group);
    rows_ = arena_.template take<A>(kShare * max64(wide_, wide_v_));
    key_ = arena_.template take<T>(kDecodeKeys * wide_);
    value_ = arena_.template take<T>(kDecodeKeys * wide_v_);
  }

  // Computes dK and dV of keys [begin, end) of a key/value head, and adds the contribution of these
  // keys to dQ, (rows, wide).
  void keys(int64_t b, int64_t h_kv, int64_t begin, int64_t end, A* grad_query) {
    memset(grad_query, 0, shape_.rows * wide_ * sizeof(A));
    if (begin >= end) return;
    if (b != b_ || h_kv != h_kv_) load_queries(b, h_kv);
    const int64_t visible = max64(min64(end, decode_keys(p_, b)), begin);
    for (int64_t j = begin; j < visible; j += kDecodeKeys) {
      block(j, min64(kDecodeKeys, visible - j), grad_query);
    }
    memset(rows_, 0, max64(wide_, wide_v_) * sizeof(A));
    for (int64_t j = visible; j < end; ++j) {
      grad_rows(bwd_.grad_key, bwd_.grad_key_strides).store(j, rows_, p_.head_dim);
      grad_rows(bwd_.grad_value, bwd_.grad_value_strides).store(j, rows_, p_.head_dim_v);
    }
  }

  // Returns the rows of dK or dV of the current key/value head.
  ResultRows<T> grad_rows(void* grad, const int64_t strides[3]) const {
    return {p_, grad, strides, key_rows(p_, b_), h_kv_};
  }

  // Loads query, dO and the statistics of all query rows of a key/value head. Fully masked rows
  // become 0, because their contents, even NaN, must not affect the result.
  void load_queries(int64_t b, int64_t h_kv) {
    b_ = b;
    h_kv_ = h_kv;
    const SequenceRows queries = query_rows(p_, b);
    memset(query_, 0, shape_.rows * wide_ * sizeof(A));
    memset(grad_out_, 0, shape_.rows * wide_v_ * sizeof(A));
    all_alive_ = true;
    for (int64_t r = 0; r < shape_.rows; ++r) {
      const int64_t h = h_kv * shape_.group + r / p_.seqlen_q, i = r % p_.seqlen_q;
      const int64_t at = lse_begin(p_, b, h) + i;
      delta_[r] = 0;
      if (!load_lse(bwd_, i < queries.count, at, units_.natural, &lse_[r], &lse_lost_[r],
                    &grad_lse_[r])) {
        all_alive_ = false;
        continue;
      }
      load_row(at_head<T>(p_.query, p_.query_strides, queries, h) + i * p_.query_strides[2],
               p_.head_dim, query_ + r * wide_);
      load_row(at_head<T>(bwd_.grad_out, bwd_.grad_out_strides, queries, h) +
                   i * bwd_.grad_out_strides[2],
               p_.head_dim_v, grad_out_ + r * wide_v_);
      delta_[r] = delta(queries, h, i, grad_out_ + r * wide_v_);
    }
  }

  // Returns rowsum(dO * O) / dropout_scale of one row, rounded like an element of dO V^T: in rows
  // where one key has all the weight, both are large and must cancel.
  A delta(const SequenceRows& queries, int64_t h, int64_t i, const A* grad_out) {
    const T* const out = at_head<T>(p_.out, p_.out_strides, queries, h) + i * p_.out_strides[2];
    const auto row = Products::padded(out, 0, 1, p_.head_dim_v, value_);
    A product[kLane];
    Products::template multiply<1>([&](int64_t) { return row.rows; }, 0, 1, wide_v_, grad_out, 0,
                                   product, 0, [](int64_t) {});
    A delta = product[0];
    if constexpr (sizeof(T) == 2) {
      if (p_.out_residual != nullptr) delta += delta_residual<T>(bwd_, queries, h, i);
    }
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    return scale == 0 ? A(0) : delta / scale;
  }

  // Processes one KV block for all query rows.
  void block(int64_t j, int64_t n, A* grad_query) {
    const SequenceRows keys = key_rows(p_, b_);
    const int64_t key_stride = p_.key_strides[2], value_stride = p_.value_strides[2];
    const T* const key = at_head<T>(p_.key, p_.key_strides, keys, h_kv_) + j * key_stride;
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv_) + j * value_stride;
    bool any = false, guard = !all_alive_;
    for (int64_t g = 0; g < shape_.group; ++g) {
      kinds_[g] = mask_.classify(b_, h_kv_ * shape_.group + g, 0, j, j + n);
      any = any || kinds_[g] != Tile::kSkip;
      guard = guard || kinds_[g] != Tile::kFull;
    }
    if (any) {
      const auto k = Products::padded(key, key_stride, n, p_.head_dim, key_);
      const auto v = Products::padded(value, value_stride, n, p_.head_dim_v, value_);
      Products::multiply_all(
          k.rows, k.stride, n, wide_, query_, wide_, shape_.rows, weights_, kDecodeKeys,
          [&](int64_t t) { prefetch(key + (kDecodeKeys + t) * key_stride, p_.head_dim); });
      Products::multiply_all(
          v.rows, v.stride, n, wide_v_, grad_out_, wide_v_, shape_.rows, grads_, kDecodeKeys,
          [&](int64_t t) { prefetch(value + (kDecodeKeys + t) * value_stride, p_.head_dim_v); });
      for (int64_t g = 0; g < shape_.group; ++g) {
        score_gradients({b_, h_kv_ * shape_.group + g, 0, j, n}, kinds_[g], g * p_.seqlen_q);
      }
      add_grad_query(k, n, guard, grad_query);
    } else {
      memset(weights_, 0, shape_.rows * kDecodeKeys * sizeof(A));
      memset(grads_, 0, shape_.rows * kDecodeKeys * sizeof(A));
    }
    write_rows(weights_, grad_out_, wide_v_, p_.head_dim_v, 1, j, n,
               grad_rows(bwd_.grad_value, bwd_.grad_value_strides));
    write_rows(grads_, query_, wide_, p_.head_dim, static_cast<A>(p_.scale), j, n,
               grad_rows(bwd_.grad_key, bwd_.grad_key_strides));
  }

  // Prefetches a row of the next block. The hardware prefetcher restarts at each block.
  static void prefetch(const T* row, int64_t dim) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(row + d, 0, 2);
  }

  // Converts the scores of one head to weights after dropout, and dP to dS.
  //
  // first: index of the first query row of the head.
  void score_gradients(const TileAt& at, Tile kind, int64_t first) {
    A *const weights = weights_ + first * kDecodeKeys, *const grads = grads_ + first * kDecodeKeys;
    if (kind == Tile::kSkip) {
      memset(weights, 0, p_.seqlen_q * kDecodeKeys * sizeof(A));
      memset(grads, 0, p_.seqlen_q * kDecodeKeys * sizeof(A));
      return;
    }
    if (kind == Tile::kPartial) block_mask_.load(p_, at.b, at.h, at.j, at.n);
    alignas(64) A cap_slope[kDecodeKeys];
    uint64_t keep = ~uint64_t{0};
    for (int64_t i = 0; i < p_.seqlen_q; ++i) {
      A* const row = weights + i * kDecodeKeys;
      if (units_.scaled) scale_row(row, cap_slope);
      if (kind == Tile::kPartial) block_mask_.apply(i, row, kLane);
      if (p_.dropout_p > 0) keep = kept_keys(at, i);
      gradient_row(first + i, at.n, keep, p_.softcap > 0 ? cap_slope : nullptr, row,
                   grads + i * kDecodeKeys);
    }
  }

  // Applies the scale or softcap to a row of scores in place. With softcap, stores its derivative.
  void scale_row(A* scores, A* cap_slope) const {
    const bool capped = p_.softcap > 0;
    const A inner = static_cast<A>(capped ? p_.scale / p_.softcap : p_.scale);
    const A cap = static_cast<A>(p_.softcap);
    for (int64_t t = 0; t < kDecodeKeys; t += kLane) {
      const Vec<A> score = load(scores + t) * inner;
      if (!capped) {
        store(scores + t, score);
        continue;
      }
      const Vec<A> x = tanh<A>(score);
      store(scores + t, x * cap);
      store(cap_slope + t, A(1) - x * x);
    }
  }

  // Returns a word in which bit t is set if dropout keeps key t for query i.
  uint64_t kept_keys(const TileAt& at, int64_t i) const {
    static_assert(kDecodeKeys <= 64, "the word has one bit per key");
    constexpr int64_t kColumns = DropoutColumns<>::kColumns;
    const PhiloxKeys keys(p_.seed);
    const DropoutAt first = dropout_at(p_, at);
    uint64_t bits = 0;
    for (int64_t t = 0; t < kDecodeKeys; t += kColumns) {
      const DropoutColumns<> columns(&keys, dropout_threshold(p_.dropout_p), first.key + t,
                                     first.head, 0);
      bits |= columns.keep(first.query + static_cast<uint32_t>(i)) << t;
    }
    return bits;
  }

  // Replaces the scores of row r by the weights after dropout, and its dP by dS. See
  // BwdTile::tile_gradients for the corrections.
  void gradient_row(int64_t r, int64_t n, uint64_t keep, const A* cap_slope, A* scores,
                    A* grads) const {
    const A infinity = static_cast<A>(__builtin_inf()), scale = A(dropout_scale(p_.dropout_p));
    const bool drops = p_.dropout_p > 0, alive = lse_[r] != infinity;
    for (int64_t t = n; t < round_up(n, kLane); ++t) scores[t] = -infinity;
    for (int64_t t = 0; t < n; t += kLane) {
      const Vec<A> score = load(scores + t), below = score - lse_[r];
      Vec<A> weight = exp_nonpositive<A, kPrecision<T>>(below, unit_);
      if (!alive) weight = Vec<A>{};  // the score may be NaN
      Vec<A> lost = (score - (below + lse_[r])) * static_cast<A>(unit_.natural) + lse_lost_[r];
      lost = weight == 0 ? Vec<A>{} : lost;  // it is NaN for masked scores
      weight += weight * lost;
      Vec<A> grad = load(grads + t), kept = weight;
      if (drops) {
        const uint32_t bits = static_cast<uint32_t>(keep >> t);
        kept = where<A>(bits, weight * scale, Vec<A>{});
        grad = where<A>(bits, grad, Vec<A>{});
      }
      grad = weight * ((grad - delta_[r]) * scale + grad_lse_[r]);
      // The gradient and the softcap derivative of a masked key may be NaN.
      if (cap_slope != nullptr) grad *= load(cap_slope + t);
      store(grads + t, weight == 0 ? Vec<A>{} : grad);
      store(scores + t, kept);
    }
  }

  // Adds dS K to dQ, with partial sums of kSumSteps keys. With `guard`, non-finite keys are skipped
  // where dS is 0.
  void add_grad_query(const typename Products::Padded& keys, int64_t n, bool guard, A* grad_query) {
    if (guard && !rows_finite(keys.rows, keys.stride, n, p_.head_dim)) {
      for (int64_t r = 0; r < shape_.rows; ++r) add_nonzero(keys, n, r, grad_query);
      return;
    }
    for (int64_t begin = 0; begin < n; begin += kSumSteps) {
      const int64_t end = min64(begin + kSumSteps, n);
      int64_t r = 0;
      for (; r + 2 <= shape_.rows; r += 2) add_keys<2>(keys, begin, end, r, grad_query);
      if (r < shape_.rows) add_keys<1>(keys, begin, end, r, grad_query);
    }
  }

  template <int kCount>
  void add_keys(const typename Products::Padded& keys, int64_t begin, int64_t end, int64_t first,
                A* grad_query) const {
    const A* const grads = grads_ + first * kDecodeKeys;
    int64_t d = 0;
    for (; d + 4 * kLane <= wide_; d += 4 * kLane) {
      add_features<kCount, 4>(keys, d, begin, end, grads, grad_query + first * wide_ + d);
    }
    for (; d < wide_; d += kLane) {
      add_features<kCount, 1>(keys, d, begin, end, grads, grad_query + first * wide_ + d);
    }
  }

  template <int kCount, int kVectors>
  void add_features(const typename Products::Padded& keys, int64_t d, int64_t begin, int64_t end,
                    const A* grads, A* grad_query) const {
    Vec<A> sum[kCount][kVectors] = {};
    for (int64_t t = begin; t < end; ++t) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec<A> x = load_as<T>(keys.rows + t * keys.stride + d + v * kLane);
        for (int i = 0; i < kCount; ++i) sum[i][v] += x * grads[i * kDecodeKeys + t];
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        A* const at = grad_query + i * wide_ + v * kLane;
        store(at, load(at) + sum[i][v]);
      }
    }
  }

  void add_nonzero(const typename Products::Padded& keys, int64_t n, int64_t r,
                   A* grad_query) const {
    for (int64_t t = 0; t < n; ++t) {
      const A grad = grads_[r * kDecodeKeys + t];
      if (grad == 0) continue;
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        grad_query[r * wide_ + d] += to_acc(keys.rows[t * keys.stride + d]) * grad;
      }
    }
  }

  // Writes factor * weights^T * rows for keys [j, j + n): dV from P and dO, dK from dS and Q.
  void write_rows(const A* weights, const A* rows, int64_t wide, int64_t dim, A factor, int64_t j,
                  int64_t n, const ResultRows<T>& out) {
    int64_t t = 0;
    for (; t + kShare <= n; t += kShare)
      write_keys<kShare>(weights + t, rows, wide, dim, factor, j + t, out);
    for (; t < n; ++t) write_keys<1>(weights + t, rows, wide, dim, factor, j + t, out);
  }

  template <int kKeys>
  void write_keys(const A* weights, const A* rows, int64_t wide, int64_t dim, A factor, int64_t j,
                  const ResultRows<T>& out) {
    constexpr bool kSameType = sizeof(T) == sizeof(A);
    const bool in_place = kSameType && dim == wide;
    A* result = rows_;
    int64_t stride = wide;
    if constexpr (kSameType) {
      if (in_place) {
        result = out.at(j);
        stride = out.stride;
      }
    }
    for (int64_t d = 0; d < wide; d += kLane) {
      Vec<A> sum[kKeys] = {};
      for (int64_t r = 0; r < shape_.rows; ++r) {
        const Vec<A> x = load(rows + r * wide + d);
        for (int t = 0; t < kKeys; ++t) sum[t] += x * weights[r * kDecodeKeys + t];
      }
      for (int t = 0; t < kKeys; ++t) store(result + t * stride + d, sum[t] * factor);
    }
    if (in_place) return;
    for (int t = 0; t < kKeys; ++t) out.store(j + t, rows_ + t * wide, dim);
  }

  void write_grad_query(int64_t b, int64_t h_kv, A* grad_query) const {
    const SequenceRows queries = query_rows(p_, b);
    const A scale = static_cast<A>(p_.scale);
    for (int64_t r = 0; r < shape_.rows; ++r) {
      const int64_t h = h_kv * shape_.group + r / p_.seqlen_q, i = r % p_.seqlen_q;
      if (i >= queries.count) continue;
      A* const row = grad_query + r * wide_;
      for (int64_t d = 0; d < p_.head_dim; ++d) row[d] *= scale;
      ResultRows<T>(p_, bwd_.grad_query, bwd_.grad_query_strides, queries, h)
          .store(i, row, p_.head_dim);
    }
  }

  const AttentionBwdParams& bwd_;
  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const DecodeShape<A>& shape_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;        // unit of the scores
  const int64_t wide_, wide_v_;  // head_dim and head_dim_v, padded to full vectors
  BlockMask<A, kDecodeKeys> block_mask_;
  Arena arena_;
  int64_t b_ = -1, h_kv_ = -1;  // of the loaded queries
  bool all_alive_ = true;       // every loaded row has a visible key
  A *query_, *grad_out_;        // (rows, wide), (rows, wide_v)
  A *lse_, *lse_lost_;          // (rows), in score units; +inf if fully masked; see in_units
  A *delta_, *grad_lse_;        // (rows)
  A *weights_, *grads_;         // (rows, kDecodeKeys): scores, then P; dP, then dS
  Tile* kinds_;                 // (group), of the current block
  A* rows_;                     // (kShare, wide)
  T *key_, *value_;             // (kDecodeKeys, wide), (kDecodeKeys, wide_v)
};

}  // namespace
}  // namespace fused_attn
