// State of the simulated GPU: kernels, memory and stream captures. It is part of libcuda.so.1,
// because a process has one driver but may have several CUDA runtimes.
#include <pthread.h>
#include <search.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pretended_gpu.h"

struct Capture {
  unsigned long long id;
  int mode;
  pthread_t thread;
  struct Stream* origin;
  bool invalid;
  size_t nodes;
  struct Capture* next;
};

struct Block {
  uintptr_t begin, end;
  enum MemoryKind kind;
};

// Recursive, because functions of this file that hold the mutex call each other.
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct Kernel* kernels;
static struct Capture* captures;
static unsigned long long last_capture;
static struct Stream default_stream;
static void* blocks;  // tree of tsearch()
static size_t allocated;
static _Thread_local int thread_mode = cudaStreamCaptureModeGlobal;

// Errors that the simulated GPU can return.
static const struct {
  cudaError_t error;
  const char *name, *text;
} kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const char* pretended_error_name(int error) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i) {
    if ((int)kErrors[i].error == error) return kErrors[i].name;
  }
  return "cudaErrorUnknown";
}

const char* pretended_error_text(int error) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i) {
    if ((int)kErrors[i].error == error) return kErrors[i].text;
  }
  return "unknown error";
}

// Kernels. They are never freed, because their launches are counted when the process ends.

struct Kernel* pretended_kernel(const char* name) {
  struct Kernel* kernel = calloc(1, sizeof *kernel);
  kernel->name = strdup(name);
  kernel->max_dynamic_shared = kSharedMemoryDefault;
  pthread_mutex_lock(&mutex);
  kernel->next = kernels;
  kernels = kernel;
  pthread_mutex_unlock(&mutex);
  return kernel;
}

// Counts a call of a cuBLAS or cuDNN function as a launch. *kernel is NULL before the first call.
void pretended_library_call(struct Kernel** kernel, const char* name) {
  if (*kernel == NULL) *kernel = pretended_kernel(name);
  __atomic_add_fetch(&(*kernel)->launches, 1, __ATOMIC_RELAXED);
}

// Returns the number of launches of all kernels whose mangled name contains `part`.
long pretended_launches(const char* part) {
  long count = 0;
  pthread_mutex_lock(&mutex);
  for (const struct Kernel* kernel = kernels; kernel != NULL; kernel = kernel->next) {
    if (kernel->launches > 0 && strstr(kernel->name, part) != NULL) count += kernel->launches;
  }
  pthread_mutex_unlock(&mutex);
  return count;
}

// At its end, a process appends its launches to $PRETENDED_GPU_LAUNCHES, in lines "count name".
__attribute__((destructor)) static void write_launches(void) {
  const char* path = getenv("PRETENDED_GPU_LAUNCHES");
  FILE* file = path == NULL ? NULL : fopen(path, "a");
  if (file == NULL) return;
  for (const struct Kernel* kernel = kernels; kernel != NULL; kernel = kernel->next) {
    if (kernel->launches > 0) fprintf(file, "%ld %s\n", kernel->launches, kernel->name);
  }
  fclose(file);
}

bool pretended_grid_is_valid(dim3 grid, dim3 block) {
  const uint64_t threads = (uint64_t)block.x * block.y * block.z;
  return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= INT32_MAX && grid.y <= 65535 &&
         grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 && threads > 0 &&
         threads <= 1024;
}

cudaError_t pretended_launch(struct Kernel* kernel, dim3 grid, dim3 block, size_t shared,
                             CUstream stream) {
  if (kernel == NULL) return cudaErrorInvalidDeviceFunction;
  if (!pretended_grid_is_valid(grid, block)) return cudaErrorInvalidConfiguration;
  if (shared > (size_t)kernel->max_dynamic_shared) return cudaErrorInvalidValue;
  const cudaError_t error = pretended_add_node(stream);
  if (error == cudaSuccess) __atomic_add_fetch(&kernel->launches, 1, __ATOMIC_RELAXED);
  return error;
}

int pretended_blocks_per_sm(int threads, size_t shared) {
  const int by_threads = threads > 0 ? kThreadsOfSm / threads : 0;
  const int by_shared = (int)(kSharedMemoryOfSm / (shared + kSharedMemoryReserved));
  const int both = by_threads < by_shared ? by_threads : by_shared;
  return both < 32 ? both : 32;
}

// Captures.

static struct Capture* find_capture(unsigned long long id) {
  struct Capture* capture = captures;
  while (capture != NULL && capture->id != id) capture = capture->next;
  return capture;
}

static struct Stream* stream_of(CUstream handle) {
  const bool is_default =
      handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
  return is_default ? &default_stream : (struct Stream*)handle;
}

