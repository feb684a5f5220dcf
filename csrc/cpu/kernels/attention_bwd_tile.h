// Base class of the attention backward kernels: recomputes the weights of one tile and computes the
// gradients of its scores.
#pragma once

#include "cpu/kernels/decode_part.h"
#include "cpu/kernels/head_prefetch.h"
#include "cpu/kernels/row_products.h"

namespace fused_attn {
namespace {

template <class T>
class BwdTile {
 protected:
  using A = Acc<T>;
  using P = Product<T>;
  using LeftElement = typename P::LeftElement;
  using RightElement = typename P::RightElement;
  using Weight = typename P::Weight;
  static constexpr int64_t kRows = kPanel<A>;
  static constexpr int kLane = kLanes<A>;

  BwdTile(const AttentionBwdParams& p, const MaskView<A>& mask)
      : bwd_(p),
        p_(p.fwd),
        mask_(mask),
        units_(p_),
        unit_(units_.natural),
        dropout_(p_),
        wide_(P::pad_dim(p_.head_dim)),
        wide_v_(P::pad_dim(p_.head_dim_v)) {}

  // Reserves workspace for `query_tiles` packed query tiles.
  //
  // rows: also reserve the operands of dK and dV.
  void place_tile(int64_t query_tiles, bool rows) {
    query_tiles_ = query_tiles;
    query_ = arena_.template take<RightElement>(query_tiles * P::right_size(wide_, kRows));
    grad_out_ = arena_.template take<RightElement>(query_tiles * P::right_size(wide_v_, kRows));
    query_rows_ =
        arena_.template take<RightElement>(rows ? P::right_size(query_tiles * kRows, wide_) : 0);
    grad_out_rows_ =
        arena_.template take<RightElement>(rows ? P::right_size(query_tiles * kRows, wide_v_) : 0);
    lse_ = arena_.template take<A>(query_tiles * kRows);
    lse_lost_ = arena_.template take<A>(query_tiles * kRows);
    delta_ = arena_.template take<A>(query_tiles * kRows);
    grad_lse_ = arena_.template take<A>(query_tiles * kRows);
    scores_ = arena_.template take<A>(kBlockN * kRows);
    grad_scores_ = arena_.template take<A>(kBlockN * kRows);
    bias_ = arena_.template take<A>(kBlockN * kRows);
    cap_slope_ = arena_.template take<A>(kBlockN * kRows);
    const int64_t weight_rows = bwd_.grad_weights == nullptr ? 0 : kRows;
    grad_weights_ = arena_.template take<A>(weight_rows * kBlockN);
    const int64_t widest = round_up(max64(wide_, wide_v_), kLane);
    stage_ = arena_.template take<T>(max64(kBlockN, kRows) * widest);
    few_rows_ = arena_.template take<A>(kFewQueries * widest);
    scratch_ = arena_.template take<RightElement>(P::scratch_size(widest));
    out_ = arena_.template take<LeftElement>(P::left_size(kRows, wide_v_));
    key_ = arena_.template take<LeftElement>(P::left_size(kBlockN, wide_));
    value_ = arena_.template take<LeftElement>(P::left_size(kBlockN, wide_v_));
  }

  // Packs a query tile of head (b, h) into `slot`, and loads its lse, dlse and delta.
  //
  // rows: also pack the operands of dK and dV.
  void pack_query_tile(int64_t b, int64_t h, int64_t query_tile, int64_t slot, bool rows) {
    const SequenceRows queries = query_rows(p_, b);
    const int64_t first = query_tile * kRows, count = min64(kRows, queries.count - first);
    const int64_t head = lse_begin(p_, b, h) + first, at = slot * kRows;
    for (int64_t l = 0; l < kRows; ++l) {
      alive_[l] = load_lse(bwd_, l < count, head + l, units_.natural, &lse_[at + l],
                           &lse_lost_[at + l], &grad_lse_[at + l]);
    }
    stage(at_head<T>(p_.query, p_.query_strides, queries, h), p_.query_strides[2], first,
          p_.head_dim);
    P::right_columns(stage_, wide_, p_.head_dim, scratch_, query_at(slot));
    if (rows) P::right_rows(stage_, p_.head_dim, query_rows_at(slot), query_tiles_);
    stage(at_head<T>(bwd_.grad_out, bwd_.grad_out_strides, queries, h), bwd_.grad_out_strides[2],
          first, p_.head_dim_v);
    const typename P::Right grad_out =
        P::right_columns(stage_, wide_v_, p_.head_dim_v, scratch_, grad_out_at(slot));
    if (rows) P::right_rows(stage_, p_.head_dim_v, grad_out_rows_at(slot), query_tiles_);
    // Compute delta as the diagonal of a matmul, so that it is rounded like an element of dO V^T:
    // in rows where one key has all the weight, both are large and must cancel. For the same
    // reason, dlse is not folded into delta.
    stage(at_head<T>(p_.out, p_.out_strides, queries, h), p_.out_strides[2], first, p_.head_dim_v);
    const typename P::Left out = P::rows(stage_, wide_v_, kRows, wide_v_, nullptr, out_);
    P::template multiply<Layout::kRowMajor, Into::kStore, kShortSumSteps>(kRows, p_.head_dim_v, out,
                                                                          grad_out, scores_, kRows);
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int64_t l = 0; l < kRows; ++l) {
      A delta = scores_[l * kRows + l];
      if constexpr (sizeof(T) == 2) {
        if (p_.out_residual != nullptr && alive_[l])
          delta += delta_residual<T>(bwd_, queries, h, first + l);
      }
      if (bwd_.row_sums != nullptr && alive_[l]) {
        delta += static_cast<const A*>(bwd_.row_sums)[head + l];
      }
      delta_[at + l] = scale == 0 ? A(0) : delta / scale;
    }
  }

