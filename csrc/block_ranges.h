// Classifies tiles of the score matrix by their mask. The CPU and CUDA kernels share this code.
//
// The structural conditions (band, key range, prefix) leave one interval of visible keys [lo(i),
// hi(i)) per row i. Neither end decreases as i grows, so the first and the last row determine the
// class of a tile.
#pragma once

#include "host_device.h"
#include "params.h"

namespace fused_attn {
namespace {

enum class Tile { kSkip = 0, kPartial = 1, kFull = 2 };

FUSED_ATTN_HOST_DEVICE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
FUSED_ATTN_HOST_DEVICE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

FUSED_ATTN_HOST_DEVICE SequenceBounds sequence_bounds(const MaskParams& mask, int64_t b,
                                                      int64_t seqlen_q, int64_t seqlen_k) {
  SequenceBounds s{0, seqlen_k, 0, seqlen_q, mask.band_lo, mask.band_hi, 0, mask.alibi_offset};
  if (mask.bounds != nullptr) s = mask.bounds[b];
  // Kernels assume that every key between the first row's lo and the last row's hi is visible to
  // some row. Rows fully masked by the band would break this, so such a band is expressed as an
  // earlier key_end.
  if (s.band_lo > s.band_hi) s.key_end = s.key_begin;
  if (s.band_lo > 0 && s.prefix_end > 0) {  // the condition j <= i never holds inside the band
    s.key_end = min64(s.key_end, s.prefix_end);
    s.prefix_end = 0;
  }
  return s;
}

// Location of a sequence in a tensor: its batch index, first row and number of rows. Packed
// sequences share batch index 0.
struct SequenceRows {
  int64_t batch, first, count;
};

FUSED_ATTN_HOST_DEVICE SequenceRows sequence_rows(const AttentionParams& p,
                                                  const int64_t* cu_seqlens, int64_t b,
                                                  int64_t seqlen) {
  if (cu_seqlens == nullptr) return {b, 0, seqlen};
#ifdef __CUDA_ARCH__
  constexpr bool left_out = false;  // its registers would cause spills in the dK and dV kernel
#else
  const bool left_out = p.left_out != nullptr && p.left_out[b] != 0;
#endif
  return {0, cu_seqlens[b], left_out ? 0 : cu_seqlens[b + 1] - cu_seqlens[b]};
}
FUSED_ATTN_HOST_DEVICE SequenceRows query_rows(const AttentionParams& p, int64_t b) {
  return sequence_rows(p, p.cu_seqlens_q, b, p.seqlen_q);
}
FUSED_ATTN_HOST_DEVICE SequenceRows key_rows(const AttentionParams& p, int64_t b) {
  return sequence_rows(p, p.cu_seqlens_k, b, p.seqlen_k);
}

// Returns the index into lse of the first row of head h of sequence b.
FUSED_ATTN_HOST_DEVICE int64_t lse_begin(const AttentionParams& p, int64_t b, int64_t h) {
  const SequenceRows rows = query_rows(p, b);
  return (rows.batch * p.num_heads + h) * p.total_q + rows.first;
}

// Returns the keys that the structural mask leaves visible to row i. The interval is empty if lo >=
// hi. Does not check that row i is within the query range.
FUSED_ATTN_HOST_DEVICE Interval visible_keys(const SequenceBounds& s, int64_t i) {
  int64_t hi = min64(s.key_end, i + s.band_hi + 1);
  if (s.prefix_end > 0) hi = min64(hi, max64(s.prefix_end, i + 1));
  return {max64(s.key_begin, i + s.band_lo), hi};
}

// Returns the queries that may attend to key j under the structural mask, the inverse of
// visible_keys(). The interval is empty if lo >= hi.
FUSED_ATTN_HOST_DEVICE Interval visible_queries(const SequenceBounds& s, int64_t j) {
  int64_t lo = max64(s.query_begin, j - s.band_hi);
  if (s.prefix_end > 0 && j >= s.prefix_end) lo = max64(lo, j);
  const bool inside = j >= s.key_begin && j < s.key_end;
  return {lo, inside ? min64(s.query_end, j - s.band_lo + 1) : lo};
}

// Classifies the tile of rows [i_begin, i_end) and keys [j_begin, j_end) by the structural mask.
// Both ranges must be non-empty.
FUSED_ATTN_HOST_DEVICE Tile classify_bounds(const SequenceBounds& s, int64_t i_begin, int64_t i_end,
                                            int64_t j_begin, int64_t j_end) {
  const int64_t first = max64(i_begin, s.query_begin), last = min64(i_end, s.query_end) - 1;
  if (first > last) return Tile::kSkip;
  const Interval top = visible_keys(s, first), bottom = visible_keys(s, last);
  if (j_begin >= bottom.hi || j_end <= top.lo) return Tile::kSkip;
  const bool rows_inside = i_begin >= s.query_begin && i_end <= s.query_end;
  return rows_inside && j_begin >= bottom.lo && j_end <= top.hi ? Tile::kFull : Tile::kPartial;
}

// Smallest and largest document id within a run of consecutive positions.
struct IdRange {
  int64_t min, max;
};

FUSED_ATTN_HOST_DEVICE Tile classify_documents(const IdRange& query, const IdRange& key) {
  if (query.max < key.min || key.max < query.min) return Tile::kSkip;
  const bool one = query.min == query.max && key.min == key.max;
  return one ? Tile::kFull : Tile::kPartial;
}

// Keys that are visible to any and to every query of a run of consecutive queries.
struct IntervalRange {
  Interval any, every;
};

FUSED_ATTN_HOST_DEVICE Tile classify_intervals(const IntervalRange& keys, int64_t j_begin,
                                               int64_t j_end) {
  if (j_begin >= keys.any.hi || j_end <= keys.any.lo) return Tile::kSkip;
  return j_begin >= keys.every.lo && j_end <= keys.every.hi ? Tile::kFull : Tile::kPartial;
}

// Classifies a tile by the summary of a dense mask or bias. Without a summary, the tile is partial.
FUSED_ATTN_HOST_DEVICE Tile classify_dense(const DenseTensor& t, int64_t b, int64_t h,
                                           int64_t i_begin, int64_t i_end, int64_t j_begin,
                                           int64_t j_end) {
  if (t.data == nullptr) return Tile::kFull;
  if (t.summary == nullptr) return Tile::kPartial;
  const uint8_t* base = t.summary + b * t.summary_strides[0] + h * t.summary_strides[1];
  bool none = true, all = true;
  FUSED_ATTN_ROLLED
  for (int64_t i = i_begin / kSummaryTileM; i * kSummaryTileM < i_end; ++i) {
    FUSED_ATTN_ROLLED
    for (int64_t j = j_begin / kSummaryTileN; j * kSummaryTileN < j_end; ++j) {
      const uint8_t value = base[i * t.summary_strides[2] + j * t.summary_strides[3]];
      none = none && value == kNoneVisible;
      all = all && value == kAllVisible;
    }
    if (t.summary_strides[2] == 0) break;  // the mask is broadcast over rows
  }
  return none ? Tile::kSkip : all ? Tile::kFull : Tile::kPartial;
}

FUSED_ATTN_HOST_DEVICE Tile combine(Tile a, Tile b) {
  if (a == Tile::kSkip || b == Tile::kSkip) return Tile::kSkip;
  return a == Tile::kFull && b == Tile::kFull ? Tile::kFull : Tile::kPartial;
}

}  // namespace
}  // namespace fused_attn
