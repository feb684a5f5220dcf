// State of the simulated GPU, which its CUDA driver and its CUDA runtime share.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>

enum {
  kSharedMemoryDefault = 48 << 10,  // more dynamic shared memory than this is opt-in
  kSharedMemoryOptIn = 227 << 10,
  kSharedMemoryOfSm = 228 << 10,
  kSharedMemoryReserved = 1 << 10,  // for each block
  kMultiprocessors = 132,
  kThreadsOfSm = 2048,
};
static const size_t kDeviceMemory = (size_t)80 << 30;

// Target of a CUfunction or a cudaKernel_t.
struct Kernel {
  const char* name;
  int max_dynamic_shared;
  long launches;
  struct Kernel* next;
};

// Target of a CUstream. `capture` is the ID of the capture that a stream or an event belongs to,
// which may have ended, or 0 for none.
struct Stream {
  unsigned long long capture;
};

struct Event {
  unsigned long long capture;
  bool recorded;
};

struct Graph {
  size_t nodes;
};

enum MemoryKind { kPageable, kPinned, kDevice };

// Returns `error`, which becomes the last error of the thread unless it is cudaSuccess (runtime.c).
cudaError_t pretended_result(cudaError_t error);
// Makes the primary context current, as the runtime does when a thread first uses the device.
void pretended_use_device(void);

const char* pretended_error_name(int error);
const char* pretended_error_text(int error);

struct Kernel* pretended_kernel(const char* name);
cudaError_t pretended_launch(struct Kernel* kernel, dim3 grid, dim3 block, size_t shared,
                             CUstream stream);
bool pretended_grid_is_valid(dim3 grid, dim3 block);
int pretended_blocks_per_sm(int threads, size_t shared);

// Each function returns cudaSuccess, or CUDA's error for a call that a capture does not permit.
cudaError_t pretended_begin_capture(CUstream stream, int mode);
cudaError_t pretended_end_capture(CUstream stream, struct Graph** graph);
cudaError_t pretended_add_node(CUstream stream);     // for work that is enqueued
cudaError_t pretended_synchronize(CUstream stream);  // for calls that wait, or may wait
cudaError_t pretended_record(CUstream stream, struct Event* event);
cudaError_t pretended_wait(CUstream stream, struct Event* event, bool external);
enum cudaStreamCaptureStatus pretended_capture_status(unsigned long long capture);
unsigned long long pretended_capture_of(CUstream stream);
int pretended_exchange_capture_mode(int mode);

cudaError_t pretended_allocate(void** address, size_t size, enum MemoryKind kind);
cudaError_t pretended_free(void* address);
enum MemoryKind pretended_memory_kind(const void* address);
size_t pretended_free_memory(void);
