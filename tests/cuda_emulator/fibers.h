// Fibers, which run the threads of a block on one host thread: stacks and context switches.
#pragma once

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <cstddef>
#include <cstdint>
#include <new>

// CPUs other than x86-64 use the slower context switch of the C library. Define FUSED_ATTN_UCONTEXT
// to use it on x86-64 too.
#if !defined(__x86_64__) && !defined(FUSED_ATTN_UCONTEXT)
#define FUSED_ATTN_UCONTEXT
#endif
#if defined(FUSED_ATTN_UCONTEXT)
#include <ucontext.h>
#endif

namespace fused_attn::emulator {

#if !defined(FUSED_ATTN_UCONTEXT)

// A suspended fiber. The top of its stack is the address at which it resumes.
struct Context {
  void** stack;
};

// Initializes `context` to call entry() on the stack of `size` bytes at `low`. entry() must not
// return.
inline void start_context(Context& context, char* low, size_t size, void (*entry)()) {
  void** top = reinterpret_cast<void**>(low + size);
  *--top = nullptr;  // the return address of `entry`, which does not return
  *--top = reinterpret_cast<void*>(entry);
  context.stack = top;
}

#if defined(__AVX512F__)
#define FUSED_ATTN_AVX512_REGISTERS                                                             \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",     \
      "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5", \
      "k6", "k7",
#else
#define FUSED_ATTN_AVX512_REGISTERS
#endif

// Suspends the running fiber in `from` and resumes `to`.
//
// Inlining lets the compiler save only live registers, and gives each call site a separate jump.
// The jump is well predicted, because all lanes of a warp switch at the same call site.
__attribute__((always_inline)) inline void switch_context(Context& from, const Context& to) {
  void*** save = &from.stack;
  void** stack = to.stack;
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"  // skip the red zone
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %1, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmp *%%rax\n"
      "1:\tpopq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(save), "+S"(stack)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", FUSED_ATTN_AVX512_REGISTERS "memory", "cc");
}

#else

using Context = ucontext_t;

inline void start_context(Context& context, char* low, size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = low;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

inline void switch_context(Context& from, const Context& to) { swapcontext(&from, &to); }

#endif

// Stacks for the threads of one block. They are allocated on first use and reused by later
// launches.
class Stacks {
 public:
  static constexpr int kMaxThreads = 1024;
  static constexpr size_t kSize = 256 << 10, kGuard = 4096, kSpread = 64 << 10;

  ~Stacks() {
    if (base_ != nullptr) munmap(base_, kMaxThreads * kSize);
  }
  void start(Context& context, int thread, void (*entry)()) {
    if (base_ == nullptr) allocate();
    // Staggers the stacks, so that equal stack depths of different threads map to different cache
    // sets.
    const size_t spread = size_t{2112} * thread % kSpread / 64 * 64;
#if defined(__SANITIZE_ADDRESS__)
    // The last fiber on this stack did not return, so its frames are still poisoned.
    __asan_unpoison_memory_region(base_ + thread * kSize + kGuard, kSize - kGuard);
#endif
    start_context(context, base_ + thread * kSize + kGuard, kSize - kGuard - spread, entry);
  }

 private:
  void allocate() {
    void* memory = mmap(nullptr, kMaxThreads * kSize, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(memory);
    for (int i = 0; i < kMaxThreads; ++i) mprotect(base_ + i * kSize, kGuard, PROT_NONE);
  }

  char* base_ = nullptr;
};

}  // namespace fused_attn::emulator
