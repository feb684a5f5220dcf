// For tests and tools only: exposes which tiles the kernels skip, as no result shows it. Ships with
// the module because tests run on the module that users get.
#pragma once

#include "params.h"

namespace fused_attn {

// Classification of a problem's tiles by the kernels of one instruction set.
struct TileKindsParams {
  AttentionParams problem;  // sizes, dtype and mask
  // (batch, num_heads, query tiles, KV blocks): 0 skipped, 1 partial, 2 full
  uint8_t* kinds;
};

}  // namespace fused_attn
