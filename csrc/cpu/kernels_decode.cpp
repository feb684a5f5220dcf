// Attention forward for few queries (decoding), in vector registers.
#include "cpu/isa.h"

#if defined(FUSED_ATTN_OWN_ATTENTION)
#include "cpu/kernels/attention_decode.h"
#include "cpu/run_as.h"

namespace fused_attn {

bool own::attention_decode(const AttentionParams& p) {
  return run_as<AttentionDecode>(p.dtype, base::attention_decode, p);
}

}  // namespace fused_attn

#endif  // FUSED_ATTN_OWN_ATTENTION
