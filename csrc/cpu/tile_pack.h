// Rows of queries, keys and values as tiles. What is missing of a row is 0.
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

// Rows [begin, begin + n) of a head as addresses, and null up to `count`.
template <class T>
inline void list_rows(const T* head, int64_t stride, int64_t begin, int64_t n, int64_t count,
                      const T** rows) {
  for (int64_t r = 0; r < count; ++r) rows[r] = r < n ? head + (begin + r) * stride : nullptr;
}

// By vectors: memset would be a string instruction, which takes a hundred cycles to begin.
inline void clear(float* at, int64_t count) {
  for (int64_t e = 0; e < count; e += 16) {
    Vec<float> zero{};
    asm volatile("" : "+v"(zero));
    store(at + e, zero);
  }
}

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

// Rows are given by their addresses; null: a row of 0.
template <class T>
class TilePack {
  using F = TileFormat<T>;
  static constexpr int kParts = F::kParts;
  static constexpr int64_t kStep = kParts * kTileNumbers;  // of 16 rows or keys

 public:
  // Of rows of `steps` * 32 features, however they are packed.
  static int64_t size(int64_t rows, int64_t steps) { return rows / 16 * steps * kStep; }

  // Left tiles (count / 16, steps, parts) of 16 rows x 32 features.
  static void left(const T* const* rows, int64_t count, int64_t dim, int64_t steps, uint16_t* dst) {
    for (int64_t r = 0; r < count; ++r) {
      uint16_t* const at = dst + r / 16 * steps * kStep + r % 16 * kTileSteps;
      for (int64_t s = 0; s < steps; ++s) {
        numbers(rows[r], s * kTileSteps, dim, at + s * kStep, kTileNumbers);
      }
    }
  }

  // Right tiles (count / 16, steps, parts) of 16 pairs of features x 16 rows.
  static void right(const T* const* rows, int64_t count, int64_t dim, int64_t steps,
                    uint16_t* dst) {
    alignas(64) uint16_t stage[kParts][kTileNumbers];
    for (int64_t tile = 0; tile < count / 16; ++tile) {
      for (int64_t s = 0; s < steps; ++s, dst += kStep) {
        for (int64_t r = 0; r < 16; ++r) {
          numbers(rows[tile * 16 + r], s * kTileSteps, dim, stage[0] + r * kTileSteps,
                  kTileNumbers);
        }
        for (int part = 0; part < kParts; ++part) {
          transpose_tile(stage[part], 16, dst + part * kTileNumbers, 16);
        }
      }
    }
  }

  // Right tiles (count / 32, 2 steps, parts) of 16 pairs of rows x 16 features.
  static void right_pairs(const T* const* rows, int64_t count, int64_t dim, int64_t steps,
                          uint16_t* dst) {
    for (int64_t r = 0; r < count; r += 32) {
      for (int64_t s = 0; s < steps; ++s, dst += 2 * kStep) {
        pairs(rows + r, s * kTileSteps, dim, dst);
      }
    }
  }

  // One pair of rows of such tiles, for types of one part; dst: its row of the first tile.
  static FUSED_ATTN_INLINE void right_pair(const T* a, const T* b, int64_t dim, int64_t steps,
                                           uint16_t* dst) {
    for (int64_t s = 0; s < steps; ++s) pair(a, b, s * kTileSteps, dim, dst + 2 * s * kStep);
  }

  // Left tiles (2 steps, parts) of 16 features x 32 rows: the transpose.
  static void left_columns(const T* const* rows, int64_t dim, int64_t steps, uint16_t* dst) {
    alignas(64) uint16_t stage[2 * kParts][kTileNumbers];
    for (int64_t s = 0; s < steps; ++s) {
      pairs(rows, s * kTileSteps, dim, stage[0]);
      for (int tile = 0; tile < 2 * kParts; ++tile, dst += kTileNumbers) {
        transpose_tile(stage[tile], 16, dst, 16);
      }
    }
  }

