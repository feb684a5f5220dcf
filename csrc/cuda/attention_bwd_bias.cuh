// Gradient of a float mask (bias): dS before multiplication by the derivative of softcap, summed
// over the dimensions in which the mask is broadcast.
//
// A tile of the gradient belongs to one batch entry and one head of the mask. The (batch entry,
// head) pairs of the call that share the tile are divided into num_bias_parts parts. Each block
// sums dS over one part, and the caller adds up the sums of all parts. Recomputing dS costs two
// matmuls per tile, but avoids a workspace of shape (batch, num_heads, seqlen_q, seqlen_k).
#pragma once

#include "cuda/attention_bwd_tile.cuh"
#include "cuda/score_tile.cuh"

namespace fused_attn {

template <class T, int kHeadDim>
struct BiasKernel {
  using Tiles = ScoreTile<T, kHeadDim>;
  static constexpr int kN = Tiles::kN;

  const AttentionBwdArgs& args;
  Tiles tile;
  typename Tiles::Scores total;

  FUSED_ATTN_DEVICE explicit BiasKernel(const AttentionBwdArgs& a)
      : args(a), tile(a.params.fwd, a.gpu) {}

  FUSED_ATTN_DEVICE void run() {
    const AttentionParams& p = args.params.fwd;
    const int64_t bias_batch = args.gpu.bias_sizes[0], bias_heads = args.gpu.bias_sizes[1];
    const int64_t bias_head = tile.rest % (bias_batch * bias_heads);
    const int64_t part = tile.rest / (bias_batch * bias_heads);
    // s enumerates the (batch entry, head) pairs that share the tile. If the mask is not broadcast
    // along a dimension, s does not advance in that dimension.
    const int64_t shared_heads = p.num_heads / bias_heads;
    const int64_t shared = p.batch / bias_batch * shared_heads;
    const int64_t each = (shared + args.gpu.num_bias_parts - 1) / args.gpu.num_bias_parts;
    set_zero<1, kN>(total);
    FUSED_ATTN_ROLLED
    for (int64_t s = part * each; s < min64((part + 1) * each, shared); ++s) {
      add(sequence_of(p, static_cast<int>(bias_head / bias_heads + s / shared_heads),
                      static_cast<int>(bias_head % bias_heads + s % shared_heads)));
    }
    store();
  }

 private:
  // Adds dS of one head of one sequence to `total`.
  FUSED_ATTN_DEVICE void add(const Sequence& sequence) {
    const AttentionBwdParams& bwd = args.params;
    const Tile kind = tile.kind(sequence);
    if (kind == Tile::kSkip) return;
    // No bounds check is needed: the statistics are padded to a multiple of kStatisticsTile rows,
    // which is a multiple of kTile.
    const RowStatistics stats = row_statistics(bwd.fwd, args.gpu, sequence.b, sequence.h);
    LogSum log_sums[2];
    float delta[2];
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int at = tile.i_begin + Tiles::row(r);
      log_sums[r] = {stats.lse[at], stats.factor[at]};
      delta[r] = stats.delta[at];
    }
    typename Tiles::Scores weights, grads;
    const Visible<1> visible = tile.products(weights, sequence, kind);
    tile.load(sequence, bwd.grad_out, bwd.grad_out_strides, bwd.fwd.value, bwd.fwd.value_strides,
              bwd.fwd.head_dim_v);
    tile.weigh(weights, visible, sequence, kind, log_sums);
    tile.multiply(grads);
    uint32_t keep_mask = ~0u;
    if (bwd.fwd.dropout_p > 0.0) {
      keep_mask = kept_weights<false, kN, 1>(dropout_of(bwd.fwd, args.gpu, sequence.b),
                                             tile.rows(sequence), 0, tile.first_column());
    }
    for_each(total, [&](float& sum, int m, int n, int e) {
      const float used =
          keep_mask >> (4 * n + e) & 1 ? grads[m][n][e] * args.gpu.dropout_scale : 0.0f;
      const float weight = weights[m][n][e], grad = weight * (used - delta[e / 2]);
      // Skip masked elements: their gradient may be NaN, and 0 * NaN is NaN.
      sum += weight == 0.0f ? 0.0f : grad;
    });
  }

