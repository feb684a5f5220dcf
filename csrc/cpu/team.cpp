#include "cpu/team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace fused_attn {
namespace {

// Number of polls before the starting thread sleeps: tens of microseconds. On an idle machine the
// other threads finish within that time, and a wakeup takes as long.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Arrivals::arrive(int thread, int num_threads) {
  if (num_threads == 1) return;
  const int arrived = __atomic_add_fetch(&count_, 1, __ATOMIC_SEQ_CST);
  if (thread == 0) return wait(num_threads);
#if defined(__linux__)
  if (arrived == num_threads && __atomic_load_n(&asleep_, __ATOMIC_SEQ_CST) != 0) {
    syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
#endif
}

void Arrivals::wait(int num_threads) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (__atomic_load_n(&count_, __ATOMIC_ACQUIRE) == num_threads) return;
    pause();
  }
  __atomic_store_n(&asleep_, 1, __ATOMIC_SEQ_CST);
  for (;;) {
    const int arrived = __atomic_load_n(&count_, __ATOMIC_SEQ_CST);
    if (arrived == num_threads) return;
#if defined(__linux__)
    syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, arrived, nullptr, nullptr, 0);
#else
    sched_yield();
#endif
  }
}

}  // namespace fused_attn
