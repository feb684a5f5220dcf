// Attention forward: online softmax over blocks of keys, never a matrix of scores.
//
// Sources: Milakov and Gimelshein 2018 (online normalizer), Dao 2023 (FlashAttention-2).
#pragma once

#include "cpu/attention_tile.h"

namespace fused_attn {
namespace {

// Panels that share a block of keys, which is then converted once and stays in cache. With 8, the
// queries and outputs of 256 queries at head_dim 64 take 128 KiB of L2; more gains little.
constexpr int64_t kMaxPanels = 8;

template <class T>
class AttentionFwd {
  using A = Acc<T>;
  static constexpr int64_t kRows = kPanel<A>;

 public:
  static bool run(const AttentionParams& p) {
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t num_panels = div_up(p.seqlen_q, kRows), heads = p.batch * p.num_heads;
    // Fewer panels a task where there are few tasks; each panel's result is the same either way.
    int64_t per_task = kMaxPanels;
    while (per_task > 1 && heads * div_up(num_panels, per_task) < 4 * p.num_threads) per_task /= 2;
    const int64_t per_head = div_up(num_panels, per_task), tasks = heads * per_head;
    bool ok = true;
#pragma omp parallel num_threads(clamp_threads(p.num_threads, tasks)) reduction(&& : ok)
    {
      AttentionFwd self(p, mask);
      ok = self.allocate(per_task);
      // Last panels first: under a causal mask they are the longest.
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < tasks; ++task) {
        const int64_t head = task / per_head, group = per_head - 1 - task % per_head;
        const int64_t first = group * per_task;
        const int64_t count = min64(per_task, num_panels - first);
        if (ok) self.head_panels(head / p.num_heads, head % p.num_heads, first, count);
      }
    }
    return ok;
  }

 private:
  struct Panel {
    A* query;    // (head_dim, panel), times softmax_scale
    A* out;      // (head_dim_v, panel), not divided by sum
    A* maximum;  // (panel)
    A* sum;      // (panel)
  };

  AttentionFwd(const AttentionParams& p, const MaskView<A>& mask) : p_(p), mask_(mask) {}

  void place(int64_t panels) {
    for (int64_t i = 0; i < panels; ++i) {
      panels_[i] = {arena_.template take<A>(p_.head_dim * kRows),
                    arena_.template take<A>(p_.head_dim_v * kRows), arena_.template take<A>(kRows),
                    arena_.template take<A>(kRows)};
    }
    scores_ = arena_.template take<A>(kBlockN * kRows);
    stage_ = arena_.template take<A>(kBlockN * kRows);
    row_ = arena_.template take<A>(max64(p_.head_dim, p_.head_dim_v));
    if (sizeof(T) != sizeof(A)) {
      key_ = arena_.template take<A>(kBlockN * p_.head_dim);
      value_ = arena_.template take<A>(kBlockN * p_.head_dim_v);
    }
  }

  bool allocate(int64_t panels) {
    place(panels);
    if (!arena_.allocate()) return false;
    place(panels);
    return true;
  }

  void head_panels(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t h_kv = h / (p_.num_heads / p_.num_heads_kv);
    const T* const query = at_head<T>(p_.query, p_.query_strides, b, h);
    const T* const key = at_head<T>(p_.key, p_.key_strides, b, h_kv);
    const T* const value = at_head<T>(p_.value, p_.value_strides, b, h_kv);
    for (int64_t i = 0; i < count; ++i) begin_panel(query, (first + i) * kRows, panels_[i]);
    for (int64_t j = 0; j < p_.seqlen_k; j += kBlockN) {
      const int64_t n = min64(kBlockN, p_.seqlen_k - j);
      Tile kinds[kMaxPanels];
      bool any = false;
      for (int64_t i = 0; i < count; ++i) {
        kinds[i] = mask_.classify(b, h, (first + i) * kRows, j, j + n);
        any = any || kinds[i] != Tile::kSkip;
      }
      if (!any) continue;
      const Rows<A> k = load_block(key, p_.key_strides[2], j, n, p_.head_dim, key_);
      const Rows<A> v = load_block(value, p_.value_strides[2], j, n, p_.head_dim_v, value_);
      for (int64_t i = 0; i < count; ++i) {
        const TileAt at{b, h, (first + i) * kRows, j, n};
        if (kinds[i] == Tile::kFull) tile<Tile::kFull>(at, panels_[i], k, v);
        if (kinds[i] == Tile::kPartial) tile<Tile::kPartial>(at, panels_[i], k, v);
      }
    }
    for (int64_t i = 0; i < count; ++i) end_panel(b, h, (first + i) * kRows, panels_[i]);
  }

  void begin_panel(const T* query, int64_t i, const Panel& panel) {
    pack_transposed(query, p_.query_strides[2], i, min64(kRows, p_.seqlen_q - i), p_.head_dim,
                    static_cast<A>(p_.softmax_scale), row_, panel.query);
    for (int64_t e = 0; e < p_.head_dim_v * kRows; ++e) panel.out[e] = 0;
    for (int64_t l = 0; l < kRows; ++l) {
      panel.maximum[l] = -static_cast<A>(__builtin_inf());
      panel.sum[l] = 0;
    }
  }

