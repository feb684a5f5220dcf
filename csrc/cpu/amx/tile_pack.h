// Packs rows of query, key and value into AMX tiles, padded with 0.
#pragma once

#include "cpu/amx/tile_format.h"
#include "cpu/simd/transpose.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

constexpr int64_t kTileQueries = 32, kTileKeys = 64;  // rows of a query tile, keys of a KV block

// A packed KV block. Does not own its memory.
struct KeyBlock {
  uint16_t *key, *value;
  bool packed;
  // Rows of value with non-finite elements. They are packed as 0, because 0 * NaN is NaN even for
  // masked keys; the kernels add their contributions separately.
  int num_nonfinite;
  uint8_t nonfinite[kTileKeys];
};

// Returns a mask of the vector lanes, starting at element d, that are within a row of `dim`
// elements.
inline __mmask32 lanes32(int64_t dim, int64_t d) {
  return dim - d >= 32 ? 0xFFFFFFFFu : dim <= d ? 0u : (1u << (dim - d)) - 1;
}
inline __mmask16 lanes16(int64_t dim, int64_t d) { return static_cast<__mmask16>(lanes32(dim, d)); }

// Writes the addresses of rows [begin, begin + n) of a head to `rows`, and pads `rows` with null
// pointers to `count` entries.
template <class T>
inline void list_rows(const T* head, int64_t stride, int64_t begin, int64_t n, int64_t count,
                      const T** rows) {
  for (int64_t r = 0; r < count; ++r) rows[r] = r < n ? head + (begin + r) * stride : nullptr;
}

// Zeroes `count` floats with vector stores. The compiler would turn memset into a string
// instruction, which takes about a hundred cycles to start.
inline void clear(float* at, int64_t count) {
  const Vec<float> zero = in_register(Vec<float>{});
  for (int64_t e = 0; e < count; e += 16) store(at + e, zero);
}

constexpr int kInfinityOrNan = 0x99;  // operand of vfpclassps

// Returns true if all elements of a row are finite.
template <class T>
inline bool row_finite(const T* row, int64_t dim) {
  if constexpr (sizeof(T) == 4) {
    __mmask16 nonfinite = 0;
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512 x = _mm512_maskz_loadu_ps(lanes16(dim, d), row + d);
      nonfinite |= _mm512_fpclass_ps_mask(x, kInfinityOrNan);
    }
    return nonfinite == 0;
  } else {
    const __m512i infinity = _mm512_set1_epi16(kIsHalf<T> ? 0x7C00 : 0x7F80);
    __mmask32 nonfinite = 0;
    for (int64_t d = 0; d < dim; d += 32) {
      const __m512i x = _mm512_maskz_loadu_epi16(lanes32(dim, d), row + d);
      nonfinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, infinity), infinity);
    }
    return nonfinite == 0;
  }
}

// Row readers. WholeRows is the fast path for complete, finite rows. AnyRows handles all other
// rows.

// Reads complete rows without lane masks. The row length must be a multiple of kTileSteps. finite()
// returns false if an element was not finite; packing is then repeated with AnyRows.
template <class T>
class WholeRows {
  using F = TileFormat<T>;

 public:
  explicit WholeRows(int64_t) {}

  // Reads 32 elements of a type with one part.
  FUSED_ATTN_INLINE __m512i numbers(const T* row, int64_t begin) {
    return track(_mm512_loadu_si512(row + begin));
  }

  // Reads 16 elements as float32.
  FUSED_ATTN_INLINE __m512 floats(const T* row, int64_t begin) {
    if constexpr (sizeof(T) == 4) {
      return (__m512)track(_mm512_loadu_si512(row + begin));
    } else {
      return (__m512)track((__m512i)load_as<T>(row + begin));
    }
  }

  static FUSED_ATTN_INLINE void split(__m512 x, Vec32* parts) { F::split((Vec<float>)x, parts); }

