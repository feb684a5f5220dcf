// Small kernels for the tests of the emulator. Each can be run with mistakes that the emulator must
// detect.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "cuda/launch.cuh"

namespace fused_attn {
namespace {

constexpr int kWarp = 32;

struct CheckArgs {
  void* pointers[4];
  int64_t sizes[4];
  const char* mistake;  // name of the mistake to make; "" for none

  bool makes(const char* name) const { return std::string(mistake) == name; }
};

// Computes c = a b in 16-bit types, with a of shape (m, k) and b of shape (k, n). n must be a
// multiple of 64, and k a multiple of 32. Each block computes a 64 x 64 tile of c, and each warp 16
// of its rows. The copies are pipelined in 3 stages.
template <class T>
FUSED_ATTN_KERNEL(128, 1)
matmul_16_bits(FUSED_ATTN_ARGUMENT CheckArgs args) {
  constexpr int kStages = 3, kStep = 32, kBytesA = 64 * kStep * 2, kStage = 2 * kBytesA;
  const int64_t m = args.sizes[0], n = args.sizes[1], k = args.sizes[2];
  const T* a = static_cast<const T*>(args.pointers[0]);
  const T* b = static_cast<const T*>(args.pointers[1]);
  float* c = static_cast<float*>(args.pointers[2]);
  const int64_t row0 = block_id() / (n / 64) * 64, column0 = block_id() % (n / 64) * 64;
  const int64_t steps = k / kStep;

  const auto load_stage = [&](int64_t step) {
    const uint32_t base = step % kStages * kStage;
    for (int chunk = thread_id(); step < steps && chunk < 512; chunk += 128) {
      const bool is_a = chunk < 256;
      const int64_t row = is_a ? row0 + chunk / 4 : step * kStep + (chunk - 256) / 8;
      const T* source =
          is_a ? a + row * k + step * kStep + chunk % 4 * 8 : b + row * n + column0 + chunk % 8 * 8;
      copy_async(base + chunk * 16, source, !is_a || row < m);
    }
    copy_commit();
  };
  float sums[8][4] = {};
  for (int stage = 0; stage < kStages - 1; ++stage) load_stage(stage);
  for (int64_t step = 0; step < steps; ++step) {
    if (!args.makes("no copy_wait")) copy_wait<kStages - 2>();
    if (!args.makes("no sync_block")) sync_block();
    if (!args.makes("early copy")) load_stage(step + kStages - 1);
    const uint32_t base = step % kStages * kStage;
    for (int depth = 0; depth < kStep; depth += 16) {
      uint32_t left[4], right[4];
      const int row = warp_id() * 16 + lane_id() % 16;
      load_matrices(left, base + row * 64 + depth * 2 + lane_id() / 16 * 16);
      if (args.makes("wrong fragment")) std::swap(left[1], left[2]);
      for (int column = 0; column < 64; column += 16) {
        load_matrices_transposed(right, base + kBytesA + (depth + lane_id() % 16) * 128 +
                                            column * 2 + lane_id() / 16 * 16);
        mma_m16n8k16<T>(sums[column / 8], left, right[0], right[1]);
        mma_m16n8k16<T>(sums[column / 8 + 1], left, right[2], right[3]);
      }
    }
    // Mistake: overwrites the stage that other warps may still read.
    if (args.makes("early copy")) load_stage(step + kStages);
  }
  for (int i = 0; i < 32; ++i) {
    const int64_t row = row0 + warp_id() * 16 + lane_id() / 4 + i % 4 / 2 * 8;
    const int64_t column = column0 + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
    if (row < m) c[row * n + column] = sums[i / 4][i % 4];
  }
}

// Computes c = a b in TF32 with one warp, for a of shape (16, k) and b of shape (k, 8). The
// operands are rounded to TF32 if sizes[1] is not 0.
FUSED_ATTN_KERNEL(32, 1) matmul_tf32(FUSED_ATTN_ARGUMENT CheckArgs args) {
  const int64_t k = args.sizes[0];
  const bool round = args.sizes[1] != 0;
  const float* a = static_cast<const float*>(args.pointers[0]);
  const float* b = static_cast<const float*>(args.pointers[1]);
  const auto operand = [&](const float* value) {
    return round ? to_tf32(load_global(value)) : float_bits(load_global(value));
  };
  const int g = lane_id() / 4, t = lane_id() % 4;
  float sums[4] = {};
  for (int64_t i = t; i < k; i += 8) {
    const uint32_t left[4] = {operand(a + g * k + i), operand(a + (g + 8) * k + i),
                              operand(a + g * k + i + 4), operand(a + (g + 8) * k + i + 4)};
    mma_m16n8k8_tf32(sums, left, operand(b + i * 8 + g), operand(b + (i + 4) * 8 + g));
  }
  float* c = static_cast<float*>(args.pointers[2]);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

// Stores the results of two shuffles and a ballot, 3 per thread, and atomically adds to a global
// sum.
FUSED_ATTN_KERNEL(1024, 1) collectives(FUSED_ATTN_ARGUMENT CheckArgs args) {
  const int thread = thread_id(), lane = lane_id();
  int* out = static_cast<int*>(args.pointers[0]) + (block_id() * args.sizes[0] + thread) * 3;
  out[0] = shuffle(thread, 31 - lane);
  out[1] = static_cast<int>(shuffle_xor(double(thread), 5));
  out[2] = static_cast<int>(ballot(thread % 3 == 0));
  atomic_add(static_cast<float*>(args.pointers[1]), Pair{1.0f, 0.0f});
}

// Two pairs of warps exchange values through shared memory. The mistakes are in synchronization and
// in the use of shared memory.
FUSED_ATTN_KERNEL(128, 1) pairs(FUSED_ATTN_ARGUMENT CheckArgs args) {
  const int thread = thread_id(), partner = thread ^ kWarp;
  int sum = 0;
  for (int round = 0; round < 10; ++round) {
    store_shared<int>(thread * 4, thread + round);
    if (args.makes("ended warp") && warp_id() == 2) return;
    if (!args.makes("no sync_block")) sync_block();
    sum += load_shared<int>(partner * 4);
    if (!args.makes("early store")) sync_block();
  }
  static_cast<int*>(args.pointers[0])[thread] = sum;
  sync_block();
  // Writes to neighboring bytes and halves of one word are not a race.
  store_shared<uint16_t>(thread * 2, static_cast<uint16_t>(thread));
  store_shared<uint8_t>(512 + thread, static_cast<uint8_t>(thread));
  if (!args.makes("no sync_warp")) sync_warp();
  static_cast<int*>(args.pointers[0])[thread] += load_shared<uint16_t>((thread ^ 1) * 2);
  if (args.makes("misaligned")) store_shared<float>(thread * 4 + 2, 0.0f);
  if (args.makes("out of bounds")) load_shared<Chunk>(1024 + thread * 16);
  if (args.makes("misaligned matrix")) {
    uint32_t r[4];
    load_matrices(r, thread == 37 ? 776 : 768);
  }
  if (args.makes("misaligned source"))
    copy_async(0, static_cast<char*>(args.pointers[0]) + 8, true);
  if (args.makes("misaligned chunk")) load_chunk(static_cast<char*>(args.pointers[0]) + 4);
  if (args.makes("diverged") && lane_id() < 20) ballot(true);
  if (args.makes("ended") && thread == 45) return;
  sync_warp();  // the end
}

// Stores the results of six conversions of each float32 value: via half, bfloat16 and TF32 back to
// float32, exp2_fast, and the bit patterns of pack<Half> and pack<BFloat16>.
FUSED_ATTN_KERNEL(32, 1) conversions(FUSED_ATTN_ARGUMENT CheckArgs args) {
  const float* in = static_cast<const float*>(args.pointers[0]);
  float* out = static_cast<float*>(args.pointers[1]);
  const int64_t count = args.sizes[0];
  for (int64_t i = thread_id(); i < count; i += kWarp) {
    const float value = load_global(in + i);
    out[i] = to_float(from_float<Half>(value));
    out[count + i] = to_float(from_float<BFloat16>(value));
    out[2 * count + i] = bits_float(to_tf32(value));
    out[3 * count + i] = exp2_fast(value);
    out[4 * count + i] = bits_float(pack<Half>(value, -value));
    out[5 * count + i] = bits_float(pack<BFloat16>(value, -value));
  }
}

const std::map<std::string, void (*)(CheckArgs)> kKernels = {
    {"matmul_float16", matmul_16_bits<Half>},
    {"matmul_bfloat16", matmul_16_bits<BFloat16>},
    {"matmul_tf32", matmul_tf32},
    {"collectives", collectives},
    {"pairs", pairs},
    {"conversions", conversions}};

// Runs one of the kernels. pointers: addresses of the operands. Throws LaunchError with the error
// that the emulator detects.
void run(const std::string& kernel, const std::vector<uintptr_t>& pointers,
         const std::vector<int64_t>& sizes, int64_t blocks, int threads, int shared_size,
         const std::string& mistake) {
  CheckArgs args = {{}, {}, mistake.c_str()};
  for (size_t i = 0; i < pointers.size(); ++i) {
    args.pointers[i] = reinterpret_cast<void*>(pointers[i]);
  }
  std::copy(sizes.begin(), sizes.end(), args.sizes);
  launch(kernel.c_str(), kKernels.at(kernel), blocks, threads, shared_size, args, nullptr);
}

}  // namespace
}  // namespace fused_attn

PYBIND11_MODULE(_emulator_check, module) {
  namespace py = pybind11;
  module.def("run", &fused_attn::run, py::arg("kernel"), py::arg("pointers"), py::arg("sizes"),
             py::arg("blocks"), py::arg("threads"), py::arg("shared_size") = 0,
             py::arg("mistake") = "", py::call_guard<py::gil_scoped_release>());
}
