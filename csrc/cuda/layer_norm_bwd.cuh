// Gradients of layer_norm and rms_norm on a GPU.
//
// Let x be the normalized row and g = weight * grad_out. Then
//   grad_residual = rstd (g - mean(g) - x mean(g x)) + grad_total, without mean(g) for rms_norm,
// and grad_input is grad_residual times the dropout mask and scale. Each block processes every
// num_blocks()-th group of rows, and accumulates their contributions to grad_weight and grad_bias.
// A second kernel adds the partial sums of the blocks in a fixed order.
//
// The kernels are memory bound. They read total, grad_out (and grad_total), and write grad_residual
// (and grad_input). For 8192 rows of 4096 bfloat16 elements this is at least 201 MB, or 47 us on an
// H200 (layer_norm.cuh). With 4096 columns and 264 blocks, writing and reading the partial sums
// once moves another 17 MB in L2.
#pragma once

#include "cuda/layer_norm.cuh"

namespace fused_attn {
namespace {

// Values per thread. With 512 threads on a multiprocessor, a thread has 128 registers. 16 values
// each of the normalized row, of g and of the two sums occupy 64 of them. Holding the weight in
// registers too would spill 20 to 52 bytes. Meanwhile the next row is in flight to shared memory:
// 32 KB for two matrices in 16-bit types, 64 KB in float32. Single-element accesses need more
// registers for addresses, so a thread has only 8 values.
template <int kWidth>
constexpr int kBwdValues = kWidth == 1 ? 8 : 16;
// Maximum size of a team that holds a full row in registers. Rows of more than 8192 columns, or of
// more than 4096 with single-element accesses, are processed in stretches.
constexpr int kBwdTeam = 512;
// Threads per block for shorter rows. Two blocks fill a multiprocessor, so that one runs while the
// other waits. More and smaller blocks would store more partial sums.
constexpr int kBwdThreads = 256;
// Number of columns whose partial sums are in shared memory if rows are processed in stretches,
// when no registers are left for them. With kTeamBytes they occupy 97 KB. A block can use 99 KB on
// every GPU since sm_80, and an sm_90 holds two such blocks. The sums of further columns are in the
// workspace, mostly in L2.
constexpr int kWideColumns = 12288;
constexpr int kBwdWideTeam = 384;  // two blocks per multiprocessor, 80 registers per thread

struct NormBwdArgs {
  NormBwdParams params;
  NormDropout dropout;
  float* partial_sums;  // (2, num_blocks(), columns): grad_weight, grad_bias; null: not requested
  int team, teams;      // threads per team, teams per block
};

enum { kTotal = 0, kGradOut = 1, kGradTotal = 2 };  // input matrices of the backward

template <class T>
FUSED_ATTN_DEVICE const T* row_of(const NormBwdParams& bwd, int which, const Stretch& s) {
  if (which == kTotal) return row_of<T>(bwd.fwd.input, bwd.fwd.input_rows, s);
  if (which == kGradOut) return row_of<T>(bwd.grad_out, bwd.grad_out_rows, s);
  return row_of<T>(bwd.grad_total, bwd.grad_total_rows, s);
}

struct RowStatistics {
  float mean, rstd;
};

// Loads the statistics of a row. Returns zeros for a row past the end, which then contributes 0 to
// all sums.
FUSED_ATTN_DEVICE RowStatistics load_statistics(const NormParams& p, int64_t row) {
  RowStatistics statistics = {0.0f, 0.0f};
  if (row >= p.rows) return statistics;
  if (!p.rms) statistics.mean = load_global(static_cast<const float*>(p.mean) + row);
  statistics.rstd = load_global(static_cast<const float*>(p.rstd) + row);
  return statistics;
}

// Reads the thread's part of a row of an input matrix. 16-byte chunks are prefetched into the
// thread's slots in shared memory. No other thread reads these slots, so copy_wait suffices and no
// barrier is needed. Single elements are too small for copy_async, and are loaded when they are
// used.
template <class T, int kWidth>
struct RowReader {
  static constexpr int kAccesses = kBwdValues<kWidth> / kWidth;
  const NormBwdParams& bwd;
  const Team& team;
  int threads;  // per block

