// Softmax of a tile of scores whose lanes hold queries: running maxima, weights and their sums.
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

// The running maximum of a row is raised only if the new maximum exceeds it by more than this power
// of 2. Outputs are then rescaled a few times per row instead of at nearly every block.
constexpr int kMaximumSlack = 8;

// Raises highest[v] to the maximum of column v of the scores (steps, kPanel<A>).
template <class A>
inline void raise_maxima(const A* scores, int64_t steps, A* highest) {
  constexpr int kLane = kLanes<A>;
  for (int v = 0; v < 2; ++v) {
    const A* const column = scores + v * kLane;
    Vec<A> found[4];
    for (Vec<A>& x : found) x = load(highest + v * kLane);
    for (int64_t t = 0; t < steps; t += 4) {
      for (int r = 0; r < 4; ++r) found[r] = max<A>(found[r], load(column + (t + r) * kPanel<A>));
    }
    store(highest + v * kLane, max<A>(max<A>(found[0], found[1]), max<A>(found[2], found[3])));
  }
}

// Raises the running maxima of a query tile to `highest` where kMaximumSlack requires it. Stores in
// alpha the factors that rescale older weights. Returns true if any factor is not 1.
template <class A>
inline bool update_maxima(const A* highest, const ExpUnit<A>& unit, A* maximum, A* alpha) {
  constexpr int kLane = kLanes<A>;
  bool rescale = false;
  for (int v = 0; v < 2; ++v) {
    const Vec<A> old = load(maximum + v * kLane), found = load(highest + v * kLane);
    const Vec<A> raised = (found - old) * unit.high > kMaximumSlack ? found : old;
    store(maximum + v * kLane, raised);
    // Before the first visible key of a row, both maxima are -inf, and their difference would be
    // NaN.
    store(alpha + v * kLane,
          raised == old ? broadcast<A>(1) : exp_nonpositive<A>(old - raised, unit));
    rescale = rescale || any(raised != old);
  }
  return rescale;
}

// Replaces the scores of a tile by the softmax weights exp(score - maximum), in the format of a
// right operand, and sums them.
template <class T>
struct ColumnSoftmax {
  using A = Acc<T>;
  using P = Product<T>;
  using RightElement = typename P::RightElement;
  static constexpr int kLane = kLanes<A>;
  static constexpr int kKeys = 4;  // per iteration, for instruction-level parallelism
  // Elements between the parts of the weights.
  static constexpr int64_t kPart = P::right_size(kBlockN, kPanel<A>) / P::kParts;
  // True if the weights fit in place of the scores.
  static constexpr bool kInPlace = P::kParts == 1;

  // keep: dropout keep masks, one per key; null without dropout.
  void run(const A* maximum, const uint32_t* keep) {
    if (keep_numbers) {
      keep != nullptr ? columns<true, true>(maximum, keep) : columns<false, true>(maximum, keep);
    } else {
      keep != nullptr ? columns<true, false>(maximum, keep) : columns<false, false>(maximum, keep);
    }
  }

  int64_t steps;               // padded number of keys
  A* scores;                   // (steps, kRows)
  RightElement* weights;       // (steps, kRows); may be `scores` if kInPlace
  bool keep_numbers;           // also overwrite the scores with the weights, in type A
  ExpUnit<A> unit;             // unit of the scores
  Vec<A> sum[2] = {};          // row sums of the unrounded weights before dropout
  Vec<A> rounded_sum[2] = {};  // row sums of the rounded weights, if P::kRoundsWeights

 private:
  // The vectors of a row are computed one after another, so that constants and sums stay in
  // registers, and so that weights of pairs of keys overwrite only scores that have been read.
  template <bool kDropout, bool kKeepNumbers>
  __attribute__((noinline)) void columns(const A* maximum, const uint32_t* keep) {
    const ExpUnit<A> exp_unit = unit;
    for (int v = 0; v < 2; ++v) {
      const Vec<A> top = load(maximum + v * kLane);
      // Rows without a visible key so far use a shift of 0, because -inf - -inf would be NaN.
      const Vec<A> shift = top == -static_cast<A>(__builtin_inf()) ? Vec<A>{} : top;
      Vec<A> total{}, rounded_total{};
      for (int64_t t = 0; t < steps; t += kKeys) {
        typename P::Weight weight[kKeys];
        Vec<A> x[kKeys];
        A* const column = scores + t * kPanel<A> + v * kLane;
        for (int r = 0; r < kKeys; ++r) x[r] = load(column + r * kPanel<A>) - shift;
        exp_nonpositive<A, kPrecision<T>>(x, exp_unit);
        for (int r = 0; r < kKeys; ++r) {
          const Vec<A> kept =
              kDropout ? where<A>(keep[t + r] >> (v * kLane), x[r], Vec<A>{}) : x[r];
          if (kKeepNumbers) store(column + r * kPanel<A>, kept);
          weight[r] = P::weight(kept);
        }
        for (int r = 0; r < kKeys; r += 2) {
          total += x[r] + x[r + 1];
          if constexpr (P::kRoundsWeights) {
            rounded_total =
                kDropout ? P::add_rounded(rounded_total, P::weight(x[r]), P::weight(x[r + 1]))
                         : P::add_rounded(rounded_total, weight[r], weight[r + 1]);
          }
          P::store_right(weights, kPart, t + r, v, weight[r], weight[r + 1]);
        }
      }
      sum[v] = total;
      rounded_sum[v] = rounded_total;
    }
  }
};

}  // namespace
}  // namespace fused_attn
