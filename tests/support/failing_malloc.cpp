// Allocator that out_of_memory.py preloads, in which one counted request fails. It counts all
// requests of one module, and large requests of all modules. Other small requests never fail,
// because torch, libgomp and Python end the process if some of them do.
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

std::atomic<int64_t> requests{0};  // number of counted requests
std::atomic<int64_t> failing{0};   // number of the request that fails
std::atomic<int64_t> blocks{0};    // number of allocated blocks
int64_t large = INT64_MAX;         // smallest size of a large request, in bytes
uintptr_t module_begin = 0, module_end = 0;
}

namespace {

bool fails(size_t size, void* caller) {
  const auto at = reinterpret_cast<uintptr_t>(caller);
  const bool counts =
      size >= static_cast<uint64_t>(large) || (at >= module_begin && at < module_end);
  return counts && ++requests == failing;
}

void* counted(void* block) {
  blocks += block != nullptr;
  return block;
}

}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" {
void* malloc(size_t size) { return fails(size, CALLER) ? nullptr : counted(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) {
  return fails(count * size, CALLER) ? nullptr : counted(__libc_calloc(count, size));
}
void* realloc(void* block, size_t size) {
  if (fails(size, CALLER)) return nullptr;
  blocks -= block != nullptr;
  return counted(__libc_realloc(block, size));
}
void* aligned_alloc(size_t alignment, size_t size) {
  return fails(size, CALLER) ? nullptr : counted(__libc_memalign(alignment, size));
}
int posix_memalign(void** block, size_t alignment, size_t size) {
  if (fails(size, CALLER)) return ENOMEM;
  *block = counted(__libc_memalign(alignment, size));
  return *block == nullptr ? ENOMEM : 0;
}
void free(void* block) {
  blocks -= block != nullptr;
  __libc_free(block);
}
}

void* operator new(size_t size) {
  void* const block = fails(size, CALLER) ? nullptr : counted(__libc_malloc(size));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
void* operator new[](size_t size) {
  void* const block = fails(size, CALLER) ? nullptr : counted(__libc_malloc(size));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
