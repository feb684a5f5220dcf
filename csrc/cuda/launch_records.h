// For tests and tools only: records the launches of a call, without a GPU. It ships because
// `launch` itself does the recording.
#pragma once

#include <cstdint>
#include <vector>

namespace fused_attn {

// While a thread's list is set, its launches are recorded in it instead of started.
struct LaunchRecord {
  const char* kernel;
  int64_t blocks;
  int threads, shared_size;
};
inline thread_local std::vector<LaunchRecord>* launch_records = nullptr;

}  // namespace fused_attn
