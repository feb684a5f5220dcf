// Kernel launches with error reporting.
#pragma once

#include <string>

#include "cuda/api.h"
#include "cuda/intrinsics.cuh"
#include "cuda/launch_records.h"

namespace fused_attn {

// Starts `blocks` blocks of a kernel without waiting for them. Does nothing if `blocks` is 0.
// Throws LaunchError if the kernel cannot be started. name: of the kernel, for messages.
// shared_size: dynamic shared memory per block in bytes.
template <class Args>
void launch(const char* name, void (*kernel)(Args), int64_t blocks, int threads, int shared_size,
            const std::remove_const_t<Args>& args, Stream stream) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;  // CUDA's limit on gridDim.x
  if (blocks == 0) return;
  if (launch_records != nullptr) {
    launch_records->push_back({name, blocks, threads, shared_size});
    return;
  }
  const char* error = blocks > kMaxBlocks
                          ? "a grid can have at most 2^31 - 1 blocks"
                          : start_kernel(kernel, blocks, threads, shared_size, args, stream);
  if (error == nullptr) return;
  throw LaunchError(std::string(name) + " could not be launched with " + std::to_string(blocks) +
                    " blocks, " + std::to_string(threads) + " threads per block and " +
                    std::to_string(shared_size) + " bytes of shared memory: " + error);
}

// Calls f(T()), with the element type T of a dtype.
template <class F>
void for_element(DType dtype, F f) {
  if (dtype == DType::kFloat32) return f(float());
  if (dtype == DType::kFloat16) return f(Half());
  if (dtype == DType::kBFloat16) return f(BFloat16());
  throw LaunchError("no kernel is compiled for this dtype");
}

}  // namespace fused_attn
