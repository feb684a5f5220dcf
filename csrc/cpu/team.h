// Parallel regions, and how tasks are shared in them.
#pragma once

#include <omp.h>

#include <cstdint>

namespace fused_attn {

// Lets the thread that began a parallel region sleep until the others are done.
//
// OpenMP's barriers spin for milliseconds. Beside other processes a thread that spins keeps a core
// from the one that it waits for, whose task then lasts a time slice or several.
class Arrivals {
 public:
  // To be called by each thread of the region, after its last task.
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

// Runs body() on each thread of a parallel region, with at most a thread for each task. False if
// one of them returned false.
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

// Runs task(0) to task(count - 1) on the threads of the team. They do not wait for each other at
// the end. fixed: a task goes to the same thread call after call, instead of to one that is free.
template <class Task>
inline void share_tasks(int64_t count, bool fixed, const Task& task) {
  if (fixed) {
#pragma omp for schedule(static, 1) nowait  // neighbours are alike in length under a mask
    for (int64_t i = 0; i < count; ++i) task(i);
  } else {
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < count; ++i) task(i);
  }
}

}  // namespace
}  // namespace fused_attn