static cudaError_t state_error(const struct Capture* capture) {
  return capture != NULL && capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaError_t pretended_begin_capture(CUstream handle, int mode) {
  struct Stream* stream = stream_of(handle);
  if (stream == &default_stream) return cudaErrorStreamCaptureUnsupported;
  pthread_mutex_lock(&mutex);
  const bool is_busy = find_capture(stream->capture) != NULL;
  if (!is_busy) {
    struct Capture* capture = calloc(1, sizeof *capture);
    *capture = (struct Capture){++last_capture, mode, pthread_self(), stream, false, 0, captures};
    captures = capture;
    stream->capture = capture->id;
  }
  pthread_mutex_unlock(&mutex);
  return is_busy ? cudaErrorIllegalState : cudaSuccess;
}

cudaError_t pretended_end_capture(CUstream handle, struct Graph** graph) {
  *graph = NULL;
  pthread_mutex_lock(&mutex);
  struct Stream* stream = stream_of(handle);
  struct Capture* capture = find_capture(stream->capture);
  cudaError_t error = state_error(capture);
  if (capture == NULL) {
    error = cudaErrorIllegalState;
  } else if (capture->origin != stream) {
    error = cudaErrorStreamCaptureUnmatched;
  } else if (capture->mode != cudaStreamCaptureModeRelaxed &&
             !pthread_equal(capture->thread, pthread_self())) {
    error = cudaErrorStreamCaptureWrongThread;
  } else {
    struct Capture** link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    if (error == cudaSuccess) {
      *graph = calloc(1, sizeof **graph);
      (*graph)->nodes = capture->nodes;
    }
    free(capture);
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

cudaError_t pretended_add_node(CUstream handle) {
  pthread_mutex_lock(&mutex);
  struct Capture* capture = find_capture(stream_of(handle)->capture);
  const cudaError_t error = state_error(capture);
  if (capture != NULL) ++capture->nodes;
  pthread_mutex_unlock(&mutex);
  return error;
}

// As in CUDA, a call that waits also invalidates the captures that forbid it.
cudaError_t pretended_synchronize(CUstream handle) {
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&mutex);
  const unsigned long long own = stream_of(handle)->capture;
  for (struct Capture* capture = captures; capture != NULL; capture = capture->next) {
    const bool is_mine = pthread_equal(capture->thread, pthread_self());
    const bool is_forbidden = capture->mode != cudaStreamCaptureModeRelaxed &&
                              thread_mode != cudaStreamCaptureModeRelaxed &&
                              (is_mine || (capture->mode == cudaStreamCaptureModeGlobal &&
                                           thread_mode == cudaStreamCaptureModeGlobal));
    if (capture->id == own || is_forbidden) {
      capture->invalid = true;
      error = cudaErrorStreamCaptureUnsupported;
    }
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

cudaError_t pretended_record(CUstream handle, struct Event* event) {
  event->capture = pretended_capture_of(handle);
  event->recorded = true;
  pthread_mutex_lock(&mutex);
  const cudaError_t error = state_error(find_capture(event->capture));
  pthread_mutex_unlock(&mutex);
  return error;
}

cudaError_t pretended_wait(CUstream handle, struct Event* event, bool external) {
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&mutex);
  struct Stream* stream = stream_of(handle);
  struct Capture* mine = find_capture(stream->capture);
  struct Capture* awaited = find_capture(event->capture);
  if (awaited != NULL && mine == NULL) {
    stream->capture = awaited->id;  // the stream joins the capture
  } else if (mine != awaited && event->recorded && !external) {
    mine->invalid = true;
    error = awaited == NULL ? cudaErrorStreamCaptureIsolation : cudaErrorStreamCaptureMerge;
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

enum cudaStreamCaptureStatus pretended_capture_status(unsigned long long id) {
  pthread_mutex_lock(&mutex);
  const struct Capture* capture = find_capture(id);
  const enum cudaStreamCaptureStatus status =
      capture == NULL
          ? cudaStreamCaptureStatusNone
          : (capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive);
  pthread_mutex_unlock(&mutex);
  return status;
}

unsigned long long pretended_capture_of(CUstream handle) {
  const unsigned long long id = stream_of(handle)->capture;
  return pretended_capture_status(id) == cudaStreamCaptureStatusNone ? 0 : id;
}

int pretended_exchange_capture_mode(int mode) {
  const int before = thread_mode;
  thread_mode = mode;
  return before;
}

// Memory. Overlapping blocks compare as equal, so that tfind() finds the block of an address.

static int compare_blocks(const void* first, const void* second) {
  const struct Block *a = first, *b = second;
  return a->end <= b->begin ? -1 : b->end <= a->begin;
}

static struct Block* find_block(const void* address) {
  const struct Block wanted = {(uintptr_t)address, (uintptr_t)address + 1, kPageable};
  void* found = tfind(&wanted, &blocks, compare_blocks);
  return found == NULL ? NULL : *(struct Block**)found;
}

// The system provides zeroed pages when the host first reads or writes them.
cudaError_t pretended_allocate(void** address, size_t size, enum MemoryKind kind) {
  *address = NULL;
  if (size == 0) return cudaSuccess;
  if (kind == kDevice && size > pretended_free_memory()) return cudaErrorMemoryAllocation;
  void* memory =
      mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  struct Block* block = malloc(sizeof *block);
  *block = (struct Block){(uintptr_t)memory, (uintptr_t)memory + size, kind};
  pthread_mutex_lock(&mutex);
  tsearch(block, &blocks, compare_blocks);
  if (kind == kDevice) allocated += size;
  pthread_mutex_unlock(&mutex);
  *address = memory;
  return cudaSuccess;
}

cudaError_t pretended_free(void* address) {
  if (address == NULL) return cudaSuccess;
  pthread_mutex_lock(&mutex);
  struct Block* block = find_block(address);
  const bool is_known = block != NULL && block->begin == (uintptr_t)address;
  if (is_known) {
    const size_t size = block->end - block->begin;
    tdelete(block, &blocks, compare_blocks);
    if (block->kind == kDevice) allocated -= size;
    munmap(address, size);
    free(block);
  }
  pthread_mutex_unlock(&mutex);
  return is_known ? cudaSuccess : cudaErrorInvalidValue;
}

enum MemoryKind pretended_memory_kind(const void* address) {
  pthread_mutex_lock(&mutex);
  const struct Block* block = find_block(address);
  const enum MemoryKind kind = block == NULL ? kPageable : block->kind;
  pthread_mutex_unlock(&mutex);
  return kind;
}

size_t pretended_free_memory(void) {
  const size_t of_driver = (size_t)1 << 30;
  return kDeviceMemory - of_driver - allocated;
}
