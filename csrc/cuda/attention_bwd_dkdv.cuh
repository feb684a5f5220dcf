// Gradients of keys and values. Each block owns a tile of keys of one KV head, and loops over the
// queries that attend to them, for all query heads that share the KV head.
//
// Score tiles are transposed, (keys, queries), so that the weights can be the left operand of an
// MMA without a transpose. Unless results must be deterministic, the block also adds its
// contribution to dQ atomically (kAddsDq). This variant needs 5 matmuls per tile, instead of 7 with
// a separate dQ kernel. It is compiled for 16-bit types with head_dim up to kMaxAddedHeadDim only;
// Product<float> has no columns_by_columns.
#pragma once

#include "cuda/attention_bwd_tile.cuh"
#include "cuda/tile_sizes.h"

namespace fused_attn {

// Shared-memory layout of a block, in this order: its keys and values; the pipeline stages, each
// with queries, gradients of out and row statistics; dS for the dQ matmul; matmul scratch of each
// warp; the tile list.
template <class T, int kHeadDim, class Sizes, bool kAddsDq>
struct KeyOwnerLayout {
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr uint32_t kKey = 0, kValue = Sizes::kRows * kRowBytes;
  static constexpr uint32_t kStages = 2 * kValue;
  static constexpr uint32_t kTileBytes = Sizes::kBlock * kRowBytes;
  static constexpr uint32_t kStageBytes = 2 * kTileBytes + 3 * Sizes::kBlock * sizeof(float);
  static constexpr uint32_t kGradScores = kStages + Sizes::kStages * kStageBytes;
  static constexpr uint32_t kScratch =
      kGradScores + (kAddsDq ? Sizes::kRows * Sizes::kBlock * sizeof(T) : 0);
  static constexpr uint32_t kScratchBytes =
      Product<T>::scratch_bytes(Sizes::kRowTiles, Sizes::kBlock);
  static constexpr uint32_t kList = kScratch + Sizes::kWarps * kScratchBytes;
  static constexpr int kBytes = kList + TileList::kBytes;

  static FUSED_ATTN_DEVICE uint32_t query(int stage) { return kStages + stage * kStageBytes; }
  static FUSED_ATTN_DEVICE uint32_t grad_out(int stage) { return query(stage) + kTileBytes; }
  // kind: 0 for lse, 1 for factor, 2 for delta (RowStatistics).
  static FUSED_ATTN_DEVICE uint32_t statistics(int stage, int kind) {
    return query(stage) + 2 * kTileBytes + kind * Sizes::kBlock * sizeof(float);
  }
};

template <class T, int kHeadDim, bool kGeneral, bool kAddsDq>
struct DkdvKernel {
  using Sizes = DkdvSizes<sizeof(T), kHeadDim, kGeneral, kAddsDq>;
  using Layout = KeyOwnerLayout<T, kHeadDim, Sizes, kAddsDq>;
  static_assert(Layout::kBytes <= kMaxSharedBytes, "tile_sizes.h: the tiles exceed shared memory");
  static constexpr int kM = Sizes::kRowTiles, kN = Sizes::kBlock, kThreads = Sizes::kThreads;

  const AttentionBwdArgs& args;
  Units<T, kGeneral> units;
  // If true, dK and dV are accumulated in one loop over the queries. With head_dim above 128 the
  // registers hold only one of the two accumulators, so the kernel loops twice.
  static constexpr bool kBoth = kHeadDim <= 128;
  Accumulator<kM, kHeadDim> grad_key, grad_value;

  FUSED_ATTN_DEVICE explicit DkdvKernel(const AttentionBwdArgs& a) : args(a), units(a.params.fwd) {}

  FUSED_ATTN_DEVICE void run() {
    const AttentionParams& p = args.params.fwd;
    const OwnedTile own = owned_keys(p);
    if (own.count <= 0) return;
    const SequenceRows rows = key_rows(p, own.b);
    load_owned<T, kHeadDim, Sizes>(Layout::kKey, p.key, p.key_strides, rows, own, p.head_dim);
    load_owned<T, kHeadDim, Sizes>(Layout::kValue, p.value, p.value_strides, rows, own,
                                   p.head_dim_v);
    if constexpr (kAddsDq) zero_what_is_not_finite(Layout::kKey);
    if constexpr (kBoth) {
      walk_heads<true, true>(own);
      store_key(own);
    } else {
      walk_heads<true, false>(own);
      store_key(own);
      walk_heads<false, true>(own);
    }
    store_value(own);
  }

