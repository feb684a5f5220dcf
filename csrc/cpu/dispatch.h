// The kernels of one instruction set, and the choice among them.
#pragma once

#include "cpu/debug.h"
#include "params.h"

namespace fused_attn {

// Every entry runs a whole operation and throws nothing; false: out of memory for workspace.
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
  // Operations a second of so many threads: float multiply-add, and bfloat16 pairs (0: has none).
  double (*multiply_add_peak)(int64_t);
  double (*product_peak)(DType, int64_t);
};

// The best of what was built and this CPU has; FUSED_ATTN_CPU_ISA (an entry of isas.inc) lowers it.
// Throws std::invalid_argument where the variable names none that can run here.
const KernelTable& kernels();

// Those for a problem of attention: of another instruction set, unless one was asked for by name,
// where that one does not pay off. A forward and its backward have the same.
const KernelTable& attention_kernels(const AttentionParams& p);

// Makes kernels() the table of that entry of isas.inc, "" for the automatic choice; for tests, not
// while kernels run. Throws std::invalid_argument where there is none that can run here.
void set_isa(const char* isa);

}  // namespace fused_attn
