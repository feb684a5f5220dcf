// Attention for few queries with vector instructions: forward (decoding) and backward.
#include "cpu/isa.h"

#if defined(FUSED_ATTN_OWN_ATTENTION)
#include "cpu/kernels/attention_bwd_rows.h"
#include "cpu/kernels/attention_decode.h"
#include "cpu/run_as.h"

namespace fused_attn {

bool own::attention_decode(const AttentionParams& p) {
  return run_as<AttentionDecode>(p.dtype, base::attention_decode, p);
}

bool own::attention_bwd_rows(const AttentionBwdParams& p) {
  return run_as<AttentionBwdRows>(p.fwd.dtype, base::attention_bwd_rows, p);
}

}  // namespace fused_attn

#endif  // FUSED_ATTN_OWN_ATTENTION