  bool finite() const {
    constexpr bool kWords = F::kParts == 1;
    const __m512i most =
        kWords ? _mm512_set1_epi16(kIsHalf<T> ? 0x7BFF : 0x7F7F) : _mm512_set1_epi32(0x7F7FFFFF);
    return (kWords ? _mm512_cmpgt_epu16_mask(largest_, most)
                   : __mmask32{_mm512_cmpgt_epu32_mask(largest_, most)}) == 0;
  }

 private:
  FUSED_ATTN_INLINE __m512i track(__m512i x) {
    if constexpr (F::kParts == 1) {
      const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
      largest_ = _mm512_max_epu16(largest_, magnitude);
    } else {
      const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7FFFFFFF));
      largest_ = _mm512_max_epu32(largest_, magnitude);
    }
    return x;
  }

  __m512i largest_ = _mm512_setzero_si512();
};

template <class T>
class AnyRows {
  using F = TileFormat<T>;

 public:
  explicit AnyRows(int64_t dim) : dim_(dim) {}

  __m512i numbers(const T* row, int64_t begin) const {
    return _mm512_maskz_loadu_epi16(row == nullptr ? 0 : lanes32(dim_, begin), row + begin);
  }

  __m512 floats(const T* row, int64_t begin) const {
    const __mmask16 own = row == nullptr ? __mmask16{0} : lanes16(dim_, begin);
    if constexpr (sizeof(T) == 4) {
      return _mm512_maskz_loadu_ps(own, row + begin);
    } else {
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(own, row + begin));
    }
  }

  // Splits like TileFormat::split(), but stores infinity and NaN in the last part only: the
  // remainder inf - inf would be NaN. The last part is multiplied only by first parts, which are 0
  // only if the number is 0. Other parts are often 0, and 0 * inf is NaN.
  static void split(__m512 x, Vec32* parts) {
    F::split((Vec<float>)x, parts);
    const __mmask16 odd = _mm512_fpclass_ps_mask(x, kInfinityOrNan);
    if (__builtin_expect(odd == 0, 1)) return;
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512((__m512i)x, _mm512_set1_epi32(0x10000));
    const __m512i whole = _mm512_mask_mov_epi32((__m512i)x, nan, quiet);
    for (int p = 0; p < F::kParts; ++p) {
      const __m512i part = p == F::kParts - 1 ? whole : _mm512_setzero_si512();
      parts[p] = (Vec32)_mm512_mask_mov_epi32((__m512i)parts[p], odd, part);
    }
  }

  static bool finite() { return true; }

 private:
  const int64_t dim_;
};

// Packing functions. Rows are passed as an array of addresses, where null stands for a row of 0.
// The functions are not inlined: each call does enough work, and there are many call sites.
template <class T>
class TilePack {
  using F = TileFormat<T>;
  static constexpr int kParts = F::kParts;
  static constexpr int64_t kStep = kParts * kTileNumbers;  // uint16_t per 16 rows and K step

 public:
  // Returns the number of uint16_t in `rows` packed rows of `steps` * 32 features. It is the same
  // for all layouts below. `rows` must be a multiple of 16.
  static int64_t size(int64_t rows, int64_t steps) { return rows / 16 * steps * kStep; }

  // Packs 32 rows as left tiles (steps, parts, 2) of 16 rows x 32 features. Calls meanwhile() once
  // per row and step.
  template <class Meanwhile = Nothing>
  static void left(const T* const* rows, int64_t dim, int64_t steps, uint16_t* dst,
                   Meanwhile meanwhile = {}) {
    read(rows, 2 * kTileRows, dim, steps, [&](auto& reader) {
      for (int64_t r = 0; r < 2 * kTileRows; ++r) {
        for (int64_t s = 0; s < steps; ++s) {
          meanwhile();
          numbers(reader, rows[r], s * kTileSteps, dst + s * 2 * kStep + r * kTileSteps);
        }
      }
      return kParts == 1 || reader.finite();
    });
  }