  FUSED_ATTN_DEVICE uint32_t place(int which, int a) const {
    return kTeamBytes + ((which * kAccesses + a) * threads + thread_id()) * sizeof(Chunk);
  }
  FUSED_ATTN_DEVICE void fetch(int which, const Stretch& s) const {
    if constexpr (kWidth > 1) {
      const T* const source = row_of<T>(bwd, which, s);
      FUSED_ATTN_UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const int column = column_of<kWidth>(team, a);
        copy_async(place(which, a), source + column, column < s.count);
      }
    }
  }
  FUSED_ATTN_DEVICE void read(int which, const Stretch& s, int a, float* values) const {
    if constexpr (kWidth > 1) {
      unpack<T, kWidth>(load_shared<Chunk>(place(which, a)), values);
    } else {
      const int column = column_of<kWidth>(team, a);
      const T* const source = row_of<T>(bwd, which, s);
      unpack<T, kWidth>(load_raw<kWidth>(source + column, column < s.count), values);
    }
  }
};

// Stores grad_residual for one access of the thread and, with dropout, grad_input. keep_mask: keep
// bits of the access.
template <class T, int kWidth>
FUSED_ATTN_DEVICE void store_gradients(const NormBwdArgs& args, const Stretch& s, int column,
                                       uint32_t keep_mask, float (&grad)[kWidth]) {
  if (column >= s.count) return;
  T* const residual = static_cast<T*>(args.params.grad_residual) + unhoisted(s.offset);
  store_raw<kWidth>(residual + column, pack_raw<T, kWidth>(grad));
  if (args.dropout.seed == nullptr) return;
  T* const input = static_cast<T*>(args.params.grad_input) + unhoisted(s.offset);
  FUSED_ATTN_UNROLL
  for (int e = 0; e < kWidth; ++e) {
    grad[e] = (keep_mask >> e & 1) != 0 ? grad[e] * args.dropout.scale : 0.0f;
  }
  store_raw<kWidth>(input + column, pack_raw<T, kWidth>(grad));
}

// Adds `sums` over the teams of the block, and stores the result to `part`, of shape (columns).
template <int kWidth>
FUSED_ATTN_DEVICE void store_part(const NormBwdArgs& args, const Team& team,
                                  float (&sums)[kBwdValues<kWidth>], float* part) {
  constexpr int kStep = kWidth == 1 ? 1 : 4;
  const int columns = static_cast<int>(args.params.fwd.columns), threads = args.team * args.teams;
  FUSED_ATTN_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    if (mask < team.size) continue;
    FUSED_ATTN_UNROLL
    for (int v = 0; v < kBwdValues<kWidth>; ++v) sums[v] += shuffle_xor(sums[v], mask);
  }
  // Every team of a warp now holds the column sums of the warp. Only the first team stores them.
  const bool first = lane_id() < team.size;
  const int places = team.size < 32 ? threads / 32 : args.teams;
  const int own = team.size < 32 ? warp_id() : team.index;
  sync_block();  // the sums overwrite shared memory that other threads may still read
  FUSED_ATTN_UNROLL
  for (int v = 0; v < kBwdValues<kWidth>; v += kStep) {
    const int column = column_of<kWidth>(team, v / kWidth) + v % kWidth;
    if (!first || column >= columns) continue;
    const Raw<float, kStep> raw = pack_raw<float, kStep>(sums + v);
    if (places == 1) {
      store_raw<kStep>(part + column, raw);
    } else {
      store_shared(kTeamBytes + static_cast<uint32_t>(own * columns + column) * 4, raw);
    }
  }
  if (places == 1) return;
  sync_block();
  for (int column = thread_id(); column < columns; column += threads) {
    float sum = 0.0f;
    for (int i = 0; i < places; ++i) {
      sum += load_shared<float>(kTeamBytes + static_cast<uint32_t>(i * columns + column) * 4);
    }
    part[column] = sum;
  }
}

