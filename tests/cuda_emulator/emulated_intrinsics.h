// Host implementation of the primitives that csrc/cuda/intrinsics.cuh documents, on the emulated
// threads of machine.h.
//
// Functions that detect errors receive the location of their caller, so that the error message
// contains the line of the kernel.
#pragma once

#include <type_traits>

#include "host_device.h"
#include "numbers.h"
#include "schedule.h"

// Parameters with the source location of the caller.
#define FUSED_ATTN_SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()

// Attribute of functions that call Machine::meet, which may switch to another fiber: they must be
// inlined, like switch_context (fibers.h).
#define FUSED_ATTN_MEETS __attribute__((always_inline)) inline

namespace fused_attn {

// ---- threads ------------------------------------------------------------------------------------

FUSED_ATTN_DEVICE int thread_id() { return emulator::machine->thread(); }
FUSED_ATTN_DEVICE int lane_id() { return emulator::machine->warp->lane; }
FUSED_ATTN_DEVICE int warp_id() { return emulator::machine->warp->id; }
FUSED_ATTN_DEVICE int64_t block_id() { return emulator::machine->block; }
FUSED_ATTN_DEVICE int64_t num_blocks() { return emulator::machine->num_blocks; }

FUSED_ATTN_MEETS void sync_block(FUSED_ATTN_SITE) { emulator::machine->sync_block({line, file}); }
FUSED_ATTN_MEETS void sync_warp(FUSED_ATTN_SITE) {
  emulator::machine->meet(emulator::Meeting::kWarp, nullptr, {line, file}, [](void* const*) {});
}

template <class T>
FUSED_ATTN_MEETS T shuffle(T value, int lane, FUSED_ATTN_SITE) {
  struct Operand {
    T value, result;
    int lane;
  } mine = {value, value, lane & 31};
  emulator::machine->meet(emulator::Meeting::kShuffle, &mine, {line, file},
                          [](void* const* operands) {
                            for (int i = 0; i < 32; ++i) {
                              Operand& to = *static_cast<Operand*>(operands[i]);
                              to.result = static_cast<const Operand*>(operands[to.lane])->value;
                            }
                          });
  return mine.result;
}
template <class T>
FUSED_ATTN_MEETS T shuffle_xor(T value, int mask, FUSED_ATTN_SITE) {
  return shuffle(value, lane_id() ^ mask, line, file);
}
FUSED_ATTN_MEETS uint32_t ballot(bool predicate, FUSED_ATTN_SITE) {
  uint32_t mine = predicate;
  emulator::machine->meet(emulator::Meeting::kBallot, &mine, {line, file},
                          [](void* const* operands) {
                            uint32_t all = 0;
                            for (int i = 0; i < 32; ++i)
                              all |= *static_cast<uint32_t*>(operands[i]) << i;
                            for (int i = 0; i < 32; ++i) *static_cast<uint32_t*>(operands[i]) = all;
                          });
  return mine;
}

FUSED_ATTN_DEVICE int unhoisted(int value) { return value; }
FUSED_ATTN_DEVICE int64_t unhoisted(int64_t value) { return value; }
FUSED_ATTN_DEVICE int count_bits(uint32_t bits) { return __builtin_popcount(bits); }

// ---- memory -------------------------------------------------------------------------------------

template <class V>
FUSED_ATTN_DEVICE V load_shared(uint32_t address, FUSED_ATTN_SITE) {
  emulator::Machine& m = *emulator::machine;
  m.check_address<sizeof(V)>(address, m.thread(), {line, file});
  m.note_read<sizeof(V)>(address, m.thread(), m.access(), {line, file});
  V value;
  std::memcpy(&value, m.shared + address, sizeof(V));
  return value;
}
template <class V>
FUSED_ATTN_DEVICE void store_shared(uint32_t address, V value, FUSED_ATTN_SITE) {
  emulator::Machine& m = *emulator::machine;
  m.check_address<sizeof(V)>(address, m.thread(), {line, file});
  m.note_write<sizeof(V)>(address, {line, file});
  std::memcpy(m.shared + address, &value, sizeof(V));
}
FUSED_ATTN_DEVICE uint32_t shared_window() { return 0; }

namespace emulator {
// Fails the launch if a global address is null or not a multiple of kSize.
template <int kSize>
void check_global(const void* address, Site site) {
  if (address == nullptr || reinterpret_cast<uintptr_t>(address) % kSize != 0) {
    machine->fail(machine->thread(), site, "global address %p is null or no multiple of %d",
                  address, kSize);
  }
}
}  // namespace emulator

template <class V>
FUSED_ATTN_DEVICE V load_global(const V* address, FUSED_ATTN_SITE) {
  emulator::check_global<sizeof(V)>(address, {line, file});
  return *address;
}
FUSED_ATTN_DEVICE Chunk load_chunk(const void* address, FUSED_ATTN_SITE) {
  emulator::check_global<16>(address, {line, file});
  Chunk value;
  std::memcpy(&value, address, 16);
  return value;
}
FUSED_ATTN_DEVICE void store_chunk(void* address, const Chunk& value, FUSED_ATTN_SITE) {
  emulator::check_global<16>(address, {line, file});
  std::memcpy(address, &value, 16);
}
FUSED_ATTN_DEVICE void atomic_add(float* address, Pair value, FUSED_ATTN_SITE) {
  emulator::check_global<8>(address, {line, file});
  address[0] += value.low;
  address[1] += value.high;
}

FUSED_ATTN_DEVICE void copy_async(uint32_t address, const void* source, bool valid,
                                  FUSED_ATTN_SITE) {
  emulator::Machine& m = *emulator::machine;
  m.check_address<16>(address, m.thread(), {line, file});
  if (valid || source != nullptr) emulator::check_global<16>(source, {line, file});
  m.start_copy(address, valid ? source : nullptr, {line, file});
}
FUSED_ATTN_DEVICE void copy_commit() { ++emulator::machine->copies().group; }
template <int kPending>
FUSED_ATTN_DEVICE void copy_wait() {
  emulator::machine->wait_for_copies(kPending);
}

// ---- conversions and math -----------------------------------------------------------------------

FUSED_ATTN_DEVICE float to_float(float value) { return value; }
FUSED_ATTN_DEVICE float to_float(Half value) {
  return emulator::float_of_16_bits<emulator::ExpandHalf>(value.bits);
}
FUSED_ATTN_DEVICE float to_float(BFloat16 value) {
  return emulator::float_of_16_bits<emulator::ExpandBFloat16>(value.bits);
}

template <class T>
FUSED_ATTN_DEVICE T from_float(float value);
template <>
FUSED_ATTN_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
FUSED_ATTN_DEVICE Half from_float<Half>(float value) {
  return {emulator::half_of(value)};
}
template <>
FUSED_ATTN_DEVICE BFloat16 from_float<BFloat16>(float value) {
  return {emulator::bfloat16_of(value)};
}

template <class T>
FUSED_ATTN_DEVICE uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

FUSED_ATTN_DEVICE uint32_t float_bits(float value) { return emulator::bits_of(value); }
FUSED_ATTN_DEVICE float bits_float(uint32_t bits) { return emulator::float_of(bits); }

FUSED_ATTN_DEVICE float exp2_fast(float x) {
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
}
FUSED_ATTN_DEVICE float exp_exact(float x) { return std::exp(x); }
FUSED_ATTN_DEVICE float tanh_exact(float x) { return std::tanh(x); }
FUSED_ATTN_DEVICE double log_exact(double x) { return std::log(x); }
FUSED_ATTN_DEVICE float rsqrt_exact(float x) { return 1.0f / std::sqrt(x); }
FUSED_ATTN_DEVICE uint32_t to_tf32(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & emulator::kInfinity) == emulator::kInfinity) {
    return emulator::is_nan(bits) ? 0x7fffffffu : bits;
  }
  return (bits + 0x1000u) & 0xffffe000u;
}

