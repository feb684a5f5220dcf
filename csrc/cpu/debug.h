// Exposes which tiles the kernels skip, because no result shows it. For tests and tools only. It is
// part of the released module, because the tests run on that module.
#pragma once

#include "params.h"

namespace fused_attn {

// Parameters of the pass that returns how the kernels classify each tile.
struct TileKindsParams {
  AttentionParams problem;  // sizes, dtype and mask
  // (batch, num_heads, query tiles, KV blocks): 0 skipped, 1 partial, 2 full.
  uint8_t* kinds;
};

}  // namespace fused_attn
