// Attention forward. Each block owns a tile of query rows, and computes the online softmax over the
// KV tiles visible to them.
//
// Source: Dao 2023, "FlashAttention-2".
#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/tile_sizes.h"

namespace fused_attn {

template <class T, int kHeadDim, bool kGeneral>
struct FwdKernel {
  using Sizes = FwdSizes<sizeof(T), kHeadDim, kGeneral>;
  static constexpr int kM = Sizes::kRowTiles, kN = Sizes::kBlock;
  using Layout = QueryOwnerLayout<T, kHeadDim, Sizes, 1>;
  static_assert(Layout::kBytes <= kMaxSharedBytes, "tile_sizes.h: the tiles exceed shared memory");
  using Args = AttentionArgs;

  const Args& args;
  Units<T, kGeneral> units;
  Accumulator<kM, kHeadDim> acc;
  SoftmaxState<kM> softmax;
  // Row sums of the rounded weights. Used for 16-bit types, if a backward follows.
  Accumulator<kM, 8> divisor;

  FUSED_ATTN_DEVICE explicit FwdKernel(const Args& a) : args(a), units(a.params) {}

  FUSED_ATTN_DEVICE void run() {
    const AttentionParams& p = args.params;
    const OwnedTile own = owned_queries(p, Sizes::kRows);
    if (own.count <= 0) return;
    load_owned<T, kHeadDim, Sizes>(Layout::kOwned, p.query, p.query_strides, query_rows(p, own.b),
                                   own, p.head_dim);
    set_zero<kM, kHeadDim>(acc);
    set_zero<kM, 8>(divisor);
    softmax.reset();
    walk_keys<T, kHeadDim, Sizes, Layout>(
        p, args.gpu, own, [&](auto partial, uint32_t key, uint32_t value, int j_begin) {
          tile<decltype(partial)::value>(own, key, value, j_begin);
        });
    finish(own);
  }

 private:
  // Returns true if a backward follows. Partial results then have lse_residual but no out_residual.
  FUSED_ATTN_DEVICE bool for_backward() const { return args.params.lse_residual != nullptr; }

  template <bool kPartial>
  FUSED_ATTN_DEVICE void tile(const OwnedTile& own, uint32_t key, uint32_t value, int j_begin) {
    const AttentionParams& p = args.params;
    // Recomputed for each tile. Kept live across tiles, `sequence` would occupy 24 registers.
    const Sequence sequence = sequence_of(p, unhoisted(own.b), own.h);
    const int warp_row = warp_id() * kM * 16;
    const FragmentRows<kM> rows = rows_from<kM>(own.begin + warp_row, own.h);
    Visible<kM> visible{};
    if constexpr (kPartial) {
      visible = visible_of<false, kM, kN>(p.mask, sequence, rows, j_begin);
    }
    Accumulator<kM, kN> s;
    set_zero<kM, kN>(s);
    Product<T>::template rows_by_rows<kM, kN, kHeadDim>(s, Layout::kOwned, warp_row, key,
                                                        args.gpu.tf32);
    finish_scores<kGeneral, kPartial, false, kM, kN>(s, visible, p, sequence, rows, j_begin);
    float rescale[2 * kM];
    softmax.template update<kPartial, kN>(s, units, rescale);
    const auto rescale_sum = [&](float& sum, int m, int, int e) { sum *= rescale[2 * m + e / 2]; };
    for_each(acc, rescale_sum);
    if constexpr (Product<T>::kRoundsWeights) {
      if (for_backward()) {
        for_each(divisor, rescale_sum);
        Product<T>::template add_row_sums<kM, kN>(divisor, s);
      }
    }
    if constexpr (kGeneral) {
      if (p.dropout_p > 0.0)
        drop<false, kM, kN>(s, dropout_of(p, args.gpu, sequence.b), rows, j_begin);
    }
    Product<T>::template weights_by_columns<kPartial, kM, kHeadDim, kN>(
        acc, s, value, kPartial ? visible_columns(p.mask, visible) : ~0u, Layout::scratch(),
        args.gpu.tf32);
  }

  FUSED_ATTN_DEVICE void finish(const OwnedTile& own) {
    const AttentionParams& p = args.params;
    const int warp_row = warp_id() * kM * 16;
    softmax.reduce();
    if (p.lse != nullptr && lane_id() % 4 == 0) {
      const int64_t at = lse_begin(p, own.b, own.h) + own.begin;
      FUSED_ATTN_UNROLL
      for (int r = 0; r < 2 * kM; ++r) {
        const int row = warp_row + r / 2 * 16 + r % 2 * 8 + lane_id() / 4;
        if (row < own.count) {
          store_lse(p, at + row, units.exponent(softmax.maximum[r]), softmax.sum[r], units);
        }
      }
    }
    // In 16-bit types, the backward needs rounded weights that sum to 1. If a row has one dominant
    // key and its weights sum to 1.002, out is 1.002 times the value of that key, and this error
    // hides the contributions of all other keys.
    const float scale = args.gpu.dropout_scale;
    float factor[2 * kM];
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      float sum = softmax.sum[r];
      if constexpr (Product<T>::kRoundsWeights) {
        if (for_backward()) sum = divisor[r / 2][0][r % 2 * 2];
      }
      factor[r] = sum == 0.0f ? 0.0f : scale / sum;
    }
    const SequenceRows rows = query_rows(p, own.b);
    store_result_rows<T, kHeadDim, kM>(p, Layout::kOwned, acc, p.out, p.out_strides, rows, own,
                                       p.head_dim_v, [&](int r) { return factor[r]; });
    if constexpr (sizeof(T) == 2) {
      if (p.out_residual == nullptr) return;
      sync_warp();  // the residual overwrites the rows of out in shared memory
      // The int16 residuals are stored as T, because store_rows only copies 16-bit patterns.
      T* const out_residual = reinterpret_cast<T*>(row_of(
          p.out_residual, p.out_residual_strides, rows.batch, own.h, rows.first + own.begin));
      store_rows<T, kHeadDim, kM>(
          Layout::kOwned, warp_row, acc, out_residual, p.out_residual_strides[2], own.count,
          static_cast<int>(p.head_dim_v), [&](int r, float low, float high) {
            const uint32_t first = lost_bits<T>(low * factor[r]);
            return first | lost_bits<T>(high * factor[r]) << 16;
          });
    }
  }
};

template <class T, int kHeadDim, bool kGeneral>
FUSED_ATTN_KERNEL((FwdSizes<sizeof(T), kHeadDim, kGeneral>::kThreads),
                  (FwdSizes<sizeof(T), kHeadDim, kGeneral>::kBlocks))
attention_fwd_kernel(FUSED_ATTN_ARGUMENT AttentionArgs args) {
  FwdKernel<T, kHeadDim, kGeneral>(args).run();
}

template <int kHeadDim>
void run_attention_fwd(const AttentionParams& p, const GpuParams& gpu) {
  for_type<kHeadDim>(p, [&](auto element, auto general) {
    using T = decltype(element);
    using Kernel = FwdKernel<T, kHeadDim, decltype(general)::value>;
    using Sizes = typename Kernel::Sizes;
    const int64_t blocks = (p.seqlen_q + Sizes::kRows - 1) / Sizes::kRows * p.batch * p.num_heads;
    launch("attention_fwd_kernel", attention_fwd_kernel<T, kHeadDim, decltype(general)::value>,
           blocks, Sizes::kThreads, Kernel::Layout::kBytes, AttentionArgs{p, gpu}, stream_of(gpu));
  });
}

}  // namespace fused_attn
