// C = A * B in AMX tile registers, with bfloat16 operands and float32 accumulation.
//
// Each element of A and B is a sum of kParts bfloat16 parts. Three parts hold all 24 bits of a
// float32, two hold all 11 bits of a float16.
//
// A tile MMA of 16 x 16 x 32 takes 16 cycles. Float32 (six MMAs) is therefore 2.7 times as fast as
// with vector multiply-adds, and float16 (four MMAs) 4 times.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/amx/amx.h"
#include "cpu/simd/micro_gemm.h"

namespace fused_attn {
namespace {

// MMAs of parts that affect the last bit of a float32. Each reuses an operand of the previous one.
//
// Two parts need all four MMAs. Without the smallest, the lse of a single score was off by 2^-17,
// more than in eager attention if float16 holds the score exactly.
//
// The first kSmall MMAs are accumulated over all steps before the others, so that C is rounded at
// its full magnitude only once per 32 steps.
template <int kParts>
struct PartProducts;
template <>
struct PartProducts<1> {
  static constexpr int kSmall = 0, kCount = 1, kOfA[] = {0}, kOfB[] = {0};
};
template <>
struct PartProducts<2> {
  static constexpr int kSmall = 0, kCount = 4, kOfA[] = {1, 1, 0, 0}, kOfB[] = {1, 0, 0, 1};
};
template <>
struct PartProducts<3> {
  static constexpr int kSmall = 5, kCount = 6;
  static constexpr int kOfA[] = {2, 1, 1, 0, 0, 0}, kOfB[] = {0, 0, 1, 1, 2, 0};
};

// For each K step, accumulates MMAs [kFirst, kLast) of PartProducts<kParts>. The accumulators are
// tile registers 0 and 1 or, with kTwo, 0 to 3.
template <int kParts, bool kTwo, int kFirst, int kLast>
inline void tile_products(int64_t k, const uint16_t* a, int64_t lda, int64_t a_part,
                          const uint32_t* b, int64_t ldb, int64_t b_part) {
  using Products = PartProducts<kParts>;
  for (int64_t t = 0; t < k; t += kTileSteps) {
#pragma GCC unroll 6
    for (int product = kFirst; product < kLast; ++product) {
      const int of_a = Products::kOfA[product], of_b = Products::kOfB[product];
      const bool new_a = product == kFirst || of_a != Products::kOfA[product - 1];
      const bool new_b = product == kFirst || of_b != Products::kOfB[product - 1];
      const uint16_t* const at_a = a + of_a * a_part;
      const uint32_t* const at_b = b + of_b * b_part;
      if (new_a) _tile_loadd(4, at_a, lda * 2);
      if (new_b) _tile_loadd(6, at_b, ldb * 4);
      _tile_dpbf16ps(0, 4, 6);
      if (new_b) _tile_loadd(7, at_b + 16, ldb * 4);
      _tile_dpbf16ps(1, 4, 7);
      if (kTwo) {
        if (new_a) _tile_loadd(5, at_a + 16 * lda, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    a += kTileSteps;
    b += kTileSteps / 2 * ldb;
  }
}

// Computes 32 columns of C, in 16 rows or, with kTwo, 32. Strides are in elements; *_part is the
// stride between bfloat16 parts.
template <int kParts, bool kTwo, Into kInto>
inline void tile_block(int64_t k, const uint16_t* a, int64_t lda, int64_t a_part, const uint32_t* b,
                       int64_t ldb, int64_t b_part, float* c, int64_t ldc, const float* columns) {
  static_assert(kInto != Into::kStoreMaximum, "AMX does not implement kStoreMaximum");
  // Start from C only with a single part. With more parts, each MMA would round C (see Into).
  constexpr bool kFromC = kInto == Into::kAdd && kParts == 1;
  asm volatile("" ::: "memory");  // keeps earlier stores before the tile loads
  if (kFromC) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16, ldc * 4);
    if (kTwo) {
      _tile_loadd(2, c + 16 * ldc, ldc * 4);
      _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  using Products = PartProducts<kParts>;
  constexpr int kSmall = Products::kSmall;
  tile_products<kParts, kTwo, 0, kSmall>(k, a, lda, a_part, b, ldb, b_part);
  tile_products<kParts, kTwo, kSmall, Products::kCount>(k, a, lda, a_part, b, ldb, b_part);
  constexpr bool kInPlace = kInto == Into::kStore || kFromC;
  alignas(64) float product[kInPlace ? 1 : 32 * 32];
  float* const out = kInPlace ? c : product;
  const int64_t ld = kInPlace ? ldc : 32;
  _tile_stored(0, out, ld * 4);
  _tile_stored(1, out + 16, ld * 4);
  if (kTwo) {
    _tile_stored(2, out + 16 * ld, ld * 4);
    _tile_stored(3, out + 16 * ld + 16, ld * 4);
  }
  if (kInPlace) return;
  for (int v = 0; v < 2; ++v) {
    const Vec<float> factor = kInto == Into::kScale ? load(columns + 16 * v) : Vec<float>{};
    for (int r = 0; r < (kTwo ? 32 : 16); ++r) {
      float* const at = c + r * ldc + 16 * v;
      const Vec<float> x = load(product + 32 * r + 16 * v);
      store(at, kInto == Into::kScale ? load(at) * factor + x : load(at) + x);
    }
  }
}

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
