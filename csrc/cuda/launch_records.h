// For tests and tools only: what calls would start, which they ask without a GPU. It ships because
// `launch` itself does the recording.
#pragma once

#include <cstdint>
#include <vector>

namespace fused_attn {

// Where a thread has a list, its launches are written down there, and not done.
struct LaunchRecord {
  const char* kernel;
  int64_t blocks;
  int threads, shared_size;
};
inline thread_local std::vector<LaunchRecord>* launch_records = nullptr;

}  // namespace fused_attn
