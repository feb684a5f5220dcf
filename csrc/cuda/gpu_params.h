// What kernels on a GPU get besides the structs of params.h.
#pragma once

#include "params.h"

namespace fused_attn {

// Ids of documents are summed up by so many positions.
constexpr int64_t kIdRangeTile = 32;
// The most queries of a tile in the backward.
constexpr int64_t kStatisticsTile = 128;
// The widest heads whose gradient of queries may be added up atomically.
constexpr int64_t kMaxAddedHeadDim = 128;

#include "fields/declare.inc"

struct GpuParams {
#include "fields/gpu.inc"
  uint32_t dropout_threshold;  // both of dropout_p (philox.h), by whoever starts the kernels
  float dropout_scale;
};

struct CacheParams {
#include "fields/cache.inc"
};

#include "fields/end.inc"

}  // namespace fused_attn
