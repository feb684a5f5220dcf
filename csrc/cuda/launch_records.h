// Records of kernel launches, for tests and tools that run without a GPU. The header ships with the
// module because `launch` does the recording.
#pragma once

#include <cstdint>
#include <vector>

namespace fused_attn {

struct LaunchRecord {
  const char* kernel;
  int64_t blocks;
  int threads, shared_size;
};
// While this pointer is set, `launch` appends the thread's launches to the list instead of starting
// them. The caller owns the list.
inline thread_local std::vector<LaunchRecord>* launch_records = nullptr;

}  // namespace fused_attn
