// Queries, keys and values as tiles.
//
//   query panel: left tiles (2, steps, parts) of 16 queries x 32 features
//   key block: right tiles (4, steps, parts) of 16 pairs of features x 16 keys
//   value block: right tiles (2, 2 steps_v, parts) of 16 pairs of keys x 16 features
// What is missing of a row, or of a block, is 0.
#pragma once

#include "cpu/tile_format.h"
#include "cpu/transpose.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

constexpr int64_t kTileQueries = 32, kTileKeys = 64;  // of a panel, and of a block

// A block of packed keys and values.
struct KeyBlock {
  uint16_t *key, *value;
  bool packed;
  // Rows of value that are not finite, and may not be multiplied with weights of 0: they are packed
  // as 0, and added one by one.
  int num_special;
  uint8_t special[kTileKeys];
};

// The lanes of a vector from `d` on that a row of `dim` has.
inline __mmask32 lanes32(int64_t dim, int64_t d) {
  return dim - d >= 32 ? 0xFFFFFFFFu : dim <= d ? 0u : (1u << (dim - d)) - 1;
}
inline __mmask16 lanes16(int64_t dim, int64_t d) { return static_cast<__mmask16>(lanes32(dim, d)); }

constexpr int kInfinityOrNan = 0x99;  // of vfpclassps

// Whether a row is finite.
template <class T>
inline bool row_finite(const T* row, int64_t dim) {
  if constexpr (sizeof(T) == 4) {
    __mmask16 special = 0;
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512 x = _mm512_maskz_loadu_ps(lanes16(dim, d), row + d);
      special |= _mm512_fpclass_ps_mask(x, kInfinityOrNan);
    }
    return special == 0;
  } else {
    const __m512i infinity = _mm512_set1_epi16(kIsHalf<T> ? 0x7C00 : 0x7F80);
    __mmask32 special = 0;
    for (int64_t d = 0; d < dim; d += 32) {
      const __m512i x = _mm512_maskz_loadu_epi16(lanes32(dim, d), row + d);
      special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, infinity), infinity);
    }
    return special == 0;
  }
}

template <class T>
class TilePack {
  using F = TileFormat<T>;
  static constexpr int kParts = F::kParts;
  static constexpr int64_t kStep = kParts * kTileNumbers;  // of 16 rows or keys

 public:
  static int64_t query_size(int64_t steps) { return 2 * steps * kStep; }
  static int64_t key_size(int64_t steps) { return 4 * steps * kStep; }
  static int64_t value_size(int64_t steps_v) { return 4 * steps_v * kStep; }

  static void query(const T* src, int64_t stride, int64_t rows, int64_t dim, int64_t steps,
                    uint16_t* dst) {
    for (int64_t r = 0; r < kTileQueries; ++r) {
      uint16_t* const at = dst + r / 16 * steps * kStep + r % 16 * kTileSteps;
      for (int64_t s = 0; s < steps; ++s) {
        numbers(src + r * stride + s * kTileSteps, r < rows ? dim - s * kTileSteps : 0,
                at + s * kStep, kTileNumbers);
      }
    }
  }

  static void key(const T* src, int64_t stride, int64_t n, int64_t dim, int64_t steps,
                  KeyBlock* block) {
    alignas(64) uint16_t stage[kParts][kTileNumbers];
    for (int64_t tile = 0; tile < 4; ++tile) {
      for (int64_t s = 0; s < steps; ++s) {
        uint16_t* const dst = block->key + (tile * steps + s) * kStep;
        for (int64_t r = 0; r < 16; ++r) {
          const int64_t t = tile * 16 + r;
          const T* const from = src + t * stride + s * kTileSteps;
          numbers(from, t < n ? dim - s * kTileSteps : 0, stage[0] + r * kTileSteps, kTileNumbers);
        }
        for (int part = 0; part < kParts; ++part) {
          transpose_tile(stage[part], 16, dst + part * kTileNumbers, 16);
        }
      }
    }
  }

  // position(t): where the weight of key t stands among 32.
  template <class Position>
  static void value(const T* src, int64_t stride, int64_t n, int64_t dim, int64_t steps_v,
                    const Position& position, KeyBlock* block) {
    const T* rows[kTileKeys];
    for (int64_t t = 0; t < kTileKeys; ++t) rows[t] = t < n ? src + t * stride : nullptr;
    choose_special(rows, n, dim, block);
    const T* ordered[kTileKeys];
    for (int t = 0; t < kTileKeys; ++t) ordered[t / 32 * 32 + position(t % 32)] = rows[t];
    alignas(64) static const uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                  11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t step = 0; step < 2; ++step) {
      for (int64_t s = 0; s < steps_v; ++s) {
        uint16_t* const dst = block->value + (step * steps_v + s) * 2 * kStep;
        for (int64_t r = 0; r < 16; ++r) {
          alignas(64) uint16_t pair[2][kParts][32];
          for (int64_t i = 0; i < 2; ++i) {
            const T* const from = ordered[step * 32 + 2 * r + i];
            numbers(from + s * kTileSteps, from == nullptr ? 0 : dim - s * kTileSteps, pair[i][0],
                    32);
          }
          for (int part = 0; part < kParts; ++part) {
            const __m512i a = _mm512_load_si512(pair[0][part]);
            const __m512i b = _mm512_load_si512(pair[1][part]);
            uint16_t* const at = dst + part * kTileNumbers + r * kTileSteps;
            _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(at + kStep, _mm512_permutex2var_epi16(a, high, b));
          }
        }
      }
    }
  }

 private:
  // 32 numbers, of which `dim` are there.
  static FUSED_ATTN_INLINE void numbers(const T* src, int64_t dim, uint16_t* dst, int64_t part) {
    if constexpr (kParts == 1) {
      (void)part;
      _mm512_storeu_si512(dst, _mm512_maskz_loadu_epi16(lanes32(dim, 0), src));
    } else {
      for (int64_t d = 0; d < 32; d += 16) {
        __m512 x;
        if constexpr (sizeof(T) == 4) {
          x = _mm512_maskz_loadu_ps(lanes16(dim, d), src + d);
        } else {
          x = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes16(dim, d), src + d));
        }
        F::split((Vec<float>)x, dst + d, part);
        // Infinity and NaN stay what they are: infinity less infinity is no part.
        const __mmask16 odd = _mm512_fpclass_ps_mask(x, kInfinityOrNan);
        for (int p = 1; __builtin_expect(odd != 0, 0) && p < kParts; ++p) {
          _mm256_mask_storeu_epi16(dst + p * part + d, odd, _mm256_setzero_si256());
        }
      }
    }
  }

  static void choose_special(const T** rows, int64_t n, int64_t dim, KeyBlock* block) {
    block->num_special = 0;
    for (int64_t t = 0; t < n; ++t) {
      if (__builtin_expect(row_finite(rows[t], dim), 1)) continue;
      rows[t] = nullptr;
      block->special[block->num_special++] = static_cast<uint8_t>(t);
    }
  }
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
