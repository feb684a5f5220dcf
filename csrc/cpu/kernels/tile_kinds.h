// Classifies tiles with the function that the kernels call. For tests and tools only (debug.h).
#pragma once

#include "cpu/debug.h"
#include "cpu/kernels/mask.h"

namespace fused_attn {
namespace {

template <class T>
struct TileKinds {
  using A = Acc<T>;

  static bool run(const TileKindsParams& params) {
    const AttentionParams& p = params.problem;
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    uint8_t* out = params.kinds;
    for (int64_t head = 0; head < p.batch * p.num_heads; ++head) {
      for (int64_t i = 0; i < p.seqlen_q; i += kPanel<A>) {
        for (int64_t j = 0; j < p.seqlen_k; j += kBlockN) {
          *out++ = static_cast<uint8_t>(mask.classify(head / p.num_heads, head % p.num_heads, i, j,
                                                      min64(j + kBlockN, p.seqlen_k)));
        }
      }
    }
    return true;
  }
};

}  // namespace
}  // namespace fused_attn
