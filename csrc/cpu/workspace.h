// Memory of one thread for one call.
#pragma once

#include "cpu/simd/simd.h"
#include "cpu/workspace_pool.h"

namespace fused_attn {
namespace {

// Hands out aligned parts of one block. A layout is written once, as a function that takes its
// parts from an Arena: run on an empty one it measures, run on an allocated one it places.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { give_workspace(base_); }

  template <class T>
  T* take(int64_t count) {
    T* const part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return part;
  }

  // Allocates what has been taken so far and starts over; false: out of memory.
  bool allocate() {
    base_ = static_cast<char*>(take_workspace(used_));
    used_ = 0;
    return base_ != nullptr;
  }

 private:
  char* base_ = nullptr;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace fused_attn