// Backward of rows that fit into the registers of a team. Each team processes one row at a time.
template <class T, int kWidth>
FUSED_ATTN_KERNEL(kBwdTeam, 1)
norm_bwd_kernel(FUSED_ATTN_ARGUMENT NormBwdArgs args) {
  constexpr int kValues = kBwdValues<kWidth>, kAccesses = kValues / kWidth;
  const NormBwdParams& bwd = args.params;
  const NormParams& p = bwd.fwd;
  const Team team = team_of(args.team);
  const RowReader<T, kWidth> reader = {bwd, team, args.team * args.teams};
  const int columns = static_cast<int>(p.columns);
  float weight_sum[kValues] = {}, bias_sum[kValues] = {};
  const float share = 1.0f / static_cast<float>(columns);
  const int64_t step = num_blocks() * args.teams;
  int64_t first = block_id() * args.teams;
  Stretch row = stretch_of(p, first + team.index, 0, columns);
  RowStatistics statistics = load_statistics(p, row.row);
  reader.fetch(kTotal, row);
  reader.fetch(kGradOut, row);
  copy_commit();
  if (bwd.grad_total != nullptr) reader.fetch(kGradTotal, row);
  copy_commit();
  int turn = 0;
  FUSED_ATTN_ROLLED
  for (; first < p.rows; first += step) {
    const Stretch next = stretch_of(p, first + step + team.index, 0, columns);
    const auto [mean, rstd] = statistics;
    float x[kValues], grad[kValues], sums[2] = {0.0f, 0.0f};
    // unhoisted() makes each row reload the weight, from L1, instead of holding it in registers.
    const int64_t zero = unhoisted(0);
    copy_wait<1>();  // total and grad_out
    FUSED_ATTN_UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      const int column = column_of<kWidth>(team, a);
      const bool inside = column < row.count;
      const float centre = inside ? mean : 0.0f;
      float total[kWidth], out[kWidth], weight[kWidth];
      reader.read(kTotal, row, a, total);
      reader.read(kGradOut, row, a, out);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kWidth; ++e) weight[e] = 1.0f;
      if (p.weight != nullptr) load_floats<kWidth>(p.weight, zero + (inside ? column : 0), weight);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        const int v = a * kWidth + e;
        x[v] = (total[e] - centre) * rstd;
        grad[v] = out[e] * weight[e];
        weight_sum[v] += out[e] * x[v];
        bias_sum[v] += out[e];
        sums[0] += grad[v] * x[v];
        sums[1] += grad[v];
      }
    }
    statistics = load_statistics(p, next.row);
    reader.fetch(kTotal, next);
    reader.fetch(kGradOut, next);
    copy_commit();
    uint32_t keep_mask = 0;
    if (args.dropout.seed != nullptr) {
      keep_mask =
          kept_columns<kWidth, kAccesses>(args.dropout, team, row, counted_row(args.dropout, row));
    }
    add_up_team(team, turn, sums);
    turn ^= 1;
    const float along = sums[0] * share, across = p.rms ? 0.0f : sums[1] * share;
    copy_wait<1>();  // grad_total
    FUSED_ATTN_UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      float added[kWidth] = {}, result[kWidth];
      if (bwd.grad_total != nullptr) reader.read(kGradTotal, row, a, added);
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        const int v = a * kWidth + e;
        result[e] = rstd * (grad[v] - across - x[v] * along) + added[e];
      }
      store_gradients<T, kWidth>(args, row, column_of<kWidth>(team, a), keep_mask >> (a * kWidth),
                                 result);
    }
    if (bwd.grad_total != nullptr) reader.fetch(kGradTotal, next);
    copy_commit();
    row = next;
  }
  copy_wait<0>();
  if (args.partial_sums == nullptr) return;
  float* const part = args.partial_sums + block_id() * p.columns;
  if (bwd.grad_weight != nullptr) store_part<kWidth>(args, team, weight_sum, part);
  if (bwd.grad_bias != nullptr) {
    store_part<kWidth>(args, team, bias_sum, part + num_blocks() * p.columns);
  }
}

// Returns the shared-memory address of a column's partial sum in norm_bwd_wide_kernel. which: 0 for
// grad_weight, 1 for grad_bias.
FUSED_ATTN_DEVICE uint32_t wide_place(int which, int64_t column) {
  return kTeamBytes + static_cast<uint32_t>(which * kWideColumns + column) * sizeof(float);
}

