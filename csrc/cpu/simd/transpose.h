// Transposes matrices between row-major rows and queries in vector lanes.
#pragma once

#include <utility>

#include "cpu/simd/simd.h"

namespace fused_attn {
namespace {

// A tile of kTransposeTile x kTransposeTile elements of 4 bytes is transposed in registers.
#if defined(__AVX512F__)
constexpr int64_t kTransposeTile = 16;

// Transposes the 16 x 16 matrix with rows row(0) to row(15) into target. The stride is in elements
// of 4 bytes.
template <class Row>
inline void transpose_rows(const Row& row, void* target, int64_t target_stride) {
  float* const dst = static_cast<float*>(target);
  __m512 a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = row(r);
  // Interleaves pairs of rows, then pairs of pairs, then groups of four 128-bit lanes.
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {
    for (int half = 0; half < 2; ++half) {
      const __m512d low = _mm512_castps_pd(b[r + half]), high = _mm512_castps_pd(b[r + 2 + half]);
      a[r + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[r + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xDD);
    b[8 + c] = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xDD);
  }
  for (int c = 0; c < 4; ++c) {
    a[c] = _mm512_shuffle_f32x4(b[c], b[8 + c], 0x88);
    a[8 + c] = _mm512_shuffle_f32x4(b[c], b[8 + c], 0xDD);
    a[4 + c] = _mm512_shuffle_f32x4(b[4 + c], b[12 + c], 0x88);
    a[12 + c] = _mm512_shuffle_f32x4(b[4 + c], b[12 + c], 0xDD);
  }
  for (int c = 0; c < 16; ++c) _mm512_storeu_ps(dst + c * target_stride, a[c]);
}

inline void transpose_tile(const void* source, int64_t source_stride, void* target,
                           int64_t target_stride) {
  const float* const src = static_cast<const float*>(source);
  transpose_rows([&](int r) { return _mm512_loadu_ps(src + r * source_stride); }, target,
                 target_stride);
}
#elif defined(__AVX2__)
constexpr int64_t kTransposeTile = 8;

inline void transpose_tile(const void* source, int64_t source_stride, void* target,
                           int64_t target_stride) {
  const float* const src = static_cast<const float*>(source);
  float* const dst = static_cast<float*>(target);
  // Halves of rows r and r + 4 are loaded into one vector, because these loads need no shuffle
  // unit.
  for (int half = 0; half < 2; ++half) {
    __m256 a[4];
    for (int r = 0; r < 4; ++r) {
      const float* const row = src + r * source_stride + 4 * half;
      a[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)),
                                  _mm_loadu_ps(row + 4 * source_stride), 1);
    }
    const __m256 low[2] = {_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpacklo_ps(a[2], a[3])};
    const __m256 high[2] = {_mm256_unpackhi_ps(a[0], a[1]), _mm256_unpackhi_ps(a[2], a[3])};
    float* const out = dst + 4 * half * target_stride;
    _mm256_storeu_ps(out, _mm256_shuffle_ps(low[0], low[1], 0x44));
    _mm256_storeu_ps(out + target_stride, _mm256_shuffle_ps(low[0], low[1], 0xEE));
    _mm256_storeu_ps(out + 2 * target_stride, _mm256_shuffle_ps(high[0], high[1], 0x44));
    _mm256_storeu_ps(out + 3 * target_stride, _mm256_shuffle_ps(high[0], high[1], 0xEE));
  }
}
#elif defined(FUSED_ATTN_NEON)
constexpr int64_t kTransposeTile = 4;

inline void transpose_tile(const void* source, int64_t source_stride, void* target,
                           int64_t target_stride) {
  const float* const src = static_cast<const float*>(source);
  float* const dst = static_cast<float*>(target);
  float32x4_t a[4];
  for (int r = 0; r < 4; ++r) a[r] = vld1q_f32(src + r * source_stride);
  for (int half = 0; half < 2; ++half) {
    const auto zip = [&](int r) {
      return half == 0 ? vzip1q_f32(a[r], a[r + 2]) : vzip2q_f32(a[r], a[r + 2]);
    };
    const float32x4_t even = zip(0), odd = zip(1);
    vst1q_f32(dst + (2 * half) * target_stride, vzip1q_f32(even, odd));
    vst1q_f32(dst + (2 * half + 1) * target_stride, vzip2q_f32(even, odd));
  }
}
#else
constexpr int64_t kTransposeTile = 1;

inline void transpose_tile(const void* source, int64_t, void* target, int64_t) {
  memcpy(target, source, 4);
}
#endif

// Computes dst (cols, rows), the transpose of src (rows, cols).
template <class E>
__attribute__((noinline)) void transpose(const E* src, int64_t src_stride, int64_t rows,
                                         int64_t cols, E* dst, int64_t dst_stride) {
  constexpr int64_t kTile = sizeof(E) == 4 ? kTransposeTile : 1;
  int64_t r = 0;
  for (; kTile > 1 && r + kTile <= rows; r += kTile) {
    int64_t c = 0;
    for (; c + kTile <= cols; c += kTile) {
      transpose_tile(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride);
    }
    for (; c < cols; ++c) {
      for (int64_t i = r; i < r + kTile; ++i) dst[c * dst_stride + i] = src[i * src_stride + c];
    }
  }
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) dst[c * dst_stride + r] = src[r * src_stride + c];
  }
}

// Shuffle indices of one level of lane_sums(), for lane l of the result. own() selects lane l, and
// paired() selects lane l ^ kStep. Both select from the second vector if bit kStep of l is set, and
// otherwise from the first. kLane is the number of lanes of a vector. Indices from kLane on refer
// to the second vector.
template <int kLane, int kStep>
constexpr int paired(int l) {
  return (l & kStep) != 0 ? kLane + (l ^ kStep) : l ^ kStep;
}
template <int kLane, int kStep>
constexpr int own(int l) {
  return (l & kStep) != 0 ? kLane + l : l;
}

// Returns a vector whose lane l is the sum of lanes l and l ^ kStep: of b if bit kStep of l is set,
// otherwise of a. Compiles to one blend, which runs in parallel with multiplications, and one
// shuffle.
template <int kStep, class T, int... kLane>
inline Vec<T> pair_sums(Vec<T> a, Vec<T> b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
// Clang lacks __builtin_shuffle, and GCC before 12 lacks __builtin_shufflevector.
#if defined(__clang__)
  return __builtin_shufflevector(a, b, own<kCount, kStep>(kLane)...) +
         __builtin_shufflevector(a, b, paired<kCount, kStep>(kLane)...);
#else
  const Vec<Int<T>> owns = {own<kCount, kStep>(kLane)...};
  const Vec<Int<T>> others = {paired<kCount, kStep>(kLane)...};
  return __builtin_shuffle(a, b, owns) + __builtin_shuffle(a, b, others);
#endif
}

// Returns a vector whose lane i is the sum of the lanes of rows[i].
template <class T, int kStep = 1>
inline Vec<T> lane_sums(const Vec<T>* rows) {
  using Lanes = std::make_integer_sequence<int, kLanes<T>>;
  if constexpr (2 * kStep == kLanes<T>) {
    return pair_sums<kStep, T>(rows[0], rows[1], Lanes());
  } else {
    Vec<T> sums[kLanes<T> / kStep / 2];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes<T> / kStep / 2; ++i) {
      sums[i] = pair_sums<kStep, T>(rows[2 * i], rows[2 * i + 1], Lanes());
    }
    return lane_sums<T, 2 * kStep>(sums);
  }
}

}  // namespace
}  // namespace fused_attn
