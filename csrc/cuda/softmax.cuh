// Conversion of QK^T to scores and weights, and the online softmax over KV tiles.
//
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
#pragma once

#include "cuda/dropout.cuh"
#include "cuda/mask.cuh"

namespace fused_attn {

constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.6931471805599453;

// Units of the scores in a kernel. In the plain case, where scores are QK^T times a positive
// factor, the kernel leaves QK^T unscaled and folds the factor times log2(e) into the multiply-add
// of the exponential. In the general case, scores are in natural units: folding a rounded log2(e)
// into each term of the scores would multiply all of them by its rounding error.
template <class T, bool kGeneral>
struct Units {
  float factor;

  FUSED_ATTN_DEVICE explicit Units(const AttentionParams& p)
      : factor(kGeneral ? 1.0f : static_cast<float>(p.scale * 1.4426950408889634)) {}

  // Converts a score to an exponent: the argument of exp2 in the plain case, of exp in the general
  // case.
  FUSED_ATTN_DEVICE float exponent(float score) const { return kGeneral ? score : score * factor; }
  // Returns the weight exp(score - log_sum). log_sum was converted by exponent(), score was not.
  FUSED_ATTN_DEVICE float power(float score, float log_sum) const {
    if constexpr (!kGeneral) {
      return exp2_fast(multiply_add(score, factor, -log_sum));
    } else {
      return power_of(score - log_sum);
    }
  }
  // Returns the ratio of two weights whose exponents differ by `difference`.
  FUSED_ATTN_DEVICE float power_of(float difference) const {
    if constexpr (!kGeneral) {
      return exp2_fast(difference);
    } else if constexpr (sizeof(T) == 4) {
      return exp_exact(difference);
    } else {
      return exp2_fast(difference * kLog2E);
    }
  }
  // Convert natural logarithms to exponents, and back.
  FUSED_ATTN_DEVICE double from_natural(double x) const { return kGeneral ? x : x / kLn2; }
  FUSED_ATTN_DEVICE double to_natural(double x) const { return kGeneral ? x : x * kLn2; }
};

// Converts QK^T to scores in the general case: applies the scale and softcap, and adds the ALiBi
// bias. cap_tanh: receives the tanh of softcap for the backward, unless null.
template <bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE void scale_scores(Accumulator<kM, kN>& s, const AttentionParams& p,
                                    const Sequence& sequence, const FragmentRows<kM>& rows,
                                    int column, Accumulator<kM, kN>* cap_tanh = nullptr) {
  const float scale = static_cast<float>(p.scale), cap = static_cast<float>(p.softcap);
  for_each(s, [&](float& score, int m, int n, int e) {
    score *= scale;
    if (cap > 0.0f) {
      const float tanh = tanh_exact(score / cap);
      score = cap * tanh;
      if (cap_tanh != nullptr) (*cap_tanh)[m][n][e] = tanh;
    }
  });
  if (p.mask.slopes != nullptr) add_alibi<kKeysFirst, kM, kN>(s, p.mask, sequence, rows, column);
}

// Adds the bias to the scores of a partial tile, and sets masked scores to -inf. Also clears the
// bits of `visible` where the bias is -inf.
template <bool kGeneral, bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE void mask_scores(Accumulator<kM, kN>& s, Visible<kM>& visible,
                                   const AttentionParams& p, const Sequence& sequence,
                                   const FragmentRows<kM>& rows, int column) {
  if (kGeneral && p.mask.bias.data != nullptr) {
    add_bias<kKeysFirst, kM, kN>(s, visible, p.mask, sequence.b, rows, column);
  }
  apply_visible<kM, kN>(s, visible);
}

// Converts QK^T to scores: applies scale_scores in the general case, and mask_scores to partial
// tiles.
template <bool kGeneral, bool kPartial, bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE void finish_scores(Accumulator<kM, kN>& s, Visible<kM>& visible,
                                     const AttentionParams& p, const Sequence& sequence,
                                     const FragmentRows<kM>& rows, int column,
                                     Accumulator<kM, kN>* cap_tanh = nullptr) {
  if constexpr (kGeneral) scale_scores<kKeysFirst, kM, kN>(s, p, sequence, rows, column, cap_tanh);
  if constexpr (kPartial) {
    mask_scores<kGeneral, kKeysFirst, kM, kN>(s, visible, p, sequence, rows, column);
  }
}

// State of the online softmax: the maximum score and the sum of the weights of each of the thread's
// rows. Before reduce(), a sum covers only the thread's columns.
template <int kM>
struct SoftmaxState {
  float maximum[2 * kM], sum[2 * kM];

