// Pre-passes over masks, for classify() in tile_list.cuh: visibility summaries of the tiles of a
// dense mask, and ranges of document ids.
#pragma once

#include "block_ranges.h"
#include "cuda/gpu_params.h"
#include "cuda/intrinsics.cuh"

namespace fused_attn {
namespace {

constexpr int kSummaryThreads = 128;
constexpr int kSummaryWarps = kSummaryThreads / 32;
constexpr int64_t kRowsAtOnce = 8;  // rows per iteration, so that a lane has 16 loads in flight

// Each warp summarizes one tile. Lane l reads columns l and l + 32, so that loads are coalesced.
static_assert(kSummaryTileN == 64, "each lane reads two columns");

// An element of a boolean mask. is_masked(x) returns true if x hides a position. is_plain(x)
// returns true if the position is visible and x adds nothing to its score.
struct Flag {
  uint8_t bits;
};
FUSED_ATTN_DEVICE bool is_masked(Flag x) { return x.bits == 0; }
FUSED_ATTN_DEVICE bool is_plain(Flag x) { return x.bits != 0; }
template <class T>
FUSED_ATTN_DEVICE bool is_masked(T x) {
  return to_float(x) == -kInfinity;
}
template <class T>
FUSED_ATTN_DEVICE bool is_plain(T x) {
  return to_float(x) == 0.0f;
}

struct TileSummaryArgs {
  SummaryParams params;
  int64_t tiles;  // number of tiles of all batch entries and heads
};

template <class T>
FUSED_ATTN_KERNEL(kSummaryThreads, 1)
tile_summary_kernel(FUSED_ATTN_ARGUMENT TileSummaryArgs args) {
  const SummaryParams& p = args.params;
  const int64_t rows = (p.sizes[2] + kSummaryTileM - 1) / kSummaryTileM;
  const int64_t columns = (p.sizes[3] + kSummaryTileN - 1) / kSummaryTileN;
  const int64_t tile = block_id() * kSummaryWarps + warp_id();
  if (tile >= args.tiles) return;  // uniform within the warp
  const int64_t head = tile / (rows * columns);
  const int64_t i_begin = tile / columns % rows * kSummaryTileM;
  const int64_t i_end = min64(i_begin + kSummaryTileM, p.sizes[2]);
  const int64_t j = tile % columns * kSummaryTileN + lane_id();
  const T* const data = static_cast<const T*>(p.data) + head / p.sizes[1] * p.strides[0] +
                        head % p.sizes[1] * p.strides[1] + j * p.strides[3];
  bool masked = true, plain = true;
  for (int64_t i = i_begin; i < i_end; i += kRowsAtOnce) {
    FUSED_ATTN_UNROLL
    for (int64_t part = 0; part < 2 * kRowsAtOnce; ++part) {
      const int64_t row = i + part / 2, column = part % 2 * 32;
      if (row >= i_end || j + column >= p.sizes[3]) continue;
      const T value = data[row * p.strides[2] + column * p.strides[3]];
      masked &= is_masked(value);
      plain &= is_plain(value);
    }
  }
  const bool none = ballot(!masked) == 0, all = ballot(!plain) == 0;
  if (lane_id() == 0) p.summary[tile] = none ? kNoneVisible : all ? kAllVisible : kSomeVisible;
}

struct IdRangesArgs {
  const int64_t* ids;  // document ids, (batch, seqlen)
  int64_t stride;      // batch stride of ids; 0 if all sequences share them
  int64_t seqlen;
  int64_t runs;     // number of runs of kIdRangeTile positions, of all sequences
  int32_t* ranges;  // (batch or 1, runs of a sequence, 2): smallest and largest id
};

// Computes the range of document ids of each run. Each warp reduces one run.
FUSED_ATTN_KERNEL(kSummaryThreads, 1)
id_ranges_kernel(FUSED_ATTN_ARGUMENT IdRangesArgs args) {
  static_assert(kIdRangeTile == 32, "each lane reads one position");
  const int64_t runs_of_sequence = (args.seqlen + kIdRangeTile - 1) / kIdRangeTile;
  const int64_t run = block_id() * kSummaryWarps + warp_id();
  if (run >= args.runs) return;  // uniform within the warp
  // Lanes past the end read the last position again.
  const int64_t position =
      min64(run % runs_of_sequence * kIdRangeTile + lane_id(), args.seqlen - 1);
  int32_t low = static_cast<int32_t>(args.ids[run / runs_of_sequence * args.stride + position]);
  int32_t high = low;
  FUSED_ATTN_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    const int32_t other_low = shuffle_xor(low, mask), other_high = shuffle_xor(high, mask);
    low = other_low < low ? other_low : low;
    high = other_high > high ? other_high : high;
  }
  if (lane_id() == 0) {
    args.ranges[2 * run] = low;
    args.ranges[2 * run + 1] = high;
  }
}

}  // namespace
}  // namespace fused_attn
