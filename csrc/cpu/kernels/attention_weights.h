// Attention weights output: recomputes the weights from query, key and lse, tile by tile as in the
// backward, and optionally averages them over the heads.
//
// A task covers a few query tiles of one head, or of all heads when averaging. The average of a
// tile is accumulated in L2, so the weights of individual heads are never materialized.
#pragma once

#include "cpu/kernels/attention_bwd_tile.h"

namespace fused_attn {
namespace {

// Base class of the kernels that recompute attention weights.
template <class T>
class WeightTiles : protected BwdTile<T> {
 protected:
  using Base = BwdTile<T>;
  using Base::arena_;
  using Base::kLane;
  using Base::kRows;
  using Base::p_;
  using typename Base::A;
  using typename Base::P;

  // Query tiles per task. They share each packed KV block.
  static constexpr int64_t kQueryTiles = 4;

  // Runs self.task(b, h, first query tile, number of query tiles) for every task on a team of
  // threads. Before each call, packs these query tiles of heads [h, h + heads). The x-th query tile
  // of head h + g is packed into slot g * kQueryTiles + x. Returns false if out of memory.
  template <class Self, class... Args>
  static bool run_tasks(const AttentionBwdParams& bwd, int64_t heads, const Args&... args) {
    const AttentionParams& p = bwd.fwd;
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t query_tiles = div_up(p.seqlen_q, kRows), parts = div_up(query_tiles, kQueryTiles);
    const int64_t tasks = p.batch * p.num_heads / heads * parts;
    return run_team(p.num_threads, tasks, [&] {
      Self self(bwd, mask, args...);
      const bool ok = self.allocate(heads);
#pragma omp for schedule(dynamic) nowait
      for (int64_t task = 0; task < tasks; ++task) {
        if (!ok) continue;
        const int64_t head = task / parts * heads, first = task % parts * kQueryTiles;
        const int64_t b = head / p.num_heads, h = head % p.num_heads;
        const int64_t count = min64(kQueryTiles, query_tiles - first);
        for (int64_t g = 0; g < heads; ++g) {
          for (int64_t x = 0; x < count; ++x) {
            self.pack_query_tile(b, h + g, first + x, g * kQueryTiles + x, false);
          }
        }
        self.task(b, h, first, count);
      }
      return ok;
    });
  }

  WeightTiles(const AttentionBwdParams& bwd, const MaskView<A>& mask) : Base(bwd, mask) {}

  bool allocate(int64_t heads) {
    return arena_.layout([&] { place(heads); });
  }

  // Calls tile_gradients() for KV block [j, j + n) and query tiles [first, first + count) of a
  // head, which are packed from `slot` on. Skips fully masked tiles, and packs the block only if a
  // tile is visible.
  //
  // use: receives the index of the query tile, relative to `first`, as an additional first
  // argument.
  template <class Use>
  void head_tiles(int64_t b, int64_t h, int64_t first, int64_t count, int64_t j, int64_t n,
                  int64_t slot, const Use& use) {
    const int64_t h_kv = h / (p_.num_heads / p_.num_heads_kv), stride = p_.key_strides[2];
    const T* const key = at_head<T>(p_.key, p_.key_strides, key_rows(p_, b), h_kv) + j * stride;
    typename P::Left k{};
    bool packed = false;
    for (int64_t x = 0; x < count; ++x) {
      const TileAt at{b, h, (first + x) * kRows, j, n};
      const Tile kind = this->mask_.classify(b, h, at.i, j, j + n);
      if (kind == Tile::kSkip) continue;
      if (!packed) k = P::rows(key, stride, n, p_.head_dim, this->stage_, this->key_);
      packed = true;
      this->tile_gradients(kind, at, slot + x, k, typename P::Left{},
                           [&](int64_t t, const auto& weight, const auto& kept, const auto& grad) {
                             use(x, t, weight, kept, grad);
                           });
    }
  }

  A* sums_;     // (kQueryTiles, kBlockN, kRows)
  A* scratch_;  // (kRows, kBlockN)

 private:
  void place(int64_t heads) {
    Base::place_tile(heads * kQueryTiles, false);
    sums_ = arena_.template take<A>(kQueryTiles * kBlockN * kRows);
    scratch_ = arena_.template take<A>(kRows * kBlockN);
  }
};

// Writes the attention weights after dropout, per head or averaged over the heads.
template <class T>
class AttentionWeights : WeightTiles<T> {
  using Base = WeightTiles<T>;
  using Base::kLane;
  using Base::kQueryTiles;
  using Base::kRows;
  using Base::p_;
  using Base::sums_;
  using typename Base::A;
  friend Base;

 public:
  static bool run(const AttentionWeightsParams& params) {
    AttentionBwdParams bwd{};
    bwd.fwd = params.fwd;
    const int64_t heads = params.average ? max64(params.fwd.num_heads, 1) : 1;
    return Base::template run_tasks<AttentionWeights>(bwd, heads, heads,
                                                      static_cast<T*>(params.weights));
  }

