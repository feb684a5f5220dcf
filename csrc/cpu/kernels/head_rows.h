// The keys or values of one head of a sequence, contiguous or in the pages of a KV cache.
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

template <class T>
class HeadRows {
 public:
  HeadRows() = default;

  // strides: of batch (or page), head and row, in elements.
  HeadRows(const AttentionParams& p, const void* data, const int64_t strides[3], int64_t b,
           int64_t h)
      : stride_(strides[2]) {
    if (p.block_table == nullptr) {
      first_ = at_head<T>(data, strides, key_rows(p, b), h);
      return;
    }
    first_ = static_cast<const T*>(data) + h * strides[1];
    pages_ = p.block_table + b * p.max_pages;
    page_stride_ = strides[0];
    page_size_ = p.page_size;
    capacity_ = p.max_pages * p.page_size;
  }

  // Returns the address of row j.
  const T* at(int64_t j) const {
    if (pages_ == nullptr) return first_ + j * stride_;
    return first_ + pages_[j / page_size_] * page_stride_ + j % page_size_ * stride_;
  }

  int64_t stride() const { return stride_; }

  // Returns true if rows [j, j + n) are stride() apart.
  bool is_run(int64_t j, int64_t n) const {
    return pages_ == nullptr || j % page_size_ + n <= page_size_;
  }

  // Returns true if each run of n rows that begins at a multiple of n is stride() apart.
  bool has_runs(int64_t n) const { return pages_ == nullptr || page_size_ % n == 0; }

  // Returns true if row j has an address, which may be past the end of the sequence.
  bool has_address(int64_t j) const { return pages_ == nullptr || j < capacity_; }

  // Calls f(row, t, count) for each run of rows [j, j + n) that are stride() apart. `row` is the
  // address of row j + t.
  template <class F>
  void for_runs(int64_t j, int64_t n, const F& f) const {
    for (int64_t t = 0; t < n;) {
      const int64_t count = pages_ == nullptr ? n : min64(n - t, page_size_ - (j + t) % page_size_);
      f(at(j + t), t, count);
      t += count;
    }
  }

  // Lists the addresses of rows [j, j + n).
  void list(int64_t j, int64_t n, const T** rows) const {
    for_runs(j, n, [&](const T* row, int64_t t, int64_t count) {
      for (int64_t r = 0; r < count; ++r) rows[t + r] = row + r * stride_;
    });
  }

  // Copies the first `dim` elements of rows [j, j + n) to dst (rows_to, dim_to), padded with 0.
  void copy(int64_t j, int64_t n, int64_t dim, T* dst, int64_t rows_to, int64_t dim_to) const {
    for_runs(j, n, [&](const T* row, int64_t t, int64_t count) {
      copy_rows(row, stride_, count, dim, dst + t * dim_to, count, dim_to);
    });
    memset(dst + n * dim_to, 0, (rows_to - n) * dim_to * sizeof(T));
  }

 private:
  const T* first_ = nullptr;  // row 0 of the sequence, or of page 0
  int64_t stride_ = 0;
  const int32_t* pages_ = nullptr;  // (max_pages); null if contiguous
  int64_t page_stride_ = 0, page_size_ = 0, capacity_ = 0;
};

}  // namespace
}  // namespace fused_attn
