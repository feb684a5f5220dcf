// layer_norm and rms_norm of residual + dropout(input) on a GPU: row layout and forward.
//
// The threads of a team share a row and hold it in registers, so that each element is read and
// written once. Mean and variance are computed in two passes over the registers. This avoids the
// cancellation in the difference of two large sums. Sources: Ba et al. 2016, equation 4; Zhang and
// Sennrich 2019, equation 4. The variance of a row that is processed in stretches follows Chan et
// al. 1983, equation 2.1.
//
// The kernels are memory bound: the lower bound on the time is the bytes moved divided by the
// memory bandwidth. An H200 copies 4.3 TB/s, which needs 33 KB in flight on each multiprocessor at
// a latency of 1 us. The forward reads input (and residual) and writes out (and total). For 8192
// rows of 4096 bfloat16 elements this is 134 MB, or 31 us. With a residual it is 268 MB, or 62 us.
#pragma once

#include <type_traits>

#include "cuda/intrinsics.cuh"
#include "params.h"
#include "philox.h"

namespace fused_attn {
namespace {

// Number of accesses that a thread makes to its row or stretch. kWidth: elements per access, either
// kChunkWidth or 1.
template <int kWidth>
constexpr int kFwdAccesses = kWidth == 1 ? 8 : 4;
// Maximum size of a team that holds a full row in registers. With 768 threads on a multiprocessor,
// a thread has 80 registers, enough for 32 values and their temporaries, and 48 KB of loads are in
// flight. Rows of more than 48 KB, or of more than 6144 elements with single-element accesses, are
// processed in stretches.
constexpr int kFwdTeam = 768;
// Threads per block for shorter rows. The smaller a block, the sooner the next one can start.
constexpr int kFwdThreads = 128;
// Threads per block for rows in stretches. Two such blocks fit on a multiprocessor, so that one can
// load while the other waits at a barrier.
constexpr int kFwdWideTeam = 384;

// The threads that share a row. size: a power of two up to 32, or a multiple of 32.
struct Team {
  int size, index, rank;  // index: of the team in the block; rank: of the thread in the team
};

FUSED_ATTN_DEVICE Team team_of(int size) { return {size, thread_id() / size, thread_id() % size}; }

// Shared memory for team sums across warps. Two buffers are used alternately, so that one barrier
// per sum suffices.
constexpr int kTeamSums = 2, kWarps = 32;
constexpr int kTeamBytes = 2 * kWarps * kTeamSums * static_cast<int>(sizeof(float));

// Replaces `values` in every thread by their sums over the team, added in a fixed order. All
// threads of the block must call this function together. turn: 0 and 1 in alternate calls; selects
// the buffer.
template <int kSums>
FUSED_ATTN_DEVICE void add_up_team(const Team& team, int turn, float (&values)[kSums]) {
  static_assert(kSums <= kTeamSums, "kTeamBytes reserves space for kTeamSums values");
  FUSED_ATTN_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask >= team.size) continue;
    FUSED_ATTN_UNROLL
    for (int s = 0; s < kSums; ++s) values[s] += shuffle_xor(values[s], mask);
  }
  if (team.size <= 32) return;
  constexpr uint32_t kSize = sizeof(float);
  const uint32_t place = turn * (kTeamBytes / 2);
  FUSED_ATTN_UNROLL
  for (int s = 0; s < kSums; ++s) {
    if (lane_id() == 0) store_shared(place + (s * kWarps + warp_id()) * kSize, values[s]);
    values[s] = 0.0f;
  }
  sync_block();
  const int first = team.index * (team.size / 32);
  for (int w = first; w < first + team.size / 32; ++w) {
    FUSED_ATTN_UNROLL
    for (int s = 0; s < kSums; ++s) {
      values[s] += load_shared<float>(place + (s * kWarps + w) * kSize);
    }
  }
}

// A range of columns of a row, which a team processes together.
struct Stretch {
  int64_t row, begin;  // begin: first column
  int64_t offset;      // offset of the first column in the contiguous output matrices
  int count;           // number of columns; 0 if the row does not exist
};

// Returns the stretch of up to `most` columns of a row that starts at column `begin`.
FUSED_ATTN_DEVICE Stretch stretch_of(const NormParams& p, int64_t row, int64_t begin, int most) {
  const int64_t left = p.columns - begin;
  const int count = static_cast<int>(left < most ? left : most);
  return {row, begin, row * p.columns + begin, row < p.rows ? count : 0};
}

// Returns the first column of the thread's a-th access, relative to the start of the stretch.
template <int kWidth>
FUSED_ATTN_DEVICE int column_of(const Team& team, int a) {
  return (a * team.size + team.rank) * kWidth;
}

