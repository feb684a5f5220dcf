// Parallel regions, and the distribution of tasks to their threads.
#pragma once

#include <omp.h>

#include <cstdint>

namespace fused_attn {

// Lets the thread that started a parallel region sleep until the others are done.
//
// OpenMP's barriers spin for milliseconds. Beside other processes, a spinning thread can occupy the
// core of the thread that it waits for, whose task then takes one or more time slices.
class Arrivals {
 public:
  // Must be called by each thread of the region after its last task.
  void arrive(int thread, int num_threads);

 private:
  void wait(int num_threads);

  int count_ = 0, asleep_ = 0;
};

namespace {

inline int clamp_threads(int64_t num_threads, int64_t tasks) {
  const int64_t most = tasks < num_threads ? tasks : num_threads;
  return static_cast<int>(most < 1 ? 1 : most);
}

// Runs body() on each thread of a parallel region of at most one thread per task. Returns false if
// any call returned false.
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

// Runs task(0) to task(count - 1) on the threads of the team, without a barrier at the end. With
// `fixed`, a task runs on the same thread in every call; otherwise on the next free thread.
template <class Task>
inline void share_tasks(int64_t count, bool fixed, const Task& task) {
  if (fixed) {
#pragma omp for schedule(static, 1) nowait  // under a mask, neighbours are about equally long
    for (int64_t i = 0; i < count; ++i) task(i);
  } else {
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < count; ++i) task(i);
  }
}

}  // namespace
}  // namespace fused_attn
