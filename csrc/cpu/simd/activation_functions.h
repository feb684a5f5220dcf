// Vectorized activation functions and their derivatives. Source of GELU: Hendrycks and Gimpel 2016.
#pragma once

#include "cpu/simd/vec_math.h"

namespace fused_attn {
namespace {

// GELU: x * Phi(x), where Phi is the cumulative distribution function of the standard normal
// distribution.
template <class A>
class Gelu {
 public:
  FUSED_ATTN_INLINE Vec<A> value(Vec<A> x) const {
    const Vec<A> a = x < 0 ? -x : x;
    return x * chance_of_less(x, a, power(a));
  }

  // The result is finite for infinite x.
  FUSED_ATTN_INLINE Vec<A> slope(Vec<A> x) const {
    const Vec<A> a = x < 0 ? -x : x, of_a = power(a);
    const Vec<A> x_density = x * (of_a * A(0.39894228040143267794));
    return chance_of_less(x, a, of_a) + (a >= kCap ? Vec<A>{} : x_density);
  }

 private:
  // Phi(-a) is set to 0 for a >= kCap, where it is subnormal or nearly so.
  static constexpr A kCap = sizeof(A) == 4 ? A(12.9) : A(37);

  // Returns Phi(x), given a = |x| and power = exp(-a^2 / 2). Computes Phi(-a) as power times
  // mills_ratio(a), which is smooth. For large a, the relative error of Phi(-a) is about the
  // absolute rounding error of a^2 / 2.
  FUSED_ATTN_INLINE Vec<A> chance_of_less(Vec<A> x, Vec<A> a, Vec<A> power) const {
    const Vec<A> product = mills_ratio(a) * power;
    const Vec<A> tail = a >= kCap ? Vec<A>{} : product;
    return x < 0 ? tail : A(1) - tail;
  }

  // Returns exp(-a^2 / 2).
  FUSED_ATTN_INLINE Vec<A> power(Vec<A> a) const {
    const Vec<A> square = a * a;
#if defined(FUSED_ATTN_FMA)
    if constexpr (sizeof(A) == 4) {
      const Vec<A> y = square * A(-0.72134752044448170368);  // max(): subnormals are slow
      return exp2_normal(max<A>(broadcast<A>(-126), y));
    }
#endif
    return exp_nonpositive<A>(square * A(-0.5), unit_);
  }

  // Returns Phi(-a) exp(a^2 / 2) for 0 <= a < kCap. Evaluates a minimax polynomial in (a - 3) / (a
  // + 3), with relative error 3.7e-8, and multiplies it by 1 / (a + 3).
  static FUSED_ATTN_INLINE Vec<float> mills_ratio(Vec<float> a) {
    constexpr float kPoly[] = {
        0.7290836572647095f,    -0.5093321800231934f,    0.230019211769104f,
        -0.047257691621780396f, -0.010479266755282879f,  0.006931914947926998f,
        0.001077951630577445f,  -0.0009150949190370739f, -0.0002745864912867546f};
    constexpr int kDegree = sizeof(kPoly) / sizeof(kPoly[0]) - 1;
    const Vec<float> inverse = reciprocal<float>(a + 3.f), t = (a - 3.f) * inverse;
    Vec<float> p = broadcast<float>(kPoly[kDegree]);
    for (int i = kDegree - 1; i >= 0; --i) p = p * t + kPoly[i];
    return p * inverse;
  }

  // Scalar code, because the speed of float64 does not matter.
  static inline Vec<double> mills_ratio(Vec<double> a) {
    for (int l = 0; l < kLanes<double>; ++l) {
      a[l] = 0.5 * __builtin_erfc(a[l] * 0.70710678118654752440) * __builtin_exp(0.5 * a[l] * a[l]);
    }
    return a;
  }

  const ExpUnit<A> unit_{1.0};
};

// tanh approximation of GELU: x * sigmoid(2 u(x)) with u(x) = sqrt(2 / pi) (x + 0.044715 x^3).
template <class A>
class GeluTanh {
 public:
  FUSED_ATTN_INLINE Vec<A> value(Vec<A> x) const {
    Vec<A> other;
    return x * sigmoid(within(x), &other);
  }

  FUSED_ATTN_INLINE Vec<A> slope(Vec<A> x) const {
    const Vec<A> inner = within(x);
    Vec<A> other;
    const Vec<A> share = sigmoid(inner, &other);
    const Vec<A> steepness = (inner * inner) * (A(3) * kCubic) + kLinear;
    return share + (inner * share) * (other * steepness);
  }

 private:
  static constexpr A kLinear = A(1.59576912160573071176);  // 2 sqrt(2 / pi)
  static constexpr A kCubic = kLinear * A(0.044715);

  // Clamps x to [-22, 22]. Beyond, the sigmoid is exactly 0 or 1, also in double.
  static FUSED_ATTN_INLINE Vec<A> within(Vec<A> x) {
    const Vec<A> capped = x > A(22) ? broadcast<A>(22) : x;
    return capped < A(-22) ? broadcast<A>(-22) : capped;  // keeps NaN
  }

  // Returns the sigmoid of 2 u(x), and stores 1 minus it in *other without cancellation.
  FUSED_ATTN_INLINE Vec<A> sigmoid(Vec<A> x, Vec<A>* other) const {
    const Vec<A> u = ((x * x) * kCubic + kLinear) * x;
    const Vec<A> power = exp_nonpositive<A>(u < 0 ? u : -u, unit_);
    const Vec<A> larger = reciprocal<A>(power + A(1)), smaller = power * larger;
    *other = u < 0 ? larger : smaller;
    return u < 0 ? smaller : larger;
  }

  const ExpUnit<A> unit_{1.0};
};

template <class A>
struct Relu {
  FUSED_ATTN_INLINE Vec<A> value(Vec<A> x) const { return x <= A(0) ? Vec<A>{} : x; }  // keeps NaN
};

template <class A>
struct Identity {
  FUSED_ATTN_INLINE Vec<A> value(Vec<A> x) const { return x; }
  FUSED_ATTN_INLINE Vec<A> slope(Vec<A>) const { return broadcast<A>(1); }
};

}  // namespace
}  // namespace fused_attn
