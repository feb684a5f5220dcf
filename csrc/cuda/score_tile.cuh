// A tile of scores at a fixed position, for one head after the other.
//
// Each head takes at most two products, through the same shared memory: queries with keys,
// gradients of out with values. Nothing is accumulated over keys here, so masked elements may hold
// anything until the weight of 0 replaces it.
#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/tile_sizes.h"

namespace fused_attn {

FUSED_ATTN_HOST_DEVICE int64_t count_tiles(int64_t seqlen, int64_t tile) {
  return (seqlen + tile - 1) / tile;
}

template <class T, int kHeadDim>
struct ScoreTile {
  using Sizes = ScoreSizes<sizeof(T)>;
  static constexpr int kTile = Sizes::kTile, kThreads = Sizes::kThreads;
  static constexpr int kN = Sizes::kColumns;  // per warp
  static constexpr uint32_t kRowBytes = kHeadDim * sizeof(T);
  static constexpr uint32_t kLeft = 0, kRight = kTile * kRowBytes;
  static constexpr int kBytes = 2 * kRight;
  static_assert(kBytes <= kMaxSharedBytes, "tile_sizes.h: tiles are too large");
  using Scores = Accumulator<1, kN>;

  const AttentionParams& p;
  const GpuParams& gpu;
  Units<T, true> units;
  int64_t m, n, rest;  // of the tile, and the remainder of the block's index
  int i_begin, j_begin;

  FUSED_ATTN_DEVICE ScoreTile(const AttentionParams& params, const GpuParams& gpu_params)
      : p(params), gpu(gpu_params), units(params) {
    const int64_t num_m = count_tiles(p.seqlen_q, kTile), num_n = count_tiles(p.seqlen_k, kTile);
    n = block_id() % num_n;
    m = block_id() / num_n % num_m;
    rest = block_id() / num_n / num_m;
    i_begin = static_cast<int>(m * kTile);
    j_begin = static_cast<int>(n * kTile);
  }
  static int64_t blocks(const AttentionParams& p, int64_t rest) {
    return count_tiles(p.seqlen_q, kTile) * count_tiles(p.seqlen_k, kTile) * rest;
  }

  // Returns the warp's first row and column in the tile.
  static FUSED_ATTN_DEVICE int warp_row() { return warp_id() % Sizes::kRowWarps * 16; }
  static FUSED_ATTN_DEVICE int warp_column() { return warp_id() / Sizes::kRowWarps * kN; }
  // Returns the thread's r-th row in the tile, and its column of element e of fragment n.
  static FUSED_ATTN_DEVICE int row(int r) { return warp_row() + r * 8 + lane_id() / 4; }
  static FUSED_ATTN_DEVICE int column(int n, int e) {
    return warp_column() + n * 8 + 2 * (lane_id() % 4) + e % 2;
  }
  // Positions of the warp's rows and columns in the sequence.
  FUSED_ATTN_DEVICE FragmentRows<1> rows(const Sequence& s) const {
    return rows_from<1>(i_begin + warp_row(), s.h);
  }
  FUSED_ATTN_DEVICE int first_column() const { return j_begin + warp_column(); }

  FUSED_ATTN_DEVICE Tile kind(const Sequence& s) const {
    // A packed sequence may end before the tile.
    if (i_begin >= s.seqlen_q || j_begin >= s.seqlen_k) return Tile::kSkip;
    return classify(p, gpu, s, i_begin, min64(i_begin + kTile, s.seqlen_q), j_begin,
                    j_begin + kTile);
  }

  // Starts the copies of the tile's rows of two tensors: left by query, right by key.
  FUSED_ATTN_DEVICE void load(const Sequence& s, const void* left, const int64_t (&left_strides)[3],
                              const void* right, const int64_t (&right_strides)[3],
                              int64_t head_dim) const {
    const SequenceRows queries = query_rows(p, s.b), keys = key_rows(p, s.b);
    const int64_t h_kv = s.h / (p.num_heads / p.num_heads_kv);
    sync_block();  // the previous product has been read
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

  // Computes the products of the rows that load started to copy.
  FUSED_ATTN_DEVICE void multiply(Scores& products) const {
    copy_wait<0>();
    sync_block();
    set_zero<1, kN>(products);
    Product<T>::template rows_by_rows<1, kN, kHeadDim>(
        products, kLeft, warp_row(), kRight + warp_column() * kRowBytes, gpu.tf32);
  }

  // Computes the products of queries and keys. Returns the elements that everything but the bias
  // leaves visible.
  FUSED_ATTN_DEVICE Visible<1> products(Scores& scores, const Sequence& s, Tile kind) const {
    load(s, p.query, p.query_strides, p.key, p.key_strides, p.head_dim);
    Visible<1> visible{};
    if (kind == Tile::kPartial) {
      visible = visible_of<false, 1, kN>(p.mask, s, rows(s), first_column());
    }
    multiply(scores);
    return visible;
  }

  // Converts products to weights before dropout.
  FUSED_ATTN_DEVICE void weigh(Scores& scores, Visible<1> visible, const Sequence& s, Tile kind,
                               const LogSum (&log_sums)[2]) const {
    scale_scores<false, 1, kN>(scores, p, s, rows(s), first_column());
    // A runtime branch, so that the code is compiled once.
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