// Type of a load or store: 16 bytes, or one element if kWidth is 1.
template <class T, int kWidth>
using Raw = std::conditional_t<kWidth == 1, T, Chunk>;
template <class T>
constexpr int kChunkWidth = 16 / static_cast<int>(sizeof(T));

template <int kWidth, class T>
FUSED_ATTN_DEVICE Raw<T, kWidth> load_raw(const T* address, bool valid) {
  Raw<T, kWidth> raw{};
  if (valid) {
    if constexpr (kWidth == 1) {
      raw = load_global(address);
    } else {
      raw = load_chunk(address);
    }
  }
  return raw;
}

template <int kWidth, class T>
FUSED_ATTN_DEVICE void store_raw(T* address, const Raw<T, kWidth>& raw) {
  if constexpr (kWidth == 1) {
    *address = raw;
  } else {
    store_chunk(address, raw);
  }
}

template <class T, int kWidth>
FUSED_ATTN_DEVICE void unpack(const Raw<T, kWidth>& raw, float* values) {
  if constexpr (kWidth == 1) {
    values[0] = to_float(raw);
  } else {
    FUSED_ATTN_UNROLL
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 4) {
        values[w] = bits_float(raw.word[w]);
      } else {
        values[2 * w] = to_float(T{static_cast<uint16_t>(raw.word[w])});
        values[2 * w + 1] = to_float(T{static_cast<uint16_t>(raw.word[w] >> 16)});
      }
    }
  }
}

template <class T, int kWidth>
FUSED_ATTN_DEVICE Raw<T, kWidth> pack_raw(const float* values) {
  if constexpr (kWidth == 1) {
    return from_float<T>(values[0]);
  } else {
    Chunk raw;
    FUSED_ATTN_UNROLL
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 4) {
        raw.word[w] = float_bits(values[w]);
      } else {
        raw.word[w] = pack<T>(values[2 * w], values[2 * w + 1]);
      }
    }
    return raw;
  }
}

// Loads kWidth float32 elements of a weight or bias, from `column` on.
template <int kWidth>
FUSED_ATTN_DEVICE void load_floats(const void* source, int64_t column, float* values) {
  constexpr int kStep = kWidth == 1 ? 1 : 4;
  FUSED_ATTN_UNROLL
  for (int e = 0; e < kWidth; e += kStep) {
    const float* address = static_cast<const float*>(source) + column + e;
    unpack<float, kStep>(load_raw<kStep>(address, true), values + e);
  }
}

// Returns the address of the first column of a stretch in an input matrix.
template <class T>
FUSED_ATTN_DEVICE const T* row_of(const void* matrix, const RowLayout& rows, const Stretch& s) {
  return static_cast<const T*>(matrix) + s.begin + row_offset(rows, unhoisted(s.row));
}

struct NormDropout {
  const int64_t* seed;  // null: no dropout
  uint32_t threshold;
  float scale;
  const int64_t* offsets;  // global index of the first row of each run; null: use row indices
  uint32_t run;            // rows per run
};

// Returns the row index that the dropout counter uses for a stretch.
FUSED_ATTN_DEVICE uint32_t counted_row(const NormDropout& dropout, const Stretch& s) {
  const uint32_t own = static_cast<uint32_t>(unhoisted(s.row));
  if (dropout.offsets == nullptr || s.count == 0) return own;
  const int64_t first = load_global(dropout.offsets + own / dropout.run);
  return static_cast<uint32_t>(first) + own % dropout.run;
}

// Returns the keep bits of the thread's columns in a stretch. Bit a * kWidth + e is element e of
// access a. row: from counted_row.
template <int kWidth, int kAccesses>
FUSED_ATTN_DEVICE uint32_t kept_columns(const NormDropout& dropout, const Team& team,
                                        const Stretch& s, uint32_t row) {
  static_assert(kWidth * kAccesses <= 32, "keep_mask has 32 bits");
  const uint64_t seed = static_cast<uint64_t>(load_global(dropout.seed));
  uint32_t keep_mask = 0;
  FUSED_ATTN_ROLLED  // unrolled, the Philox calls would cause register spills
      for (int a = 0; a < kAccesses; ++a) {
    const int64_t column = s.begin + column_of<kWidth>(team, a);
    FUSED_ATTN_UNROLL
    for (int e = 0; e < kWidth; e += kDecisions) {
      const uint32_t octet = static_cast<uint32_t>((column + e) / kDecisions);
      const uint32_t decisions =
          kept_decisions(philox4x32(octet, row, 0, 1, seed), dropout.threshold);
      constexpr uint32_t kMine = (1u << (kWidth < kDecisions ? kWidth : kDecisions)) - 1;
      keep_mask |= (decisions >> ((column + e) % kDecisions) & kMine) << (a * kWidth + e);
    }
  }
  return keep_mask;
}

struct NormFwdArgs {
  NormParams params;
  NormDropout dropout;
  int team, teams;  // threads per team, teams per block
};

