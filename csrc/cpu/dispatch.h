// The kernel table of one instruction set, and the dispatch among them.
#pragma once

#include "cpu/debug.h"
#include "params.h"

namespace fused_attn {

// Every entry runs a complete pass and does not throw. It returns false if out of memory.
struct KernelTable {
  const char* isa;
  bool (*attention_fwd)(const AttentionParams&);
  bool (*attention_bwd)(const AttentionBwdParams&);
  bool (*attention_weights)(const AttentionWeightsParams&);
  bool (*norm_fwd)(const NormParams&);
  bool (*norm_bwd)(const NormBwdParams&);
  bool (*activation)(const ActivationParams&);
  bool (*tile_kinds)(const TileKindsParams&);
  void (*tile_summary)(const SummaryParams&);
  int64_t (*query_tile)(DType);  // queries of a tile
  int64_t block;                 // keys of a tile
  // Operations a second of that many threads: float multiply-adds, and the products of attention.
  double (*multiply_add_peak)(int64_t);
  double (*product_peak)(DType, int64_t);
};

// Returns the kernels of the best instruction set that was built and that this CPU supports.
// FUSED_ATTN_CPU_ISA, an entry of isas.inc, selects another. Throws std::invalid_argument if it
// names none that can run here.
const KernelTable& kernels();

// Returns the kernels for an attention problem: those of another instruction set where the best
// does not pay off and the user selected none. A forward and its backward use the same kernels.
const KernelTable& attention_kernels(const AttentionParams& p);

// Selects an entry of isas.inc for kernels(), "" for the default. For tests; must not be called
// while kernels run. Throws std::invalid_argument if the entry cannot run here.
void set_isa(const char* isa);

}  // namespace fused_attn
