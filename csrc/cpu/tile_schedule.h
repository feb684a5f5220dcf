// The products of a tile in tile registers, with vector work in between.
//
// A step is four products, 2 x 2 tiles, of 32 numbers each. What a group of steps has summed up is
// stored only when the next group needs its registers, one tile before each product: stored at
// once, a product took 22.6 cycles instead of 16.
#pragma once

#include "cpu/tile_format.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// kRows: of the softmax, in each step.
template <class F, int kRows, class Softmax>
struct TileSchedule {
  static constexpr int64_t kStep = F::kParts * kTileNumbers;
  static constexpr int kProducts = 4 * TileProducts<F::kParts>::kCount;

  // After product `kIndex` of the step.
  template <int kIndex>
  FUSED_ATTN_INLINE void meanwhile() {
    constexpr int kCount = (kIndex + 1) * kRows / kProducts - kIndex * kRows / kProducts;
    for (int i = 0; i < kCount; ++i) {
      if (!softmax.done()) softmax.next();
    }
  }

  // Sum kTile to where it belongs, to make room for the next one: that at `next`, or 0.
  template <int kTile, bool kFirst>
  FUSED_ATTN_INLINE void begin(float* const* next) {
    if (!kFirst) return;
    tile_store<kTile>(pending[kTile]);
    if (next == nullptr) {
      tile_zero<kTile>();
    } else {
      tile_load<kTile>(next[kTile]);
    }
  }

  // a0, a1: left tiles of 16 rows each; b0, b1: right tiles of 16 columns each.
  template <bool kFirst>
  FUSED_ATTN_INLINE void step(const uint16_t* a0, const uint16_t* a1, const uint16_t* b0,
                              const uint16_t* b1, float* const* next) {
    products<kFirst, 0>(a0, a1, b0, b1, next);
  }

  // Products of parts from kProduct on; what the last one has loaded is not loaded again.
  template <bool kFirst, int kProduct>
  FUSED_ATTN_INLINE void products(const uint16_t* a0, const uint16_t* a1, const uint16_t* b0,
                                  const uint16_t* b1, float* const* next) {
    using Products = TileProducts<F::kParts>;
    if constexpr (kProduct < Products::kCount) {
      constexpr int kLeft = Products::kOfLeft[kProduct], kRight = Products::kOfRight[kProduct];
      constexpr int kBefore = kProduct == 0 ? 0 : kProduct - 1;
      constexpr bool kNewLeft = kProduct == 0 || kLeft != Products::kOfLeft[kBefore];
      constexpr bool kNewRight = kProduct == 0 || kRight != Products::kOfRight[kBefore];
      constexpr bool kBegin = kFirst && kProduct == 0;
      if (kNewLeft) tile_load<4>(a0 + kLeft * kTileNumbers);
      if (kNewRight) tile_stream<6>(b0 + kRight * kTileNumbers);
      begin<0, kBegin>(next);
      F::Number::template multiply<0, 4, 6>();
      meanwhile<4 * kProduct>();
      if (kNewRight) tile_stream<7>(b1 + kRight * kTileNumbers);
      begin<1, kBegin>(next);
      F::Number::template multiply<1, 4, 7>();
      meanwhile<4 * kProduct + 1>();
      if (kNewLeft) tile_load<5>(a1 + kLeft * kTileNumbers);
      begin<2, kBegin>(next);
      F::Number::template multiply<2, 5, 6>();
      meanwhile<4 * kProduct + 2>();
      begin<3, kBegin>(next);
      F::Number::template multiply<3, 5, 7>();
      meanwhile<4 * kProduct + 3>();
      products<kFirst, kProduct + 1>(a0, a1, b0, b1, next);
    }
  }

  // (32, columns) sums of left (2, steps) and right tiles: those of column tile c and step s lie at
  // c * column_stride + s * step_stride.
  //
  // out: tiles (2, columns); kAdd: what is there is added to.
  template <bool kAdd>
  FUSED_ATTN_INLINE void multiply(int64_t steps, int64_t columns, const uint16_t* left,
                                  const uint16_t* right, int64_t column_stride, int64_t step_stride,
                                  float* out) {
    for (int64_t c = 0; c < columns; c += 2) {
      float* const own[4] = {out + c * kTileSums, out + (c + 1) * kTileSums,
                             out + (columns + c) * kTileSums, out + (columns + c + 1) * kTileSums};
      const uint16_t *a = left, *b = right + c * column_stride;
      step<true>(a, a + steps * kStep, b, b + column_stride, kAdd ? own : nullptr);
      for (int64_t s = 1; s < steps; ++s) {
        a += kStep;
        b += step_stride;
        step<false>(a, a + steps * kStep, b, b + column_stride, nullptr);
      }
      for (int i = 0; i < 4; ++i) pending[i] = own[i];
    }
  }

  float** pending;  // (4): where the sums in registers 0 to 3 belong
  Softmax softmax;
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