  // Takes rows that are not finite out, and says which of a block they were.
  static void take_special(const T** rows, int64_t count, int64_t dim, KeyBlock* block) {
    block->num_special = 0;
    for (int64_t t = 0; t < count; ++t) {
      if (rows[t] == nullptr || __builtin_expect(row_finite(rows[t], dim), 1)) continue;
      rows[t] = nullptr;
      block->special[block->num_special++] = static_cast<uint8_t>(t);
    }
  }

 private:
  // Right tiles (2, parts) of 16 pairs of rows x 16 features, from feature `begin` on.
  static FUSED_ATTN_INLINE void pairs(const T* const* rows, int64_t begin, int64_t dim,
                                      uint16_t* dst) {
    for (int64_t r = 0; r < 16; ++r) {
      if constexpr (kParts == 1) {
        pair(rows[2 * r], rows[2 * r + 1], begin, dim, dst + r * kTileSteps);
      } else {
        for (int64_t half = 0; half < 2; ++half) {
          Vec32 a[kParts], b[kParts];
          split(rows[2 * r], begin + 16 * half, dim, a);
          split(rows[2 * r + 1], begin + 16 * half, dim, b);
          for (int part = 0; part < kParts; ++part) {
            F::store_woven(a[part], b[part],
                           dst + half * kStep + part * kTileNumbers + r * kTileSteps);
          }
        }
      }
    }
  }

  static FUSED_ATTN_INLINE void pair(const T* a, const T* b, int64_t begin, int64_t dim,
                                     uint16_t* dst) {
    const __m512i down = low_halves(), up = _mm512_add_epi16(down, _mm512_set1_epi16(16));
    const __m512i x = load_numbers(a, begin, dim), y = load_numbers(b, begin, dim);
    _mm512_store_si512(dst, _mm512_permutex2var_epi16(x, down, y));
    _mm512_store_si512(dst + kStep, _mm512_permutex2var_epi16(x, up, y));
  }

  // 32 numbers of a row from `begin` on. In parts, numbers i and 16 + i are neighbours: queries and
  // keys are packed alike, and products do not mind.
  static FUSED_ATTN_INLINE void numbers(const T* row, int64_t begin, int64_t end, uint16_t* dst,
                                        int64_t part) {
    if constexpr (kParts == 1) {
      (void)part;
      _mm512_storeu_si512(dst, load_numbers(row, begin, end));
    } else {
      Vec32 a[kParts], b[kParts];
      split(row, begin, end, a);
      split(row, begin + 16, end, b);
      for (int p = 0; p < kParts; ++p) F::store_woven(a[p], b[p], dst + p * part);
    }
  }

  // 32 numbers that are multiplied as they are.
  static FUSED_ATTN_INLINE __m512i load_numbers(const T* row, int64_t begin, int64_t end) {
    return _mm512_maskz_loadu_epi16(row == nullptr ? 0 : lanes32(end, begin), row + begin);
  }

  // 16 numbers as parts, in the upper halves of words. Infinity and NaN stay what they are:
  // infinity less infinity is no part.
  static FUSED_ATTN_INLINE void split(const T* row, int64_t begin, int64_t end, Vec32* parts) {
    const __mmask16 own = row == nullptr ? __mmask16{0} : lanes16(end, begin);
    __m512 x;
    if constexpr (sizeof(T) == 4) {
      x = _mm512_maskz_loadu_ps(own, row + begin);
    } else {
      x = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(own, row + begin));
    }
    F::split((Vec<float>)x, parts);
    const __mmask16 odd = _mm512_fpclass_ps_mask(x, kInfinityOrNan);
    if (__builtin_expect(odd == 0, 1)) return;
    const __m512i quiet = _mm512_or_si512((__m512i)x, _mm512_set1_epi32(0x10000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    parts[0] = (Vec32)_mm512_mask_mov_epi32((__m512i)parts[0], nan, quiet);
    for (int p = 1; p < kParts; ++p) {
      parts[p] = (Vec32)_mm512_mask_mov_epi32((__m512i)parts[p], odd, _mm512_setzero_si512());
    }
  }

  // Numbers 0 to 15 of two vectors, in turn.
  static FUSED_ATTN_INLINE __m512i low_halves() {
    alignas(64) static const uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                  11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return _mm512_load_si512(kLow);
  }
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
