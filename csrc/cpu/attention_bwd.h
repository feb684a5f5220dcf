// Attention backward: scores are computed anew, tile by tile, from query, key and lse.
//
// With P = exp(S - lse), Z what dropout keeps (1 or 0), c = 1 / (1 - dropout_p) and
// delta = rowsum(dO * O) / c:
//   dV = c (P Z)^T dO,  dP = dO V^T,  dS = P (c (Z dP - delta) + dlse),  dK = scale dS^T Q,
//   dQ = scale dS K.
// (Dao et al. 2022, FlashAttention, appendix B.4; delta as in FlashAttention-2, section 3.1.)
#pragma once

#include "cpu/attention_tile.h"

namespace fused_attn {
namespace {

// What the backward needs of one head's queries, in both layouts; padded columns are 0.
template <class A>
struct BwdPanels {
  A* query;          // (panels, head_dim, panel), times softmax_scale
  A* query_rows;     // (panels, panel, padded head_dim), times softmax_scale
  A* grad_out;       // (panels, head_dim_v, panel)
  A* grad_out_rows;  // (panels, panel, padded head_dim_v)
  A* lse;            // (panels, panel); +inf where a row sees nothing, so that P is 0
  A* lse_low;        // (panels, panel); what rounding took from lse
  // (panels, panel); rounded as an element of dO V^T: where one key has all the weight the two then
  // cancel, though each is large. So dlse is not folded in, and c is left out of both.
  A* delta;
  A* grad_lse;  // (panels, panel)
};

template <class T>
class BwdTile {
 protected:
  using A = Acc<T>;
  static constexpr int64_t kRows = kPanel<A>;

  BwdTile(const AttentionBwdParams& p, const MaskView<A>& mask)
      : bwd_(p),
        p_(p.fwd),
        mask_(mask),
        padded_(div_up(p_.head_dim, kRows) * kRows),
        padded_v_(div_up(p_.head_dim_v, kRows) * kRows) {}

  void place_tile(int64_t panels) {
    panels_.query = arena_.template take<A>(panels * p_.head_dim * kRows);
    panels_.query_rows = arena_.template take<A>(panels * kRows * padded_);
    panels_.grad_out = arena_.template take<A>(panels * p_.head_dim_v * kRows);
    panels_.grad_out_rows = arena_.template take<A>(panels * kRows * padded_v_);
    panels_.lse = arena_.template take<A>(panels * kRows);
    panels_.lse_low = arena_.template take<A>(panels * kRows);
    panels_.delta = arena_.template take<A>(panels * kRows);
    panels_.grad_lse = arena_.template take<A>(panels * kRows);
    scores_ = arena_.template take<A>(kBlockN * kRows);
    grad_scores_ = arena_.template take<A>(kBlockN * kRows);
    stage_ = arena_.template take<A>(kBlockN * kRows);
    cap_slope_ = arena_.template take<A>(kBlockN * kRows);
    row_ = arena_.template take<A>(max64(p_.head_dim, p_.head_dim_v));
    out_row_ = arena_.template take<A>(p_.head_dim_v);
    if (sizeof(T) != sizeof(A)) {
      key_ = arena_.template take<A>(kBlockN * p_.head_dim);
      value_ = arena_.template take<A>(kBlockN * p_.head_dim_v);
    }
  }

  // Panel `panel` of head (b, h) into slot `slot`.
  void pack_panel(int64_t b, int64_t h, int64_t panel, int64_t slot) {
    const T* const query = at_head<T>(p_.query, p_.query_strides, b, h);
    const T* const out = at_head<T>(p_.out, p_.out_strides, b, h);
    const T* const grad_out = at_head<T>(bwd_.grad_out, bwd_.grad_out_strides, b, h);
    const int64_t head = (b * p_.num_heads + h) * p_.seqlen_q;
    A* const q = panels_.query + slot * p_.head_dim * kRows;
    A* const q_rows = panels_.query_rows + slot * kRows * padded_;
    A* const g = panels_.grad_out + slot * p_.head_dim_v * kRows;
    A* const g_rows = panels_.grad_out_rows + slot * kRows * padded_v_;
    for (int64_t l = 0; l < kRows; ++l) {
      const int64_t i = panel * kRows + l;
      const A infinity = static_cast<A>(__builtin_inf());
      const A lse = i < p_.seqlen_q ? static_cast<const A*>(p_.lse)[head + i] : -infinity;
      // What stands in rows that see nothing must not matter, NaN included: they are 0.
      const bool alive = lse != -infinity;
      zero(row_, p_.head_dim);
      if (alive) load_row(query + i * p_.query_strides[2], p_.head_dim, row_);
      put_row(row_, p_.head_dim, padded_, static_cast<A>(p_.softmax_scale), l, q, q_rows);
      zero(row_, p_.head_dim_v);
      A delta = 0;
      if (alive) {
        load_row(grad_out + i * bwd_.grad_out_strides[2], p_.head_dim_v, row_);
        load_row(out + i * p_.out_strides[2], p_.head_dim_v, out_row_);
        if (p_.dropout_p > 0) divide(out_row_, p_.head_dim_v, dropout_scale(p_.dropout_p));
        delta = dot_as_gemm<kShortSumSteps>(p_.head_dim_v, out_row_, row_);
      }
      put_row(row_, p_.head_dim_v, padded_v_, A(1), l, g, g_rows);
      panels_.lse[slot * kRows + l] = alive ? lse : infinity;
      panels_.lse_low[slot * kRows + l] =
          alive ? static_cast<const A*>(p_.lse_low)[head + i] : A(0);
      panels_.delta[slot * kRows + l] = delta;
      const bool has_grad_lse = alive && bwd_.grad_lse != nullptr;
      panels_.grad_lse[slot * kRows + l] =
          has_grad_lse ? static_cast<const A*>(bwd_.grad_lse)[head + i] : A(0);
    }
  }