 private:
  // Returns the block's tile of keys. The first tiles of each head are scheduled first, because
  // under a causal mask they take longest.
  static FUSED_ATTN_DEVICE OwnedTile owned_keys(const AttentionParams& p) {
    const int64_t num_n = (p.seqlen_k + Sizes::kRows - 1) / Sizes::kRows;
    const int64_t n = block_id() % num_n, bh = block_id() / num_n;
    OwnedTile own{static_cast<int>(bh / p.num_heads_kv), static_cast<int>(bh % p.num_heads_kv),
                  static_cast<int>(n * Sizes::kRows), 0};
    own.count = static_cast<int>(min64(Sizes::kRows, key_rows(p, own.b).count - own.begin));
    return own;
  }

  // Computes grad_key (kKeys) and grad_value (kValues) from the queries of all heads that share the
  // KV head.
  template <bool kKeys, bool kValues>
  FUSED_ATTN_DEVICE void walk_heads(const OwnedTile& own) {
    const AttentionParams& p = args.params.fwd;
    if (kKeys) set_zero<kM, kHeadDim>(grad_key);
    if (kValues) set_zero<kM, kHeadDim>(grad_value);
    const int group = static_cast<int>(p.num_heads / p.num_heads_kv);
    FUSED_ATTN_ROLLED
    for (int g = 0; g < group; ++g) walk_queries<kKeys, kValues>(own, own.h * group + g);
    copy_wait<0>();
    sync_block();
  }

  FUSED_ATTN_DEVICE void store(const Accumulator<kM, kHeadDim>& grad, uint32_t tile, void* target,
                               const int64_t (&strides)[3], const OwnedTile& own, int64_t head_dim,
                               float scale) {
    const AttentionParams& p = args.params.fwd;
    // In the plain kernel with the atomic dQ, addresses that depend on `begin` would be computed
    // before the loop over queries, and spill. In the other kernels, recomputing them spills.
    const int begin = kAddsDq && !kGeneral ? unhoisted(own.begin) : own.begin;
    const OwnedTile to{own.b, own.h, begin, own.count};
    store_result_rows<T, kHeadDim, kM>(p, tile, grad, target, strides, key_rows(p, own.b), to,
                                       head_dim, [&](int) { return scale; });
  }
  // Stages grad_key through the shared memory of the values. The loop for grad_value does not read
  // the values, but may still read the keys.
  FUSED_ATTN_DEVICE void store_key(const OwnedTile& own) {
    const AttentionBwdParams& p = args.params;
    store(grad_key, Layout::kValue, p.grad_key, p.grad_key_strides, own, p.fwd.head_dim,
          static_cast<float>(p.fwd.scale));
  }
  FUSED_ATTN_DEVICE void store_value(const OwnedTile& own) {
    const AttentionBwdParams& p = args.params;
    store(grad_value, Layout::kKey, p.grad_value, p.grad_value_strides, own, p.fwd.head_dim_v,
          args.gpu.dropout_scale);
  }

