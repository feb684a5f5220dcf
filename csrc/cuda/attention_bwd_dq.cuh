// Gradient of queries. Each block owns a tile of query rows and loops over the KV tiles visible to
// them.
#pragma once

#include "cuda/attention_bwd_tile.cuh"
#include "cuda/tile_sizes.h"

namespace fused_attn {

template <class T, int kHeadDim, bool kGeneral>
struct DqKernel {
  using Sizes = DqSizes<sizeof(T), kHeadDim, kGeneral>;
  static constexpr int kM = Sizes::kRowTiles, kN = Sizes::kBlock;
  // The block owns two tiles: its rows of query and of grad_out.
  using Layout = QueryOwnerLayout<T, kHeadDim, Sizes, 2>;
  static_assert(Layout::kBytes <= kMaxSharedBytes, "tile_sizes.h: the tiles exceed shared memory");
  static constexpr uint32_t kGradOut = Layout::kOwned + Layout::kOwnedBytes;

  const AttentionBwdArgs& args;
  Units<T, kGeneral> units;
  Accumulator<kM, kHeadDim> grad_query;
  float lse[2 * kM], factor[2 * kM], delta[2 * kM];
  // Row sums of dS (excess) and P (total) over the thread's columns. Computed only in the general
  // case.
  float excess[2 * kM], total[2 * kM];

  FUSED_ATTN_DEVICE explicit DqKernel(const AttentionBwdArgs& a) : args(a), units(a.params.fwd) {}

  // Returns true if delta is corrected for the bias gradient. Each row of dS should sum to dlse,
  // but the rounding error of out changes the sum, and the bias gradient would expose the
  // difference. The correction restores the sum.
  FUSED_ATTN_DEVICE bool corrects() const {
    return kGeneral && args.gpu.grad_bias_parts != nullptr;
  }

  FUSED_ATTN_DEVICE void run() {
    const AttentionParams& p = args.params.fwd;
    const OwnedTile own = owned_queries(p, Sizes::kRows);
    if (own.count <= 0) return;
    const SequenceRows rows = query_rows(p, own.b);
    load_owned<T, kHeadDim, Sizes>(Layout::kOwned, p.query, p.query_strides, rows, own, p.head_dim);
    load_owned<T, kHeadDim, Sizes>(kGradOut, args.params.grad_out, args.params.grad_out_strides,
                                   rows, own, p.head_dim_v);
    const RowStatistics stats = row_statistics(p, args.gpu, own.b, own.h);
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      const int64_t at = own.begin + row(r);
      const bool inside = row(r) < own.count;
      lse[r] = inside ? stats.lse[at] : kInfinity;
      factor[r] = inside ? stats.factor[at] : 0.0f;
      delta[r] = inside ? stats.delta[at] : 0.0f;
      excess[r] = total[r] = 0.0f;
    }
    set_zero<kM, kHeadDim>(grad_query);
    walk_keys<T, kHeadDim, Sizes, Layout>(
        p, args.gpu, own, [&](auto partial, uint32_t key, uint32_t value, int j_begin) {
          tile<decltype(partial)::value>(own, key, value, j_begin);
        });
    const float scale = static_cast<float>(p.scale);
    store_result_rows<T, kHeadDim, kM>(p, Layout::kOwned, grad_query, args.params.grad_query,
                                       args.params.grad_query_strides, rows, own, p.head_dim,
                                       [&](int) { return scale; });
    if (corrects()) correct(own, stats);
  }

 private:
  // Returns the thread's r-th row in the owned tile.
  static FUSED_ATTN_DEVICE int row(int r) {
    return warp_id() * kM * 16 + r / 2 * 16 + r % 2 * 8 + lane_id() / 4;
  }

