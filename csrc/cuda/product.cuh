// Warp-level tile matmuls, for each element type.
//
// A warp computes kM * 16 rows of the result. The accumulators, and left operands that are softmax
// weights, are in registers, in the layout of mma.m16n8 (intrinsics.cuh) for every type.
#pragma once

#include "cuda/shared_tile.cuh"

namespace fused_attn {

// A thread's part of a warp's accumulator tile, which has kM * 16 rows and kN columns.
template <int kM, int kN>
using Accumulator = float[kM][kN / 8][4];

// Calls f(element, m, n, e) for each of the thread's elements of an Accumulator.
template <int kM, int kFragments, class F>
FUSED_ATTN_DEVICE void for_each(float (&acc)[kM][kFragments][4], const F& f) {
  FUSED_ATTN_UNROLL
  for (int m = 0; m < kM; ++m) {
    FUSED_ATTN_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 4; ++e) f(acc[m][n][e], m, n, e);
    }
  }
}

template <int kM, int kN>
FUSED_ATTN_DEVICE void set_zero(Accumulator<kM, kN>& acc) {
  for_each(acc, [](float& element, int, int, int) { element = 0.0f; });
}

// Number of terms that float32 matmuls add in a partial sum before they add it to the accumulator.
// This costs one extra addition per four multiply-adds. With a single running sum, the rounding
// error exceeded the limit of the numerics contract: 1.75 times the limit in gradients of rows with
// few visible keys (sums of head_dim terms), and 1.1 times the limit in out (of seqlen_k terms).
constexpr int kPartOfSum = 4;

// Bit mask of the thread's columns of a weight tile that are visible to any row of the warp. Bit
// 2 n + e is column 8 n + 2 t + e, with t = lane % 4.
using VisibleColumns = uint32_t;

// Matmuls of Half and BFloat16, on tensor cores.
template <class T>
struct Product {
  // Returns the bytes of scratch in shared memory that a warp needs for weights_by_columns with kK
  // columns of weights.
  static constexpr int scratch_bytes(int /*kM*/, int /*kK*/) { return 0; }

