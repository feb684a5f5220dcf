// For tests and tools only: which tiles the kernels skip, which no result shows. It ships because
// tests run on the module that users get.
#pragma once

#include "params.h"

namespace fused_attn {

// How the kernels of an instruction set classify the tiles of a problem.
struct TileKindsParams {
  AttentionParams problem;  // sizes, dtype and mask
  uint8_t* kinds;           // (batch, num_heads, query tiles, blocks): 0 skipped, 1 partial, 2 full
};

}  // namespace fused_attn
