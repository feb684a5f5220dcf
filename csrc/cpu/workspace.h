// Workspace of one thread during one call.
#pragma once

#include "cpu/simd/simd.h"
#include "cpu/workspace_pool.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace fused_attn {
namespace {

// Allocator that divides one pooled block into 64-byte aligned parts. The destructor returns the
// block to the pool. Not thread-safe.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { return_workspace(base_); }

  template <class T>
  T* take(int64_t count) {
    T* const part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    const int64_t size = count * static_cast<int64_t>(sizeof(T));
    used_ += (size + kGap + 63) / 64 * 64;
#if defined(__SANITIZE_ADDRESS__)
    if (part != nullptr) {
      char* const end = reinterpret_cast<char*>(part) + size;
      __asan_poison_memory_region(end, base_ + used_ - end);
    }
#endif
    return part;
  }

  // Calls place() twice: first to measure the total size, then, after allocation, to assign
  // addresses. Returns false if out of memory.
  template <class Place>
  bool layout(const Place& place) {
    place();
    base_ = static_cast<char*>(acquire_workspace(used_));
    used_ = 0;
    if (base_ == nullptr) return false;
    place();
    return true;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kGap = 64;  // after each part; ASan reports accesses to it
#else
  static constexpr int64_t kGap = 0;
#endif

  char* base_ = nullptr;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace fused_attn