// Computes the thread's part of residual + dropout(input) in stretch s. Writes it to x, and also to
// args.params.total unless that is null. The sum is rounded to T, because the backward starts from
// the rounded value. Elements of x outside the stretch are 0.
template <class T, int kWidth, int kAccesses>
FUSED_ATTN_DEVICE void load_sum(const NormFwdArgs& args, const Team& team, const Stretch& s,
                                float (&x)[kWidth * kAccesses]) {
  const NormParams& p = args.params;
  const T* const input = row_of<T>(p.input, p.input_rows, s);
  const T* const residual = row_of<T>(p.residual, p.residual_rows, s);
  T* const total = static_cast<T*>(p.total) + unhoisted(s.offset);
  const bool has_residual = p.residual != nullptr, drops = args.dropout.seed != nullptr;
  // Computed before the loads, because the division needs registers. Recomputed for each stretch,
  // because keeping the result live would occupy a register.
  const uint32_t row = drops ? counted_row(args.dropout, s) : 0;
  Raw<T, kWidth> raw[kAccesses], added[kAccesses];
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int column = column_of<kWidth>(team, a);
    raw[a] = load_raw<kWidth>(input + column, column < s.count);
  }
  // The loads are predicated instead of in a branch. Before a branch, the compiler would wait for
  // the input.
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int column = column_of<kWidth>(team, a);
    added[a] = load_raw<kWidth>(residual + column, has_residual && column < s.count);
  }
  uint32_t keep_mask = ~0u;
  float scale = 1.0f;
  if (drops) {
    keep_mask = kept_columns<kWidth, kAccesses>(args.dropout, team, s, row);
    scale = args.dropout.scale;
  }
  if (drops || has_residual || p.total != nullptr) {
    FUSED_ATTN_UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      const int column = column_of<kWidth>(team, a);
      float sum[kWidth], other[kWidth];
      unpack<T, kWidth>(raw[a], sum);
      unpack<T, kWidth>(added[a], other);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        sum[e] = (keep_mask >> (a * kWidth + e) & 1) != 0 ? sum[e] * scale + other[e] : other[e];
      }
      raw[a] = pack_raw<T, kWidth>(sum);
      if (p.total != nullptr && column < s.count) store_raw<kWidth>(total + column, raw[a]);
    }
  }
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) unpack<T, kWidth>(raw[a], x + a * kWidth);
}

// Loads the thread's part of `total`, which load_sum stored. Each thread reads only elements that
// it wrote itself, so no barrier is needed.
template <class T, int kWidth, int kAccesses>
FUSED_ATTN_DEVICE void load_total(const NormParams& p, const Team& team, const Stretch& s,
                                  float (&x)[kWidth * kAccesses]) {
  const T* const total = static_cast<const T*>(p.total) + s.offset;
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int column = column_of<kWidth>(team, a);
    Raw<T, kWidth> raw{};  // load_raw would use read-only loads, but the kernel wrote this memory
    if (column < s.count) raw = *reinterpret_cast<const Raw<T, kWidth>*>(total + column);
    unpack<T, kWidth>(raw, x + a * kWidth);
  }
}

// Returns the sum of (x - centre)^2 over the thread's columns in a stretch.
template <int kWidth, int kAccesses>
FUSED_ATTN_DEVICE float squares_off(const Team& team, const Stretch& s, float centre,
                                    const float (&x)[kWidth * kAccesses]) {
  float squares = 0.0f;
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const bool inside = column_of<kWidth>(team, a) < s.count;
    FUSED_ATTN_UNROLL
    for (int e = 0; e < kWidth; ++e) {
      const float off = inside ? x[a * kWidth + e] - centre : 0.0f;
      squares += off * off;
    }
  }
  return squares;
}

// Returns 1 / sqrt(variance + eps) of a row. squares: sum of (x - mean)^2 over the row. The first
// thread of the team stores mean and rstd, if requested.
FUSED_ATTN_DEVICE float finish_statistics(const NormParams& p, const Team& team, int64_t row,
                                          float mean, float squares) {
  const float variance = squares / static_cast<float>(p.columns);
  const float rstd = rsqrt_exact(variance + static_cast<float>(p.eps));
  if (team.rank == 0 && row < p.rows) {
    if (p.mean != nullptr && !p.rms) static_cast<float*>(p.mean)[row] = mean;
    if (p.rstd != nullptr) static_cast<float*>(p.rstd)[row] = rstd;
  }
  return rstd;
}

