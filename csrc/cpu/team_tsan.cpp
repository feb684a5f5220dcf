// Reports the synchronization of libgomp to ThreadSanitizer, in its build only
// (scripts/sanitize.py).
//
// libgomp is not instrumented. The linker calls these wrappers in place of its functions (--wrap).
// Without them, every read of data that another thread wrote before a parallel region or a barrier
// would be reported as a race. Conflicts between the tasks of one loop are reported.
#include <sanitizer/tsan_interface.h>

extern "C" {
void __real_GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
void __real_GOMP_barrier();
void __real_GOMP_loop_end();  // the end of a loop with dynamic schedule and without `nowait`
}

namespace {

struct Region {
  void (*body)(void*);
  void* data;
  char begin, barrier, end;  // only their addresses are used
};

thread_local Region* region = nullptr;

void run(void* started) {
  region = static_cast<Region*>(started);
  __tsan_acquire(&region->begin);
  region->body(region->data);
  __tsan_release(&region->end);
}

void meet(void (*wait)()) {
  __tsan_release(&region->barrier);
  wait();
  __tsan_acquire(&region->barrier);
}

}  // namespace

extern "C" {
void __wrap_GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  Region own{body, data, 0, 0, 0};
  __tsan_release(&own.begin);
  __real_GOMP_parallel(run, &own, threads, flags);
  __tsan_acquire(&own.end);
}
void __wrap_GOMP_barrier() { meet(__real_GOMP_barrier); }
void __wrap_GOMP_loop_end() { meet(__real_GOMP_loop_end); }
}
