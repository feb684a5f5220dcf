// Dot products of a few rows with the rows of a KV block, with keys in vector lanes.
//
// Each sum is rounded like those of micro_gemm.h: kSteps features are accumulated one after
// another, and these sums are added to a total. The scores are therefore bit-identical to those of
// the query-tile kernels, and a forward of one kernel may be followed by a backward of the other.
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

template <class T>
class RowProducts {
  using A = Acc<T>;
  static constexpr int64_t kLane = kLanes<A>;
  static constexpr int kVectors = 4;  // independent sums, which hide the latency
  static constexpr int64_t kGroup = kTransposeTile > 8 ? kTransposeTile : 8;

 public:
  static constexpr int64_t kKeys = kVectors * kLane;  // keys that are transposed together

  void place(Arena* arena, int64_t dim) {
    numbers_ = arena->template take<A>(sizeof(T) == sizeof(A) ? 0 : kGroup * dim);
    columns_ = arena->template take<A>(dim * kKeys);
  }

  // Computes the products of `count` rows with n keys. Calls between(begin, end) before keys
  // [begin, end) are read, a few keys at a time.
  //
  // rows: (count, dim), row_stride elements apart.
  // products: (count, n rounded up to a multiple of kKeys), product_stride elements apart.
  template <int64_t kSteps, class Between>
  void multiply(const T* key, int64_t stride, int64_t n, int64_t dim, const A* rows,
                int64_t row_stride, int64_t count, A* products, int64_t product_stride,
                const Between& between) {
    for (int64_t t = 0; t < n; t += kKeys) {
      load_columns(key, stride, t, min64(t + kKeys, n), dim, between);
      int64_t r = 0;
      for (; r + 2 <= count; r += 2) {
        multiply_rows<kStepsOf<T, kSteps>, 2>(dim, rows + r * row_stride, row_stride,
                                              products + r * product_stride + t, product_stride);
      }
      if (r < count) {
        multiply_rows<kStepsOf<T, kSteps>, 1>(dim, rows + r * row_stride, row_stride,
                                              products + r * product_stride + t, product_stride);
      }
    }
  }

 private:
  // Transposes keys [begin, end) into columns_, (dim, kKeys). The lanes after the last key are 0.
  template <class Between>
  void load_columns(const T* key, int64_t stride, int64_t begin, int64_t end, int64_t dim,
                    const Between& between) {
    if (end - begin < kKeys) memset(columns_, 0, dim * kKeys * sizeof(A));
    for (int64_t t = begin; t < end; t += kGroup) {
      const int64_t n = min64(kGroup, end - t);
      between(t, t + n);
      if constexpr (sizeof(T) == sizeof(A)) {
        transpose(key + t * stride, stride, n, dim, columns_ + t - begin, kKeys);
      } else {
        for (int64_t r = 0; r < n; ++r) load_row(key + (t + r) * stride, dim, numbers_ + r * dim);
        transpose(numbers_, dim, n, dim, columns_ + t - begin, kKeys);
      }
    }
  }

  template <int64_t kSteps, int kCount>
  void multiply_rows(int64_t dim, const A* rows, int64_t row_stride, A* products,
                     int64_t product_stride) const {
    Vec<A> total[kCount][kVectors] = {};
    for (int64_t begin = 0; begin < dim; begin += kSteps) {
      Vec<A> sum[kCount][kVectors] = {};
      for (int64_t d = begin; d < min64(begin + kSteps, dim); ++d) {
        for (int i = 0; i < kCount; ++i) {
          const A x = rows[i * row_stride + d];
          for (int v = 0; v < kVectors; ++v) {
            sum[i][v] =
                Numbers<A>::multiply_add(x, load(columns_ + d * kKeys + v * kLane), sum[i][v]);
          }
        }
      }
      for (int i = 0; i < kCount; ++i) {
        for (int v = 0; v < kVectors; ++v) total[i][v] += sum[i][v];
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        store(products + i * product_stride + v * kLane, total[i][v]);
      }
    }
  }

  A* numbers_;  // (kGroup, dim), of 16-bit keys
  A* columns_;  // (dim, kKeys)
};

}  // namespace
}  // namespace fused_attn