template <class T, int kWidth, int kAccesses>
FUSED_ATTN_DEVICE void store_normalised(const NormParams& p, const Team& team, const Stretch& s,
                                        float mean, float rstd,
                                        const float (&x)[kWidth * kAccesses]) {
  if (s.count == 0) return;
  T* const out = static_cast<T*>(p.out) + unhoisted(s.offset);
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int column = column_of<kWidth>(team, a);
    const bool inside = column < s.count;
    // Weight and bias are loaded unconditionally. With a branch, one load would wait for the other.
    const int64_t read = s.begin + (inside ? column : 0);
    float y[kWidth], parameter[kWidth];
    FUSED_ATTN_UNROLL
    for (int e = 0; e < kWidth; ++e) y[e] = (x[a * kWidth + e] - mean) * rstd;
    if (p.weight != nullptr) {
      load_floats<kWidth>(p.weight, read, parameter);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kWidth; ++e) y[e] *= parameter[e];
    }
    if (p.bias != nullptr) {
      load_floats<kWidth>(p.bias, read, parameter);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kWidth; ++e) y[e] += parameter[e];
    }
    if (inside) store_raw<kWidth>(out + column, pack_raw<T, kWidth>(y));
  }
}

// Forward of rows that fit into the registers of a team. Each team processes one row.
template <class T, int kWidth>
FUSED_ATTN_KERNEL(kFwdTeam, 1)
norm_fwd_kernel(FUSED_ATTN_ARGUMENT NormFwdArgs args) {
  constexpr int kAccesses = kFwdAccesses<kWidth>, kValues = kWidth * kAccesses;
  const NormParams& p = args.params;
  const Team team = team_of(args.team);
  const Stretch row = stretch_of(p, block_id() * args.teams + team.index, 0, args.team * kValues);
  float x[kValues];
  load_sum<T, kWidth, kAccesses>(args, team, row, x);
  float sum[1] = {0.0f};
  if (!p.rms) {
    FUSED_ATTN_UNROLL
    for (int v = 0; v < kValues; ++v) sum[0] += x[v];
    add_up_team(team, 0, sum);
  }
  const float mean = sum[0] / static_cast<float>(p.columns);
  sum[0] = squares_off<kWidth, kAccesses>(team, row, mean, x);
  add_up_team(team, 1, sum);
  const float rstd = finish_statistics(p, team, row.row, mean, sum[0]);
  store_normalised<T, kWidth, kAccesses>(p, team, row, mean, rstd, x);
}

// Forward of longer rows. Each block processes one row, in stretches. Each thread updates the mean
// and the sum of squares of its columns per stretch. A second loop over the row normalizes it, and
// usually reads it from L2.
template <class T, int kWidth>
FUSED_ATTN_KERNEL(kFwdWideTeam, 2)
norm_fwd_wide_kernel(FUSED_ATTN_ARGUMENT NormFwdArgs args) {
  constexpr int kAccesses = kFwdAccesses<kWidth>, kValues = kWidth * kAccesses;
  constexpr int kColumns = kFwdWideTeam * kValues;
  const NormParams& p = args.params;
  const Team team = team_of(kFwdWideTeam);
  const int64_t row = block_id();
  float x[kValues];
  float count = 0.0f, centre = 0.0f, squares = 0.0f;
  FUSED_ATTN_ROLLED
  for (int64_t begin = 0; begin < p.columns; begin += kColumns) {
    const Stretch s = stretch_of(p, row, begin, kColumns);
    load_sum<T, kWidth, kAccesses>(args, team, s, x);
    float more = 0.0f, sum = 0.0f;
    FUSED_ATTN_UNROLL
    for (int a = 0; a < kAccesses; ++a) more += column_of<kWidth>(team, a) < s.count ? kWidth : 0;
    if (more == 0.0f) continue;
    if (!p.rms) {
      FUSED_ATTN_UNROLL
      for (int v = 0; v < kValues; ++v) sum += x[v];
    }
    const float own = sum / more, step = own - centre, part = more / (count + more);
    // step * step is avoided: it may overflow while count is 0.
    const float apart = count * step * part * step;
    squares += squares_off<kWidth, kAccesses>(team, s, own, x) + apart;
    centre += step * part;
    count += more;
  }
  float sum[1] = {centre * count};
  add_up_team(team, 0, sum);
  const float mean = sum[0] / static_cast<float>(p.columns);
  sum[0] = squares + count * (centre - mean) * (centre - mean);
  add_up_team(team, 1, sum);
  const float rstd = finish_statistics(p, team, row, mean, sum[0]);
  FUSED_ATTN_ROLLED
  for (int64_t begin = 0; begin < p.columns; begin += kColumns) {
    const Stretch s = stretch_of(p, row, begin, kColumns);
    if (p.total != nullptr) {
      load_total<T, kWidth, kAccesses>(p, team, s, x);
    } else {
      load_sum<T, kWidth, kAccesses>(args, team, s, x);
    }
    store_normalised<T, kWidth, kAccesses>(p, team, s, mean, rstd, x);
  }
}

}  // namespace
}  // namespace fused_attn