// ---- tensor cores -------------------------------------------------------------------------------

namespace emulator {

// Operand of a lane in load_matrices.
struct MatrixOperand {
  uint32_t* result;
  uint32_t address;
};

// Executes load_matrices for all lanes of the current warp.
template <bool kTransposed>
void load_matrices_of_warp(void* const* operands) {
  Machine& m = *machine;
  uint16_t matrices[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t address = static_cast<const MatrixOperand*>(operands[lane])->address;
    const int thread = m.warp->id * 32 + lane;
    m.check_address<16>(address, thread, m.warp->site);
    // All lanes read the row, so sync_warp must separate this read from earlier writes by any lane.
    m.note_read<16>(address, thread, {m.warp->id, Shadow::kSeveral}, m.warp->site);
    std::memcpy(matrices[lane / 8][lane % 8], m.shared + address, 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t* result = static_cast<const MatrixOperand*>(operands[lane])->result;
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const auto& matrix = matrices[i];
      result[i] = kTransposed ? matrix[column][row] | uint32_t{matrix[column + 1][row]} << 16
                              : matrix[row][column] | uint32_t{matrix[row][column + 1]} << 16;
    }
  }
}

}  // namespace emulator

FUSED_ATTN_MEETS void load_matrices(uint32_t (&r)[4], uint32_t address, FUSED_ATTN_SITE) {
  emulator::MatrixOperand mine = {r, address};
  emulator::machine->meet(emulator::Meeting::kLoadMatrices, &mine, {line, file},
                          emulator::load_matrices_of_warp<false>);
}
FUSED_ATTN_MEETS void load_matrices_transposed(uint32_t (&r)[4], uint32_t address,
                                               FUSED_ATTN_SITE) {
  emulator::MatrixOperand mine = {r, address};
  emulator::machine->meet(emulator::Meeting::kLoadMatrices, &mine, {line, file},
                          emulator::load_matrices_of_warp<true>);
}

