// Gradient of a bias, computed inside a backward whose dS has queries as rows. One task owns the
// keys of a bias head that it processes, so threads share no accumulators.
//
// The elements of dS in a row add up to dlse. For 16-bit types, delta is computed from an out whose
// weights were rounded, so dS contains P times the error of delta. This term exceeds dS if a few
// keys have nearly all the weight. The row sum minus dlse is the error of delta; the gradients of
// the keys with large weights are corrected by it.
#pragma once

#include "cpu/kernels/tile_gradients.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

template <class T>
class BiasRows {
 public:
  // True if a task must process all keys of a row.
  static constexpr bool kWholeRows = TileFormat<T>::kRounds;

  explicit BiasRows(const AttentionBwdParams& bwd) : bwd_(bwd), p_(bwd.fwd) {}

  // Reserves workspace for `rows` query rows.
  void place(Arena* arena, int64_t rows) {
    sums_ = arena->take<float>(kWholeRows ? rows * 16 : 0);
    heavy_ = arena->take<Heavy>(kWholeRows ? rows : 0);
  }

  // Zeroes the gradient of keys [j, j + n) in the bias heads that query heads [h, h + heads) of
  // batch b use.
  void begin(int64_t b, int64_t h, int64_t heads, int64_t j, int64_t n) const {
    const int64_t own = p_.mask.bias.strides[1] == 0 ? 1 : heads;
    for (int64_t e = 0; n > 0 && e < own * p_.seqlen_q; ++e) {
      memset(row(b, h + e / p_.seqlen_q, e % p_.seqlen_q) + j, 0, n * sizeof(float));
    }
  }

  void begin_rows(int64_t rows) {
    for (int64_t at = 0; kWholeRows && at < rows; ++at) {
      store(sums_ + at * 16, Vec<float>{});
      heavy_[at].count = 0;
    }
  }

  // Adds a tile of dS with `rows` queries to the gradient. `first` is the index of its first query
  // in the workspace. weights: the tile of P.
  void add(const TileAt& at, int64_t first, int64_t rows, const float* grads,
           const float* weights) {
    for (uint32_t r = 0; r < rows; ++r) {
      const float* const own = grads + r * 16;
      float* const out = row(at.b, at.h, at.i + r) + at.j;
      for (int64_t v = 0; v * 16 < at.n; ++v) {
        const __mmask16 valid = lanes16(at.n, v * 16);
        const __m512 sum = _mm512_maskz_loadu_ps(valid, out + v * 16);
        _mm512_mask_storeu_ps(out + v * 16, valid,
                              _mm512_add_ps(sum, (__m512)load(own + v * kPairSums)));
      }
      if (kWholeRows) add_to_row(first + r, at.j, own, weights + r * 16);
    }
  }

  // Corrects the gradient of query i of head (b, h), whose index in the workspace is `at`. Called
  // after all keys were added.
  void end_row(int64_t at, int64_t b, int64_t h, int64_t i, float grad_lse) const {
    const Heavy& heavy = heavy_[at];
    if (heavy.count == 0 || p_.partial) return;  // partial rows need not add up to dlse
    const float missed = horizontal_sum<float>(load(sums_ + at * 16)) - grad_lse;
    float* const grads = row(b, h, i);
    for (int k = 0; k < heavy.count; ++k) grads[heavy.key[k]] -= missed * heavy.weight[k];
  }

 private:
  // The keys of a row with more than 1/16 of its weight.
  struct Heavy {
    static constexpr int kMost = 15;
    int count;
    float weight[kMost];
    int64_t key[kMost];
  };

  void add_to_row(int64_t at, int64_t j, const float* grads, const float* weights) {
    static_assert(kGradientKeys == 32, "a row of keys is two vectors of 16");
    store(sums_ + at * 16, load(sums_ + at * 16) + (load(grads) + load(grads + kPairSums)));
    const __m512 least = _mm512_set1_ps(1.f / (Heavy::kMost + 1));
    uint32_t heavy =
        _mm512_kunpackw(_mm512_cmp_ps_mask((__m512)load(weights + kPairSums), least, _CMP_GT_OQ),
                        _mm512_cmp_ps_mask((__m512)load(weights), least, _CMP_GT_OQ));
    for (; heavy != 0; heavy &= heavy - 1) {
      Heavy& found = heavy_[at];
      if (found.count == Heavy::kMost) return;  // only possible because of rounding
      const int t = __builtin_ctz(heavy);
      found.weight[found.count] = weights[t % 16 + t / 16 * kPairSums];
      found.key[found.count++] = j + t;
    }
  }

  float* row(int64_t b, int64_t h, int64_t i) const {
    const int64_t* const strides = p_.mask.bias.strides;
    const int64_t heads = strides[1] == 0 ? 1 : p_.num_heads;
    const int64_t own = (strides[0] == 0 ? 0 : b) * heads + (strides[1] == 0 ? 0 : h);
    return static_cast<float*>(bwd_.grad_bias) + (own * p_.seqlen_q + i) * p_.seqlen_k;
  }

  const AttentionBwdParams& bwd_;
  const AttentionParams& p_;
  float* sums_;   // (rows, 16); row sums of dS, one partial sum per lane
  Heavy* heavy_;  // (rows); the keys of each row to correct
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