  // Weights after dropout into scores_ and the gradient of the scores, before the derivative of
  // softcap, into grad_scores_; both (n, panel). cap_slope_ has that derivative. Where weights is
  // not null it gets P.
  void tile_gradients(Tile kind, const TileAt& at, int64_t slot, const Rows<A>& key,
                      const Rows<A>& value, A* weights = nullptr) {
    score_tile<A>(p_, mask_, kind, at, panels_.query + slot * p_.head_dim * kRows, key, scores_,
                  cap_slope_, stage_);
    gemm<Layout::kRowMajor, Into::kStore, kShortSumSteps>(
        at.n, p_.head_dim_v, value.data, value.stride,
        panels_.grad_out + slot * p_.head_dim_v * kRows, kRows, grad_scores_, kRows);
    const bool dropout = p_.dropout_p > 0;
    if (dropout) dropout_tile(p_, at, stage_);
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int v = 0; v < 2; ++v) {
      const Vec<A> lse = load(panels_.lse + slot * kRows + v * kLanes<A>);
      const Vec<A> low = load(panels_.lse_low + slot * kRows + v * kLanes<A>);
      const Vec<A> delta = load(panels_.delta + slot * kRows + v * kLanes<A>);
      const Vec<A> grad_lse = load(panels_.grad_lse + slot * kRows + v * kLanes<A>);
      for (int64_t e = v * kLanes<A>; e < at.n * kRows; e += kRows) {
        // exp(-low) is 1 - low; taken from the exponent, low would be lost in its rounding.
        const Vec<A> rounded = exp_nonpositive<A>(load(scores_ + e) - lse);
        const Vec<A> weight = rounded - rounded * low;
        Vec<A> kept = weight, grad = load(grad_scores_ + e);
        if (dropout) {
          const Vec<A> keep = load(stage_ + e);
          kept *= keep * scale;
          grad *= keep;
        }
        const Vec<A> grad_score = weight * ((grad - delta) * scale + grad_lse);
        store(scores_ + e, kept);
        if (weights != nullptr) store(weights + e, weight);
        // An invisible key may hold NaN, and 0 * NaN is no 0.
        store(grad_scores_ + e, weight == 0 ? Vec<A>{} : grad_score);
      }
    }
  }

  static void zero(A* data, int64_t count) {
    for (int64_t e = 0; e < count; ++e) data[e] = 0;
  }

  static void divide(A* data, int64_t count, double divisor) {
    for (int64_t e = 0; e < count; ++e) data[e] = divisor == 0 ? A(0) : data[e] / A(divisor);
  }

  const AttentionBwdParams& bwd_;
  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const int64_t padded_, padded_v_;  // columns of the row layouts: whole panels
  Arena arena_;
  BwdPanels<A> panels_;
  A *scores_, *grad_scores_, *stage_, *cap_slope_;  // (kBlockN, panel)
  A *row_, *out_row_;
  A* key_ = nullptr;    // (kBlockN, head_dim)
  A* value_ = nullptr;  // (kBlockN, head_dim_v)

