// Gradient of the additive bias (float mask), reduced over its broadcast dimensions.
//
// This is a separate pass over the score tiles, for calls in which AttentionBwd computes only the
// other gradients. A task computes one query tile of one (batch, head) of the bias and loops over
// all batches, heads and query tiles that broadcast it. Threads therefore share no accumulators,
// and memory is linear in the sequence length.
#pragma once

#include "cpu/kernels/attention_bwd_tile.h"

namespace fused_attn {
namespace {

template <class T>
class AttentionBwdBias : BwdTile<T> {
  using Base = BwdTile<T>;
  using Base::arena_;
  using Base::bwd_;
  using Base::kRows;
  using Base::p_;
  using typename Base::A;
  using typename Base::P;

 public:
  static bool run(const AttentionBwdParams& bwd) {
    const AttentionParams& p = bwd.fwd;
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t* const strides = p.mask.bias.strides;
    const int64_t query_tiles = div_up(p.seqlen_q, kRows);
    const int64_t bias_batch = strides[0] == 0 ? min64(1, p.batch) : p.batch;
    const int64_t bias_heads = strides[1] == 0 ? min64(1, p.num_heads) : p.num_heads;
    const int64_t bias_query_tiles = strides[2] == 0 ? 1 : query_tiles;
    const int64_t tasks = bias_batch * bias_heads * bias_query_tiles;
    return run_team(p.num_threads, tasks, [&] {
      AttentionBwdBias self(bwd, mask);
      const bool ok = self.allocate();
#pragma omp for schedule(dynamic) nowait
      for (int64_t task = 0; task < tasks; ++task) {
        const int64_t bias_head = task / bias_query_tiles, query_tile = task % bias_query_tiles;
        const int64_t b = bias_head / bias_heads, h = bias_head % bias_heads;
        if (!ok) continue;
        self.begin();
        for (int64_t bb = b; bb < (strides[0] == 0 ? p.batch : b + 1); ++bb) {
          for (int64_t hh = h; hh < (strides[1] == 0 ? p.num_heads : h + 1); ++hh) {
            for (int64_t i = query_tile; i < (strides[2] == 0 ? query_tiles : query_tile + 1);
                 ++i) {
              self.query_tile(bb, hh, i);
            }
          }
        }
        self.write(bias_head, query_tile);
      }
      return ok;
    });
  }

 private:
  using Base::Base;

  bool allocate() {
    return arena_.layout([&] { place(); });
  }

  void place() {
    Base::place_tile(1, false);
    sum_ = arena_.template take<A>(p_.seqlen_k * kRows);
    grads_ = arena_.template take<A>(p_.seqlen_k * kRows);
    weights_ = arena_.template take<A>(p_.seqlen_k * kRows);
  }

  void begin() {
    this->zero(sum_, p_.seqlen_k * kRows);
    for (Wide<A>& sum : row_sum_) sum = 0;
  }

  // Accumulates dS of one query tile.
  void query_tile(int64_t b, int64_t h, int64_t query_tile) {
    const int64_t h_kv = h / (p_.num_heads / p_.num_heads_kv);
    const SequenceRows keys = key_rows(p_, b);
    const T* const key = at_head<T>(p_.key, p_.key_strides, keys, h_kv);
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv);
    if (query_tile * kRows >= query_rows(p_, b).count) return;
    this->pack_query_tile(b, h, query_tile, 0, false);
    if (p_.mask.bias.strides[3] == 0 && !p_.partial) {
      // A bias that is broadcast over keys only shifts lse. Its gradient is rowsum(dS) = dlse.
      for (int64_t l = 0; l < kRows; ++l) row_sum_[l] += this->grad_lse_[l];
      return;
    }
    this->zero(grads_, p_.seqlen_k * kRows);
    this->zero(weights_, p_.seqlen_k * kRows);
    for (int64_t j = 0; j < keys.count; j += kBlockN) {
      const TileAt at{b, h, query_tile * kRows, j, min64(kBlockN, keys.count - j)};
      const Tile kind = this->mask_.classify(b, h, at.i, j, j + at.n);
      if (kind == Tile::kSkip) continue;
      const int64_t stride = p_.key_strides[2], stride_v = p_.value_strides[2];
      const auto k = P::rows(key + j * stride, stride, at.n, p_.head_dim, this->stage_, this->key_);
      const auto v =
          P::rows(value + j * stride_v, stride_v, at.n, p_.head_dim_v, this->stage_, this->value_);
      const auto use = [&](int64_t t, const auto& weight, const auto&, const auto& grad) {
        for (int r = 0; r < (t + 1 < at.n ? 2 : 1) && t < at.n; ++r) {
          for (int x = 0; x < 2; ++x) {
            const int64_t e = (j + t + r) * kRows + x * kLanes<A>;
            store(weights_ + e, weight[r][x]);
            store(grads_ + e, grad[r][x]);
          }
        }
      };
      this->tile_gradients(kind, at, 0, k, v, use);
    }
    p_.partial || sizeof(T) == sizeof(A) ? add() : add_consistent();
  }

