// Merging of partial attention results of a row, from different warps or splits of split-KV.
#pragma once

#include "cuda/attention_tile.cuh"

namespace fused_attn {

// Merged softmax statistics of a row. largest: the maximum score over all parts, in the units of
// Units::exponent. sum: the sum of the weights relative to that maximum.
template <class T>
struct Merged {
  const Units<T, true>& units;
  float largest = -kInfinity, sum = 0.0f;

  FUSED_ATTN_DEVICE explicit Merged(const Units<T, true>& u) : units(u) {}
  // Returns the factor that rescales the weights of a part with maximum score `exponent`. `largest`
  // must be set first.
  FUSED_ATTN_DEVICE float share(float exponent) const {
    return units.power_of(exponent - (largest == -kInfinity ? 0.0f : largest));
  }
};

// Location of a query row. lse: its index in lse, which is also its row index in the workspace
// `splits`. out: the offset of its first element in out.
struct DecodedRow {
  int64_t lse, out;
};

FUSED_ATTN_DEVICE DecodedRow decoded_row(const AttentionParams& p, int64_t b, int64_t h,
                                         int64_t i) {
  const SequenceRows rows = query_rows(p, b);
  return {lse_begin(p, b, h) + i, rows.batch * p.out_strides[0] + h * p.out_strides[1] +
                                      (rows.first + i) * p.out_strides[2]};
}

// Stores out and lse of a row, using `count` threads. own: index of this thread among them.
// value(column): merged accumulator of a column, not yet divided by the row sum.
template <class T, class M, class U, class Value>
FUSED_ATTN_DEVICE void store_decoded(const AttentionParams& p, const GpuParams& gpu,
                                     const DecodedRow& to, const M& merged, const U& units, int own,
                                     int count, Value value) {
  if (own == 0 && p.lse != nullptr) store_lse(p, to.lse, merged.largest, merged.sum, units);
  const float scale = merged.sum == 0.0f ? 0.0f : gpu.dropout_scale / merged.sum;
  for (int column = own; column < static_cast<int>(p.head_dim_v); column += count) {
    store_result<T>(p, p.out, to.out + column, value(column) * scale);
  }
}

constexpr int kMergeWarps = 4, kMergeThreads = kMergeWarps * 32;

// Merges the splits of one query row per block. Each warp processes every kMergeWarps-th split.
template <class T, int kHeadDim>
struct MergeKernel {
  static_assert(kHeadDim % 32 == 0, "each lane merges equally many columns");
  static constexpr int kColumns = kHeadDim / 32;  // per lane
  static constexpr int kBytes = kMergeWarps * (kHeadDim + 1) * 4;

  static FUSED_ATTN_DEVICE void run(const AttentionArgs& args) {
    const AttentionParams& p = args.params;
    const Units<T, true> units(p);
    const int num_parts = static_cast<int>(args.gpu.num_splits);
    const int head_dim_v = static_cast<int>(p.head_dim_v);
    const int64_t part_size = 2 + p.head_dim_v;
    const float* const parts = args.gpu.splits + block_id() * num_parts * part_size;

    Merged<T> merged(units);
    for (int s = lane_id(); s < num_parts; s += 32) {
      merged.largest = larger(merged.largest, parts[s * part_size]);
    }
    FUSED_ATTN_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) {
      merged.largest = larger(merged.largest, shuffle_xor(merged.largest, mask));
    }
    float acc[kColumns] = {};
    FUSED_ATTN_UNROLL_BY(4)
    for (int s = warp_id(); s < num_parts; s += kMergeWarps) {
      const float* const part = parts + s * part_size;
      const float share = merged.share(part[0]);
      merged.sum = multiply_add(part[1], share, merged.sum);
      FUSED_ATTN_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * 32 + lane_id();
        if (column < head_dim_v) acc[c] = multiply_add(part[2 + column], share, acc[c]);
      }
    }
    const auto address = [](int warp, int column) {
      return static_cast<uint32_t>(warp * (kHeadDim + 1) + column) * 4;
    };
    FUSED_ATTN_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      store_shared(address(warp_id(), c * 32 + lane_id()), acc[c]);
    }
    if (lane_id() == 0) store_shared(address(warp_id(), kHeadDim), merged.sum);
    sync_block();
    const auto value = [&](int column) {
      float sum = 0.0f;
      FUSED_ATTN_UNROLL
      for (int w = 0; w < kMergeWarps; ++w) sum += load_shared<float>(address(w, column));
      return sum;
    };
    merged.sum = value(kHeadDim);
    store_decoded<T>(p, args.gpu, row_at(p, block_id()), merged, units, thread_id(), kMergeThreads,
                     value);
  }

 private:
  // Returns the location of the query row with index n in lse.
  static FUSED_ATTN_DEVICE DecodedRow row_at(const AttentionParams& p, int64_t n) {
    const int64_t head = n / p.total_q;
    return {n, head / p.num_heads * p.out_strides[0] + head % p.num_heads * p.out_strides[1] +
                   n % p.total_q * p.out_strides[2]};
  }
};

template <class T, int kHeadDim>
FUSED_ATTN_KERNEL(kMergeThreads, 4)
decode_merge_kernel(FUSED_ATTN_ARGUMENT AttentionArgs args) {
  MergeKernel<T, kHeadDim>::run(args);
}

template <class T, int kHeadDim>
void run_decode_merge(const AttentionParams& p, const GpuParams& gpu) {
  const int64_t batch = p.cu_seqlens_q == nullptr ? p.batch : 1;
  launch("decode_merge_kernel", decode_merge_kernel<T, kHeadDim>, batch * p.num_heads * p.total_q,
         kMergeThreads, MergeKernel<T, kHeadDim>::kBytes, AttentionArgs{p, gpu}, stream_of(gpu));
}

}  // namespace fused_attn