  // Accumulates the contributions of the queries of head h to the requested gradients.
  template <bool kKeys, bool kValues>
  FUSED_ATTN_DEVICE void walk_queries(const OwnedTile& own, int h) {
    const AttentionParams& p = args.params.fwd;
    const Sequence sequence = sequence_of(p, own.b, h);
    const SequenceBounds& bounds = sequence.bounds;
    const int64_t j_end = own.begin + own.count;
    const int64_t first = max64(own.begin, bounds.key_begin);
    const int64_t last = min64(j_end, bounds.key_end) - 1;
    const int lo = static_cast<int>(max64(0, visible_queries(bounds, first).lo));
    const int hi = static_cast<int>(min64(sequence.seqlen_q, visible_queries(bounds, last).hi));
    const int tiles_begin = lo / kN;
    const int tiles_end = first > last || lo >= hi ? 0 : (hi + kN - 1) / kN;

    // Keys past the end have a score of 0, so their weight is infinite if lse is very low, and
    // their dS would make dQ NaN. Including them in the classified range makes the tile partial,
    // and the partial path masks them.
    const int64_t j_owned = kAddsDq ? int64_t{own.begin} + Sizes::kRows : j_end;
    TileList list{Layout::kList, 0, 0, 0};
    FUSED_ATTN_ROLLED
    for (int begin = tiles_begin; begin < tiles_end; begin += TileList::kCapacity) {
      const int count = tiles_end - begin;
      list.build(begin, count < TileList::kCapacity ? count : TileList::kCapacity, kThreads,
                 [&](int m) {
                   const int64_t i_begin = int64_t{m} * kN;
                   const Sequence s = sequence_of(p, own.b, h);
                   return classify(p, args.gpu, s, i_begin, min64(i_begin + kN, s.seqlen_q),
                                   own.begin, j_owned);
                 });
      auto pipeline = pipeline_of<Sizes::kStages>(
          list.num_all, [&](int stage, int t) { load(stage, own, h, list.tile(t) * kN, lo, hi); });
      FUSED_ATTN_ROLLED
      for (int t = 0; t < list.num_full; ++t) {
        const int stage = pipeline.next(t);
        tile<false, kKeys, kValues>(own, h, stage, list.tile(t) * kN);
      }
      FUSED_ATTN_ROLLED
      for (int t = list.num_full; t < list.num_all; ++t) {
        const int stage = pipeline.next(t);
        tile<true, kKeys, kValues>(own, h, stage, list.tile(t) * kN);
      }
    }
  }

  // Starts the copies of a tile of query rows that begins at i_begin: query, grad_out and the row
  // statistics. Rows of query and grad_out outside [lo, hi) attend to none of the keys and become
  // 0.
  FUSED_ATTN_DEVICE void load(int stage, const OwnedTile& own, int h, int i_begin, int lo, int hi) {
    const AttentionParams& p = args.params.fwd;
    const int b = unhoisted(own.b);
    const SequenceRows rows = query_rows(p, b);
    const RowStatistics stats = row_statistics(p, args.gpu, b, h);
    const bool listed = has_listed_masks(p.mask);
    // Fully masked rows are not loaded: they may contain NaN, and 0 * NaN is NaN.
    const auto sees = [&](int row) { return !listed || stats.lse[i_begin + row] != kInfinity; };
    const int64_t first = rows.first + i_begin;
    load_rows_async<T, kHeadDim, kN, kThreads>(
        Layout::query(stage),
        row_of(static_cast<const T*>(p.query), p.query_strides, rows.batch, h, first),
        p.query_strides[2], lo - i_begin, hi - i_begin, static_cast<int>(p.head_dim), sees);
    const int64_t (&strides)[3] = args.params.grad_out_strides;
    load_rows_async<T, kHeadDim, kN, kThreads>(
        Layout::grad_out(stage),
        row_of(static_cast<const T*>(args.params.grad_out), strides, rows.batch, h, first),
        strides[2], lo - i_begin, hi - i_begin, static_cast<int>(p.head_dim_v), sees);
    constexpr int kChunks = kN / 4;
    for (int c = unhoisted(thread_id()); c < 3 * kChunks; c += kThreads) {
      const int kind = c / kChunks, row = c % kChunks * 4;
      const float* const source = kind == 0 ? stats.lse : kind == 1 ? stats.factor : stats.delta;
      copy_async(Layout::statistics(stage, kind) + row * 4, source + i_begin + row, true);
    }
  }

