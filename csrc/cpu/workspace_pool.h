// Memory pool that outlives calls, so that the system need not map and clear the same pages again:
// glibc returns large blocks at every free, and a page fault takes as long as writing 8 KiB.
// (layer_norm of 4096 x 768 takes 0.7 ms into fresh memory.)
#pragma once

#include <cstdint>

namespace fused_attn {

// Returns at least `size` bytes, aligned to 64, or null if out of memory. Thread-safe.
void* take_workspace(int64_t size);

// Returns a block to the pool, which caches up to kMaxPooledBlocks blocks of up to kMaxPooledBytes
// in total.
void give_workspace(void* block);

// Returns cached blocks to the system.
void release_workspace();

}  // namespace fused_attn