  FUSED_ATTN_DEVICE void reset() {
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      maximum[r] = -kInfinity;
      sum[r] = 0.0f;
    }
  }

  // Updates the state with a tile of scores, and converts the scores to weights. rescale: receives
  // the factor of each row by which the caller multiplies its accumulators.
  template <bool kPartial, int kN, class T, bool kGeneral>
  FUSED_ATTN_DEVICE void update(Accumulator<kM, kN>& s, const Units<T, kGeneral>& units,
                                float (&rescale)[2 * kM]) {
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      float largest = maximum[r];
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 8; ++n) {
        const float (&four)[4] = s[r / 2][n];
        largest = larger(largest, larger(four[r % 2 * 2], four[r % 2 * 2 + 1]));
      }
      largest = larger(largest, shuffle_xor(largest, 1));
      largest = larger(largest, shuffle_xor(largest, 2));
      // Rows without a visible key so far use a shift of 0, because -inf - -inf is NaN.
      const float shift = units.exponent(kPartial && largest == -kInfinity ? 0.0f : largest);
      rescale[r] = units.power(maximum[r], shift);
      maximum[r] = largest;
      float total = 0.0f;
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kN / 8; ++n) {
        FUSED_ATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = s[r / 2][n][r % 2 * 2 + e];
          score = units.power(score, shift);
          total += score;
        }
      }
      sum[r] = multiply_add(sum[r], rescale[r], total);
    }
  }

  // Adds up `sum` over the four lanes that share a row. All four lanes receive the total.
  FUSED_ATTN_DEVICE void reduce() {
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      sum[r] += shuffle_xor(sum[r], 1);
      sum[r] += shuffle_xor(sum[r], 2);
    }
  }
};

// Returns the dropout keep bits of the thread's weights in row m of fragments. Bit 4 n + e is
// element e of fragment (m, n). column: position of the warp tile's first column.
template <bool kKeysFirst, int kN, int kM>
FUSED_ATTN_DEVICE uint32_t kept_weights(const Dropout& dropout, const FragmentRows<kM>& rows, int m,
                                        int column) {
  const int upper = rows.position[2 * m], lower = rows.position[2 * m + 1];
  constexpr int kCount = kN % 16 == 0 ? 2 : 1;
  static_assert(kN <= 64, "keep_mask has 32 bits");
  uint32_t keep_mask = 0;
  FUSED_ATTN_UNROLL
  for (int n = 0; n < kN / 8; n += kCount) {
    const int at = column + n * 8;
    uint32_t own;
    if constexpr (kKeysFirst) {
      own = dropout.kept_by_key<kCount>(at, rows.head[2 * m], upper - lane_id() / 4);
    } else {
      own = dropout.kept_by_query<kCount>({upper, lower}, {rows.head[2 * m], rows.head[2 * m + 1]},
                                          at);
    }
    keep_mask |= own << (4 * n);
  }
  return keep_mask;
}

// Sets dropped weights to 0.
template <bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE void drop(Accumulator<kM, kN>& weights, const Dropout& dropout,
                            const FragmentRows<kM>& rows, int column) {
  uint32_t keep_mask[kM];
  FUSED_ATTN_UNROLL
  for (int m = 0; m < kM; ++m) {
    keep_mask[m] = kept_weights<kKeysFirst, kN, kM>(dropout, rows, m, column);
  }
  for_each(weights, [&](float& weight, int m, int n, int e) {
    if (!(keep_mask[m] >> (4 * n + e) & 1)) weight = 0.0f;
  });
}

}  // namespace fused_attn