template <class T>
FUSED_ATTN_MEETS void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                   FUSED_ATTN_SITE) {
  using Expand =
      std::conditional_t<std::is_same_v<T, Half>, emulator::ExpandHalf, emulator::ExpandBFloat16>;
  emulator::MmaOperand mine = {d, a, {b0, b1}};
  emulator::machine->meet(emulator::Meeting::kMma, &mine, {line, file},
                          emulator::multiply_16_bits<Expand>);
}
FUSED_ATTN_MEETS void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1, FUSED_ATTN_SITE) {
  emulator::MmaOperand mine = {d, a, {b0, b1}};
  emulator::machine->meet(emulator::Meeting::kMma, &mine, {line, file}, emulator::multiply_tf32);
}

// ---- launches (host) ----------------------------------------------------------------------------

using Stream = void*;

template <class Args>
const char* obstacle(void (*)(Args)) {
  return nullptr;
}

// Runs all blocks of a kernel before it returns. Returns an error message, valid until the thread's
// next launch, or null.
template <class Args>
const char* start_kernel(void (*kernel)(Args), int64_t blocks, int threads, int shared_size,
                         const std::remove_const_t<Args>& args, Stream) {
  if (blocks < 1 || threads < 32 || threads > 1024 || threads % 32 != 0) {
    return "the emulator takes 1 block or more, of 32, 64, ... 1024 threads";
  }
  if (shared_size < 0 || shared_size > emulator::Machine::kMaxShared)
    return "too much shared memory";
  using Value = std::remove_const_t<Args>;
  const emulator::Call call = {
      reinterpret_cast<void*>(kernel), &args, [](void* kernel, const void* args) {
        reinterpret_cast<void (*)(Args)>(kernel)(*static_cast<const Value*>(args));
      }};
  return emulator::machine_of_thread().run(blocks, threads, shared_size, call);
}

}  // namespace fused_attn

// Sets the seed of the schedule and enables or disables the race check, for all later launches of
// the module. Tests call it through ctypes.
extern "C" __attribute__((used, visibility("default"))) inline void cuda_emulator_settings(
    uint64_t seed, bool race_check) {
  fused_attn::emulator::settings = {seed, fused_attn::emulator::settings.generation + 1,
                                    race_check};
}
