// Host side of layer_norm and rms_norm: selects the kernels and distributes rows over blocks.
#include <algorithm>

#include "cuda/api.h"
#include "cuda/launch.cuh"
#include "cuda/layer_norm.cuh"
#include "cuda/layer_norm_bwd.cuh"

namespace fused_attn {
namespace {

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the smallest number of threads (a valid Team::size) that hold a row with `accesses`
// accesses of `width` elements each. Single-element accesses are spread over a full warp if the row
// has enough columns, because memory is read in 32-byte sectors.
int64_t team_size(int64_t columns, int width, int accesses) {
  const int64_t needed = div_up(columns, width);
  int64_t size = div_up(needed, accesses);
  if (width == 1) size = std::max(size, std::min<int64_t>(needed, 32));
  if (size > 32) return div_up(size, 32) * 32;
  int64_t power = 1;
  while (power < size) power *= 2;
  return power;
}

// Returns the number of teams in a block of about `threads` threads, at least 1. `team` is the
// number of threads of a team.
int64_t teams_of(int64_t team, int64_t threads) { return std::max<int64_t>(1, threads / team); }

// Returns true if all pointers are multiples of 16 bytes.
bool aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(Chunk) == 0;
  });
}

// Calls run(T(), width), with the element type T and the number of elements per access as an
// integral_constant. An access is 16 bytes if every row begins at a multiple of 16 bytes, and a
// single element otherwise. aligned: true if all pointers are aligned. read: layouts of the input
// matrices, whose rows need not be contiguous.
template <class Run>
void dispatch(const NormParams& p, bool aligned, std::initializer_list<RowLayout> read,
              const Run& run) {
  for_element(p.dtype, [&](auto element) {
    constexpr int kWidth = kChunkWidth<decltype(element)>;
    const bool fits = std::all_of(read.begin(), read.end(), [](const RowLayout& rows) {
      return rows.run_step % kWidth == 0 && rows.row_stride % kWidth == 0;
    });
    if (aligned && fits && p.columns % kWidth == 0) {
      run(element, std::integral_constant<int, kWidth>());
    } else {
      run(element, std::integral_constant<int, 1>());
    }
  });
}

NormDropout dropout_of(const NormParams& p, const GpuParams& gpu) {
  if (!(p.dropout_p > 0)) return {};
  if (p.dropout_offsets != nullptr && p.rows >= int64_t{1} << 32) {
    throw LaunchError("dropout_offsets requires fewer than 2^32 rows");
  }
  return {gpu.seed_address, dropout_threshold(p.dropout_p),
          static_cast<float>(dropout_scale(p.dropout_p)), p.dropout_offsets,
          static_cast<uint32_t>(p.dropout_run)};
}

}  // namespace

void run_norm_fwd(const NormParams& params, const GpuParams& gpu) {
  const NormParams& p = params;
  const auto run = [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int kWidth = width, kAccesses = kFwdAccesses<kWidth>;
    NormFwdArgs args = {p, dropout_of(p, gpu), 0, 1};
    const auto stream = static_cast<Stream>(gpu.stream);
    const int64_t team = team_size(p.columns, kWidth, kAccesses);
    if (team > kFwdTeam) {
      launch("norm_fwd_wide_kernel", norm_fwd_wide_kernel<T, kWidth>, p.rows, kFwdWideTeam,
             kTeamBytes, args, stream);
      return;
    }
    args.team = static_cast<int>(team);
    args.teams = static_cast<int>(teams_of(team, kFwdThreads));
    launch("norm_fwd_kernel", norm_fwd_kernel<T, kWidth>, div_up(p.rows, args.teams),
           args.team * args.teams, kTeamBytes, args, stream);
  };
  dispatch(p, aligned({p.input, p.residual, p.weight, p.bias, p.out, p.total}),
           {p.input_rows, p.residual_rows}, run);
}

// Returns the number of blocks that run concurrently if accesses are 16 bytes. With single-element
// accesses, blocks may process more or fewer rows at a time, so some blocks may have less work.
int64_t norm_bwd_parts(int64_t rows, int64_t columns, int64_t num_multiprocessors) {
  const int64_t team = team_size(columns, kBwdValues<4>, 1);
  if (team > kBwdTeam) return std::min(rows, 2 * num_multiprocessors);
  const int64_t teams = teams_of(team, kBwdThreads);
  const int64_t blocks = teams_of(team * teams, kBwdTeam);  // per multiprocessor
  return std::min(div_up(rows, teams), blocks * num_multiprocessors);
}

void run_norm_bwd(const NormBwdParams& params, float* partial_sums, int64_t num_parts,
                  const GpuParams& gpu) {
  const NormParams& p = params.fwd;
  const auto stream = static_cast<Stream>(gpu.stream);
  const int64_t blocks = std::min(p.rows, num_parts);
  const bool adds_up = params.grad_weight != nullptr || params.grad_bias != nullptr;
  const auto run = [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int kWidth = width, kValues = kBwdValues<kWidth>;
    NormBwdArgs args = {params, dropout_of(p, gpu), adds_up ? partial_sums : nullptr, 0, 1};
    const int64_t team = team_size(p.columns, kWidth, kValues / kWidth);
    if (team > kBwdTeam) {
      const int sums = adds_up ? 2 * kWideColumns * static_cast<int>(sizeof(float)) : 0;
      launch("norm_bwd_wide_kernel", norm_bwd_wide_kernel<T, kWidth>, blocks, kBwdWideTeam,
             kTeamBytes + sums, args, stream);
      return;
    }
    args.team = static_cast<int>(team);
    args.teams = static_cast<int>(teams_of(team, kBwdThreads));
    const int threads = args.team * args.teams;
    const int matrices = params.grad_total == nullptr ? 2 : 3;
    const int values = threads * kValues;
    const int fetched = kWidth == 1 ? 0 : matrices * values * static_cast<int>(sizeof(T));
    const int sums = values * static_cast<int>(sizeof(float));
    launch("norm_bwd_kernel", norm_bwd_kernel<T, kWidth>, blocks, threads,
           kTeamBytes + std::max(fetched, sums), args, stream);
  };
  dispatch(p,
           aligned({p.input, p.weight, params.grad_out, params.grad_total, params.grad_input,
                    params.grad_residual, partial_sums}),
           {p.input_rows, params.grad_out_rows, params.grad_total_rows}, run);
  if (!adds_up) return;
  NormSumArgs sums = {partial_sums, blocks, p.columns, {}};
  sums.out[0] = static_cast<float*>(params.grad_weight);
  sums.out[1] = static_cast<float*>(params.grad_bias);
  launch("norm_sum_kernel", norm_sum_kernel, 2 * div_up(p.columns, 32), kSumWarps * 32,
         kSumWarps * 32 * static_cast<int>(sizeof(float)), sums, stream);
}

}  // namespace fused_attn