  RightElement* query_at(int64_t slot) { return query_ + slot * P::right_size(wide_, kRows); }
  RightElement* grad_out_at(int64_t slot) {
    return grad_out_ + slot * P::right_size(wide_v_, kRows);
  }
  RightElement* query_rows_at(int64_t slot) {
    return query_rows_ + slot * P::right_size(kRows, wide_) / P::kParts;
  }
  RightElement* grad_out_rows_at(int64_t slot) {
    return grad_out_rows_ + slot * P::right_size(kRows, wide_v_) / P::kParts;
  }

  // Computes the weights P of a tile and the gradients of its scores, two keys at a time. The
  // gradients exclude the derivative of softcap, which is stored in cap_slope_.
  //
  // use(t, weight, kept, grad): called for keys t and t + 1. The arrays are indexed [key][vector];
  // kept is the weight after dropout.
  template <class Use>
  void tile_gradients(Tile kind, const TileAt& at, int64_t slot, const typename P::Left& key,
                      const typename P::Left& value, const Use& use) {
    if (has_few_queries<T>(p_, query_rows(p_, at.b).count, key_rows(p_, at.b).count)) {
      multiply_few(at, slot);
    } else {
      P::template multiply<Layout::kRowMajor, Into::kStore>(
          at.n, p_.head_dim, key, P::columns_view(query_at(slot), p_.head_dim), scores_, kRows,
          nullptr, prefetch_);
    }
    finish_scores<T>(p_, mask_, units_, kind, at, scores_, cap_slope_, bias_);
    P::template multiply<Layout::kRowMajor, Into::kStore, kShortSumSteps>(
        at.n, p_.head_dim_v, value, P::columns_view(grad_out_at(slot), p_.head_dim_v), grad_scores_,
        kRows, nullptr, prefetch_);
    if (bwd_.grad_weights != nullptr) add_grad_weights(at);
    const bool dropout = p_.dropout_p > 0, plain = !dropout && bwd_.grad_lse == nullptr;
    uint32_t keep[kBlockN];
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    const int64_t steps = P::pad_steps(at.n);
    if (dropout) dropout_.keep(at, steps, keep);
    const bool guard =
        kind == Tile::kPartial || steps != at.n || at.i + kRows > query_rows(p_, at.b).count;
    const Vec<A> infinity = broadcast<A>(static_cast<A>(__builtin_inf()));
    Vec<A> lse[2], lse_lost[2], delta[2], grad_lse[2];
    for (int v = 0; v < 2; ++v) {
      lse[v] = load(lse_ + slot * kRows + v * kLane);
      lse_lost[v] = load(lse_lost_ + slot * kRows + v * kLane);
      delta[v] = load(delta_ + slot * kRows + v * kLane);
      grad_lse[v] = load(grad_lse_ + slot * kRows + v * kLane);
    }
    for (int64_t t = 0; t < steps; t += 2) {
      Vec<A> weight[2][2], kept[2][2], grad[2][2], below[4], rounded[4];
      for (int x = 0; x < 4; ++x) {
        below[x] = rounded[x] = load(scores_ + t * kRows + x * kLane) - lse[x % 2];
      }
      exp_nonpositive<A, kPrecision<T>>(rounded, unit_);
      for (int r = 0; r < 2; ++r) {
        for (int v = 0; v < 2; ++v) {
          const int64_t e = (t + r) * kRows + v * kLane;
          // Apply the rounding residuals of lse and of the difference as a factor. Added to the
          // exponent, they would be rounded away.
          const int x = 2 * r + v;
          // In rows without a visible key and rows that do not exist, the score may be NaN.
          if (guard) rounded[x] = lse[v] == infinity ? Vec<A>{} : rounded[x];
          Vec<A> lost = lse_lost[v];
          if (kPrecision<T> == Precision::kFull) {
            lost += (load(scores_ + e) - (below[x] + lse[v])) * unit_.natural;
            lost = rounded[x] == 0 ? Vec<A>{} : lost;  // it is NaN for masked scores
          }
          weight[r][v] = kept[r][v] = rounded[x] + rounded[x] * lost;
          Vec<A> g = load(grad_scores_ + e);
          if (plain) {
            g = weight[r][v] * (g - delta[v]);
          } else {
            if (dropout) {
              const uint32_t bits = keep[t + r] >> (v * kLane);
              kept[r][v] = where<A>(bits, weight[r][v] * scale, Vec<A>{});
              g = where<A>(bits, g, Vec<A>{});
            }
            g = weight[r][v] * ((g - delta[v]) * scale + grad_lse[v]);
          }
          // A masked key may contain NaN, and 0 * NaN is NaN.
          grad[r][v] = guard ? (weight[r][v] == 0 ? Vec<A>{} : g) : g;
        }
      }
      use(t, weight, kept, grad);
    }
  }

