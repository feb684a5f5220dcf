// C = A * B for small tiles, in vector registers.
//
// C is (m, 2 vectors) and B (k, 2 vectors); the elements of A are broadcast. Each K step loads two
// vectors of B and micro_rows() elements of A. On a machine with two multiply-add units,
// multiply-adds alone then limit the speed.
//
// Partial sums of these rows of C stay in registers, and so do most of the totals to which they are
// added. Share of the peak multiply-add rate (float32, partial sums of 16 steps unless stated), for
// A row-major in 64 steps and column-major in 128 steps:
//
//   AVX-512, AMD Zen 5
//     partial sums added to C in memory, 12 rows: 0.95, 0.96; 8 steps 0.90, 0.93
//     totals in registers, 6 rows: 0.98, 0.88, because 12 sums are too few to hide the latency
//     totals in registers, 8 rows: 0.97, 0.97; 8 steps 0.97, 0.98, although a few are spilled
//     single sum, 8 rows: 0.98, 0.99
//   AVX2, AMD Zen 3; after the semicolon, with another thread on the same core
//     6 rows, all totals spilled: 0.77, 0.80; 0.73, 0.73
//     4 rows: 0.92, 0.90; 0.74, 0.72
//     single sum, 6 rows: 0.93, 0.94; 0.87, 0.84; 4 rows: 0.97, 0.91; 0.78, 0.75
//   AMD Zen 1, with half as wide units: 6 rows 0.83, 0.85; single sum 0.97, 0.96
#pragma once

#include "cpu/simd/simd.h"

namespace fused_attn {
namespace {

template <class A>
constexpr int64_t kPanel = 2 * kLanes<A>;  // columns of B and C, which are queries or features

// Destination of the product A * B, which is accumulated from zero and added to C at the end. This
// costs no more than starting from C and rounds less. `columns` holds one number per column of C.
enum class Into {
  kStore,         // C = product
  kStoreMaximum,  // C = product, columns = max(columns, maximum of each column of C)
  kAdd,           // C += product
  kScale,         // C = C * columns + product
};

// Value of kSteps for a single sum over all steps.
constexpr int64_t kAllSteps = int64_t{1} << 40;

// Returns the number of rows of C that are computed together.
constexpr int micro_rows(int64_t steps) { return steps == kAllSteps ? kMicroRows : kTotalRows; }

// Layout of A. Element (r, t) is a[r * lda + t] if kRowMajor, and a[t * lda + r] if kColumnMajor.
// kColumnGroups is column-major in groups of micro_rows(kSteps) rows, each with lda columns.
enum class Layout { kRowMajor, kColumnMajor, kColumnGroups };

// Multiply-add whose K step is one element of the accumulator type.
template <class A>
struct Numbers {
  using Element = A;
  using Result = A;
  static Vec<A> multiply_add(A x, Vec<A> b, Vec<A> c) { return x * b + c; }
};

#if defined(FUSED_ATTN_NEON_BF16)
// Hides the value from the compiler. GCC 12 emits bfloat16 constants as float16 (1 becomes 2^-13),
// which its assembler rejects unless float16 is enabled.
inline bfloat16x8_t bfloat16_vector(Vec32 words) {
  asm("" : "+w"(words));
  return vreinterpretq_bf16_u32((uint32x4_t)words);
}
#endif

#if defined(FUSED_ATTN_BF16_PAIRS)
// Multiply-add whose K step is a pair of bfloat16 elements in one word.
struct BFloat16Pairs {
  using Element = uint32_t;
  using Result = float;
  static Vec<float> multiply_add(uint32_t x, Vec32 b, Vec<float> c) {
#if defined(__AVX512BF16__)
    return (Vec<float>)_mm512_dpbf16_ps((__m512)c, (__m512bh)(Vec32{} + x), (__m512bh)b);
#else
    return (Vec<float>)vbfdotq_f32((float32x4_t)c, bfloat16_vector(b),
                                   bfloat16_vector(Vec32{} + x));
#endif
  }
};
#endif

// Computes kRows rows of C. Adds partial sums of kSteps steps to totals, most of them in registers.
template <class Op, int kRows, Layout kLayout, Into kInto, int64_t kSteps>
inline void gemm_rows(int64_t k, const typename Op::Element* a, int64_t lda,
                      const typename Op::Element* b, int64_t ldb, typename Op::Result* c,
                      int64_t ldc, typename Op::Result* columns) {
  using A = typename Op::Result;
  constexpr int kLane = kLanes<A>;
  const auto add_step = [=](int64_t t, Vec<A>(&sum)[kRows][2]) FUSED_ATTN_LAMBDA {
    const auto b0 = load(b + t * ldb), b1 = load(b + t * ldb + kLane);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto x = kLayout == Layout::kRowMajor      ? a[r * lda + t]
                     : kLayout == Layout::kColumnMajor ? a[t * lda + r]
                                                       : a[t * micro_rows(kSteps) + r];
      sum[r][0] = Op::multiply_add(x, b0, sum[r][0]);
      sum[r][1] = Op::multiply_add(x, b1, sum[r][1]);
    }
  };
  Vec<A> total[kRows][2] = {};
  if constexpr (kSteps == kAllSteps) {
#pragma GCC unroll 4
    for (int64_t t = 0; t < k; ++t) add_step(t, total);
  } else {
    int64_t t = 0;
    const auto add_sum = [&](Vec<A>(&sum)[kRows][2]) FUSED_ATTN_LAMBDA {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        total[r][0] += sum[r][0];
        total[r][1] += sum[r][1];
      }
    };
    for (; t + kSteps <= k; t += kSteps) {
      Vec<A> sum[kRows][2] = {};
#pragma GCC unroll 4
      for (int u = 0; u < kSteps; ++u) add_step(t + u, sum);
      add_sum(sum);
    }
    if (t < k) {
      Vec<A> sum[kRows][2] = {};
#pragma GCC unroll 1
      for (; t < k; ++t) add_step(t, sum);
      add_sum(sum);
    }
  }
  for (int v = 0; kInto == Into::kStoreMaximum && v < 2; ++v) {
    Vec<A> highest = load(columns + v * kLane);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) highest = max<A>(highest, total[r][v]);
    store(columns + v * kLane, highest);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 2; ++v) {
      A* const out = c + r * ldc + v * kLane;
      if (kInto == Into::kAdd) total[r][v] += load(out);
      if (kInto == Into::kScale) total[r][v] += load(out) * load(columns + v * kLane);
      store(out, total[r][v]);
    }
  }
}

