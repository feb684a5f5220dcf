// Formats of tile operands: how each storage type is split into parts that AMX multiplies.
//
//   bfloat16: one part, unchanged.
//   float16: one part, unchanged, with AMX-FP16; otherwise two bfloat16 parts.
//   float32: three bfloat16 parts. Two float16 parts would be 1.5 times as fast, but hold only 22
//   of float32's 24 significand bits. If one key has all the weight, out equals its value, and the
//   lost bits would be visible.
//
// MMAs of parts too small to affect the last bit of the type are skipped.
#pragma once

#include "cpu/amx/amx.h"
#include "cpu/simd/vec_math.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

struct BFloat16Tiles {
  static constexpr int kExponentBits = 8;
  static constexpr uint32_t kBits = 0xFFFF0000u;  // bits of a float32 that one part holds

  template <int kSum, int kLeft, int kRight>
  static FUSED_ATTN_INLINE void multiply() {
    tile_multiply_bfloat16<kSum, kLeft, kRight>();
  }

  static float load(const uint16_t* at) { return to_acc(BFloat16{*at}); }
  // Rounds to bfloat16 in the upper half of each word. Uses an integer addition, because a
  // conversion takes as long as two tile MMAs.
  static FUSED_ATTN_INLINE Vec32 upper(Vec<float> x) { return (Vec32)x + 0x8000u; }
};

#if defined(FUSED_ATTN_AMX_FP16)
struct HalfTiles {
  static constexpr int kExponentBits = 5;
  static constexpr uint32_t kBits = 0xFFFFE000u;

  template <int kSum, int kLeft, int kRight>
  static FUSED_ATTN_INLINE void multiply() {
    tile_multiply_half<kSum, kLeft, kRight>();
  }

  static float load(const uint16_t* at) { return to_acc(Half{*at}); }
  static FUSED_ATTN_INLINE Vec32 upper(Vec<float> x) {
    const __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    return (Vec32)_mm512_cvtepu16_epi32(half) << 16;
  }
};
#endif

// Selects the part format, the number of parts and the weight scale of a storage type.
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
  // Softmax weights are stored scaled by 2^kWeightExponent, so that small weights stay
  // representable.
  using TileFormatOf<T>::kWeightExponent;
  // True if the weights are rounded for the PV matmul.
  static constexpr bool kRounds = sizeof(T) == 2;
  // True if the exponent range is smaller than float32's.
  static constexpr bool kShortRange = Number::kExponentBits < 8;

  // Splits 16 float32 values into parts, each in the upper half of its word.
  static FUSED_ATTN_INLINE void split(Vec<float> x, Vec32* parts) {
    for (int part = 0; part < kParts - 1; ++part) {
      parts[part] = (Vec32)x & Number::kBits;
      x -= (Vec<float>)parts[part];
    }
    parts[kParts - 1] = Number::upper(x);
  }

  // Interleaves the upper halves of the words of a and b ("woven" order) and stores them. Uses a
  // byte shuffle, because shifts would compete with the MMAs for a port.
  static FUSED_ATTN_INLINE void store_woven(Vec32 a, Vec32 b, uint16_t* at) {
    const __m512i down = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    const __m512i low = _mm512_shuffle_epi8((__m512i)a, down);
    _mm512_store_si512(at, _mm512_mask_blend_epi16(0xAAAAAAAAu, low, (__m512i)b));
  }

  // Returns the position of element t of 32 in woven order.
  static constexpr int woven(int t) { return t < 16 ? 2 * t : 2 * t - 31; }
  // Returns the element at position i of 32, the inverse of woven().
  static constexpr int unwoven(int i) { return i / 2 + i % 2 * 16; }

  // Returns a vector mask over 32 woven elements: all ones for each element whose bit is set.
  static __m512i woven_mask(uint32_t bits) {
    const __m512i low = _mm512_maskz_set1_epi32(static_cast<__mmask16>(bits), 0xFFFF);
    const __mmask16 upper_bits = static_cast<__mmask16>(bits >> 16);
    return _mm512_or_si512(low, _mm512_maskz_set1_epi32(upper_bits, ~0xFFFF));
  }

  // Stores 32 weights in one row of left tiles, in woven order. Adds the rounded weights to
  // *rounded. With kDrops, then zeroes the weights whose bit in `keep` is 0. Uses integer
  // instructions, which do not compete with MMAs and conversions for a port.
  template <bool kDrops>
  static FUSED_ATTN_INLINE void store_weights(uint16_t* row, Vec<float> a, Vec<float> b,
                                              uint32_t keep, Vec<float>* rounded) {
    if constexpr (kRounds) {
      a = round(a);
      b = round(b);
      *rounded += a + b;
    }
    if constexpr (kDrops) {
      a = where<float>(keep & 0xFFFF, a, Vec<float>{});
      b = where<float>(keep >> 16, b, Vec<float>{});
    }
    Vec32 parts_a[kParts], parts_b[kParts];
    split(a, parts_a);
    split(b, parts_b);
    for (int part = 0; part < kParts; ++part) {
      store_woven(parts_a[part], parts_b[part], row + part * kPairNumbers);
    }
  }

  static float weight(const uint16_t* at) {
    float sum = 0;
    for (int part = kParts - 1; part >= 0; --part) sum += Number::load(at + part * kPairNumbers);
    return sum;
  }

 private:
  // Rounds to the significand bits that all parts hold together: 16 for two bfloat16 parts, 8 for
  // one, and 11 for float16.
  static FUSED_ATTN_INLINE Vec<float> round(Vec<float> x) {
    constexpr uint32_t kLast = kParts == 2 ? 1u << 8 : ~Number::kBits + 1;
    return (Vec<float>)(((Vec32)x + kLast / 2) & (0u - kLast));
  }
};

// Order of the MMAs of parts. Each MMA shares an operand with the previous one, and the largest
// come last as far as possible.
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
