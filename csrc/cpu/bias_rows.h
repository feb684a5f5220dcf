// The gradient of a bias while a backward goes on that makes dS by rows: columns of a bias' head
// belong to one task, so nothing is added up between threads.
#pragma once

#include "cpu/tile_scores.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

class BiasRows {
 public:
  explicit BiasRows(const AttentionBwdParams& bwd) : bwd_(bwd), p_(bwd.fwd) {}

  // Clears keys [j, j + n) of the bias' heads that query heads [h, h + heads) of batch b have.
  void begin(int64_t b, int64_t h, int64_t heads, int64_t j, int64_t n) const {
    const int64_t own = p_.mask.bias.strides[1] == 0 ? 1 : heads;
    for (int64_t e = 0; n > 0 && e < own * p_.seqlen_q; ++e) {
      memset(row(b, h + e / p_.seqlen_q, e % p_.seqlen_q) + j, 0, n * sizeof(float));
    }
  }

  // Adds a tile of dS with so many queries.
  void add(const TileAt& at, int64_t rows, const float* grads) const {
    for (uint32_t r = 0; r < rows; ++r) {
      const float* const own = grads + r * 16;
      float* const out = row(at.b, at.h, at.i + r) + at.j;
      for (int64_t v = 0; v * 16 < at.n; ++v) {
        const __mmask16 there = lanes16(at.n, v * 16);
        const __m512 sum = _mm512_maskz_loadu_ps(there, out + v * 16);
        _mm512_mask_storeu_ps(out + v * 16, there,
                              _mm512_add_ps(sum, (__m512)load(own + v * kPairSums)));
      }
    }
  }

 private:
  float* row(int64_t b, int64_t h, int64_t i) const {
    const int64_t* const strides = p_.mask.bias.strides;
    const int64_t heads = strides[1] == 0 ? 1 : p_.num_heads;
    const int64_t own = (strides[0] == 0 ? 0 : b) * heads + (strides[1] == 0 ? 0 : h);
    return static_cast<float*>(bwd_.grad_bias) + (own * p_.seqlen_q + i) * p_.seqlen_k;
  }

  const AttentionBwdParams& bwd_;
  const AttentionParams& p_;
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
