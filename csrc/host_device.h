// Function annotations for code that runs on host and device. nvcc compiles the CUDA kernels. A
// host compiler compiles the CPU kernels and, for tests without a GPU, the CUDA kernels.
#pragma once

#if defined(__CUDACC__)

#define FUSED_ATTN_HOST_DEVICE __host__ __device__ inline
#define FUSED_ATTN_DEVICE __device__ __forceinline__
// Declares a kernel with up to `threads` threads per block and at least `blocks` resident blocks
// per multiprocessor.
#define FUSED_ATTN_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define FUSED_ATTN_ARGUMENT const __grid_constant__
#define FUSED_ATTN_PRAGMA(text) _Pragma(#text)
#define FUSED_ATTN_UNROLL _Pragma("unroll")
#define FUSED_ATTN_UNROLL_BY(times) FUSED_ATTN_PRAGMA(unroll times)
// For short or rarely executed loops: unrolling them would use registers that enclosing loops need.
#define FUSED_ATTN_ROLLED _Pragma("unroll 1")

#else

#define FUSED_ATTN_HOST_DEVICE inline
#define FUSED_ATTN_DEVICE inline
#define FUSED_ATTN_KERNEL(threads, blocks) void
#define FUSED_ATTN_ARGUMENT const
#define FUSED_ATTN_UNROLL
#define FUSED_ATTN_UNROLL_BY(times)
#define FUSED_ATTN_ROLLED

#endif