  template <bool kPartial, bool kKeys, bool kValues>
  FUSED_ATTN_DEVICE void tile(const OwnedTile& own, int h, int stage, int i_begin) {
    const AttentionParams& p = args.params.fwd;
    const Sequence sequence = sequence_of(p, unhoisted(own.b), h);
    const int warp_row = warp_id() * kM * 16, t = lane_id() % 4;
    const FragmentRows<kM> rows = rows_from<kM>(own.begin + warp_row, h);
    const uint32_t query = Layout::query(stage), grad_out = Layout::grad_out(stage);
    Visible<kM> visible{};
    if constexpr (kPartial) {
      visible = visible_of<true, kM, kN>(p.mask, sequence, rows, i_begin);
    }
    Accumulator<kM, kN> weights, grads, cap_tanh;
    set_zero<kM, kN>(weights);
    Product<T>::template rows_by_rows<kM, kN, kHeadDim>(weights, Layout::kKey, warp_row, query,
                                                        args.gpu.tf32);
    finish_scores<kGeneral, kPartial, true, kM, kN>(weights, visible, p, sequence, rows, i_begin,
                                                    &cap_tanh);
    FUSED_ATTN_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      const uint32_t at = (n * 8 + 2 * t) * sizeof(float);
      const Pair lse = load_shared<Pair>(Layout::statistics(stage, 0) + at);
      Pair factor{1.0f, 1.0f};
      if (kGeneral) factor = load_shared<Pair>(Layout::statistics(stage, 1) + at);
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        FUSED_ATTN_UNROLL
        for (int e = 0; e < 4; ++e) {
          float& weight = weights[m][n][e];
          weight = units.power(weight, e % 2 == 0 ? lse.low : lse.high);
          if (kGeneral) weight *= e % 2 == 0 ? factor.low : factor.high;
        }
      }
    }
    if constexpr (kKeys) {
      set_zero<kM, kN>(grads);
      Product<T>::template rows_by_rows<kM, kN, kHeadDim>(grads, Layout::kValue, warp_row, grad_out,
                                                          args.gpu.tf32);
    }
    uint32_t keep_mask[kM];
    FUSED_ATTN_UNROLL
    for (int m = 0; m < kM; ++m) {
      keep_mask[m] = ~0u;
      if (kGeneral && p.dropout_p > 0.0) {
        keep_mask[m] =
            kept_weights<true, kN, kM>(dropout_of(p, args.gpu, sequence.b), rows, m, i_begin);
      }
    }
    FUSED_ATTN_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      const Pair delta = load_shared<Pair>(Layout::statistics(stage, 2) + (n * 8 + 2 * t) * 4);
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        FUSED_ATTN_UNROLL
        for (int e = 0; e < 4; ++e) {
          const bool keeps = keep_mask[m] >> (4 * n + e) & 1;
          float &weight = weights[m][n][e], &grad = grads[m][n][e];
          if constexpr (kKeys) {
            if constexpr (kGeneral) grad = keeps ? grad * args.gpu.dropout_scale : 0.0f;
            grad = weight * (grad - (e % 2 == 0 ? delta.low : delta.high));
            // Skip masked elements: their gradient may be NaN, and 0 * NaN is NaN.
            if (kPartial && weight == 0.0f) grad = 0.0f;
            if constexpr (kGeneral) {
              const float tanh = cap_tanh[m][n][e];
              if (p.softcap > 0.0 && weight != 0.0f) grad *= 1.0f - tanh * tanh;
            }
          }
          if (kGeneral && !keeps) weight = 0.0f;
        }
      }
    }
    const uint32_t scratch = Layout::kScratch + warp_id() * Layout::kScratchBytes;
    if constexpr (kValues) {
      Product<T>::template weights_by_columns<false, kM, kHeadDim, kN>(
          grad_value, weights, grad_out, ~0u, scratch, args.gpu.tf32);
    }
    if constexpr (kKeys) {
      Product<T>::template weights_by_columns<false, kM, kHeadDim, kN>(grad_key, grads, query, ~0u,
                                                                       scratch, args.gpu.tf32);
      if constexpr (kAddsDq) add_grad_query(own, h, i_begin, grads);
    }
  }

  // Zeroes the non-finite elements of the keys, for dQ. Keys that are masked for all queries may be
  // NaN or infinite, and 0 (their dS) times NaN or infinity is NaN. Zeroing does not hide the NaN
  // of a visible key: a query that attends to it has an lse of NaN, and so do its gradients. The
  // exception is an infinite key with a score of -inf, whose weight is computed as if the key were
  // 0.
  FUSED_ATTN_DEVICE void zero_what_is_not_finite(uint32_t tile) {
    using Tile = SharedTile<T, kHeadDim>;
    copy_wait<0>();
    sync_block();
    for (int c = thread_id(); c < Sizes::kRows * Tile::kChunks; c += kThreads) {
      Chunk chunk = load_shared<Chunk>(tile + c * 16);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < Tile::kPerChunk; ++e) {
        const float value = element<T>(chunk, e);
        if (value - value != 0.0f) chunk.word[e / 2] &= e % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
      }
      store_shared(tile + c * 16, chunk);
    }
    sync_block();
  }

  // Adds the block's contribution to dQ, dS K, to grad_query_sums. Each warp computes 16 query rows
  // and kColumns columns.
  FUSED_ATTN_DEVICE void add_grad_query(const OwnedTile& own, int h, int i_begin,
                                        const Accumulator<kM, kN>& grads) {
    using Tile = SharedTile<T, kN>;
    constexpr int kRowTiles = kN / 16, kParts = Sizes::kWarps / kRowTiles;
    static_assert(kRowTiles * kParts == Sizes::kWarps, "each row tile needs equally many warps");
    constexpr int kColumns = kHeadDim / kParts;
    // Columns per iteration. More would need registers that grad_key and grad_value occupy.
    constexpr int kColumnsPerStep = kColumns % 32 == 0 ? 32 : 16;
    const int lane = unhoisted(lane_id()), g = lane / 4, t = lane % 4;
    FUSED_ATTN_UNROLL
    for (int m = 0; m < kM; ++m) {
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 8; ++n) {
        FUSED_ATTN_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int row = warp_id() * kM * 16 + m * 16 + half * 8 + g;
          store_shared(Tile::element(Layout::kGradScores, row, n * 8 + 2 * t),
                       pair_of<T>(grads[m][n][2 * half], grads[m][n][2 * half + 1]));
        }
      }
    }
    sync_block();
    const AttentionParams& p = args.params.fwd;
    const int first_row = warp_id() % kRowTiles * 16,
              first_column = warp_id() / kRowTiles * kColumns;
    const int b = unhoisted(own.b);
    const int64_t stride = grad_query_sums_stride(p.head_dim);
    const int64_t lse_at = lse_begin(p, b, h) + i_begin;
    const int64_t end = query_rows(p, b).count - i_begin;
    FUSED_ATTN_ROLLED
    for (int column = first_column; column < first_column + kColumns; column += kColumnsPerStep) {
      Accumulator<1, kColumnsPerStep> part;
      set_zero<1, kColumnsPerStep>(part);
      Product<T>::template columns_by_columns<1, kColumnsPerStep, Sizes::kRows, kN, kHeadDim>(
          part, Layout::kGradScores, first_row, Layout::kKey, column);
      FUSED_ATTN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8 + g;
        if (row >= end) continue;
        float* const sums = args.gpu.grad_query_sums + (lse_at + row) * stride + column + 2 * t;
        FUSED_ATTN_UNROLL
        for (int n = 0; n < kColumnsPerStep / 8; ++n) {
          if (column + n * 8 >= stride) continue;
          atomic_add(sums + n * 8, Pair{part[0][n][2 * half], part[0][n][2 * half + 1]});
        }
      }
    }
  }
};

