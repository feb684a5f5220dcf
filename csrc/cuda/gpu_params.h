// Parameters of the GPU kernels, in addition to the structs in params.h. Pointers to tensors and
// workspaces are device pointers.
#pragma once

#include "params.h"

namespace fused_attn {

// Positions per entry of query_id_ranges and key_id_ranges.
constexpr int64_t kIdRangeTile = 32;
// Query rows per tile of the row statistics, and an upper bound on the query rows of a tile in the
// backward.
constexpr int64_t kStatisticsTile = 128;
// Largest head_dim for which dQ may be accumulated atomically.
constexpr int64_t kMaxAddedHeadDim = 128;

#include "fields/declare.inc"

struct GpuParams {
#include "fields/gpu.inc"
  // Derived from dropout_p (philox.h) by the launch functions, not by the caller.
  uint32_t dropout_threshold;
  float dropout_scale;
};

struct CacheParams {
#include "fields/cache.inc"
};

#include "fields/end.inc"

}  // namespace fused_attn
