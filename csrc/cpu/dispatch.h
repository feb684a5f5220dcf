// Kernel tables, one per instruction set, and the dispatch among them.
#pragma once

#include "cpu/debug.h"
#include "params.h"

namespace fused_attn {

// Every pass entry runs a complete pass and does not throw. Entries that return bool return false
// if out of memory.
struct KernelTable {
  const char* isa;
  bool (*attention_fwd)(const AttentionParams&);
  bool (*attention_bwd)(const AttentionBwdParams&);
  bool (*attention_weights)(const AttentionWeightsParams&);
  bool (*norm_fwd)(const NormParams&);
  bool (*norm_bwd)(const NormBwdParams&);
  bool (*activation)(const ActivationParams&);
  bool (*rotary)(const RotaryParams&);
  bool (*tile_kinds)(const TileKindsParams&);
  void (*tile_summary)(const SummaryParams&);
  int64_t (*query_tile)(DType);  // rows of a query tile
  int64_t block;                 // keys of a KV block
  // Peak rates of the given number of threads, in operations per second: of float multiply-adds,
  // and of the instructions that attention uses for matmuls of a dtype.
  double (*multiply_add_peak)(int64_t);
  double (*product_peak)(DType, int64_t);
};

// Returns the kernels of the best instruction set that was built and that this CPU supports. The
// environment variable FUSED_ATTN_CPU_ISA selects another entry of isas.inc. Throws
// std::invalid_argument if that entry does not exist or cannot run on this CPU.
const KernelTable& kernels();

// Returns the kernels for an attention problem. They are those of kernels(), unless another
// instruction set is faster for the problem and the user selected none.
const KernelTable& attention_kernels(const AttentionParams& p);

// Run a pass of attention_kernels(). Without a bias, each packed sequence uses the kernels that it
// would use alone. Forward and backward use the same kernels. Return false if out of memory.
bool attention_forward(const AttentionParams& p);
bool attention_backward(const AttentionBwdParams& p);

// Selects the entry of isas.inc that kernels() returns; "" restores the default. Throws
// std::invalid_argument if the entry does not exist or cannot run on this CPU. This function is for
// tests, and must not be called while kernels run.
void set_isa(const char* isa);

}  // namespace fused_attn