// Computes rows [r, m) of C, kRows at a time as long as enough rows remain, then fewer at a time.
template <class Op, int kRows, Layout kLayout, Into kInto, int64_t kSteps, class Between>
inline void gemm_from(int64_t r, int64_t m, int64_t k, const typename Op::Element* a, int64_t lda,
                      const typename Op::Element* b, int64_t ldb, typename Op::Result* c,
                      int64_t ldc, typename Op::Result* columns, Between& between) {
  for (; r + kRows <= m; r += kRows) {
    between();
    const int64_t in_group = r % micro_rows(kSteps);
    const int64_t row = kLayout == Layout::kRowMajor      ? r * lda
                        : kLayout == Layout::kColumnMajor ? r
                                                          : (r - in_group) * lda + in_group;
    gemm_rows<Op, kRows, kLayout, kInto, kSteps>(k, a + row, lda, b, ldb, c + r * ldc, ldc,
                                                 columns);
  }
  if constexpr (kRows > 1) {
    constexpr int kFewer = kRows > 4 ? 4 : kRows / 2;
    if (r < m) {
      gemm_from<Op, kFewer, kLayout, kInto, kSteps>(r, m, k, a, lda, b, ldb, c, ldc, columns,
                                                    between);
    }
  }
}

// Computes all m rows of C. Calls between() before each group of rows.
template <class Op, Layout kLayout, Into kInto, int64_t kSteps, class Between>
inline void gemm(int64_t m, int64_t k, const typename Op::Element* a, int64_t lda,
                 const typename Op::Element* b, int64_t ldb, typename Op::Result* c, int64_t ldc,
                 typename Op::Result* columns, Between& between) {
  gemm_from<Op, micro_rows(kSteps), kLayout, kInto, kSteps>(0, m, k, a, lda, b, ldb, c, ldc,
                                                            columns, between);
}

}  // namespace
}  // namespace fused_attn