// Adds `terms` to the block's partial sums of kWidth columns. The same thread handles a column for
// every row, so no synchronization is needed. begun: false for the first row, which initializes the
// sums.
template <int kWidth>
FUSED_ATTN_DEVICE void add_to_sums(int which, int64_t column, float* part, bool begun,
                                   const float (&terms)[kWidth]) {
  constexpr int kStep = kWidth == 1 ? 1 : 4;
  using Piece = Raw<float, kStep>;
  const bool shared = column < kWideColumns;
  FUSED_ATTN_UNROLL
  for (int e = 0; e < kWidth; e += kStep) {
    float sums[kStep] = {};
    if (begun) {
      const Piece before = shared ? load_shared<Piece>(wide_place(which, column + e))
                                  : *reinterpret_cast<const Piece*>(part + column + e);
      unpack<float, kStep>(before, sums);
    }
    FUSED_ATTN_UNROLL
    for (int i = 0; i < kStep; ++i) sums[i] += terms[e + i];
    const Piece after = pack_raw<float, kStep>(sums);
    if (shared) {
      store_shared(wide_place(which, column + e), after);
    } else {
      store_raw<kStep>(part + column + e, after);
    }
  }
}

// Loads the thread's part of a stretch (consecutive columns of a row): the normalized row (x) and
// grad_out (grad). Elements outside the stretch are 0.
template <class T, int kWidth>
FUSED_ATTN_DEVICE void load_stretch(const NormBwdParams& bwd, const Team& team, const Stretch& s,
                                    const RowStatistics& statistics, float (&x)[kBwdValues<kWidth>],
                                    float (&grad)[kBwdValues<kWidth>]) {
  constexpr int kAccesses = kBwdValues<kWidth> / kWidth;
  const T* const total = row_of<T>(bwd, kTotal, s);
  const T* const grad_out = row_of<T>(bwd, kGradOut, s);
  Raw<T, kWidth> total_raw[kAccesses], grad_raw[kAccesses];
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int column = column_of<kWidth>(team, a);
    total_raw[a] = load_raw<kWidth>(total + column, column < s.count);
    grad_raw[a] = load_raw<kWidth>(grad_out + column, column < s.count);
  }
  FUSED_ATTN_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const float centre = column_of<kWidth>(team, a) < s.count ? statistics.mean : 0.0f;
    unpack<T, kWidth>(total_raw[a], x + a * kWidth);
    unpack<T, kWidth>(grad_raw[a], grad + a * kWidth);
    FUSED_ATTN_UNROLL
    for (int e = 0; e < kWidth; ++e) {
      x[a * kWidth + e] = (x[a * kWidth + e] - centre) * statistics.rstd;
    }
  }
}

// Multiplies kWidth values by the weight of the columns from `column` on, which must exist. Does
// nothing without a weight.
template <int kWidth>
FUSED_ATTN_DEVICE void multiply_by_weight(const NormParams& p, int64_t column, float* values) {
  if (p.weight == nullptr) return;
  float weight[kWidth];
  load_floats<kWidth>(p.weight, column, weight);
  FUSED_ATTN_UNROLL
  for (int e = 0; e < kWidth; ++e) values[e] *= weight[e];
}

