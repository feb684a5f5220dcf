// Function annotations for host and device code. nvcc compiles CUDA kernels; a host compiler
// compiles the CPU kernels and, in tests without a GPU, the CUDA kernels too.
#pragma once

#if defined(__CUDACC__)

#define FUSED_ATTN_HOST_DEVICE __host__ __device__ inline
#define FUSED_ATTN_DEVICE __device__ __forceinline__
// A kernel for thread blocks of `threads` threads, `blocks` of which fit onto a multiprocessor.
#define FUSED_ATTN_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define FUSED_ATTN_ARGUMENT const __grid_constant__
#define FUSED_ATTN_PRAGMA(text) _Pragma(#text)
#define FUSED_ATTN_UNROLL _Pragma("unroll")
#define FUSED_ATTN_UNROLL_BY(times) FUSED_ATTN_PRAGMA(unroll times)
// For short or rare loops: unrolled, they would take registers from the loops around them.
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
