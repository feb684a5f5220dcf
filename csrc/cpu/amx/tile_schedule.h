// Schedule that interleaves tile MMAs with vector work.
//
// A step is 2 x 2 tile MMAs with K = 32. The accumulators of a quad are stored only when the next
// quad needs their registers, one tile before each MMA. Storing all four together increased the
// time of an MMA from 16 to 22.6 cycles.
#pragma once

#include "cpu/amx/tile_format.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// One matmul of left tiles (steps, parts, 2) and right tiles (2, steps, parts), with 2 x 2
// accumulators. The strides between steps and between columns are in elements. `out` holds the four
// output tiles.
struct TileQuad {
  const uint16_t *left, *right;
  int64_t steps, left_step, right_column, right_step;
  float* out[4];
};

// Sets the output tiles of a quad, which are stored as (2 columns, 2 rows).
inline void set_out(float* out, TileQuad* quad) {
  quad->out[0] = out;
  quad->out[1] = out + kPairSums;
  quad->out[2] = out + kTileSums;
  quad->out[3] = out + kPairSums + kTileSums;
}

// Fills `quads` with the columns / 2 quads that multiply left tiles (steps, 2) by right tiles
// (columns, steps) into output tiles (columns, 2). Left and right are contiguous.
template <class F>
inline void product_quads(const uint16_t* left, const uint16_t* right, int64_t steps,
                          int64_t columns, float* out, TileQuad* quads) {
  constexpr int64_t kStep = F::kParts * kTileNumbers;
  for (int64_t c = 0; c < columns; c += 2) {
    TileQuad& quad = quads[c / 2];
    quad.left = left;
    quad.right = right + c * steps * kStep;
    quad.steps = steps;
    quad.left_step = 2 * kStep;
    quad.right_column = steps * kStep;
    quad.right_step = kStep;
    set_out(out + c * kPairSums, &quad);
  }
}

// Fills `quads` with the columns / 2 quads that multiply left tiles (steps, 2) by right tiles
// (steps, columns), which hold pairs of keys, into output tiles (columns, 2). Left and right are
// contiguous.
template <class F>
inline void sum_quads(const uint16_t* left, const uint16_t* right, int64_t steps, int64_t columns,
                      float* out, TileQuad* quads) {
  constexpr int64_t kStep = F::kParts * kTileNumbers;
  for (int64_t c = 0; c < columns; c += 2) {
    TileQuad& quad = quads[c / 2];
    quad.left = left;
    quad.right = right + c * kStep;
    quad.steps = steps;
    quad.left_step = 2 * kStep;
    quad.right_column = kStep;
    quad.right_step = columns * kStep;
    set_out(out + c * kPairSums, &quad);
  }
}

// The accumulators in registers 0 to 3 that are not stored yet, with their destinations.
struct PendingSums {
  PendingSums() { forget(); }

  void forget() {
    for (int i = 0; i < 4; ++i) at[i] = apart[i];
    adds = false;
  }

  // Adds the partial sums in `apart` to their destinations `sums`.
  void add() {
    for (int i = 0; i < 4; ++i) {
      for (int64_t e = 0; e < kTileSums; e += 16) {
        store(sums[i] + e, load(sums[i] + e) + load(apart[i] + e));
      }
    }
    adds = false;
  }

  // Stores all four accumulators and completes a pending addition.
  void flush() {
    tile_store<0>(at[0]);
    tile_store<1>(at[1]);
    tile_store<2>(at[2]);
    tile_store<3>(at[3]);
    if (adds) add();
    forget();
  }

  float* at[4];
  // For float32, a step is six MMAs of bfloat16 parts, each of which rounds its accumulator. To
  // round less, a few steps are accumulated in `apart` and then added to `sums` once.
  bool adds;
  float* sums[4];
  alignas(64) float apart[4][kTileSums];
};

// Empty vector work.
struct NoWork {
  bool done() const { return true; }
  template <int kQuarter>
  void next() {}
};

// Issues MMAs and does a share of the vector work after each step. The share is a compile-time
// constant and the loops have few branches, because a branch mispredict costs as much as an MMA.
//
// Work must have done(), and next<0>() to next<3>(), which do the four quarters of a unit of work.
template <class F, class Work>
class TileSchedule {
  using Products = TileProducts<F::kParts>;
  static constexpr bool kApart = !F::kRounds;

 public:
  TileSchedule(PendingSums* pending, const Work& work) : work(work), pending_(pending) {}