template <class T, int kHeadDim, bool kGeneral, bool kAddsDq>
FUSED_ATTN_KERNEL((DkdvSizes<sizeof(T), kHeadDim, kGeneral, kAddsDq>::kThreads),
                  (DkdvSizes<sizeof(T), kHeadDim, kGeneral, kAddsDq>::kBlocks))
attention_bwd_dkdv_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  DkdvKernel<T, kHeadDim, kGeneral, kAddsDq>(args).run();
}

template <int kHeadDim>
void run_attention_bwd_dkdv(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_type<kHeadDim>(p.fwd, [&](auto element, auto general) {
    using T = decltype(element);
    const auto start = [&](auto adds_dq) {
      using Kernel = DkdvKernel<T, kHeadDim, decltype(general)::value, decltype(adds_dq)::value>;
      using Sizes = typename Kernel::Sizes;
      const int64_t blocks =
          (p.fwd.seqlen_k + Sizes::kRows - 1) / Sizes::kRows * p.fwd.batch * p.fwd.num_heads_kv;
      launch("attention_bwd_dkdv_kernel",
             attention_bwd_dkdv_kernel<T, kHeadDim, decltype(general)::value,
                                       decltype(adds_dq)::value>,
             blocks, Sizes::kThreads, Kernel::Layout::kBytes, AttentionBwdArgs{p, gpu},
             stream_of(gpu));
    };
    if constexpr (sizeof(T) == 2 && kHeadDim <= kMaxAddedHeadDim) {
      if (!gpu.deterministic) return start(std::true_type());
    }
    start(std::false_type());
  });
}

}  // namespace fused_attn