 private:
  AttentionWeights(const AttentionBwdParams& bwd, const MaskView<A>& mask, int64_t heads,
                   T* weights)
      : Base(bwd, mask), heads_(heads), weights_(weights) {}

  void task(int64_t b, int64_t h, int64_t first, int64_t count) {
    T* const out = weights_ + (b * p_.num_heads + h) / heads_ * p_.seqlen_q * p_.seqlen_k;
    for (int64_t j = 0; j < p_.seqlen_k; j += kBlockN) {
      const int64_t n = min64(kBlockN, p_.seqlen_k - j);
      bool visible[kQueryTiles] = {};
      this->zero(sums_, count * kBlockN * kRows);
      for (int64_t g = 0; g < heads_; ++g) {
        this->head_tiles(b, h + g, first, count, j, n, g * kQueryTiles,
                         [&](int64_t x, int64_t t, const auto&, const auto& kept, const auto&) {
                           visible[x] = true;
                           for (int r = 0; r < 2; ++r) {
                             for (int v = 0; v < 2; ++v) {
                               A* const at = sums_ + (x * kBlockN + t + r) * kRows + v * kLane;
                               store(at, load(at) + kept[r][v]);
                             }
                           }
                         });
      }
      for (int64_t x = 0; x < count; ++x) {
        const int64_t i = (first + x) * kRows;
        write(x, visible[x], n, i, out + i * p_.seqlen_k + j);
      }
    }
  }

  // Divides an accumulated tile by the number of heads and writes it. Writes 0 if the tile is fully
  // masked in all heads.
  void write(int64_t x, bool visible, int64_t n, int64_t i, T* out) {
    const int64_t rows = min64(kRows, p_.seqlen_q - i);
    if (!visible) {
      for (int64_t l = 0; l < rows; ++l) memset(out + l * p_.seqlen_k, 0, n * sizeof(T));
      return;
    }
    A* const sum = sums_ + x * kBlockN * kRows;
    for (int64_t e = 0; heads_ > 1 && e < n * kRows; e += kLane) {
      store(sum + e, load(sum + e) / static_cast<A>(heads_));
    }
    write_query_tile<T>(sum, n, rows, this->scratch_, {out, p_.seqlen_k, false}, 0);
  }

  const int64_t heads_;
  T* const weights_;
};

// Computes the row sums of the weights times their gradient, which the backward adds to delta.
//
// The row sums are divided by the sum of the recomputed weights, which differs from 1 only by
// rounding. The weight gradient and the row sum then cancel in rows where one key has all the
// weight.
template <class T>
class WeightRowSums : WeightTiles<T> {
  using Base = WeightTiles<T>;
  using Base::kLane;
  using Base::kQueryTiles;
  using Base::kRows;
  using Base::p_;
  using typename Base::A;
  friend Base;

 public:
  static bool run(const AttentionBwdParams& params) {
    // With dlse, row_sums and values removed, dS is c P Z times the gradient of the weights, which
    // is the term to sum.
    AttentionBwdParams bwd = params;
    bwd.grad_lse = nullptr;
    bwd.row_sums = nullptr;
    bwd.fwd.head_dim_v = 0;
    return Base::template run_tasks<WeightRowSums>(bwd, 1, static_cast<A*>(params.row_sums));
  }

 private:
  WeightRowSums(const AttentionBwdParams& bwd, const MaskView<A>& mask, A* row_sums)
      : Base(bwd, mask), row_sums_(row_sums) {}

  void task(int64_t b, int64_t h, int64_t first, int64_t count) {
    Vec<A> totals[kQueryTiles][2] = {}, weights[kQueryTiles][2] = {};
    for (int64_t j = 0; j < p_.seqlen_k; j += kBlockN) {
      const int64_t n = min64(kBlockN, p_.seqlen_k - j);
      Vec<A> sums[kQueryTiles][2] = {};
      this->head_tiles(b, h, first, count, j, n, 0,
                       [&](int64_t x, int64_t, const auto& weight, const auto&, const auto& grad) {
                         for (int v = 0; v < 2; ++v) {
                           sums[x][v] += grad[0][v] + grad[1][v];
                           weights[x][v] += weight[0][v] + weight[1][v];
                         }
                       });
      for (int64_t x = 0; x < count; ++x) {
        for (int v = 0; v < 2; ++v) totals[x][v] += sums[x][v];
      }
    }
    A* const out = row_sums_ + lse_begin(p_, b, h);
    for (int64_t x = 0; x < count; ++x) {
      const int64_t i = (first + x) * kRows;
      for (int64_t l = 0; l < min64(kRows, p_.seqlen_q - i); ++l) {
        const A weight = weights[x][l / kLane][l % kLane];
        out[i + l] = weight == 0 ? A(0) : totals[x][l / kLane][l % kLane] / weight;
      }
    }
  }

  A* const row_sums_;
};

}  // namespace
}  // namespace fused_attn