  template <Tile kKind>
  void tile(const TileAt& at, const Panel& panel, const Rows<A>& key, const Rows<A>& value) {
    score_tile<A>(p_, mask_, kKind, at, panel.query, key, scores_, nullptr, stage_);
    alignas(64) A alpha[kRows];
    uint8_t seen[kBlockN];
    softmax<kKind>(at.n, panel, alpha, seen);
    if (p_.dropout_p > 0) {
      dropout_tile(p_, at, stage_);
      for (int64_t e = 0; e < at.n * kRows; e += kLanes<A>) {
        store(scores_ + e, load(scores_ + e) * load(stage_ + e));
      }
    }
    if (kKind == Tile::kFull) {
      gemm<Layout::kColumnMajor, Into::kScale>(p_.head_dim_v, at.n, value.data, value.stride,
                                               scores_, kRows, panel.out, kRows, alpha);
      return;
    }
    // Where nobody sees any key of the tile the maximum stays, and there is nothing to rescale.
    bool rescaled = false;
    for_each_run(seen, at.n, [&](int64_t begin, int64_t end) {
      const A* const v = value.data + begin * value.stride;
      const A* const weights = scores_ + begin * kRows;
      if (!rescaled) {
        gemm<Layout::kColumnMajor, Into::kScale>(p_.head_dim_v, end - begin, v, value.stride,
                                                 weights, kRows, panel.out, kRows, alpha);
      } else {
        gemm<Layout::kColumnMajor, Into::kAdd>(p_.head_dim_v, end - begin, v, value.stride, weights,
                                               kRows, panel.out, kRows);
      }
      rescaled = true;
    });
  }

  // Scores to weights exp(score - maximum), maximum and sum brought up to date; alpha is what
  // earlier results are multiplied by, seen flags the keys with a weight.
  template <Tile kKind>
  void softmax(int64_t n, const Panel& panel, A* alpha, uint8_t* seen) {
    constexpr int kLane = kLanes<A>;
    const Vec<A> old[2] = {load(panel.maximum), load(panel.maximum + kLane)};
    Vec<A> maximum[2] = {old[0], old[1]};
    for (int64_t t = 0; t < n; ++t) {
      for (int v = 0; v < 2; ++v) {
        maximum[v] = max<A>(maximum[v], load(scores_ + t * kRows + v * kLane));
      }
    }
    Vec<A> shift[2], sum[4][2] = {};  // four partial sums round half as much as one
    for (int v = 0; v < 2; ++v) {
      // -inf - -inf would be NaN: rows that have seen nothing yet are shifted by 0.
      shift[v] = maximum[v] == -static_cast<A>(__builtin_inf()) ? Vec<A>{} : maximum[v];
      store(alpha + v * kLane, exp_nonpositive<A>(old[v] - shift[v]));
      store(panel.maximum + v * kLane, maximum[v]);
    }
    for (int64_t t = 0; t < n; ++t) {
      Vec<A> weight[2];
      for (int v = 0; v < 2; ++v) {
        A* const at = scores_ + t * kRows + v * kLane;
        weight[v] = exp_nonpositive<A>(load(at) - shift[v]);
        sum[t % 4][v] += weight[v];
        store(at, weight[v]);
      }
      if (kKind == Tile::kPartial) seen[t] = any((weight[0] != 0) | (weight[1] != 0));
    }
    for (int v = 0; v < 2; ++v) {
      A* const total = panel.sum + v * kLane;
      const Vec<A> block = (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]);
      store(total, load(total) * load(alpha + v * kLane) + block);
    }
  }

  void end_panel(int64_t b, int64_t h, int64_t i, const Panel& panel) {
    const int64_t rows = min64(kRows, p_.seqlen_q - i);
    const A kept = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int v = 0; v < 2; ++v) {
      const Vec<A> sum = load(panel.sum + v * kLanes<A>);
      const Vec<A> divisor = sum == 0 ? broadcast<A>(1) : sum;  // rows that saw nothing stay 0
      for (int64_t d = 0; d < p_.head_dim_v; ++d) {
        A* const at = panel.out + d * kRows + v * kLanes<A>;
        store(at, load(at) / divisor * kept);
      }
    }
    T* const out = const_cast<T*>(at_head<T>(p_.out, p_.out_strides, b, h));
    unpack_transposed<T>(panel.out, p_.head_dim_v, rows, A(1), row_, out + i * p_.out_strides[2],
                         p_.out_strides[2]);
    const int64_t at = (b * p_.num_heads + h) * p_.seqlen_q + i;
    A *const lse = static_cast<A*>(p_.lse) + at, *const low = static_cast<A*>(p_.lse_low) + at;
    for (int64_t l = 0; l < rows; ++l) {
      if (panel.sum[l] == 0) {
        lse[l] = -static_cast<A>(__builtin_inf());
        low[l] = 0;
      } else {
        log_sum_exp(panel.maximum[l], panel.sum[l], &lse[l], &low[l]);
      }
    }
  }

  const AttentionParams& p_;
  const MaskView<A>& mask_;
  Arena arena_;
  Panel panels_[kMaxPanels];
  A* scores_;  // (kBlockN, panel)
  A* stage_;   // (kBlockN, panel)
  A* row_;
  A* key_ = nullptr;    // (kBlockN, head_dim)
  A* value_ = nullptr;  // (kBlockN, head_dim_v)
};

}  // namespace
}  // namespace fused_attn
