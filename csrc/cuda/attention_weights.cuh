// Attention weights as an output. A pass after the forward computes them from query, key and lse.
//
// Each block computes one tile of the weights. If the average over heads is requested, the block
// loops over the heads and accumulates their weights in registers.
#pragma once

#include "cuda/score_tile.cuh"

namespace fused_attn {

struct AttentionWeightsArgs {
  AttentionWeightsParams params;
  GpuParams gpu;
};

template <class T, int kHeadDim>
struct WeightsKernel {
  using Tiles = ScoreTile<T, kHeadDim>;
  static constexpr int kN = Tiles::kN;

  const AttentionWeightsParams& params;
  Tiles tile;
  typename Tiles::Scores total;

  FUSED_ATTN_DEVICE explicit WeightsKernel(const AttentionWeightsArgs& args)
      : params(args.params), tile(args.params.fwd, args.gpu) {}

  FUSED_ATTN_DEVICE void run() {
    const AttentionParams& p = params.fwd;
    const int64_t heads = params.average ? p.num_heads : 1;
    set_zero<1, kN>(total);
    FUSED_ATTN_ROLLED
    for (int64_t head = tile.rest * heads; head < (tile.rest + 1) * heads; ++head) {
      add(sequence_of(p, head / p.num_heads, head % p.num_heads));
    }
    sync_block();  // store_rows overwrites the tiles
    const int row = tile.i_begin + Tiles::warp_row(), column = tile.first_column();
    T* const target =
        static_cast<T*>(params.weights) + (tile.rest * p.seqlen_q + row) * p.seqlen_k + column;
    const float scale = tile.gpu.dropout_scale / static_cast<float>(heads);
    store_rows<T, kN, 1>(
        warp_id() * 16 * kN * sizeof(T), 0, total, target, p.seqlen_k,
        static_cast<int>(p.seqlen_q) - row, static_cast<int>(p.seqlen_k) - column,
        [&](int, float low, float high) { return pair_of<T>(low * scale, high * scale); });
  }

 private:
  // Adds the weights of one head of one sequence to `total`.
  FUSED_ATTN_DEVICE void add(const Sequence& sequence) {
    const AttentionParams& p = params.fwd;
    const Tile kind = tile.kind(sequence);
    if (kind == Tile::kSkip) return;
    const int64_t lse_at = lse_begin(p, sequence.b, sequence.h) + tile.i_begin;
    LogSum log_sums[2];
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2; ++r) {
      const bool inside = tile.i_begin + Tiles::row(r) < sequence.seqlen_q;
      log_sums[r] = inside ? load_lse(p, lse_at + Tiles::row(r), tile.units) : kFullyMasked;
    }
    typename Tiles::Scores weights;
    const Visible<1> visible = tile.products(weights, sequence, kind);
    tile.weigh(weights, visible, sequence, kind, log_sums);
    if (p.dropout_p > 0.0) {
      drop<false, 1, kN>(weights, dropout_of(p, tile.gpu, sequence.b), tile.rows(sequence),
                         tile.first_column());
    }
    for_each(total, [&](float& sum, int m, int n, int e) { sum += weights[m][n][e]; });
  }
};

template <class T, int kHeadDim>
FUSED_ATTN_KERNEL((ScoreSizes<sizeof(T)>::kThreads), (ScoreSizes<sizeof(T)>::kBlocks))
attention_weights_kernel(FUSED_ATTN_ARGUMENT AttentionWeightsArgs args) {
  WeightsKernel<T, kHeadDim>(args).run();
}

template <int kHeadDim>
void run_attention_weights(const AttentionWeightsParams& p, const GpuParams& gpu) {
  for_element(p.fwd.dtype, [&](auto element) {
    using T = decltype(element);
    using Tiles = ScoreTile<T, kHeadDim>;
    const int64_t results = p.fwd.batch * (p.average ? 1 : p.fwd.num_heads);
    launch("attention_weights_kernel", attention_weights_kernel<T, kHeadDim>,
           Tiles::blocks(p.fwd, results), Tiles::kThreads, Tiles::kBytes,
           AttentionWeightsArgs{p, gpu}, stream_of(gpu));
  });
}

}  // namespace fused_attn
