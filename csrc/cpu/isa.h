// Namespaces for the sources of one instruction set (kernels*.cpp), and macros that select the
// passes that these sources compile.
//
// The sources are compiled once for each line of isas.inc. The second name of a line is the base.
// For dtypes whose machine code would be the same as that of the base, the sources call the base's
// kernels instead of compiling any.
#pragma once

#include "cpu/dispatch.h"

#define FUSED_ATTN_PASTE_(a, b) a##b
#define FUSED_ATTN_PASTE(a, b) FUSED_ATTN_PASTE_(a, b)
#define FUSED_ATTN_STRING_(a) #a
#define FUSED_ATTN_STRING(a) FUSED_ATTN_STRING_(a)
#define FUSED_ATTN_ISA_NAMESPACE FUSED_ATTN_PASTE(isa_, FUSED_ATTN_ISA)
#define FUSED_ATTN_BASE_NAMESPACE FUSED_ATTN_PASTE(isa_, FUSED_ATTN_BASE)

// Passes that this instruction set compiles instead of calling its base. OWN_ROWS: norms and all
// other row-wise passes. OWN_ATTENTION: attention in vector registers. OWN_TILES: attention in tile
// registers.
#if defined(FUSED_ATTN_AMX_FP16)
#define FUSED_ATTN_OWN_TILES 1
#elif defined(__AMX_BF16__)
#define FUSED_ATTN_OWN_ATTENTION 1
#define FUSED_ATTN_OWN_TILES 1
#else
#define FUSED_ATTN_OWN_ATTENTION 1
#define FUSED_ATTN_OWN_ROWS 1
#endif

namespace fused_attn {

// Attention passes in tile registers, for the dtypes that AMX multiplies. The supports_ functions
// return true if the corresponding pass supports the problem.
struct TilePasses {
  bool (*forward)(const AttentionParams&);
  bool (*supports_decode)(const AttentionParams&);
  bool (*decode)(const AttentionParams&);
  bool (*supports_backward)(const AttentionBwdParams&);
  bool (*supports_bias)(const AttentionBwdParams&);  // the backward also computes the bias gradient
  bool (*backward)(const AttentionBwdParams&);
};

// Functions that the sources of an instruction set export to each other and to the instruction sets
// that have it as their base. The TilePasses pointer is null without tile registers.
#define FUSED_ATTN_PASSES                                                \
  bool attention_fwd(const AttentionParams&);                            \
  bool attention_bwd(const AttentionBwdParams&);                         \
  bool attention_decode(const AttentionParams&);                         \
  bool attention_bwd_rows(const AttentionBwdParams&);                    \
  bool attention_fwd_with(const TilePasses*, const AttentionParams&);    \
  bool attention_bwd_with(const TilePasses*, const AttentionBwdParams&); \
  bool tiles_fwd(const AttentionParams&);                                \
  bool tiles_take_decode(const AttentionParams&);                        \
  bool tiles_decode(const AttentionParams&);                             \
  bool tiles_take_bwd(const AttentionBwdParams&);                        \
  bool tiles_take_bias(const AttentionBwdParams&);                       \
  bool tiles_bwd(const AttentionBwdParams&);                             \
  bool attention_weights(const AttentionWeightsParams&);                 \
  bool norm_fwd(const NormParams&);                                      \
  bool norm_bwd(const NormBwdParams&);                                   \
  bool activation(const ActivationParams&);                              \
  bool rotary(const RotaryParams&);                                      \
  bool tile_kinds(const TileKindsParams&);                               \
  void tile_summary(const SummaryParams&);                               \
  double multiply_add_peak(int64_t);                                     \
  double product_peak(DType, int64_t);
namespace FUSED_ATTN_ISA_NAMESPACE {
FUSED_ATTN_PASSES
extern const KernelTable kKernels;
}  // namespace FUSED_ATTN_ISA_NAMESPACE
namespace FUSED_ATTN_BASE_NAMESPACE {
FUSED_ATTN_PASSES
}
#undef FUSED_ATTN_PASSES

namespace own = FUSED_ATTN_ISA_NAMESPACE;
namespace base = FUSED_ATTN_BASE_NAMESPACE;

}  // namespace fused_attn