  // Packs rows as right tiles (count / 16, steps, parts) of 16 pairs of features x 16 rows.
  static void right(const T* const* rows, int64_t count, int64_t dim, int64_t steps,
                    uint16_t* dst) {
    read(rows, count, dim, steps, [&](auto& reader) {
      for (int64_t tile = 0; tile < count / 16; ++tile) {
        for (int64_t s = 0; s < steps; ++s) {
          right_tile(reader, rows + tile * 16, s * kTileSteps, dst + (tile * steps + s) * kStep);
        }
      }
      return kParts == 1 || reader.finite();
    });
  }

  // Packs rows as right tiles (count / 32, 2 steps, parts) of 16 pairs of rows x 16 features, for
  // the PV matmul. A weight of 0 must not multiply a non-finite row, so such a row is packed as 0
  // and listed in block->nonfinite. row_at(i) returns the index, within a group of 32 rows, of the
  // row at position i. Calls meanwhile() once per pair of rows and step.
  template <class RowAt, class Meanwhile = Nothing>
  static void values(const T** rows, int64_t count, int64_t dim, int64_t steps, const RowAt& row_at,
                     KeyBlock* block, Meanwhile meanwhile = {}) {
    const auto pack = [&](auto& reader) {
      for (int64_t r = 0; r < count / 32; ++r) {
        for (int64_t s = 0; s < steps; ++s) {
          pairs(reader, rows + 32 * r, s * kTileSteps, block->value + (r * steps + s) * 2 * kStep,
                row_at, meanwhile);
        }
      }
      return reader.finite();
    };
    block->num_nonfinite = 0;
    if (read_fast(rows, count, dim, steps, pack)) return;
    take_nonfinite(rows, count, dim, block);
    AnyRows<T> reader(dim);
    pack(reader);
  }

  // Packs the transpose of 32 rows as left tiles (steps, parts, 2) of 16 features x 32 rows.
  static void left_columns(const T* const* rows, int64_t dim, int64_t steps, uint16_t* dst) {
    read(rows, 32, dim, steps, [&](auto& reader) {
      alignas(64) uint16_t stage[2 * kParts][kTileNumbers];
      for (int64_t s = 0; s < steps; ++s) {
        pairs(reader, rows, s * kTileSteps, stage[0], [](int i) { return i; }, Nothing());
        for (int tile = 0; tile < 2 * kParts; ++tile) {
          const int64_t at = s * 2 * kParts + tile % kParts * 2 + tile / kParts;
          transpose_tile(stage[tile], 16, dst + at * kTileNumbers, 16);
        }
      }
      return kParts == 1 || reader.finite();
    });
  }

 private:
  // Replaces the addresses of non-finite rows with null and lists these rows in block->nonfinite.
  static void take_nonfinite(const T** rows, int64_t count, int64_t dim, KeyBlock* block) {
    block->num_nonfinite = 0;
    for (int64_t t = 0; t < count; ++t) {
      if (rows[t] == nullptr || __builtin_expect(row_finite(rows[t], dim), 1)) continue;
      rows[t] = nullptr;
      block->nonfinite[block->num_nonfinite++] = static_cast<uint8_t>(t);
    }
  }

  // Calls pack() with WholeRows if possible, otherwise with AnyRows.
  template <class Packing>
  static FUSED_ATTN_INLINE void read(const T* const* rows, int64_t count, int64_t dim,
                                     int64_t steps, const Packing& pack) {
    if (read_fast(rows, count, dim, steps, pack)) return;
    AnyRows<T> reader(dim);
    pack(reader);
  }

  // Calls pack() with WholeRows. Returns false if the rows require AnyRows.
  template <class Packing>
  static FUSED_ATTN_INLINE bool read_fast(const T* const* rows, int64_t count, int64_t dim,
                                          int64_t steps, const Packing& pack) {
    if (dim != steps * kTileSteps) return false;
    __mmask8 missing = 0;
    for (int64_t r = 0; r < count; r += 8) {
      const __m512i addresses = _mm512_loadu_si512(rows + r);
      missing |= _mm512_testn_epi64_mask(addresses, addresses);
    }
    if (missing != 0) return false;
    WholeRows<T> reader(dim);
    return pack(reader);
  }

