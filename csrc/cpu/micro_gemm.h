// The one product of all attention kernels: C = A * B on small tiles.
//
// C (m, 2 vectors), B (k, 2 vectors); the elements of A are broadcast. With kMicroRows rows of C in
// registers, each step of k loads two vectors of B and kMicroRows scalars of A, so on a machine
// with two multiply-add units nothing but the additions counts.
#pragma once

#include "cpu/simd.h"

namespace fused_attn {
namespace {

template <class A>
constexpr int kPanel = 2 * kLanes<A>;  // columns of B and C: queries, or features, of one panel

// What becomes of the product, which is summed up from zero: adding it to C at the end instead of
// starting from C costs nothing and rounds less.
enum class Into {
  kStore,  // C = product
  kAdd,    // C += product
  kScale,  // C = C * scale + product, scale by column
};

// How A is stored: element (r, t) of A at a[r * lda + t], or at a[t * lda + r].
enum class Layout { kRowMajor, kColumnMajor };

template <class A, int kRows, Layout kLayout, Into kInto>
inline void micro_gemm(int64_t k, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
                       int64_t ldc, const A* scale) {
  constexpr int kLane = kLanes<A>;
  Vec<A> acc[kRows][2] = {};
  for (int64_t t = 0; t < k; ++t) {
    const Vec<A> b0 = load(b + t * ldb), b1 = load(b + t * ldb + kLane);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const A x = kLayout == Layout::kRowMajor ? a[r * lda + t] : a[t * lda + r];
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 2; ++v) {
      A* const out = c + r * ldc + v * kLane;
      if (kInto == Into::kAdd) acc[r][v] += load(out);
      if (kInto == Into::kScale) acc[r][v] += load(out) * load(scale + v * kLane);
      store(out, acc[r][v]);
    }
  }
}

// Steps of k that one sum takes before it is added to C: the error of a sum grows with its length.
// Sums over keys of a row that one key dominates round at that key's size each time; 32 halves the
// error of out against 128 steps, and costs 5 % of a product over 64.
constexpr int64_t kSumSteps = 32;
// For dO V^T, whose elements are large, and are left with their rounding where dS is a small
// difference: 8 halves the error of dQ in rows that one key dominates, and costs a third of this
// one of five products.
constexpr int64_t kShortSumSteps = 8;

// kRows rows of C, the sum over k in parts.
template <class A, int kRows, Layout kLayout, Into kInto, int64_t kSteps>
inline void gemm_rows(int64_t k, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
                      int64_t ldc, const A* scale) {
  const int64_t step = kLayout == Layout::kRowMajor ? 1 : lda;
  const int64_t first = k < kSteps ? k : kSteps;
  micro_gemm<A, kRows, kLayout, kInto>(first, a, lda, b, ldb, c, ldc, scale);
  for (int64_t t = kSteps; t < k; t += kSteps) {
    const int64_t steps = k - t < kSteps ? k - t : kSteps;
    micro_gemm<A, kRows, kLayout, Into::kAdd>(steps, a + t * step, lda, b + t * ldb, ldb, c, ldc,
                                              scale);
  }
}

// All m rows; C has rows of at least one panel.
template <Layout kLayout, Into kInto, int64_t kSteps = kSumSteps, class A>
inline void gemm(int64_t m, int64_t k, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
                 int64_t ldc, const A* scale = nullptr) {
  const int64_t step = kLayout == Layout::kRowMajor ? lda : 1;
  int64_t r = 0;
  for (; r + kMicroRows <= m; r += kMicroRows) {
    gemm_rows<A, kMicroRows, kLayout, kInto, kSteps>(k, a + r * step, lda, b, ldb, c + r * ldc, ldc,
                                                     scale);
  }
  for (; r + 2 <= m; r += 2) {
    gemm_rows<A, 2, kLayout, kInto, kSteps>(k, a + r * step, lda, b, ldb, c + r * ldc, ldc, scale);
  }
  for (; r < m; ++r) {
    gemm_rows<A, 1, kLayout, kInto, kSteps>(k, a + r * step, lda, b, ldb, c + r * ldc, ldc, scale);
  }
}

// The sum of a[t] * b[t], rounded as an element of gemm's product.
template <int64_t kSteps, class A>
inline A dot_as_gemm(int64_t k, const A* a, const A* b) {
  A sum = 0;
  for (int64_t begin = 0; begin < k; begin += kSteps) {
    const int64_t end = k - begin < kSteps ? k : begin + kSteps;
    A part = 0;
    for (int64_t t = begin; t < end; ++t) part = multiply_add(a[t], b[t], part);
    sum += part;
  }
  return sum;
}

}  // namespace
}  // namespace fused_attn
