#include "cpu/workspace_pool.h"

#include <cstdlib>
#include <mutex>

namespace fused_attn {
namespace {

// What an idle process may hold: some layers' outputs and gradients, and each thread's workspace.
constexpr int kMaxPooledBlocks = 64;
constexpr int64_t kMaxPooledBytes = int64_t{256} << 20;
constexpr int64_t kHeader = 64;  // holds the size; keeps what follows aligned

struct Pool {
  std::mutex mutex;
  char* blocks[kMaxPooledBlocks];
  int count = 0;
  int64_t bytes = 0;
};

// Never destroyed: threads may still run when the process ends.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

int64_t& size_of(char* block) { return *reinterpret_cast<int64_t*>(block); }

}  // namespace

void* take_workspace(int64_t size) {
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    // The smallest that fits, unless it would be mostly unused.
    int best = -1;
    for (int i = 0; i < p.count; ++i) {
      const int64_t have = size_of(p.blocks[i]);
      if (have < size || have / 4 > size + (int64_t{1} << 20)) continue;
      if (best < 0 || have < size_of(p.blocks[best])) best = i;
    }
    if (best >= 0) {
      char* const block = p.blocks[best];
      p.blocks[best] = p.blocks[--p.count];
      p.bytes -= size_of(block);
      return block + kHeader;
    }
  }
  const int64_t rounded = (size + kHeader + 4095) / 4096 * 4096;
  char* const block = static_cast<char*>(std::aligned_alloc(64, rounded));
  if (block == nullptr) return nullptr;
  size_of(block) = rounded - kHeader;
  return block + kHeader;
}

void give_workspace(void* workspace) {
  if (workspace == nullptr) return;
  char* block = static_cast<char*>(workspace) - kHeader;
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    if (p.count < kMaxPooledBlocks && p.bytes + size_of(block) <= kMaxPooledBytes) {
      p.blocks[p.count++] = block;
      p.bytes += size_of(block);
      block = nullptr;
    }
  }
  std::free(block);
}

void release_workspace() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  for (int i = 0; i < p.count; ++i) std::free(p.blocks[i]);
  p.count = 0;
  p.bytes = 0;
}

}  // namespace fused_attn
