// Numbers as tile registers multiply them: how a storage type is split and stored.
//
//   bfloat16: as it is.
//   float16: as it is where tiles know it; else two bfloat16 parts.
//   float32: three bfloat16 parts. Two float16 parts would be 1.5 times as fast, but have 22 bits:
//   in rows where one key has all the weight, out is that key's value, which then misses a bit.
// Of the products of parts, those below the type's last bit are left out.
#pragma once

#include "cpu/amx.h"
#include "cpu/vec_math.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

struct BFloat16Tiles {
  static constexpr uint32_t kBits = 0xFFFF0000u;  // of a float32 that one such number has

  template <int kSum, int kLeft, int kRight>
  static FUSED_ATTN_INLINE void multiply() {
    tile_multiply_bfloat16<kSum, kLeft, kRight>();
  }

  // 16 numbers, rounded.
  static FUSED_ATTN_INLINE void store(uint16_t* at, Vec<float> x) {
    _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
  static float load(const uint16_t* at) { return to_acc(BFloat16{*at}); }
};

#if defined(FUSED_ATTN_AMX_FP16)
struct HalfTiles {
  static constexpr uint32_t kBits = 0xFFFFE000u;

  template <int kSum, int kLeft, int kRight>
  static FUSED_ATTN_INLINE void multiply() {
    tile_multiply_half<kSum, kLeft, kRight>();
  }

  static FUSED_ATTN_INLINE void store(uint16_t* at, Vec<float> x) {
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
  }
  static float load(const uint16_t* at) { return to_acc(Half{*at}); }
};
#endif

// What a storage type is multiplied as.
template <class T>
struct TileFormatOf {  // float32
  using Number = BFloat16Tiles;
  static constexpr int kParts = 3, kWeightExponent = 0;
};
template <>
struct TileFormatOf<Half> {
#if defined(FUSED_ATTN_AMX_FP16)
  using Number = HalfTiles;
  static constexpr int kParts = 1, kWeightExponent = 7;
#else
  using Number = BFloat16Tiles;
  static constexpr int kParts = 2, kWeightExponent = 0;
#endif
};
template <>
struct TileFormatOf<BFloat16> {
  using Number = BFloat16Tiles;
  static constexpr int kParts = 1, kWeightExponent = 0;
};

template <class T>
struct TileFormat : TileFormatOf<T> {
  using Number = typename TileFormatOf<T>::Number;
  using TileFormatOf<T>::kParts;
  // A weight of 1 is stored as 2^kWeightExponent, so that small ones keep their bits.
  using TileFormatOf<T>::kWeightExponent;
  // Weights are multiplied as other numbers than they are.
  static constexpr bool kRounds = sizeof(T) == 2;

  // 16 numbers as parts that lie `apart`. All but the last are cut off, so that what is left is
  // exact.
  static FUSED_ATTN_INLINE void split(Vec<float> x, uint16_t* at, int64_t apart) {
    for (int part = 0; part < kParts - 1; ++part) {
      const Vec<float> high = (Vec<float>)((Vec32)x & Number::kBits);
      Number::store(at + part * apart, high);
      x -= high;
    }
    Number::store(at + (kParts - 1) * apart, x);
  }

  // 32 weights in a row of tiles; adds to *rounded what they became.
  static FUSED_ATTN_INLINE void store_weights(uint16_t* row, Vec<float> a, Vec<float> b,
                                              Vec<float>* rounded) {
    if constexpr (kParts == 1 && kWeightExponent == 0) {
      const __m512bh pair = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      _mm512_store_si512(row, (__m512i)pair);
      *rounded =
          (Vec<float>)_mm512_dpbf16_ps((__m512)*rounded, pair, (__m512bh)_mm512_set1_epi16(0x3F80));
      return;
    }
    if constexpr (kRounds) {
      // By integer instructions, which have a port of their own beside the conversions.
      // Two bfloat16 parts have 16 bits of the 24, a float16 11.
      constexpr uint32_t kLast = kParts == 2 ? 1u << 8 : 1u << 13;
      a = (Vec<float>)(((Vec32)a + kLast / 2) & (0u - kLast));
      b = (Vec<float>)(((Vec32)b + kLast / 2) & (0u - kLast));
      *rounded += a + b;
    }
    split(a, row, kTileNumbers);
    split(b, row + 16, kTileNumbers);
  }

  static float weight(const uint16_t* at) {
    float sum = 0;
    for (int part = kParts - 1; part >= 0; --part) sum += Number::load(at + part * kTileNumbers);
    return sum;
  }
};

// The products of parts, the largest last as far as it goes, in an order in which the next one
// shares an operand with the one before.
template <int kParts>
struct TileProducts;
template <>
struct TileProducts<1> {
  static constexpr int kCount = 1, kOfLeft[] = {0}, kOfRight[] = {0};
};
template <>
struct TileProducts<2> {
  static constexpr int kCount = 3, kOfLeft[] = {1, 0, 0}, kOfRight[] = {0, 0, 1};
};
template <>
struct TileProducts<3> {
  static constexpr int kCount = 6;
  static constexpr int kOfLeft[] = {2, 1, 1, 0, 0, 0}, kOfRight[] = {0, 0, 1, 1, 2, 0};
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
