// Device primitives of the kernels: threads, barriers, shared memory, copies and tensor cores.
//
// nvcc compiles most of them to one or two instructions. For a host compiler, tests/cuda_emulator
// defines the same functions, so that tests can run the kernel sources without a GPU. Shared memory
// means the block's dynamic shared memory. Its addresses are byte offsets from the start.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace fused_attn {

// Bit patterns of 16-bit floats. They replace CUDA's types, which a host compiler lacks.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Two adjacent floats with 8-byte alignment.
struct alignas(8) Pair {
  float low, high;
};

// 16 bytes with 16-byte alignment, the unit of copies and vector loads.
struct alignas(16) Chunk {
  uint32_t word[4];
};

}  // namespace fused_attn

#if !defined(__CUDACC__)
#include "emulated_intrinsics.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

namespace fused_attn {

FUSED_ATTN_DEVICE int thread_id() { return threadIdx.x; }
FUSED_ATTN_DEVICE int lane_id() { return threadIdx.x % 32; }
FUSED_ATTN_DEVICE int warp_id() { return threadIdx.x / 32; }
FUSED_ATTN_DEVICE int64_t block_id() { return blockIdx.x; }
FUSED_ATTN_DEVICE int64_t num_blocks() { return gridDim.x; }

FUSED_ATTN_DEVICE void sync_block() { __syncthreads(); }
FUSED_ATTN_DEVICE void sync_warp() { __syncwarp(); }

// The following three functions must be called by all lanes of the warp.
template <class T>
FUSED_ATTN_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
FUSED_ATTN_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
FUSED_ATTN_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

FUSED_ATTN_DEVICE int count_bits(uint32_t bits) { return __popc(bits); }

// Returns the value unchanged, but opaque to the compiler. The compiler then does not hoist
// computations that depend on it out of a loop, where their results would occupy registers.
FUSED_ATTN_DEVICE int unhoisted(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
FUSED_ATTN_DEVICE int64_t unhoisted(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

extern __shared__ __align__(128) char shared_bytes[];

// Load or store a value in shared memory. V has 1, 2, 4, 8 or 16 bytes, and `address` must be a
// multiple of its size.
template <class V>
FUSED_ATTN_DEVICE V load_shared(uint32_t address) {
  return *reinterpret_cast<const V*>(shared_bytes + address);
}
template <class V>
FUSED_ATTN_DEVICE void store_shared(uint32_t address, V value) {
  *reinterpret_cast<V*>(shared_bytes + address) = value;
}
// Returns the address of the block's shared memory in the shared state space of PTX.
FUSED_ATTN_DEVICE uint32_t shared_window() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
}

// Loads from global memory that no thread writes while the kernel runs. V as in load_shared.
template <class V>
FUSED_ATTN_DEVICE V load_global(const V* address) {
  return __ldg(address);
}
FUSED_ATTN_DEVICE Half load_global(const Half* address) { return {__ldg(&address->bits)}; }
FUSED_ATTN_DEVICE BFloat16 load_global(const BFloat16* address) { return {__ldg(&address->bits)}; }
FUSED_ATTN_DEVICE Chunk load_chunk(const void* address) {
  const uint4 value = __ldg(static_cast<const uint4*>(address));
  return {{value.x, value.y, value.z, value.w}};
}
FUSED_ATTN_DEVICE void store_chunk(void* address, const Chunk& value) {
  *static_cast<uint4*>(address) =
      make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}
// Adds to two adjacent floats in global memory, each atomically. The address must be a multiple of
// 8 bytes.
FUSED_ATTN_DEVICE void atomic_add(float* address, Pair value) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
  atomicAdd(reinterpret_cast<float2*>(address), make_float2(value.low, value.high));
#else
  atomicAdd(address, value.low);
  atomicAdd(address + 1, value.high);
#endif
}

// Starts a copy of 16 bytes from global to shared memory. If `valid` is false, writes zeros and
// does not read `source`.
FUSED_ATTN_DEVICE void copy_async(uint32_t address, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_window() + address),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
// Ends the thread's current group of copies and begins a new one.
FUSED_ATTN_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the thread's kPending newest groups of copies are in flight.
template <int kPending>
FUSED_ATTN_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Packs two floats as T into one word, rounded to nearest even. `low` is in the lower half.
template <class T>
FUSED_ATTN_DEVICE uint32_t pack(float low, float high);
template <>
FUSED_ATTN_DEVICE uint32_t pack<Half>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
FUSED_ATTN_DEVICE uint32_t pack<BFloat16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

FUSED_ATTN_DEVICE float to_float(float value) { return value; }
FUSED_ATTN_DEVICE float to_float(Half value) { return __half2float(__ushort_as_half(value.bits)); }
FUSED_ATTN_DEVICE float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
FUSED_ATTN_DEVICE T from_float(float value);
template <>
FUSED_ATTN_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
FUSED_ATTN_DEVICE Half from_float<Half>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}
template <>
FUSED_ATTN_DEVICE BFloat16 from_float<BFloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}