  // Accumulates dS of the query tile. In a partial result, a row of dS need not add up to dlse.
  void add() {
    for (int64_t e = 0; e < p_.seqlen_k * kRows; ++e) {
      sum_[e] += grads_[e];
      row_sum_[e % kRows] += grads_[e];
    }
  }

  // Accumulates dS of the query tile, corrected for the rounding error of delta. delta is computed
  // from out, whose weights were rounded, so dS contains P times the error of delta. Since
  // rowsum(dS) is dlse in exact arithmetic, the error is (rowsum(dS) - dlse) / rowsum(P).
  void add_consistent() {
    for (int v = 0; v < 2; ++v) {
      const int64_t first = v * kLanes<A>, end = p_.seqlen_k * kRows;
      Vec<A> excess = -load(this->grad_lse_ + first), total{};
      for (int64_t e = first; e < end; e += kRows) {
        excess += load(grads_ + e);
        total += load(weights_ + e);
      }
      const Vec<A> error = total == 0 ? Vec<A>{} : excess / total;
      for (int64_t e = first; e < end; e += kRows) {
        store(sum_ + e, load(sum_ + e) + (load(grads_ + e) - load(weights_ + e) * error));
      }
    }
  }

  // Writes an accumulated query tile to grad_bias, reduced over broadcast rows or columns.
  void write(int64_t bias_head, int64_t query_tile) {
    const int64_t* const strides = p_.mask.bias.strides;
    const int64_t columns = strides[3] == 0 ? 1 : p_.seqlen_k;
    const int64_t bias_rows = strides[2] == 0 ? 1 : p_.seqlen_q;
    const int64_t i = query_tile * kRows;
    const int64_t rows = strides[2] == 0 ? 1 : min64(kRows, p_.seqlen_q - i);
    A* const out = static_cast<A*>(bwd_.grad_bias) + (bias_head * bias_rows + i) * columns;
    if (strides[3] == 0) {
      Wide<A> all = 0;
      for (int64_t l = 0; l < kRows; ++l) {
        all += row_sum_[l];
        if (strides[2] != 0 && l < rows) out[l] = static_cast<A>(row_sum_[l]);
      }
      if (strides[2] == 0) out[0] = static_cast<A>(all);
      return;
    }
    if (strides[2] != 0) {
      return write_query_tile<A>(sum_, columns, rows, grads_, {out, columns, false}, 0);
    }
    for (int64_t j = 0; j < columns; ++j) {
      Wide<A> all = 0;
      for (int64_t l = 0; l < kRows; ++l) all += sum_[j * kRows + l];
      out[j] = static_cast<A>(all);
    }
  }

  Wide<A> row_sum_[kRows];  // row sums of dS, for a bias that is broadcast over keys
  A* sum_;                  // (seqlen_k, kRows), dS summed over all query tiles of the task
  A* grads_;                // (seqlen_k, kRows), dS of the current query tile
  A* weights_;              // (seqlen_k, kRows), P of the current query tile
};

}  // namespace
}  // namespace fused_attn
