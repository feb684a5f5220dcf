// Parameters of GPU kernels in addition to the structs of params.h.
#pragma once

#include "params.h"

namespace fused_attn {

// Positions per entry of the document id ranges.
constexpr int64_t kIdRangeTile = 32;
// Upper bound on the queries of a tile in the backward.
constexpr int64_t kStatisticsTile = 128;
// Widest heads whose dQ may be accumulated atomically.
constexpr int64_t kMaxAddedHeadDim = 128;

#include "fields/declare.inc"

struct GpuParams {
#include "fields/gpu.inc"
  uint32_t dropout_threshold;  // both from dropout_p (philox.h), set by the launching code
  float dropout_scale;
};

struct CacheParams {
#include "fields/cache.inc"
};

#include "fields/end.inc"

}  // namespace fused_attn
