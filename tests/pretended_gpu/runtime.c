// Errors, devices and memory of a CUDA runtime on the simulated driver. libcudart.so.13 consists of
// this file, launches.c, streams.c, and stubs from build.py that return "not supported".
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "pretended_gpu.h"

// A failed call sets the last error of its thread, which cudaGetLastError() returns and clears.
static _Thread_local cudaError_t last_error;

cudaError_t pretended_result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char* cudaGetErrorString(cudaError_t error) { return pretended_error_text(error); }

const char* cudaGetErrorName(cudaError_t error) { return pretended_error_name(error); }

// Devices.

static cudaError_t check_device(int device) {
  return pretended_result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceCount(int* count) { return (cudaError_t)cuDeviceGetCount(count); }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

void pretended_use_device(void) {
  CUcontext context;
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
}

cudaError_t cudaSetDevice(int device) {
  if (check_device(device) != cudaSuccess) return cudaErrorInvalidDevice;
  pretended_use_device();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  return pretended_result(
      (cudaError_t)cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device));
}

static int attribute(enum cudaDeviceAttr which) {
  int value;
  cudaDeviceGetAttribute(&value, which, 0);
  return value;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  if (check_device(device) != cudaSuccess) return cudaErrorInvalidDevice;
  *properties = (struct cudaDeviceProp){
      .totalGlobalMem = kDeviceMemory,
      .sharedMemPerBlock = kSharedMemoryDefault,
      .sharedMemPerBlockOptin = kSharedMemoryOptIn,
      .sharedMemPerMultiprocessor = kSharedMemoryOfSm,
      .reservedSharedMemPerBlock = kSharedMemoryReserved,
      .regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock),
      .regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor),
      .warpSize = attribute(cudaDevAttrWarpSize),
      .memPitch = attribute(cudaDevAttrMaxPitch),
      .maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock),
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .totalConstMem = attribute(cudaDevAttrTotalConstantMemory),
      .major = attribute(cudaDevAttrComputeCapabilityMajor),
      .minor = attribute(cudaDevAttrComputeCapabilityMinor),
      .textureAlignment = attribute(cudaDevAttrTextureAlignment),
      .multiProcessorCount = kMultiprocessors,
      .maxThreadsPerMultiProcessor = kThreadsOfSm,
      .maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor),
      .memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth),
      .l2CacheSize = attribute(cudaDevAttrL2CacheSize),
      .unifiedAddressing = 1,
      .concurrentKernels = 1,
      .cooperativeLaunch = 1,
      .managedMemory = 1,
  };
  cuDeviceGetName(properties->name, sizeof properties->name, device);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) { return (cudaError_t)cuDriverGetVersion(version); }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:00:00.0");
  return check_device(device);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = 0;
  return check_device(device | peer);
}

cudaError_t cudaDeviceSynchronize(void) { return pretended_result(pretended_synchronize(NULL)); }

// Memory.

cudaError_t cudaMalloc(void** address, size_t size) {
  pretended_use_device();
  // May wait for the device, so captures forbid it, unless the thread relaxed its capture mode.
  cudaError_t error = pretended_synchronize(NULL);
  if (error == cudaSuccess) error = pretended_allocate(address, size, kDevice);
  return pretended_result(error);
}

cudaError_t cudaFree(void* address) {
  const cudaError_t error = pretended_synchronize(NULL);
  return pretended_result(error == cudaSuccess ? pretended_free(address) : error);
}

cudaError_t cudaHostAlloc(void** address, size_t size, unsigned flags) {
  (void)flags;
  return pretended_result(pretended_allocate(address, size, kPinned));
}

cudaError_t cudaFreeHost(void* address) { return pretended_result(pretended_free(address)); }

cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t stream) {
  (void)stream;
  return pretended_result(pretended_allocate(address, size, kDevice));
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  (void)stream;
  return pretended_result(pretended_free(address));
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = pretended_free_memory();
  *total = kDeviceMemory;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes,
                                     const void* address) {
  const enum MemoryKind kind = pretended_memory_kind(address);
  void* known = kind == kPageable ? NULL : (void*)address;
  *attributes = (struct cudaPointerAttributes){.devicePointer = known, .device = -2};
  if (kind != kPageable) attributes->device = 0;
  if (kind == kDevice) attributes->type = cudaMemoryTypeDevice;
  if (kind == kPinned) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = known;
  }
  return cudaSuccess;
}

// Captures record copies, except copies of pageable memory, because the host waits for these.
static cudaError_t begin_copy(void* target, const void* source, cudaStream_t stream) {
  if (pretended_capture_of(stream) != 0 &&
      (pretended_memory_kind(target) == kPageable || pretended_memory_kind(source) == kPageable)) {
    return pretended_result(pretended_synchronize(stream));
  }
  return pretended_result(pretended_add_node(stream));
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  (void)kind;
  const cudaError_t error = begin_copy(target, source, stream);
  if (error == cudaSuccess) memmove(target, source, size);
  return error;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, enum cudaMemcpyKind kind) {
  (void)kind;
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) memmove(target, source, size);
  return error;
}

cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source,
                                int source_device, size_t size, cudaStream_t stream) {
  if (check_device(target_device | source_device) != cudaSuccess) return cudaErrorInvalidDevice;
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                              size_t source_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  const cudaError_t error = begin_copy(target, source, stream);
  for (size_t i = 0; error == cudaSuccess && i < height; ++i) {
    memmove((char*)target + i * target_pitch, (const char*)source + i * source_pitch, width);
  }
  return error;
}

static void fill(void* target, int value, size_t size) {
  // Return zeroed pages to the system, because the host may have less memory than the GPU.
  const size_t large = 1 << 20, page = 4096;
  if (value == 0 && size >= large && pretended_memory_kind(target) == kDevice) {
    char* begin = (char*)(((uintptr_t)target + page - 1) / page * page);
    const size_t whole = ((char*)target + size - begin) / page * page;
    memset(target, 0, begin - (char*)target);
    madvise(begin, whole, MADV_DONTNEED);
    memset(begin + whole, 0, (char*)target + size - begin - whole);
  } else {
    memset(target, value, size);
  }
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  const cudaError_t error = pretended_result(pretended_add_node(stream));
  if (error == cudaSuccess) fill(target, value, size);
  return error;
}

cudaError_t cudaMemset(void* target, int value, size_t size) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) fill(target, value, size);
  return error;
}