  // Multiplies a quad. With kAdd, adds to the output instead of overwriting it. kUnits is the
  // number of units of work per step.
  template <bool kAdd, int kUnits>
  FUSED_ATTN_INLINE void multiply(const TileQuad& quad) {
    const uint16_t *a = quad.left, *b = quad.right;
    step<true, kAdd, kUnits>(a, b, b + quad.right_column, quad.out);
    if (kApart && pending_->adds) pending_->add();
    for (int64_t s = 1; s < quad.steps; ++s) {
      a += quad.left_step;
      b += quad.right_step;
      step<false, kAdd, kUnits>(a, b, b + quad.right_column, quad.out);
    }
    constexpr bool kAddsApart = kApart && kAdd;
    for (int i = 0; i < 4; ++i) {
      pending_->at[i] = kAddsApart ? pending_->apart[i] : quad.out[i];
      if (kAddsApart) pending_->sums[i] = quad.out[i];
    }
    pending_->adds = kAddsApart;
  }

  FUSED_ATTN_INLINE void finish() {
    while (!work.done()) unit();
  }

  Work work;

 private:
  // Does the part of the work that is due. A step calls this at four places, because 100 cycles of
  // work at one place would delay the MMAs after it.
  template <int kIndex, int kUnits>
  FUSED_ATTN_INLINE void meanwhile() {
    if constexpr (kIndex % Products::kCount == Products::kCount - 1) {
      constexpr int kPlace = kIndex / Products::kCount;
      if (work.done()) return;
      if constexpr (kUnits == 1) work.template next<kPlace>();
      if constexpr (kUnits == 2) {
        work.template next<kPlace % 2 * 2>();
        work.template next<kPlace % 2 * 2 + 1>();
      }
      for (int i = 0; i < kUnits / 4; ++i) {
        if (i == 0 || !work.done()) unit();
      }
    }
  }

  FUSED_ATTN_INLINE void unit() {
    work.template next<0>();
    work.template next<1>();
    work.template next<2>();
    work.template next<3>();
  }

  // Stores accumulator kTile of the previous quad and initializes it for this one.
  template <int kTile, bool kFirst, bool kAdd>
  FUSED_ATTN_INLINE void begin(float* const* out) {
    if (!kFirst) return;
    tile_store<kTile>(pending_->at[kTile]);
    if (kAdd && !kApart) {
      tile_load<kTile>(out[kTile]);
    } else {
      tile_zero<kTile>();
    }
  }

  // Issues the MMAs of parts from kProduct on. Does not reload an operand that the previous MMA
  // used.
  //
  // a: left tiles of 16 rows. b0, b1: right tiles of 16 columns.
  template <bool kFirst, bool kAdd, int kUnits, int kProduct = 0>
  FUSED_ATTN_INLINE void step(const uint16_t* a, const uint16_t* b0, const uint16_t* b1,
                              float* const* out) {
    if constexpr (kProduct < Products::kCount) {
      constexpr int kLeft = Products::kOfLeft[kProduct], kRight = Products::kOfRight[kProduct];
      constexpr int kBefore = kProduct == 0 ? 0 : kProduct - 1;
      constexpr bool kNewLeft = kProduct == 0 || kLeft != Products::kOfLeft[kBefore];
      constexpr bool kNewRight = kProduct == 0 || kRight != Products::kOfRight[kBefore];
      constexpr bool kBegin = kFirst && kProduct == 0;
      if (kNewLeft) tile_stream<4>(a + kLeft * kPairNumbers);
      if (kNewRight) tile_stream<6>(b0 + kRight * kTileNumbers);
      begin<0, kBegin, kAdd>(out);
      F::Number::template multiply<0, 4, 6>();
      meanwhile<4 * kProduct, kUnits>();
      if (kNewRight) tile_stream<7>(b1 + kRight * kTileNumbers);
      begin<1, kBegin, kAdd>(out);
      F::Number::template multiply<1, 4, 7>();
      meanwhile<4 * kProduct + 1, kUnits>();
      if (kNewLeft) tile_stream<5>(a + kLeft * kPairNumbers + kTileNumbers);
      begin<2, kBegin, kAdd>(out);
      F::Number::template multiply<2, 5, 6>();
      meanwhile<4 * kProduct + 2, kUnits>();
      begin<3, kBegin, kAdd>(out);
      F::Number::template multiply<3, 5, 7>();
      meanwhile<4 * kProduct + 3, kUnits>();
      step<kFirst, kAdd, kUnits, kProduct + 1>(a, b0, b1, out);
    }
  }

  PendingSums* const pending_;
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
