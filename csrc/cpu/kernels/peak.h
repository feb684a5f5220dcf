// Measures the peak rate of the multiply instructions of this instruction set. Benchmarks compare
// kernels with these rates.
#pragma once

#include <time.h>

#include "cpu/amx/tile_format.h"
#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Independent accumulators. 8 hide a latency of 4 cycles at two multiply-adds per cycle.
constexpr int kPeakChains = 2 * kMicroRows < 12 ? 2 * kMicroRows : 12;

// Returns x, hidden from constant propagation. If the compiler knew the start values, it could
// remove a sum from the loop: 1 is a fixed point of sum * 0.999 + 0.001.
inline float hidden(float x) {
  volatile float hidden_x = x;
  return hidden_x;
}

// Runs vector multiply-adds on the calling thread. Returns the number of operations.
inline double spin_multiply_add(int64_t rounds) {
  Vec<float> sum[kPeakChains];
  const Vec<float> x = broadcast<float>(hidden(0.999f)), y = broadcast<float>(hidden(1e-3f));
  for (int i = 0; i < kPeakChains; ++i) {
    sum[i] = broadcast<float>(hidden(0.1f * static_cast<float>(i)));
  }
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kPeakChains; ++i) sum[i] = sum[i] * x + y;
  }
  for (int i = 1; i < kPeakChains; ++i) sum[0] += sum[i];
  volatile float result = sum[0][0];  // keeps the compiler from removing the loop
  (void)result;
  return 2.0 * kPeakChains * kLanes<float> * static_cast<double>(rounds);
}

#if defined(__AMX_BF16__)
// Runs tile MMAs with one operand load per MMA. Returns the number of operations; the MMAs of all
// parts of a number count as one. Types with several parts need fewer loads (float32: 14 operands
// for 24 MMAs), so their actual peak is slightly higher.
template <class F>
inline double spin_tiles(int64_t rounds) {
  TileRegisters registers;
  // Arbitrary nonzero values. With zeros, the tile unit draws less power and runs faster.
  alignas(64) uint16_t data[4][kTileNumbers];
  for (int i = 0; i < 4 * kTileNumbers; ++i) {
    (&data[0][0])[i] = static_cast<uint16_t>(0x3C00 + i * 37 % 128 - (i % 3 == 0 ? 0x8000 : 0));
  }
  asm volatile("" : : "r"(data) : "memory");
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t r = 0; r < rounds; ++r) {
    tile_load<4>(data[0]);
    tile_load<6>(data[1]);
    F::Number::template multiply<0, 4, 6>();
    tile_load<7>(data[2]);
    F::Number::template multiply<1, 4, 7>();
    tile_load<5>(data[3]);
    F::Number::template multiply<2, 5, 6>();
    F::Number::template multiply<3, 5, 7>();
  }
  const double products = 4.0 / TileProducts<F::kParts>::kCount * static_cast<double>(rounds);
  return products * 2 * 16 * 16 * 32;
}
#elif defined(FUSED_ATTN_BF16_PAIRS)
constexpr int kPairChains = 16;

inline double spin_pairs(int64_t rounds) {
#if defined(FUSED_ATTN_NEON_BF16)
  constexpr double kOperations = 32;
  const auto multiply_add = [](Vec32 x, Vec<float> sum) {
    const bfloat16x8_t both = bfloat16_vector(x);
    return (Vec<float>)vbfmmlaq_f32((float32x4_t)sum, both, both);
  };
#else
  constexpr double kOperations = 4 * kLanes<float>;
  const auto multiply_add = [](Vec32 x, Vec<float> sum) {
    return BFloat16Pairs::multiply_add(0x3C003C00u, x, sum);
  };
#endif
  Vec<float> sum[kPairChains];
  for (int i = 0; i < kPairChains; ++i) sum[i] = broadcast<float>(static_cast<float>(i));
  Vec32 x = Vec32{} + 0x3F003F00u;
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kPairChains; ++i) sum[i] = multiply_add(x, sum[i]);
  }
  for (int i = 1; i < kPairChains; ++i) sum[0] += sum[i];
  volatile float result = sum[0][0];  // keeps the compiler from removing the loop
  (void)result;
  return kOperations * kPairChains * static_cast<double>(rounds);
}
#endif

// Returns the operations per second of `threads` threads combined, the best of five trials.
template <class Spin>
inline double peak_of(int64_t threads, const Spin& spin) {
  double best = 0;
  for (int trial = 0; trial < 5; ++trial) {
    double done = 0;
    const double start = seconds_now();
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(+ : done)
    done += spin(int64_t{1000000});
    const double rate = done / (seconds_now() - start);
    best = rate > best ? rate : best;
  }
  return best;
}

inline double multiply_add_peak(int64_t threads) { return peak_of(threads, spin_multiply_add); }

// Returns the peak rate of the instructions that attention uses for matmuls of type T.
template <class T>
inline double product_peak(int64_t threads) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) < 8) return peak_of(threads, spin_tiles<TileFormat<T>>);
#elif defined(FUSED_ATTN_BF16_PAIRS)
  if constexpr (kIsBFloat16<T>) return peak_of(threads, spin_pairs);
#endif
  return multiply_add_peak(threads) * 4 / static_cast<double>(sizeof(Acc<T>));
}

}  // namespace
}  // namespace fused_attn