  // Packs features [begin, begin + 32) of 16 rows as a right tile. Transposes before splitting,
  // because the parts are more data.
  template <class Reader>
  static FUSED_ATTN_INLINE void right_tile(Reader& reader, const T* const* rows, int64_t begin,
                                           uint16_t* dst) {
    if constexpr (kParts == 1) {
      transpose_rows([&](int r) { return (__m512)reader.numbers(rows[r], begin); }, dst, 16);
    } else {
      alignas(64) float turned[2][16][16];
      for (int64_t half = 0; half < 2; ++half) {
        transpose_rows([&](int r) { return reader.floats(rows[r], begin + 16 * half); },
                       turned[half], 16);
      }
      for (int64_t d = 0; d < 16; ++d) {
        weave(reader, _mm512_load_ps(turned[0][d]), _mm512_load_ps(turned[1][d]), kTileNumbers,
              dst + d * kTileSteps);
      }
    }
  }

  // Packs features [begin, begin + 32) of 32 rows as right tiles (2, parts) of 16 pairs of rows x
  // 16 features.
  template <class Reader, class RowAt, class Meanwhile>
  static FUSED_ATTN_INLINE void pairs(Reader& reader, const T* const* rows, int64_t begin,
                                      uint16_t* dst, const RowAt& row_at, Meanwhile meanwhile) {
    for (int r = 0; r < 16; ++r) {
      meanwhile();
      const T *const a = rows[row_at(2 * r)], *const b = rows[row_at(2 * r + 1)];
      uint16_t* const at = dst + r * kTileSteps;
      if constexpr (kParts == 1) {
        pair(reader, a, b, begin, at);
      } else {
        for (int64_t half = 0; half < 2; ++half) {
          weave(reader, reader.floats(a, begin + 16 * half), reader.floats(b, begin + 16 * half),
                kTileNumbers, at + half * kStep);
        }
      }
    }
  }

  template <class Reader>
  static FUSED_ATTN_INLINE void pair(Reader& reader, const T* a, const T* b, int64_t begin,
                                     uint16_t* dst) {
    const __m512i down = low_halves(), up = _mm512_add_epi16(down, _mm512_set1_epi16(16));
    const __m512i x = reader.numbers(a, begin), y = reader.numbers(b, begin);
    _mm512_store_si512(dst, _mm512_permutex2var_epi16(x, down, y));
    _mm512_store_si512(dst + kStep, _mm512_permutex2var_epi16(x, up, y));
  }

  // Packs 32 elements of a row, starting at `begin`, into a row of left tiles. With several parts,
  // elements i and 16 + i become neighbors. Queries and keys use the same order, so QK^T is
  // unaffected.
  template <class Reader>
  static FUSED_ATTN_INLINE void numbers(Reader& reader, const T* row, int64_t begin,
                                        uint16_t* dst) {
    if constexpr (kParts == 1) {
      _mm512_storeu_si512(dst, reader.numbers(row, begin));
    } else {
      weave(reader, reader.floats(row, begin), reader.floats(row, begin + 16), kPairNumbers, dst);
    }
  }

  // Interleaves the parts of a and b and stores each part in its tile. `apart` is the stride
  // between these tiles, in elements.
  template <class Reader>
  static FUSED_ATTN_INLINE void weave(const Reader&, __m512 a, __m512 b, int64_t apart,
                                      uint16_t* dst) {
    Vec32 parts_a[kParts], parts_b[kParts];
    Reader::split(a, parts_a);
    Reader::split(b, parts_b);
    for (int p = 0; p < kParts; ++p) {
      F::store_woven(parts_a[p], parts_b[p], dst + p * apart);
    }
  }

  // Returns the permutation that interleaves elements 0 to 15 of two vectors.
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