  // Stores the tile of the gradient, summed over rows if the mask is broadcast over queries, and
  // over columns if it is broadcast over keys.
  FUSED_ATTN_DEVICE void store() {
    const AttentionParams& p = args.params.fwd;
    const bool per_row = args.gpu.bias_sizes[2] > 1, per_column = args.gpu.bias_sizes[3] > 1;
    const int64_t num_rows = per_row ? p.seqlen_q : count_tiles(p.seqlen_q, Tiles::kTile);
    const int64_t num_columns = per_column ? p.seqlen_k : count_tiles(p.seqlen_k, Tiles::kTile);
    const int64_t first_row = per_row ? tile.i_begin : tile.m;
    const int64_t first_column = per_column ? tile.j_begin : tile.n;
    float* const target =
        args.gpu.grad_bias_parts + (tile.rest * num_rows + first_row) * num_columns + first_column;
    const int64_t rows = num_rows - first_row, columns = num_columns - first_column;
    if (per_row && per_column) {
      store_tile(target, rows, columns);
    } else {
      store_sums(per_row, per_column);
      const int shares = per_row      ? Tiles::Sizes::kColumnWarps
                         : per_column ? Tiles::Sizes::kRowWarps
                                      : Tiles::Sizes::kWarps;
      const int64_t count = per_row ? rows : per_column ? columns : 1;
      sync_block();
      for (int i = thread_id(); i < min64(count, Tiles::kTile); i += Tiles::kThreads) {
        float sum = 0.0f;
        for (int share = 0; share < shares; ++share) sum += load_shared<float>(sum_at(share, i));
        target[per_row ? i * num_columns : i] = sum;
      }
    }
  }

  FUSED_ATTN_DEVICE void store_tile(float* target, int64_t rows, int64_t columns) const {
    const int64_t stride = args.params.fwd.seqlen_k;
    FUSED_ATTN_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int row = Tiles::row(e / 2), column = Tiles::column(n, e);
        if (row < rows && column < columns) target[row * stride + column] = total[0][n][e];
      }
    }
  }

  // Sums `total` over the warp's columns, its rows, or both, and stores the result to shared
  // memory.
  FUSED_ATTN_DEVICE void store_sums(bool per_row, bool per_column) const {
    sync_block();  // the sums overwrite the tiles
    if (per_row) {
      FUSED_ATTN_UNROLL
      for (int r = 0; r < 2; ++r) {
        float sum = 0.0f;
        FUSED_ATTN_UNROLL
        for (int n = 0; n < kN / 8; ++n) sum += total[0][n][2 * r] + total[0][n][2 * r + 1];
        sum = add_lanes(sum, 1, 4);
        const int share = Tiles::warp_column() / kN;
        if (lane_id() % 4 == 0) store_shared(sum_at(share, Tiles::row(r)), sum);
      }
      return;
    }
    float all = 0.0f;
    FUSED_ATTN_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float sum = add_lanes(total[0][n][e] + total[0][n][e + 2], 4, 32);
        all += sum;
        const int share = Tiles::warp_row() / 16;
        if (per_column && lane_id() < 4) store_shared(sum_at(share, Tiles::column(n, e)), sum);
      }
    }
    all = add_lanes(all, 1, 4);
    if (!per_column && lane_id() == 0) store_shared(sum_at(warp_id(), 0), all);
  }

  // Returns the sum of `value` over all lanes whose ids differ only in the bits first, 2 * first,
  // ..., end / 2. first and end are powers of two.
  static FUSED_ATTN_DEVICE float add_lanes(float value, int first, int end) {
    FUSED_ATTN_UNROLL
    for (int lanes = first; lanes < end; lanes *= 2) value += shuffle_xor(value, lanes);
    return value;
  }

  // Returns the shared-memory address of partial sum i of share `share`. Warps with different
  // shares cover different rows or columns of the tile; store() adds their partial sums.
  static FUSED_ATTN_DEVICE uint32_t sum_at(int share, int i) {
    return (share * Tiles::kTile + i) * sizeof(float);
  }
};

template <class T, int kHeadDim>
FUSED_ATTN_KERNEL((ScoreSizes<sizeof(T)>::kThreads), (ScoreSizes<sizeof(T)>::kBlocks))
attention_bwd_bias_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  BiasKernel<T, kHeadDim>(args).run();
}

template <int kHeadDim>
void run_attention_bwd_bias(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_element(p.fwd.dtype, [&](auto element) {
    using T = decltype(element);
    using Tiles = ScoreTile<T, kHeadDim>;
    const int64_t owned = gpu.bias_sizes[0] * gpu.bias_sizes[1];
    launch("attention_bwd_bias_kernel", attention_bwd_bias_kernel<T, kHeadDim>,
           Tiles::blocks(p.fwd, owned * gpu.num_bias_parts), Tiles::kThreads, Tiles::kBytes,
           AttentionBwdArgs{p, gpu}, stream_of(gpu));
  });
}

}  // namespace fused_attn