 private:
  static void put_row(const A* row, int64_t dim, int64_t padded, A factor, int64_t l, A* transposed,
                      A* rows) {
    for (int64_t d = 0; d < dim; ++d) {
      const A x = row[d] * factor;
      transposed[d * kRows + l] = x;
      rows[l * padded + d] = x;
    }
    for (int64_t d = dim; d < padded; ++d) rows[l * padded + d] = 0;
  }
};

// Gradients of query, key and value.
//
// A task is a key/value head with all its query heads, so dK and dV are summed up by one thread.
// Few heads are split over the keys as well, into parts that depend on the shape alone, each with a
// dQ of its own that is added up in order: results are the same for any number of threads.
template <class T>
class AttentionBwd : BwdTile<T> {
  using Base = BwdTile<T>;
  using Base::arena_;
  using Base::bwd_;
  using Base::kRows;
  using Base::p_;
  using Base::panels_;
  using typename Base::A;

  static constexpr int64_t kMinTasks = 8;  // splits stop here: each costs a dQ in float

 public:
  static bool run(const AttentionBwdParams& bwd) {
    const AttentionParams& p = bwd.fwd;
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t blocks = div_up(p.seqlen_k, kBlockN), heads = p.batch * p.num_heads_kv;
    const int64_t group = p.num_heads / max64(p.num_heads_kv, 1);
    const int64_t panels = div_up(p.seqlen_q, kRows), part = panels * p.head_dim * kRows;
    int64_t splits = 1;
    if (heads > 0 && heads < kMinTasks) splits = max64(1, min64(blocks, kMinTasks / heads));
    const int64_t per_split = div_up(blocks, splits), tasks = heads * splits;
    Arena parts;  // (heads, group, splits, part)
    A* grad_query = parts.template take<A>(splits > 1 ? tasks * group * part : 0);
    if (!parts.allocate()) return false;
    grad_query = parts.template take<A>(splits > 1 ? tasks * group * part : 0);
    bool ok = true;
#pragma omp parallel num_threads(clamp_threads(p.num_threads, tasks)) reduction(&& : ok)
    {
      AttentionBwd self(bwd, mask);
      ok = self.allocate(panels, min64(per_split * kBlockN, p.seqlen_k), splits == 1);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < tasks; ++task) {
        if (!ok) continue;
        const int64_t head = task / splits, split = task % splits;
        const int64_t begin = min64(split * per_split * kBlockN, p.seqlen_k);
        const int64_t end = min64(begin + per_split * kBlockN, p.seqlen_k);
        A* const own = splits == 1 ? nullptr : grad_query + (head * group * splits + split) * part;
        self.keys(head / p.num_heads_kv, head % p.num_heads_kv, begin, end, own, splits * part);
      }
      if (splits > 1) {
#pragma omp for schedule(static)
        for (int64_t head = 0; head < p.batch * p.num_heads; ++head) {
          if (!ok) continue;
          A* const first = grad_query + head * splits * part;
          for (int64_t s = 1; s < splits; ++s) {
            for (int64_t e = 0; e < part; ++e) first[e] += first[s * part + e];
          }
          self.write_grad_query(head / p.num_heads, head % p.num_heads, first);
        }
      }
    }
    return ok;
  }

 private:
  using Base::Base;

  void place(int64_t panels, int64_t keys, bool own_grad_query) {
    Base::place_tile(panels);
    grad_key_ = arena_.template take<A>(keys * this->padded_);
    grad_value_ = arena_.template take<A>(keys * this->padded_v_);
    grad_query_ = arena_.template take<A>(own_grad_query ? panels * p_.head_dim * kRows : 0);
  }

  bool allocate(int64_t panels, int64_t keys, bool own_grad_query) {
    place(panels, keys, own_grad_query);
    if (!arena_.allocate()) return false;
    place(panels, keys, own_grad_query);
    return true;
  }

