// The functions of the CUDA runtime for kernels, launches and driver entry points.
#include <dlfcn.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>

#include "pretended_gpu.h"

// When a library with device code is loaded, it registers each kernel under the address of a host
// function. Launches pass that address.

struct Registered {
  const void* host_function;
  struct Kernel* kernel;
};

static void* registered;  // tree of tsearch(); constructors fill it, in one thread at a time

static int compare_registered(const void* first, const void* second) {
  const char* a = ((const struct Registered*)first)->host_function;
  const char* b = ((const struct Registered*)second)->host_function;
  return (a > b) - (a < b);
}

static struct Kernel* kernel_of(const void* host_function) {
  const struct Registered wanted = {host_function, NULL};
  void* found = tfind(&wanted, &registered, compare_registered);
  return found == NULL ? NULL : (*(struct Registered**)found)->kernel;
}

void** __cudaRegisterFatBinary(void* binary) { return binary; }

void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }

void __cudaUnregisterFatBinary(void** handle) { (void)handle; }

char __cudaInitModule(void** handle) {
  (void)handle;
  return 1;
}

void __cudaRegisterFunction(void** handle, const char* host_function, char* device_function,
                            const char* name, int thread_limit, uint3* thread, uint3* block,
                            dim3* block_size, dim3* grid_size, int* warp_size) {
  (void)handle, (void)device_function, (void)thread_limit, (void)thread, (void)block;
  (void)block_size, (void)grid_size, (void)warp_size;
  struct Registered* entry = malloc(sizeof *entry);
  *entry = (struct Registered){host_function, pretended_kernel(name)};
  tsearch(entry, &registered, compare_registered);
}

void __cudaRegisterVar(void** handle, char* host_variable, char* device_variable, const char* name,
                       int is_external, size_t size, int is_constant, int is_global) {
  (void)handle, (void)host_variable, (void)device_variable, (void)name;
  (void)is_external, (void)size, (void)is_constant, (void)is_global;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};

// <<<...>>> pushes a configuration, which the kernel's host stub pops. Configurations nest, because
// the evaluation of kernel arguments may launch kernels.
static _Thread_local struct Configuration configurations[8];
static _Thread_local unsigned pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     struct CUstream_st* stream) {
  if (pushed == sizeof configurations / sizeof *configurations) abort();
  configurations[pushed++] = (struct Configuration){grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (pushed == 0) return pretended_result(cudaErrorMissingConfiguration);
  const struct Configuration top = configurations[--pushed];
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *(void**)stream = top.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = (cudaKernel_t)kernel_of(host_function);
  return pretended_result(*kernel == NULL ? cudaErrorInvalidDeviceFunction : cudaSuccess);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  (void)arguments;
  pretended_use_device();
  return pretended_result(pretended_launch((struct Kernel*)kernel, grid, block, shared, stream));
}

cudaError_t cudaLaunchKernel(const void* host_function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return __cudaLaunchKernel((cudaKernel_t)kernel_of(host_function), grid, block, arguments, shared,
                            stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host_function,
                                void** arguments) {
  return cudaLaunchKernel(host_function, config->gridDim, config->blockDim, arguments,
                          config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* host_function, dim3 grid, dim3 block,
                                        void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(host_function, grid, block, arguments, shared, stream);
}

cudaError_t cudaFuncSetAttribute(const void* host_function, enum cudaFuncAttribute which,
                                 int value) {
  struct Kernel* kernel = kernel_of(host_function);
  if (kernel == NULL) return pretended_result(cudaErrorInvalidDeviceFunction);
  return pretended_result(
      (cudaError_t)cuFuncSetAttribute((CUfunction)kernel, (CUfunction_attribute)which, value));
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes,
                                  const void* host_function) {
  const struct Kernel* kernel = kernel_of(host_function);
  if (kernel == NULL) return pretended_result(cudaErrorInvalidDeviceFunction);
  *attributes = (struct cudaFuncAttributes){
      .maxThreadsPerBlock = 1024,
      .numRegs = 64,
      .ptxVersion = 90,
      .binaryVersion = 90,
      .maxDynamicSharedSizeBytes = kernel->max_dynamic_shared,
  };
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host_function,
                                                          int threads, size_t shared) {
  (void)host_function;
  *blocks = pretended_blocks_per_sm(threads, shared);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* host_function,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host_function, threads, shared);
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

// torch looks up all functions at once and calls few, so a missing function fails when called.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* status) {
  (void)version, (void)flags;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  char second_version[128];
  snprintf(second_version, sizeof second_version, "%s_v2", symbol);
  *function = dlsym(driver, second_version);
  if (*function == NULL) *function = dlsym(driver, symbol);
  if (*function == NULL) *function = (void*)not_supported;
  if (status != NULL) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
