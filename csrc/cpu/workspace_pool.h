// Memory pool that outlives calls. glibc returns large blocks to the system at every free, so each
// call would map and clear the same pages again. A page fault takes as long as writing 8 KiB;
// layer_norm of 4096 x 768 takes 0.7 ms with newly mapped memory.
#pragma once

#include <cstdint>

namespace fused_attn {

// Returns a block of at least `size` bytes, aligned to 64 bytes, or null if out of memory. The
// contents are arbitrary. Thread-safe.
void* acquire_workspace(int64_t size);

// Returns a block to the pool, which caches up to kMaxPooledBlocks blocks and kMaxPooledBytes bytes
// and frees the others. Null is ignored. Thread-safe.
void return_workspace(void* block);

// Frees all cached blocks. Thread-safe.
void release_workspace();

}  // namespace fused_attn