  // Computes acc += a b^T, for tiles a and b with kK columns in shared memory. a_row: the warp's
  // first row of a.
  template <int kM, int kN, int kK>
  static FUSED_ATTN_DEVICE void rows_by_rows(Accumulator<kM, kN>& acc, uint32_t a, int a_row,
                                             uint32_t b, bool /*tf32*/) {
    using Tile = SharedTile<T, kK>;
    const int lane = unhoisted(lane_id());
    // Limits unrolling for wide heads. Otherwise the compiler would load the fragments of full rows
    // far ahead, and they would occupy registers.
    [[maybe_unused]] constexpr int kUnroll = kK > 128 ? 4 : 8;
    FUSED_ATTN_UNROLL_BY(kUnroll)
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t left[kM][4];
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        load_matrices(left[m], Tile::at(a, a_row + m * 16 + lane % 16, 2 * k + lane / 16));
      }
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 16; ++n) {
        uint32_t right[4];
        load_matrices(right, Tile::at(b, n * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
        FUSED_ATTN_UNROLL
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16<T>(acc[m][2 * n], left[m], right[0], right[1]);
          mma_m16n8k16<T>(acc[m][2 * n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // True if weights_by_columns rounds the weights to T.
  static constexpr bool kRoundsWeights = true;

  // Adds the row sums of the rounded weights to each column of acc, as a matmul with a tile of
  // ones.
  template <int kM, int kK>
  static FUSED_ATTN_DEVICE void add_row_sums(Accumulator<kM, 8>& acc,
                                             const Accumulator<kM, kK>& weights) {
    const uint32_t ones = pack<T>(1.0f, 1.0f);
    FUSED_ATTN_UNROLL
    for (int k = 0; k < kK / 16; ++k) {
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        uint32_t left[4];
        pack_left<kM, kK>(left, weights, m, k);
        mma_m16n8k16<T>(acc[m][0], left, ones, ones);
      }
    }
  }

  // Computes acc += weights b, for a tile b with kK rows in shared memory. If kMasked, rows of b
  // that are not in `visible` are treated as 0, because they may contain NaN.
  template <bool kMasked, int kM, int kN, int kK>
  static FUSED_ATTN_DEVICE void weights_by_columns(Accumulator<kM, kN>& acc,
                                                   const Accumulator<kM, kK>& weights, uint32_t b,
                                                   VisibleColumns visible, uint32_t /*scratch*/,
                                                   bool /*tf32*/) {
    using Tile = SharedTile<T, kN>;
    const int lane = unhoisted(lane_id());
    FUSED_ATTN_UNROLL
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t left[kM][4];
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) pack_left<kM, kK>(left[m], weights, m, k);
      const uint32_t mask_low = visible_halves(visible >> (4 * k));
      const uint32_t mask_high = visible_halves(visible >> (4 * k + 2));
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 16; ++n) {
        uint32_t right[4];
        load_matrices_transposed(right, Tile::at(b, k * 16 + lane % 16, 2 * n + lane / 16));
        if (kMasked) {
          right[0] &= mask_low;
          right[1] &= mask_high;
          right[2] &= mask_low;
          right[3] &= mask_high;
        }
        FUSED_ATTN_UNROLL
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16<T>(acc[m][2 * n], left[m], right[0], right[1]);
          mma_m16n8k16<T>(acc[m][2 * n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // Computes acc += a^T b, for tiles with kK rows in shared memory. kA, kB: columns of a and b.
  // a_column, b_column: first columns used.
  template <int kM, int kN, int kK, int kA, int kB>
  static FUSED_ATTN_DEVICE void columns_by_columns(Accumulator<kM, kN>& acc, uint32_t a,
                                                   int a_column, uint32_t b, int b_column) {
    using Left = SharedTile<T, kA>;
    using Right = SharedTile<T, kB>;
    const int lane = unhoisted(lane_id());
    FUSED_ATTN_UNROLL
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t left[kM][4];
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        const int row = k * 16 + lane % 8 + lane / 16 * 8;
        load_matrices_transposed(left[m], Left::at(a, row, a_column / 8 + 2 * m + lane / 8 % 2));
      }
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 16; ++n) {
        uint32_t right[4];
        load_matrices_transposed(
            right, Right::at(b, k * 16 + lane % 16, b_column / 8 + 2 * n + lane / 16));
        FUSED_ATTN_UNROLL
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16<T>(acc[m][2 * n], left[m], right[0], right[1]);
          mma_m16n8k16<T>(acc[m][2 * n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

 private:
  // Rounds columns 16 k to 16 k + 15 of the weights to T, and packs them as a left MMA operand.
  template <int kM, int kK>
  static FUSED_ATTN_DEVICE void pack_left(uint32_t (&left)[4], const Accumulator<kM, kK>& weights,
                                          int m, int k) {
    FUSED_ATTN_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float (&pair)[4] = weights[m][2 * k + e / 2];
      left[e] = pack<T>(pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
    }
  }

  // Returns a mask of the 16-bit halves of a word: bit 0 selects the lower half, bit 1 the upper.
  static FUSED_ATTN_DEVICE uint32_t visible_halves(uint32_t bits) {
    return (bits & 1 ? 0x0000ffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
  }
};

// float32 matmuls, with FMAs or TF32 tensor cores. The weights are staged through shared memory,
// so that loops over their columns need not be unrolled.
template <>
struct Product<float> {
  static constexpr bool kRoundsWeights = false;
  static constexpr int scratch_bytes(int kM, int kK) { return kM * 16 * kK * 4; }

  template <int kM, int kN, int kK>
  static FUSED_ATTN_DEVICE void rows_by_rows(Accumulator<kM, kN>& acc, uint32_t a, int a_row,
                                             uint32_t b, bool tf32) {
    const ByRows<kK> left{a, a_row}, right{b, 0};
    if (tf32) {
      multiply_tf32<false, kM, kN, kK>(acc, left, right, ~0u);
    } else {
      multiply_float<false, kM, kN, kK>(acc, left, right);
    }
  }

  template <bool kMasked, int kM, int kN, int kK>
  static FUSED_ATTN_DEVICE void weights_by_columns(Accumulator<kM, kN>& acc,
                                                   const Accumulator<kM, kK>& weights, uint32_t b,
                                                   VisibleColumns visible, uint32_t scratch,
                                                   bool tf32) {
    using Tile = SharedTile<float, kK>;
    const int lane = unhoisted(lane_id()), g = lane / 4, t = lane % 4;
    sync_warp();  // the weights overwrite scratch that other lanes may still read
    FUSED_ATTN_UNROLL
    for (int m = 0; m < kM; ++m) {
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kK / 8; ++n) {
        FUSED_ATTN_UNROLL
        for (int half = 0; half < 2; ++half) {
          store_shared(Tile::element(scratch, m * 16 + half * 8 + g, n * 8 + 2 * t),
                       Pair{weights[m][n][2 * half], weights[m][n][2 * half + 1]});
        }
      }
    }
    sync_warp();
    const ByRows<kK> left{scratch, 0};
    const ByColumns<kN> right{b};
    if (tf32) {
      multiply_tf32<kMasked, kM, kN, kK>(acc, left, right, visible);
    } else {
      multiply_float<kMasked, kM, kN, kK>(acc, left, right);
    }
  }

 private:
  // Operands of a matmul: element (outer, k) is read from row `outer` of a tile (ByRows) or from
  // its column `outer` (ByColumns).
  template <int kColumns>
  struct ByRows {
    uint32_t tile;
    int first;
    FUSED_ATTN_DEVICE void quad(float (&x)[4], int outer, int k) const {
      const Chunk c =
          load_shared<Chunk>(SharedTile<float, kColumns>::at(tile, first + outer, k / 4));
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 4; ++e) x[e] = bits_float(c.word[e]);
    }
    // Loads elements k to k + 3 of `outer` and of outer + 1.
    FUSED_ATTN_DEVICE void quads(float (&x)[2][4], int outer, int k) const {
      quad(x[0], outer, k);
      quad(x[1], outer + 1, k);
    }
    FUSED_ATTN_DEVICE Pair pair(int outer, int k) const {
      return load_shared<Pair>(SharedTile<float, kColumns>::element(tile, first + outer, k));
    }
  };
  template <int kColumns>
  struct ByColumns {
    uint32_t tile;
    FUSED_ATTN_DEVICE float one(int outer, int k) const {
      return load_shared<float>(SharedTile<float, kColumns>::element(tile, k, outer));
    }
    FUSED_ATTN_DEVICE void quads(float (&x)[2][4], int outer, int k) const {
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 4; ++e) {
        const Pair p = load_shared<Pair>(SharedTile<float, kColumns>::element(tile, k + e, outer));
        x[0][e] = p.low;
        x[1][e] = p.high;
      }
    }
    FUSED_ATTN_DEVICE Pair pair(int outer, int k) const {
      return {one(outer, k), one(outer, k + 1)};
    }
  };

  // Computes acc += left right^T with multiply-adds. If kMasked, skips terms with a weight of 0,
  // because 0 * NaN is NaN.
  template <bool kMasked, int kM, int kN, int kK, class Left, class Right>
  static FUSED_ATTN_DEVICE void multiply_float(Accumulator<kM, kN>& acc, Left left, Right right) {
    const int lane = unhoisted(lane_id()), g = lane / 4, t = lane % 4;
    FUSED_ATTN_ROLLED
    for (int k = 0; k < kK; k += kPartOfSum) {
      float a[kM][2][kPartOfSum];
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        left.quad(a[m][0], m * 16 + g, k);
        left.quad(a[m][1], m * 16 + 8 + g, k);
      }
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 8; ++n) {
        float b[2][kPartOfSum];
        right.quads(b, n * 8 + 2 * t, k);
        FUSED_ATTN_UNROLL
        for (int m = 0; m < kM; ++m) {
          FUSED_ATTN_UNROLL
          for (int e = 0; e < 4; ++e) {
            float part = 0.0f;
            FUSED_ATTN_UNROLL
            for (int i = 0; i < kPartOfSum; ++i) {
              const float x = a[m][e / 2][i], added = multiply_add(x, b[e % 2][i], part);
              part = kMasked && x == 0.0f ? part : added;
            }
            acc[m][n][e] += part;
          }
        }
      }
    }
  }

  // Computes acc += left right^T in TF32. Columns 2 t and 2 t + 1 of both operands are passed as
  // columns t and t + 4 of the MMA. They are adjacent in memory, and they are the columns of the
  // thread's bits in `visible`.
  template <bool kMasked, int kM, int kN, int kK, class Left, class Right>
  static FUSED_ATTN_DEVICE void multiply_tf32(Accumulator<kM, kN>& acc, Left left, Right right,
                                              VisibleColumns visible) {
    const int lane = unhoisted(lane_id()), g = lane / 4, t = lane % 4;
    FUSED_ATTN_ROLLED
    for (int k = 0; k < kK; k += 8) {
      uint32_t a[kM][4];
      FUSED_ATTN_UNROLL
      for (int m = 0; m < kM; ++m) {
        FUSED_ATTN_UNROLL
        for (int half = 0; half < 2; ++half) {
          const Pair p = left.pair(m * 16 + half * 8 + g, k + 2 * t);
          a[m][half] = to_tf32(p.low);
          a[m][half + 2] = to_tf32(p.high);
        }
      }
      const uint32_t bits = visible >> (k / 4);
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 8; ++n) {
        const Pair p = right.pair(n * 8 + g, k + 2 * t);
        const uint32_t b0 = kMasked && !(bits & 1) ? 0u : to_tf32(p.low);
        const uint32_t b1 = kMasked && !(bits & 2) ? 0u : to_tf32(p.high);
        FUSED_ATTN_UNROLL
        for (int m = 0; m < kM; ++m) mma_m16n8k8_tf32(acc[m][n], a[m], b0, b1);
      }
    }
  }
};

}  // namespace fused_attn
