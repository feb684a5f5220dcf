#include "cpu/workspace_pool.h"

#include <pthread.h>

#include <cstdlib>
#include <mutex>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fused_attn {
namespace {

// Sanitizer builds allocate each block for a single use, without rounding its size to pages, to
// detect uses after its return and past its end.
#if defined(FUSED_ATTN_SANITIZE)
constexpr bool kSanitize = true;
#else
constexpr bool kSanitize = false;
#endif

// Limits on the memory that an idle process caches. They suffice for the outputs and gradients of
// some layers and the workspace of each thread.
constexpr int kMaxPooledBlocks = 64;
constexpr int64_t kMaxPooledBytes = kSanitize ? 0 : int64_t{256} << 20;
// Blocks of at least half this size request huge pages. Packed keys and values of 1 MiB are read in
// tiles of 1 KiB, and with 4 KiB pages every fourth tile missed the TLB. Huge pages reduce the time
// of a bfloat16 forward with head_dim 64 from 3.9 to 3.5 ms.
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kHeader = 64;  // holds a BlockInfo; a multiple of the workspace alignment

struct BlockInfo {
  int64_t size;       // in bytes, without the header
  const void* owner;  // the thread that last used the block
};

struct Pool {
  std::mutex mutex;
  char* blocks[kMaxPooledBlocks];
  int count = 0;
  int64_t bytes = 0;
};

// Never destroyed, because threads may still run while the process exits.
Pool& pool() {
  static Pool* const instance = [] {
    // A thread that holds the mutex during a fork does not exist in the child, which would wait
    // for it forever.
    const auto unlock = [] { pool().mutex.unlock(); };
    pthread_atfork([] { pool().mutex.lock(); }, unlock, unlock);
    return new Pool;
  }();
  return *instance;
}

BlockInfo& info(char* block) { return *reinterpret_cast<BlockInfo*>(block); }

// Returns the index of the smallest block.
int smallest(const Pool& p) {
  int found = 0;
  for (int i = 1; i < p.count; ++i) {
    if (info(p.blocks[i]).size < info(p.blocks[found]).size) found = i;
  }
  return found;
}

// Returns an address that is unique to this thread.
const void* this_thread() {
  static thread_local char mark;
  return &mark;
}

}  // namespace

void* acquire_workspace(int64_t size) {
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    // Chooses the smallest block that is large enough, unless most of it would be unused. Prefers
    // blocks that this thread used last, which may still be in the core's private cache. A block
    // from another core costs more: 16 instead of 14 us for 8 heads of 32 x 64 on two threads.
    int best = -1;
    for (int i = 0; i < p.count; ++i) {
      const BlockInfo& have = info(p.blocks[i]);
      if (have.size < size || have.size / 4 > size + (int64_t{1} << 20)) continue;
      if (best >= 0) {
        const BlockInfo& found = info(p.blocks[best]);
        const bool own = have.owner == this_thread(), found_own = found.owner == this_thread();
        if (own != found_own ? found_own : have.size >= found.size) continue;
      }
      best = i;
    }
    if (best >= 0) {
      char* const block = p.blocks[best];
      p.blocks[best] = p.blocks[--p.count];
      p.bytes -= info(block).size;
      return block + kHeader;
    }
  }
  const int64_t page = kSanitize ? kHeader : size >= kHugePage / 2 ? kHugePage : 4096;
  const int64_t rounded = (size + kHeader + page - 1) / page * page;
  char* const block =
      static_cast<char*>(std::aligned_alloc(page == kHugePage ? page : kHeader, rounded));
#if defined(__linux__)
  if (page == kHugePage && block != nullptr) madvise(block, rounded, MADV_HUGEPAGE);
#endif
  if (block == nullptr) return nullptr;
  info(block).size = rounded - kHeader;
  return block + kHeader;
}

void return_workspace(void* workspace) {
  if (workspace == nullptr) return;
  char* block = static_cast<char*>(workspace) - kHeader;
  info(block).owner = this_thread();
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    // A large block replaces a small one, because allocating it again takes longer.
    const bool full = p.count == kMaxPooledBlocks;
    const int at = full ? smallest(p) : p.count;
    char* const before = full ? p.blocks[at] : nullptr;
    const int64_t gain = info(block).size - (full ? info(before).size : 0);
    if (gain > 0 && p.bytes + gain <= kMaxPooledBytes) {
      p.blocks[at] = block;
      p.bytes += gain;
      p.count += full ? 0 : 1;
      block = before;
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