  // Keys [begin, end) of a key/value head against all its query heads.
  //
  // parts: dQ of the first query head, the next ones `parts_stride` further on; null: this task has
  // all keys, so its dQ is final.
  void keys(int64_t b, int64_t h_kv, int64_t begin, int64_t end, A* parts, int64_t parts_stride) {
    const int64_t group = p_.num_heads / p_.num_heads_kv;
    const int64_t panels = div_up(p_.seqlen_q, kRows);
    this->zero(grad_key_, (end - begin) * this->padded_);
    this->zero(grad_value_, (end - begin) * this->padded_v_);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t h = h_kv * group + g;
      A* const grad_query = parts == nullptr ? grad_query_ : parts + g * parts_stride;
      this->zero(grad_query, panels * p_.head_dim * kRows);
      for (int64_t panel = 0; panel < panels; ++panel) this->pack_panel(b, h, panel, panel);
      for (int64_t j = begin; j < end; j += kBlockN) block(b, h, h_kv, begin, j, end, grad_query);
      if (parts == nullptr) write_grad_query(b, h, grad_query);
    }
    write_rows(grad_key_, this->padded_, p_.head_dim, begin, end, bwd_.grad_key,
               bwd_.grad_key_strides, b, h_kv);
    write_rows(grad_value_, this->padded_v_, p_.head_dim_v, begin, end, bwd_.grad_value,
               bwd_.grad_value_strides, b, h_kv);
  }

  // The block of keys at j against every panel of a query head.
  void block(int64_t b, int64_t h, int64_t h_kv, int64_t begin, int64_t j, int64_t end,
             A* grad_query) {
    const int64_t n = min64(kBlockN, end - j);
    const T* const key = at_head<T>(p_.key, p_.key_strides, b, h_kv);
    const T* const value = at_head<T>(p_.value, p_.value_strides, b, h_kv);
    Rows<A> k{}, v{};
    for (int64_t panel = 0; panel < div_up(p_.seqlen_q, kRows); ++panel) {
      const TileAt at{b, h, panel * kRows, j, n};
      const Tile kind = this->mask_.classify(b, h, at.i, j, j + n);
      if (kind == Tile::kSkip) continue;
      if (k.data == nullptr) {
        k = load_block(key, p_.key_strides[2], j, n, p_.head_dim, this->key_);
        v = load_block(value, p_.value_strides[2], j, n, p_.head_dim_v, this->value_);
      }
      this->tile_gradients(kind, at, panel, k, v);
      accumulate(kind, n, panel, k, grad_key_ + (j - begin) * this->padded_,
                 grad_value_ + (j - begin) * this->padded_v_,
                 grad_query + panel * p_.head_dim * kRows);
    }
  }

  // One tile's part of the three gradients.
  void accumulate(Tile kind, int64_t n, int64_t panel, const Rows<A>& key, A* grad_key,
                  A* grad_value, A* grad_query) {
    A* const ds = this->grad_scores_;
    if (p_.softcap > 0) {
      for (int64_t e = 0; e < n * kRows; e += kLanes<A>) {
        // Not where dS is 0: an invisible key's derivative may be NaN.
        const Vec<A> grad = load(ds + e);
        store(ds + e, grad == 0 ? grad : grad * load(this->cap_slope_ + e));
      }
    }
    const A* const grad_out = panels_.grad_out_rows + panel * kRows * this->padded_v_;
    for (int64_t d = 0; d < this->padded_v_; d += kRows) {
      gemm<Layout::kRowMajor, Into::kAdd>(n, kRows, this->scores_, kRows, grad_out + d,
                                          this->padded_v_, grad_value + d, this->padded_v_);
    }
    const A* const query = panels_.query_rows + panel * kRows * this->padded_;
    for (int64_t d = 0; d < this->padded_; d += kRows) {
      gemm<Layout::kRowMajor, Into::kAdd>(n, kRows, ds, kRows, query + d, this->padded_,
                                          grad_key + d, this->padded_);
    }
    uint8_t seen[kBlockN];
    for (int64_t t = 0; t < n; ++t) seen[t] = 1;
    if (kind == Tile::kPartial) {
      for (int64_t t = 0; t < n; ++t) {
        const A* const row = ds + t * kRows;
        seen[t] = any((load(row) != 0) | (load(row + kLanes<A>) != 0));
      }
    }
    for_each_run(seen, n, [&](int64_t begin, int64_t end) {
      gemm<Layout::kColumnMajor, Into::kAdd>(p_.head_dim, end - begin,
                                             key.data + begin * key.stride, key.stride,
                                             ds + begin * kRows, kRows, grad_query, kRows);
    });
  }

  void write_grad_query(int64_t b, int64_t h, const A* panels) {
    T* const head = const_cast<T*>(at_head<T>(bwd_.grad_query, bwd_.grad_query_strides, b, h));
    const int64_t stride = bwd_.grad_query_strides[2];
    for (int64_t i = 0; i < p_.seqlen_q; i += kRows) {
      unpack_transposed<T>(panels + i * p_.head_dim, p_.head_dim, min64(kRows, p_.seqlen_q - i),
                           static_cast<A>(p_.softmax_scale), this->row_, head + i * stride, stride);
    }
  }

  static void write_rows(const A* rows, int64_t padded, int64_t dim, int64_t begin, int64_t end,
                         void* out, const int64_t strides[3], int64_t b, int64_t h) {
    T* const head = const_cast<T*>(at_head<T>(out, strides, b, h));
    for (int64_t j = begin; j < end; ++j) {
      store_row(rows + (j - begin) * padded, dim, head + j * strides[2]);
    }
  }

  A *grad_key_, *grad_value_;  // (keys of a split, padded head_dim), (., padded head_dim_v)
  A* grad_query_;              // (panels, head_dim, panel), without softmax_scale
};

}  // namespace
}  // namespace fused_attn
