// Summarizes the visibility of each tile of a dense mask or bias, before the attention pass.
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

// An element of a bool mask. is_masked(x) returns true if x hides a position, is_plain(x) if the
// position is visible and x adds nothing to its score. A bias element may be neither.
struct Flag {
  uint8_t bits;
};
inline bool is_masked(Flag x) { return x.bits == 0; }
inline bool is_plain(Flag x) { return x.bits != 0; }
template <class B>
inline bool is_masked(B x) {
  return to_acc(x) == -__builtin_inf();
}
template <class B>
inline bool is_plain(B x) {
  return to_acc(x) == 0;
}

template <class B>
void tile_summary(const SummaryParams& p) {
  const int64_t rows = div_up(p.sizes[2], kSummaryTileM), cols = div_up(p.sizes[3], kSummaryTileN);
  const int64_t tasks = p.sizes[0] * p.sizes[1] * rows;
#pragma omp parallel for schedule(static) num_threads(clamp_threads(p.num_threads, tasks))
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t head = task / rows, i_begin = task % rows * kSummaryTileM;
    const B* const base = static_cast<const B*>(p.data) + head / p.sizes[1] * p.strides[0] +
                          head % p.sizes[1] * p.strides[1];
    for (int64_t tile = 0; tile < cols; ++tile) {
      const int64_t j_begin = tile * kSummaryTileN;
      const int64_t j_end = min64(j_begin + kSummaryTileN, p.sizes[3]);
      int64_t masked = 0, plain = 0, count = 0;
      for (int64_t i = i_begin; i < min64(i_begin + kSummaryTileM, p.sizes[2]); ++i) {
        const B* const row = base + i * p.strides[2];
        for (int64_t j = j_begin; j < j_end; ++j) {
          masked += is_masked(row[j * p.strides[3]]);
          plain += is_plain(row[j * p.strides[3]]);
        }
        count += j_end - j_begin;
      }
      p.summary[task * cols + tile] = masked == count  ? kNoneVisible
                                      : plain == count ? kAllVisible
                                                       : kSomeVisible;
    }
  }
}

}  // namespace
}  // namespace fused_attn
