// Recomputes one tile of the weights, one head at a time.
//
// A head needs at most two matmuls, QK^T and dO V^T, which use the same shared memory. Their
// results are not summed over keys, so masked elements may be NaN until their weight is set to 0.
#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/tile_sizes.h"

namespace fused_attn {

// Returns the number of tiles of `tile` positions that cover a sequence.
FUSED_ATTN_HOST_DEVICE int64_t count_tiles(int64_t seqlen, int64_t tile) {
  return (seqlen + tile - 1) / tile;
}

template <class T, int kHeadDim>
struct ScoreTile {
  using Sizes = ScoreSizes<sizeof(T)>;
  static constexpr int kTile = Sizes::kTile, kThreads = Sizes::kThreads;
  static constexpr int kN = Sizes::kColumns;  // columns per warp
  static constexpr uint32_t kRowBytes = kHeadDim * sizeof(T);
  static constexpr uint32_t kLeft = 0, kRight = kTile * kRowBytes;
  static constexpr int kBytes = 2 * kRight;
  static_assert(kBytes <= kMaxSharedBytes, "tile_sizes.h: the tiles exceed shared memory");
  using Scores = Accumulator<1, kN>;

  const AttentionParams& p;
  const GpuParams& gpu;
  Units<T, true> units;
  int64_t m, n, rest;    // row and column of the tile, in tiles; index of the output
  int i_begin, j_begin;  // first query and first key of the tile

  FUSED_ATTN_DEVICE ScoreTile(const AttentionParams& params, const GpuParams& gpu_params)
      : p(params), gpu(gpu_params), units(params) {
    const int64_t num_m = count_tiles(p.seqlen_q, kTile), num_n = count_tiles(p.seqlen_k, kTile);
    n = block_id() % num_n;
    m = block_id() / num_n % num_m;
    rest = block_id() / num_n / num_m;
    i_begin = static_cast<int>(m * kTile);
    j_begin = static_cast<int>(n * kTile);
  }
  // Returns the grid size for `rest` outputs of shape (seqlen_q, seqlen_k): one block per tile.
  static int64_t blocks(const AttentionParams& p, int64_t rest) {
    return count_tiles(p.seqlen_q, kTile) * count_tiles(p.seqlen_k, kTile) * rest;
  }

  // Return the warp's first row and first column in the tile.
  static FUSED_ATTN_DEVICE int warp_row() { return warp_id() % Sizes::kRowWarps * 16; }
  static FUSED_ATTN_DEVICE int warp_column() { return warp_id() / Sizes::kRowWarps * kN; }
  // Return the thread's r-th row in the tile, and the column of element e of its fragment n.
  static FUSED_ATTN_DEVICE int row(int r) { return warp_row() + r * 8 + lane_id() / 4; }
  static FUSED_ATTN_DEVICE int column(int n, int e) {
    return warp_column() + n * 8 + 2 * (lane_id() % 4) + e % 2;
  }
  // Return the positions of the thread's rows, and of the warp's first column, in the sequence.
  FUSED_ATTN_DEVICE FragmentRows<1> rows(const Sequence& s) const {
    return rows_from<1>(i_begin + warp_row(), s.h);
  }
  FUSED_ATTN_DEVICE int first_column() const { return j_begin + warp_column(); }

  // Classifies the tile for one head of a sequence.
  FUSED_ATTN_DEVICE Tile kind(const Sequence& s) const {
    // A packed sequence may end before the tile begins.
    if (i_begin >= s.seqlen_q || j_begin >= s.seqlen_k) return Tile::kSkip;
    return classify(p, gpu, s, i_begin, min64(i_begin + kTile, s.seqlen_q), j_begin,
                    j_begin + kTile);
  }

  // Starts the copies of the operands of a matmul: the rows of `left` at the tile's queries, and
  // the rows of `right` at its keys. strides: of the batch, head and row dimensions.
  FUSED_ATTN_DEVICE void load(const Sequence& s, const void* left, const int64_t (&left_strides)[3],
                              const void* right, const int64_t (&right_strides)[3],
                              int64_t head_dim) const {
    const SequenceRows queries = query_rows(p, s.b), keys = key_rows(p, s.b);
    const int64_t h_kv = s.h / (p.num_heads / p.num_heads_kv);
    sync_block();  // the copies overwrite the operands of the previous matmul
    load_rows_async<T, kHeadDim, kTile, kThreads>(
        kLeft,
        row_of(static_cast<const T*>(left), left_strides, queries.batch, s.h,
               queries.first + i_begin),
        left_strides[2], 0, s.seqlen_q - i_begin, static_cast<int>(head_dim));
    load_rows_async<T, kHeadDim, kTile, kThreads>(
        kRight,
        row_of(static_cast<const T*>(right), right_strides, keys.batch, h_kv, keys.first + j_begin),
        right_strides[2], 0, s.seqlen_k - j_begin, static_cast<int>(head_dim));
    copy_commit();
  }

  // Waits for the operands that load() copies, and computes left right^T.
  FUSED_ATTN_DEVICE void multiply(Scores& products) const {
    copy_wait<0>();
    sync_block();
    set_zero<1, kN>(products);
    Product<T>::template rows_by_rows<1, kN, kHeadDim>(
        products, kLeft, warp_row(), kRight + warp_column() * kRowBytes, gpu.tf32);
  }

  // Computes QK^T. Returns the elements of a partial tile that are visible under all masks except
  // the bias.
  FUSED_ATTN_DEVICE Visible<1> products(Scores& scores, const Sequence& s, Tile kind) const {
    load(s, p.query, p.query_strides, p.key, p.key_strides, p.head_dim);
    Visible<1> visible{};
    if (kind == Tile::kPartial) {
      visible = visible_of<false, 1, kN>(p.mask, s, rows(s), first_column());
    }
    multiply(scores);
    return visible;
  }

  // Converts QK^T to softmax weights, before dropout.
  FUSED_ATTN_DEVICE void weigh(Scores& scores, Visible<1> visible, const Sequence& s, Tile kind,
                               const LogSum (&log_sums)[2]) const {
    scale_scores<false, 1, kN>(scores, p, s, rows(s), first_column());
    // A runtime branch instead of a template parameter, to compile the code only once.
    if (kind == Tile::kPartial) {
      mask_scores<true, false, 1, kN>(scores, visible, p, s, rows(s), first_column());
    }
    for_each(scores, [&](float& weight, int, int, int e) {
      const LogSum& log_sum = log_sums[e / 2];
      weight = units.power(weight, log_sum.exponent) * log_sum.factor;
    });
  }
};

}  // namespace fused_attn