FUSED_ATTN_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
FUSED_ATTN_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }

// Returns 2^x with an error of at most 2 ulp. Denormals are flushed to 0, and exp2_fast(-inf) is 0.
FUSED_ATTN_DEVICE float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
FUSED_ATTN_DEVICE float exp_exact(float x) { return expf(x); }
FUSED_ATTN_DEVICE float tanh_exact(float x) { return tanhf(x); }
FUSED_ATTN_DEVICE double log_exact(double x) { return log(x); }
FUSED_ATTN_DEVICE float rsqrt_exact(float x) { return 1.0f / sqrtf(x); }
// Rounds a float32 to TF32, which has 10 mantissa bits. Rounds to nearest, ties away from zero.
FUSED_ATTN_DEVICE uint32_t to_tf32(float value) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix
// l / 8, a row of 16 bytes. It receives two elements of each matrix: (l / 4, 2 (l % 4)) and the
// next one in the row.
FUSED_ATTN_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_window() + address));
}
// Like load_matrices, but transposes each matrix.
FUSED_ATTN_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_window() + address));
}

// Computes d += a b, for a of shape (16, 16) and b of shape (16, 8). With g = lane / 4 and
// t = lane % 4, each lane holds the elements
//   a[0..3]: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with the next column;
//   b0, b1: (2t, g), (2t + 8, g), each with the next row;
//   d[0..3]: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
template <class T>
FUSED_ATTN_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
FUSED_ATTN_DEVICE void mma_m16n8k16<Half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
FUSED_ATTN_DEVICE void mma_m16n8k16<BFloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Computes d += a b in TF32, for a of shape (16, 8) and b of shape (8, 8). Each lane holds the
// elements
//   a[0..3]: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
//   b0, b1: (t, g), (t + 4, g);
//   d[0..3]: as in mma_m16n8k16.
FUSED_ATTN_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

using Stream = cudaStream_t;

// Returns the reason why the current GPU can never run a kernel: it was compiled for other GPUs, or
// the driver is too old. Returns null otherwise; a launch reports other errors.
template <class Args>
const char* obstacle(void (*kernel)(Args)) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  cudaGetLastError();  // clear the error
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInsufficientDriver:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      return cudaGetErrorString(error);
    default:
      return nullptr;
  }
}

// Starts a kernel without waiting for it. Returns an error message if that fails, otherwise null.
template <class Args>
const char* start_kernel(void (*kernel)(Args), int64_t blocks, int threads, int shared_size,
                         const std::remove_const_t<Args>& args, Stream stream) {
  constexpr int kWithoutAsking = 48 << 10;  // more dynamic shared memory than this is opt-in
  // kMaxSharedBytes (tile_sizes.h). Each launch requests the same, because another thread may set
  // the attribute between this call and the launch.
  constexpr int kRequested = 99 << 10;
  if (shared_size > kWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRequested);
    if (error != cudaSuccess) {
      cudaGetLastError();  // clear the error, so that later calls do not report it again
      return cudaGetErrorString(error);
    }
  }
  // clang-format mangles the <<<...>>> launch syntax.
  void* arguments[] = {const_cast<std::remove_const_t<Args>*>(&args)};
  const cudaError_t error =
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), arguments,
                       static_cast<size_t>(shared_size), stream);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

}  // namespace fused_attn

#endif

namespace fused_attn {

constexpr float kInfinity = __builtin_huge_valf();

// Returns the larger value. If one value is NaN, returns the other one.
FUSED_ATTN_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
FUSED_ATTN_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

}  // namespace fused_attn
