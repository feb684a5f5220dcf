// Streams, events and graphs of the CUDA runtime. Enqueued work completes immediately, so no call
// waits. The functions check only whether a call is permitted, mainly during a capture.
#include <stdlib.h>

#include "pretended_gpu.h"

// Streams.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  (void)flags, (void)priority;
  *stream = calloc(1, sizeof(struct Stream));
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  free(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  (void)stream;
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return pretended_result(pretended_synchronize(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return pretended_result(pretended_synchronize(stream));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  const bool is_external = flags & cudaEventWaitExternal;
  return pretended_result(pretended_wait(stream, (struct Event*)event, is_external));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaError_t error = pretended_add_node(stream);
  if (error == cudaSuccess && pretended_capture_of(stream) == 0) function(data);
  return pretended_result(error);
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned flags) {
  (void)flags;
  if (pretended_capture_of(stream) != 0) return cudaStreamSynchronize(stream);
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}

// Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof(struct Event));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  (void)flags;
  return pretended_result(pretended_record(stream, (struct Event*)event));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const struct Event* event = (const struct Event*)handle;
  const bool is_captured = pretended_capture_status(event->capture) != cudaStreamCaptureStatusNone;
  return pretended_result(is_captured ? cudaErrorCapturedEvent : pretended_synchronize(NULL));
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1.0f;  // long enough that benchmarks repeat few calls
  const bool are_recorded = ((struct Event*)start)->recorded && ((struct Event*)end)->recorded;
  return pretended_result(are_recorded ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

// Captures and graphs. A graph stores its number of nodes, because torch warns of empty graphs.

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return pretended_result(pretended_begin_capture(stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return pretended_result(pretended_end_capture(stream, (struct Graph**)graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = pretended_capture_status(pretended_capture_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(stream, status);
  if (id != NULL) *id = pretended_capture_of(stream);
  if (graph != NULL) *graph = NULL;
  if (dependencies != NULL) *dependencies = NULL;
  if (edges != NULL) *edges = NULL;
  if (count != NULL) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  *mode = pretended_exchange_capture_mode(*mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != NULL) return pretended_result(cudaErrorNotSupported);
  *count = ((struct Graph*)graph)->nodes;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  (void)flags;
  if (graph == NULL) return pretended_result(cudaErrorInvalidValue);
  *executable = calloc(1, sizeof(struct Graph));
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  free(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  if (executable == NULL) return pretended_result(cudaErrorInvalidValue);
  return pretended_result(pretended_add_node(stream));
}
