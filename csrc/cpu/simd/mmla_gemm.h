// C = A * B for small bfloat16 tiles with ARM's BFMMLA. One instruction multiplies two rows of A by
// two columns of B over four K steps.
//
// Operands consist of words of two neighboring K steps, as for BFDOT. A is (m, words) in row-major
// order, B is (words, 8 lanes).
//
// BFMMLA reads two words of a row or lane from each half of a vector, so pairs of rows of A and
// pairs of words of B are zipped. The 32 instructions of an 8 x 8 x 8 block then need 16
// permutations. This reaches two thirds of the peak of BFMMLA, which is 2.7 times the peak of FMLA.
//
// Operands packed for BFMMLA would need no permutations, but the softmax produces weights with
// queries in lanes, and keys are multiplied in place.
#pragma once

#include "cpu/simd/micro_gemm.h"

namespace fused_attn {
namespace {

#if defined(FUSED_ATTN_NEON_BF16)
// Accumulators of rows 2 r and 2 r + 1 of C, in blocks of two by two.
struct RowPair {
  float32x4_t block[4];
  // Returns lanes 4 v to 4 v + 3 of row 2 r + odd of C.
  Vec<float> lanes(int odd, int v) const {
    const float64x2_t low = vreinterpretq_f64_f32(block[2 * v]);
    const float64x2_t high = vreinterpretq_f64_f32(block[2 * v + 1]);
    return (Vec<float>)(odd != 0 ? vzip2q_f64(low, high) : vzip1q_f64(low, high));
  }
};

inline bfloat16x8_t zip_words(Vec32 a, Vec32 b, bool upper) {
  return vreinterpretq_bf16_u32(upper ? vzip2q_u32((uint32x4_t)a, (uint32x4_t)b)
                                      : vzip1q_u32((uint32x4_t)a, (uint32x4_t)b));
}

// Computes kPairs pairs of rows of C. If `last_is_one`, the second row of the last pair is read
// from A but not written to C. `words` must be even.
template <int kPairs, Into kInto>
inline void mmla_rows(int64_t words, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                      float* c, int64_t ldc, float* columns, bool last_is_one) {
  RowPair sums[kPairs] = {};
  for (int64_t w = 0; w < words; w += 2) {
    bfloat16x8_t lanes[4];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const uint32_t* const at = b + w * ldb + v * kLanes<float>;
      lanes[2 * v] = zip_words(load(at), load(at + ldb), false);
      lanes[2 * v + 1] = zip_words(load(at), load(at + ldb), true);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kPairs; ++r) {
      const uint32_t* const row = a + 2 * r * lda + w;
      const bfloat16x8_t rows =
          vreinterpretq_bf16_u32(vcombine_u32(vld1_u32(row), vld1_u32(row + lda)));
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) {
        sums[r].block[l] = vbfmmlaq_f32(sums[r].block[l], rows, lanes[l]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < 2 * kPairs; ++r) {
    if (r == 2 * kPairs - 1 && last_is_one) break;
    for (int v = 0; v < 2; ++v) {
      float* const out = c + r * ldc + v * kLanes<float>;
      Vec<float> sum = sums[r / 2].lanes(r % 2, v);
      if (kInto == Into::kAdd) sum += load(out);
      if (kInto == Into::kScale) sum += load(out) * load(columns + v * kLanes<float>);
      if (kInto == Into::kStoreMaximum) {
        float* const column = columns + v * kLanes<float>;
        store(column, max<float>(load(column), sum));
      }
      store(out, sum);
    }
  }
}

// Computes C (m, 8). A must have an even number of readable rows.
template <Into kInto>
inline void mmla_gemm(int64_t m, int64_t words, const uint32_t* a, int64_t lda, const uint32_t* b,
                      int64_t ldb, float* c, int64_t ldc, float* columns) {
  int64_t r = 0;
  for (; r + 8 <= m; r += 8) {
    mmla_rows<4, kInto>(words, a + r * lda, lda, b, ldb, c + r * ldc, ldc, columns, false);
  }
  for (; r < m; r += 2) {
    mmla_rows<1, kInto>(words, a + r * lda, lda, b, ldb, c + r * ldc, ldc, columns, r + 1 == m);
  }
}
#endif

}  // namespace
}  // namespace fused_attn