  template <bool kPartial>
  FUSED_ATTN_DEVICE void tile(const OwnedTile& own, uint32_t key, uint32_t value, int j_begin) {
    const AttentionParams& p = args.params.fwd;
    const Sequence sequence = sequence_of(p, unhoisted(own.b), own.h);
    const int warp_row = warp_id() * kM * 16;
    const FragmentRows<kM> rows = rows_from<kM>(own.begin + warp_row, own.h);
    Visible<kM> visible{};
    if constexpr (kPartial) {
      visible = visible_of<false, kM, kN>(p.mask, sequence, rows, j_begin);
    }
    Accumulator<kM, kN> weights, grads, cap_tanh;
    set_zero<kM, kN>(weights);
    Product<T>::template rows_by_rows<kM, kN, kHeadDim>(weights, Layout::kOwned, warp_row, key,
                                                        args.gpu.tf32);
    finish_scores<kGeneral, kPartial, false, kM, kN>(weights, visible, p, sequence, rows, j_begin,
                                                     &cap_tanh);
    for_each(weights, [&](float& weight, int m, int, int e) {
      weight = units.power(weight, lse[2 * m + e / 2]);
      if (kGeneral) weight *= factor[2 * m + e / 2];
    });
    set_zero<kM, kN>(grads);
    Product<T>::template rows_by_rows<kM, kN, kHeadDim>(grads, kGradOut, warp_row, value,
                                                        args.gpu.tf32);
    uint32_t keep_mask[kM];
    FUSED_ATTN_UNROLL
    for (int m = 0; m < kM; ++m) {
      keep_mask[m] = ~0u;
      if (kGeneral && p.dropout_p > 0.0) {
        keep_mask[m] =
            kept_weights<false, kN, kM>(dropout_of(p, args.gpu, sequence.b), rows, m, j_begin);
      }
    }
    for_each(grads, [&](float& grad, int m, int n, int e) {
      const int r = 2 * m + e / 2;
      const float weight = weights[m][n][e];
      if constexpr (kGeneral) {
        grad = keep_mask[m] >> (4 * n + e) & 1 ? grad * args.gpu.dropout_scale : 0.0f;
      }
      grad = weight * (grad - delta[r]);
      // Skip masked elements: their gradient may be NaN, and 0 * NaN is NaN.
      if (kPartial && weight == 0.0f) grad = 0.0f;
      if constexpr (kGeneral) {
        excess[r] += grad;
        total[r] += weight;
        const float tanh = cap_tanh[m][n][e];
        if (p.softcap > 0.0 && weight != 0.0f) grad *= 1.0f - tanh * tanh;
      }
    });
    Product<T>::template weights_by_columns<kPartial, kM, kHeadDim, kN>(
        grad_query, grads, key, kPartial ? visible_columns(p.mask, visible) : ~0u,
        Layout::scratch(), args.gpu.tf32);
  }

  // Stores the corrected delta of the block's rows to the row statistics, for the bias gradient.
  // Rows of a partial result do not add up to dlse, so their delta is not corrected.
  FUSED_ATTN_DEVICE void correct(const OwnedTile& own, const RowStatistics& stats) {
    const AttentionParams& p = args.params.fwd;
    if (p.partial) return;
    const float* grad_lse = static_cast<const float*>(args.params.grad_lse);
    const int64_t lse_at = lse_begin(p, own.b, own.h) + own.begin;
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      FUSED_ATTN_UNROLL
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        excess[r] += shuffle_xor(excess[r], lanes);
        total[r] += shuffle_xor(total[r], lanes);
      }
      if (lane_id() % 4 != 0 || row(r) >= own.count || total[r] == 0.0f) continue;
      const float wanted = grad_lse == nullptr ? 0.0f : grad_lse[lse_at + row(r)];
      stats.delta[own.begin + row(r)] = delta[r] + (excess[r] - wanted) / total[r];
    }
  }
};

template <class T, int kHeadDim, bool kGeneral>
FUSED_ATTN_KERNEL((DqSizes<sizeof(T), kHeadDim, kGeneral>::kThreads),
                  (DqSizes<sizeof(T), kHeadDim, kGeneral>::kBlocks))
attention_bwd_dq_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  DqKernel<T, kHeadDim, kGeneral>(args).run();
}

template <int kHeadDim>
void run_attention_bwd_dq(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_type<kHeadDim>(p.fwd, [&](auto element, auto general) {
    using T = decltype(element);
    using Kernel = DqKernel<T, kHeadDim, decltype(general)::value>;
    using Sizes = typename Kernel::Sizes;
    const int64_t blocks =
        (p.fwd.seqlen_q + Sizes::kRows - 1) / Sizes::kRows * p.fwd.batch * p.fwd.num_heads;
    launch("attention_bwd_dq_kernel",
           attention_bwd_dq_kernel<T, kHeadDim, decltype(general)::value>, blocks, Sizes::kThreads,
           Kernel::Layout::kBytes, AttentionBwdArgs{p, gpu}, stream_of(gpu));
  });
}

}  // namespace fused_attn