// Backward of longer rows. Each block processes one row at a time, in stretches. The first loop
// reads the row from memory and computes its sums. The second loop computes everything else, and
// usually reads the row from L1 or L2.
template <class T, int kWidth>
FUSED_ATTN_KERNEL(kBwdWideTeam, 2)
norm_bwd_wide_kernel(FUSED_ATTN_ARGUMENT NormBwdArgs args) {
  constexpr int kValues = kBwdValues<kWidth>, kAccesses = kValues / kWidth;
  constexpr int kColumns = kBwdWideTeam * kValues;
  const NormBwdParams& bwd = args.params;
  const NormParams& p = bwd.fwd;
  const Team team = team_of(kBwdWideTeam);
  float* const weight_part = args.partial_sums + block_id() * p.columns;
  float* const bias_part = weight_part + num_blocks() * p.columns;
  const float share = 1.0f / static_cast<float>(p.columns);
  int turn = 0;
  FUSED_ATTN_ROLLED
  for (int64_t row = block_id(); row < p.rows; row += num_blocks()) {
    const bool begun = row != block_id();
    const RowStatistics statistics = load_statistics(p, row);
    float x[kValues], grad[kValues], sums[2] = {0.0f, 0.0f};
    FUSED_ATTN_ROLLED
    for (int64_t begin = 0; begin < p.columns; begin += kColumns) {
      const Stretch s = stretch_of(p, row, begin, kColumns);
      load_stretch<T, kWidth>(bwd, team, s, statistics, x, grad);
      FUSED_ATTN_UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const int column = column_of<kWidth>(team, a);
        multiply_by_weight<kWidth>(p, begin + (column < s.count ? column : 0), grad + a * kWidth);
        FUSED_ATTN_UNROLL
        for (int v = a * kWidth; v < (a + 1) * kWidth; ++v) {
          sums[0] += grad[v] * x[v];
          sums[1] += grad[v];
        }
      }
    }
    add_up_team(team, turn, sums);
    turn ^= 1;
    const float along = sums[0] * share, across = p.rms ? 0.0f : sums[1] * share;
    FUSED_ATTN_ROLLED
    for (int64_t begin = 0; begin < p.columns; begin += kColumns) {
      const Stretch s = stretch_of(p, row, begin, kColumns);
      load_stretch<T, kWidth>(bwd, team, s, statistics, x, grad);
      uint32_t keep_mask = 0;
      if (args.dropout.seed != nullptr) {
        keep_mask =
            kept_columns<kWidth, kAccesses>(args.dropout, team, s, counted_row(args.dropout, s));
      }
      FUSED_ATTN_UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const int column = column_of<kWidth>(team, a);
        if (column >= s.count) continue;
        float terms[kWidth], added[kWidth] = {};
        if (bwd.grad_weight != nullptr) {
          FUSED_ATTN_UNROLL
          for (int e = 0; e < kWidth; ++e) terms[e] = grad[a * kWidth + e] * x[a * kWidth + e];
          add_to_sums<kWidth>(0, begin + column, weight_part, begun, terms);
        }
        if (bwd.grad_bias != nullptr) {
          FUSED_ATTN_UNROLL
          for (int e = 0; e < kWidth; ++e) terms[e] = grad[a * kWidth + e];
          add_to_sums<kWidth>(1, begin + column, bias_part, begun, terms);
        }
        multiply_by_weight<kWidth>(p, begin + column, grad + a * kWidth);
        if (bwd.grad_total != nullptr) {
          const T* const source = row_of<T>(bwd, kGradTotal, s);
          unpack<T, kWidth>(load_raw<kWidth>(source + column, true), added);
        }
        FUSED_ATTN_UNROLL
        for (int e = 0; e < kWidth; ++e) {
          const int v = a * kWidth + e;
          terms[e] = statistics.rstd * (grad[v] - across - x[v] * along) + added[e];
        }
        store_gradients<T, kWidth>(args, s, column, keep_mask >> (a * kWidth), terms);
      }
    }
  }
  sync_block();
  for (int64_t column = thread_id(); column < kWideColumns && column < p.columns;
       column += kBwdWideTeam) {
    if (bwd.grad_weight != nullptr) weight_part[column] = load_shared<float>(wide_place(0, column));
    if (bwd.grad_bias != nullptr) bias_part[column] = load_shared<float>(wide_place(1, column));
  }
}

struct NormSumArgs {
  const float* partial_sums;  // (2, parts, columns)
  int64_t parts, columns;
  float* out[2];  // grad_weight and grad_bias, (columns); null: not requested
};

constexpr int kSumWarps = 32;

// Adds the partial sums of the backward. Each block reduces 32 columns: each warp adds every
// kSumWarps-th part, and the first warp adds the sums of the warps.
FUSED_ATTN_KERNEL(kSumWarps * 32, 1)
norm_sum_kernel(FUSED_ATTN_ARGUMENT NormSumArgs args) {
  const int64_t which = block_id() % 2, column = block_id() / 2 * 32 + lane_id();
  float* const out = args.out[which];
  if (out == nullptr) return;
  const bool inside = column < args.columns;
  const float* const parts = args.partial_sums + which * args.parts * args.columns + column;
  float sum = 0.0f;
  for (int64_t i = warp_id(); i < args.parts && inside; i += kSumWarps) {
    sum += load_global(parts + i * args.columns);
  }
  store_shared(static_cast<uint32_t>(thread_id()) * 4, sum);
  sync_block();
  if (warp_id() != 0 || !inside) return;
  FUSED_ATTN_UNROLL
  for (int w = 1; w < kSumWarps; ++w) {
    sum += load_shared<float>(static_cast<uint32_t>(w * 32 + lane_id()) * 4);
  }
  out[column] = sum;
}

}  // namespace
}  // namespace fused_attn