  static void zero(A* data, int64_t count) { memset(data, 0, count * sizeof(A)); }

  const AttentionBwdParams& bwd_;
  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;  // unit of the scores
  const ColumnDropout<A> dropout_;
  const int64_t wide_, wide_v_;  // padded head_dim and head_dim_v
  Arena arena_;
  typename P::Registers registers_;
  HeadPrefetch prefetch_;
  int64_t query_tiles_ = 0;  // number of slots
  bool alive_[kRows];        // true for rows with a visible key
  A* lse_;                   // (query tiles, kRows), in score units; +inf if fully masked
  A* lse_lost_;              // (query tiles, kRows), correction factor of P minus 1 (in_units)
  A *delta_, *grad_lse_;     // (query tiles, kRows)
  A *scores_, *grad_scores_, *bias_, *cap_slope_;  // (kBlockN, kRows)
  A* grad_weights_;                                // (kRows, kBlockN)
  T* stage_;                                       // (kBlockN, max(head_dim, head_dim_v)), padded
  LeftElement* key_;                               // (kBlockN, head_dim)
  LeftElement* value_;                             // (kBlockN, head_dim_v)
  RightElement *query_rows_, *grad_out_rows_;      // (queries, head_dim), (queries, head_dim_v)

 private:
  // Computes QK^T of a tile of few queries. bias_ holds the products until finish_scores(). stage_
  // is overwritten only if keys need padding, and then holds no operand.
  void multiply_few(const TileAt& at, int64_t slot) {
    const SequenceRows queries = query_rows(p_, at.b);
    const int64_t wide = round_up(p_.head_dim, kLane), stride = p_.key_strides[2];
    const T* const query = at_head<T>(p_.query, p_.query_strides, queries, at.h);
    const T* const key = at_head<T>(p_.key, p_.key_strides, key_rows(p_, at.b),
                                    at.h / (p_.num_heads / p_.num_heads_kv));
    zero(few_rows_, queries.count * wide);
    for (int64_t i = 0; i < queries.count; ++i) {
      const bool alive = lse_[slot * kRows + i] != static_cast<A>(__builtin_inf());
      if (alive) load_row(query + i * p_.query_strides[2], p_.head_dim, few_rows_ + i * wide);
    }
    const auto k = RowProducts<T>::padded(key + at.j * stride, stride, at.n, p_.head_dim, stage_);
    RowProducts<T>::multiply_all(k.rows, k.stride, at.n, wide, few_rows_, wide, queries.count,
                                 bias_, kBlockN, [](int64_t) {});
    zero(scores_, at.n * kRows);
    for (int64_t i = 0; i < queries.count; ++i) {
      for (int64_t t = 0; t < at.n; ++t) scores_[t * kRows + i] = bias_[i * kBlockN + t];
    }
  }

  // Transposes the tile of grad_weights, whose rows are queries, and adds it to grad_scores_.
  void add_grad_weights(const TileAt& at) {
    const int64_t* const strides = bwd_.grad_weights_strides;
    const T* const src = static_cast<const T*>(bwd_.grad_weights) + at.b * strides[0] +
                         at.h * strides[1] + at.i * strides[2] + at.j;
    const int64_t count = min64(kRows, p_.seqlen_q - at.i);
    for (int64_t l = 0; l < count; ++l) {
      load_row(src + l * strides[2], at.n, grad_weights_ + l * kBlockN);
    }
    zero(grad_weights_ + count * kBlockN, (kRows - count) * kBlockN);
    transpose(grad_weights_, kBlockN, kRows, at.n, bias_, kRows);
    const A factor = static_cast<A>(bwd_.grad_weights_factor);
    for (int64_t e = 0; e < at.n * kRows; e += kLane) {
      store(grad_scores_ + e, load(grad_scores_ + e) + load(bias_ + e) * factor);
    }
  }

  // Copies the rows of a query tile to stage_. Fully masked rows become 0, because their contents,
  // even NaN, must not affect the result.
  void stage(const T* head, int64_t stride, int64_t first, int64_t dim) {
    const int64_t wide = P::pad_dim(dim);
    for (int64_t l = 0; l < kRows; ++l) {
      copy_rows(head + (first + l) * stride, stride, alive_[l] ? 1 : 0, dim, stage_ + l * wide, 1,
                wide);
    }
  }

  RightElement *query_,
      *grad_out_;  // (query tiles, head_dim, kRows), (query tiles, head_dim_v, kRows)
  RightElement* scratch_;
  LeftElement* out_;  // (kRows, head_dim_v)
  A* few_rows_;       // (kFewQueries, head_dim)
};

}  // namespace
}  // namespace fused_attn
