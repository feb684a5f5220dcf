// Dot products of a few rows with the rows of a KV block, with features in vector lanes: keys are
// read in place, and each product is a horizontal sum.
//
// The forward of few queries and all kernels that recompute its scores call these functions, which
// add in the same order for any number of rows, so the scores are bit-identical. Otherwise,
// rounding errors would not cancel in rows where one key has all the weight.
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

template <class T>
struct RowProducts {
  using A = Acc<T>;
  static constexpr int64_t kLane = kLanes<A>;
  static constexpr int64_t kShare = 4;  // rows that share each load of a key

  // Calls f(count, first) for all rows, in groups of kShare, then 2, then 1. `count` is a
  // std::integral_constant.
  template <class F>
  static void for_rows(int64_t rows, const F& f) {
    int64_t r = 0;
    for (; r + kShare <= rows; r += kShare) f(std::integral_constant<int, kShare>(), r);
    if (rows - r >= 2) {
      f(std::integral_constant<int, 2>(), r);
      r += 2;
    }
    if (r < rows) f(std::integral_constant<int, 1>(), r);
  }

  // Computes the products of kCount rows with n keys. The products that pad n to full vectors
  // repeat the last key. Not inlined, because GCC spills the sums in a large function.
  //
  // key_at(t): returns the address of key t, where t is a multiple of kLane. The next kLane - 1
  // keys are `stride` apart. Keys and rows have `wide` elements, zero-padded to full vectors.
  // before(t): called before key t is read, also for keys that pad n.
  // products: (kCount, n), padded to full vectors, product_stride elements apart.
  template <int kCount, class KeyAt, class Before>
  __attribute__((noinline)) static void multiply(const KeyAt& key_at, int64_t stride, int64_t n,
                                                 int64_t wide, const A* rows, int64_t row_stride,
                                                 A* products, int64_t product_stride,
                                                 const Before& before) {
    for (int64_t t = 0; t < n; t += kLane) {
      const T* const keys = key_at(t);
      Vec<A> sums[kCount][kLane];
      const auto at = [&](int64_t l) FUSED_ATTN_LAMBDA {
        before(t + l);
        return keys + min64(l, n - 1 - t) * stride;
      };
      // With fewer rows, keys are read one at a time: multiplying one query by 8 keys at a time, or
      // two by 4, took 1.3 to 1.5 times as long (AMD Zen 1).
      if constexpr (kCount < kShare) {
        for (int64_t l = 0; l < kLane; ++l) {
          multiply_key<kCount>(at(l), wide, rows, row_stride, l, sums);
        }
      } else {
        for (int64_t l = 0; l < kLane; l += 2) {
          const T* const pair[2] = {at(l), at(l + 1)};
          multiply_pair<kCount>(pair, wide, rows, row_stride, l, sums);
        }
      }
      for (int i = 0; i < kCount; ++i) {
        store(products + i * product_stride + t, lane_sums<A>(sums[i]));
      }
    }
  }

  // Computes the products of `count` rows with n keys that are `stride` apart. Calls before(t)
  // before key t is read for the first time.
  template <class Before>
  static void multiply_all(const T* keys, int64_t stride, int64_t n, int64_t wide, const A* rows,
                           int64_t row_stride, int64_t count, A* products, int64_t product_stride,
                           const Before& before) {
    for_rows(count, [&](auto some, int64_t r) {
      multiply<some>([&](int64_t t) { return keys + t * stride; }, stride, n, wide,
                     rows + r * row_stride, row_stride, products + r * product_stride,
                     product_stride,
                     [&](int64_t t) {
                       if (r == 0) before(t);
                     });
    });
  }

  // Rows that are zero-padded to full vectors.
  struct Padded {
    const T* rows;
    int64_t stride;
  };

  // Returns n rows, in place if possible, else as a copy in `buffer`.
  static Padded padded(const T* rows, int64_t stride, int64_t n, int64_t dim, T* buffer) {
    const int64_t wide = round_up(dim, kLane);
    if (dim == wide) return {rows, stride};
    copy_rows(rows, stride, n, dim, buffer, n, wide);
    return {buffer, wide};
  }

 private:
  // Computes sums[i][l], whose lanes add up to the product of row i with a key. Vectors of even and
  // odd index are summed separately.
  template <int kCount>
  static FUSED_ATTN_INLINE void multiply_key(const T* key, int64_t wide, const A* rows,
                                             int64_t row_stride, int64_t l, Vec<A> (*sums)[kLane]) {
    Vec<A> sum[2][kCount] = {};
    for (int64_t d = 0; d < wide; d += 2 * kLane) {
      for (int odd = 0; odd < 2 && d + odd * kLane < wide; ++odd) {
        const Vec<A> x = load_as<T>(key + d + odd * kLane);
        for (int i = 0; i < kCount; ++i) {
          sum[odd][i] += x * load(rows + i * row_stride + d + odd * kLane);
        }
      }
    }
    for (int i = 0; i < kCount; ++i) sums[i][l] = sum[0][i] + sum[1][i];
  }

  // Computes sums[i][l] and sums[i][l + 1]. The two keys share each load of a row.
  template <int kCount>
  static FUSED_ATTN_INLINE void multiply_pair(const T* const* keys, int64_t wide, const A* rows,
                                              int64_t row_stride, int64_t l,
                                              Vec<A> (*sums)[kLane]) {
    for (int odd = 0; odd < 2; ++odd) {
      Vec<A> sum[kCount][2] = {};
      for (int64_t d = odd * kLane; d < wide; d += 2 * kLane) {
        const Vec<A> x[2] = {load_as<T>(keys[0] + d), load_as<T>(keys[1] + d)};
        for (int i = 0; i < kCount; ++i) {
          const Vec<A> row = load(rows + i * row_stride + d);
          for (int k = 0; k < 2; ++k) sum[i][k] += x[k] * row;
        }
      }
      for (int i = 0; i < kCount; ++i) {
        for (int k = 0; k < 2; ++k) {
          sums[i][l + k] = odd == 0 ? sum[i][k] : sums[i][l + k] + sum[i][k];
        }
      }
    }
  }
};

}  // namespace
}  // namespace fused_attn
