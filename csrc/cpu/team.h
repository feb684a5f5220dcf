// Parallel regions, and the distribution of tasks among their threads.
#pragma once

#include <omp.h>

#include <cstdint>

namespace fused_attn {

// Lets the thread that started a parallel region sleep until the other threads have finished.
//
// OpenMP barriers spin for milliseconds. On a busy machine, the spinning thread can occupy the core
// of the thread that it waits for. That thread's task then takes one or more additional time
// slices.
class Arrivals {
 public:
  // Every thread of the region must call this after its last task. Thread 0 then waits for all
  // threads; the others return immediately.
  void arrive(int thread, int num_threads);

 private:
  void wait(int num_threads);

  int count_ = 0, asleep_ = 0;
};

namespace {

inline int clamp_threads(int64_t num_threads, int64_t tasks) {
  constexpr int64_t kMostThreads = 1024;  // libgomp exits the process if it cannot create threads
  const int64_t most = tasks < num_threads ? tasks : num_threads;
  return static_cast<int>(most < 1 ? 1 : most < kMostThreads ? most : kMostThreads);
}

// Calls body() on each thread of a parallel region that has at most one thread per task. Returns
// false if any call returned false.
template <class Body>
inline bool run_team(int64_t num_threads, int64_t tasks, const Body& body) {
  bool ok = true;
  Arrivals arrivals;
#pragma omp parallel num_threads(clamp_threads(num_threads, tasks)) reduction(&& : ok)
  {
    ok = body();
    arrivals.arrive(omp_get_thread_num(), omp_get_num_threads());
  }
  return ok;
}

// Distribution of tasks among threads.
//
// In (batch, seqlen, heads, head_dim) tensors, the rows of neighboring heads are adjacent. If two
// threads compute neighboring heads at the same time, they fetch and write neighboring cache lines:
// 32 x 12 heads of 128 x 32 in float32 then took 1.25 times as long, the backward 1.19 times (AMD
// Zen 4).
enum class Tasks {
  kEqual,   // tasks take equally long: each thread runs adjacent tasks
  kCached,  // operands stay in the cores' caches: threads run the same tasks in every call
  kShort,   // dynamic scheduling, a few tasks at a time
  kLong,    // dynamic scheduling, one task at a time
};

// Returns the number of adjacent tasks that are assigned to a thread at a time.
inline int64_t run_length(Tasks kind, int64_t count, int64_t num_threads) {
  constexpr int64_t kRuns = 16;  // of short tasks, per thread
  const int64_t runs = kind == Tasks::kEqual   ? num_threads
                       : kind == Tasks::kShort ? kRuns * num_threads
                                               : count;
  return runs > 0 && count > runs ? count / runs : 1;
}

// Runs task(0) to task(count - 1) on the threads of the enclosing parallel region, without a
// barrier at the end.
template <class Task>
inline void share_tasks(int64_t count, Tasks kind, const Task& task) {
  const int64_t run = run_length(kind, count, omp_get_num_threads());
  if (kind == Tasks::kEqual) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; ++i) task(i);
  } else if (kind == Tasks::kCached) {
#pragma omp for schedule(static, 1) nowait  // under a mask, neighboring tasks take similar time
    for (int64_t i = 0; i < count; ++i) task(i);
  } else {
#pragma omp for schedule(dynamic, run) nowait
    for (int64_t i = 0; i < count; ++i) task(i);
  }
}

}  // namespace
}  // namespace fused_attn
