// Vectorized exp2, exp and tanh, and log-sum-exp.
#pragma once

#include "cpu/simd/convert.h"

namespace fused_attn {
namespace {

// Constants for expm1(r) = r + r^2 p(r) on |r| <= ln(2) / 2. The polynomial p interpolates at
// Chebyshev nodes.
template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  // Relative error of exp: 1.0e-8.
  static constexpr float kPoly[] = {0.5f, 0.16666576989698776f, 0.041666554617204574f,
                                    0.0083631790527225774f, 0.0013926183587713495f};
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kLn2Hi = 0.693145751953125f, kLn2Lo = 1.4286068203094172e-6f;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23; adding it rounds to an integer
  static constexpr float kLn2 = 0.6931471805599453f;
  static constexpr float kUnderflow = -126.0f;  // 2^x is subnormal below this
  static constexpr int kMantissaBits = 23;
  using Bits = uint32_t;
  static constexpr Bits kOne = 0x3F800000;
};

template <>
struct ExpConstants<double> {
  // Relative error of exp: 2.3e-19.
  static constexpr double kPoly[] = {0.5,
                                     0.16666666666666670991,
                                     0.041666666666666669755,
                                     0.0083333333333261351258,
                                     0.0013888888888883748305,
                                     0.00019841269874820625271,
                                     0.000024801587325547741216,
                                     2.755725540020642443e-6,
                                     2.7557273643110295328e-7,
                                     2.5105217004720745164e-8,
                                     2.0914686968086877233e-9};
  static constexpr double kLog2E = 1.4426950408889634074;
  static constexpr double kLn2Hi = 0.69314718036912381649, kLn2Lo = 1.9082149292705877e-10;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2 = 0.69314718055994530942;
  static constexpr double kUnderflow = -1022.0;
  static constexpr int kMantissaBits = 52;
  using Bits = uint64_t;
  static constexpr Bits kOne = 0x3FF0000000000000;
};

template <class T>
struct ReducedExp {
  Vec<T> power;  // 2^n
  Vec<T> expm1;  // expm1(r), where x = n ln(2) + r
};

template <class T>
FUSED_ATTN_INLINE ReducedExp<T> expm1_near_0(Vec<T> r, Vec<typename ExpConstants<T>::Bits> power) {
  using C = ExpConstants<T>;
  constexpr int kDegree = sizeof(C::kPoly) / sizeof(C::kPoly[0]) - 1;
  Vec<T> p = broadcast<T>(C::kPoly[kDegree]);
  for (int i = kDegree - 1; i >= 0; --i) p = p * r + C::kPoly[i];
  return {(Vec<T>)power, (r * r) * p + r};
}

template <class T>
inline ReducedExp<T> reduced_exp(Vec<T> x) {
  using C = ExpConstants<T>;
  using VecU = Vec<typename C::Bits>;
  const Vec<T> shifted = x * C::kLog2E + C::kRound;
  const Vec<T> n = shifted - C::kRound;
  return expm1_near_0<T>((x - n * C::kLn2Hi) - n * C::kLn2Lo,
                         ((VecU)shifted << C::kMantissaBits) + C::kOne);
}

// Wider type, for accumulating a few long sums.
template <class T>
struct WideOf {
  using type = double;
};
template <>
struct WideOf<double> {
  using type = long double;
};
template <class T>
using Wide = typename WideOf<T>::type;

// Precision of exp, named after the type in which the weights are multiplied.
enum class Precision { kBFloat16, kHalf, kFull };

// Minimax polynomials (relative error) for 2^r that are 1 at 0. kPoly holds the coefficients of r,
// r^2, ...
template <Precision kPrecision>
struct Exp2Poly;  // on [-0.5, 0.5]
template <>
struct Exp2Poly<Precision::kBFloat16> {  // error 1.01e-4, a twentieth of bfloat16's rounding error
  static constexpr float kPoly[] = {0.6932829022407532f, 0.24221095442771912f,
                                    0.05500893294811249f};
};
template <>
struct Exp2Poly<Precision::kFull> {  // error 2.0e-9, or 6.4e-8 with rounding
  static constexpr float kPoly[] = {0.6931471824645996f,    0.24022647738456726f,
                                    0.055503323674201965f,  0.00961843691766262f,
                                    0.0013398873852565885f, 0.00015353361959569156f};
};
#if defined(__AMX_BF16__)
// The coefficients add up to 1 in float arithmetic, so both ends are exact. Nearly equal scores,
// whose r is near 0 or 1, then have an lse as accurate as in eager attention. The error elsewhere
// is a fifth larger.
template <Precision kPrecision>
struct Exp2FloorPoly;  // on [0, 1]
template <>
struct Exp2FloorPoly<Precision::kBFloat16> {  // error 1.03e-4
  static constexpr float kPoly[] = {0.6954243183135986f, 0.226307675242424f, 0.07826796919107437f};
};
template <>
struct Exp2FloorPoly<Precision::kHalf> {  // error 3.4e-6
  static constexpr float kPoly[] = {0.6930321455001831f, 0.2413797676563263f, 0.05203237012028694f,
                                    0.013555747456848621f};
};
#endif

// Factors from a score to an exponent: `natural` for exp, `high` + `low` for exp2. The latter is
// log2(e) times `natural`, where `low` is the rounding residual of `high`.
template <class A>
struct ExpUnit {
  explicit ExpUnit(double unit) : natural(static_cast<A>(unit)) {
    const Wide<A> whole = static_cast<Wide<A>>(1.442695040888963407359924681001892137L) * unit;
    high = static_cast<A>(whole);
    low = static_cast<A>(whole - static_cast<Wide<A>>(high));
  }
  ExpUnit() = default;
  A natural, high, low;
};

#if defined(__AMX_BF16__)
// Returns 2^y with the error of Exp2FloorPoly. y must be NaN or at most slightly positive. If 2^y
// is subnormal, any value in [0, 2^y] is correct, because MMAs flush subnormal operands to 0.
template <Precision kPrecision>
FUSED_ATTN_INLINE Vec<float> exp2_rough(Vec<float> y) {
  // VREDUCEPS returns y - floor(y), and VSCALEFPS scales by 2^floor(y). Both handle infinities.
  const Vec<float> r = (Vec<float>)_mm512_reduce_ps((__m512)y, 0x09);
  constexpr auto& kPoly = Exp2FloorPoly<kPrecision>::kPoly;
  constexpr int kDegree = sizeof(kPoly) / sizeof(float);
  Vec<float> p = broadcast<float>(kPoly[kDegree - 1]);
  for (int i = kDegree - 2; i >= 0; --i) p = p * r + kPoly[i];
  return (Vec<float>)_mm512_scalef_ps((__m512)(p * r + 1.f), (__m512)y);
}
#endif

#if defined(FUSED_ATTN_FMA)
// Replaces each x by exp(x * unit), with the error of Exp2Poly. Adding kRound rounds the exponent
// to the integer n, whose bits are then added to the exponent field of 2^(x * unit - n). On AMD Zen
// 4 and 5, this is faster than VREDUCEPS and VSCALEFPS, which take two multiply-adds each.
//
// Each step is computed for all vectors before the next. A vector's steps depend on each other, and
// the processor looks only about a hundred instructions ahead for independent ones.
template <Precision kPrecision, int kCount>
FUSED_ATTN_INLINE void exp2_nearest(Vec<float> (&x)[kCount], const ExpUnit<float>& unit) {
  using C = ExpConstants<float>;
  constexpr auto& kPoly = Exp2Poly<kPrecision>::kPoly;
  constexpr int kDegree = sizeof(kPoly) / sizeof(float);
  constexpr float kLowest = C::kRound + C::kUnderflow;
  const Vec<float> high = broadcast<float>(unit.high), low = broadcast<float>(unit.low);
  const Vec<float> round = broadcast<float>(C::kRound);
  Vec<float> shifted[kCount], r[kCount], p[kCount];
  for (int i = 0; i < kCount; ++i) shifted[i] = fused_multiply_add<float>(x[i], high, round);
  for (int i = 0; i < kCount; ++i) r[i] = shifted[i] - round;
  for (int i = 0; i < kCount; ++i) r[i] = fused_multiply_add<float>(x[i], high, -r[i]);
  for (int i = 0; kPrecision == Precision::kFull && i < kCount; ++i) r[i] += x[i] * low;
  for (int i = 0; i < kCount; ++i) p[i] = broadcast<float>(kPoly[kDegree - 1]);
  for (int d = kDegree - 2; d >= 0; --d) {
    for (int i = 0; i < kCount; ++i) p[i] = p[i] * r[i] + kPoly[d];
  }
  for (int i = 0; i < kCount; ++i) p[i] = p[i] * r[i] + 1.f;
  for (int i = 0; i < kCount; ++i) {
    const Vec32 result = (Vec32)p[i] + ((Vec32)shifted[i] << C::kMantissaBits);
    // The result is 0 if it would be subnormal, and NaN if x is. The integer addition above could
    // turn NaN into any number.
    const Vec<float> otherwise = max<float>(Vec<float>{}, x[i]);
#if defined(__AVX512F__)
    const __mmask16 normal =
        _mm512_cmp_ps_mask((__m512)shifted[i], _mm512_set1_ps(kLowest), _CMP_GE_OQ);
    x[i] = (Vec<float>)_mm512_mask_mov_epi32((__m512i)otherwise, normal, (__m512i)result);
#else
    x[i] = shifted[i] >= kLowest ? (Vec<float>)result : otherwise;
#endif
  }
}
#endif

#if defined(FUSED_ATTN_FMA)
// Returns 2^y for -126 <= y <= 126 with the error of Exp2Poly, and any number if y is NaN.
FUSED_ATTN_INLINE Vec<float> exp2_normal(Vec<float> y) {
  using C = ExpConstants<float>;
  constexpr auto& kPoly = Exp2Poly<Precision::kFull>::kPoly;
  constexpr int kDegree = sizeof(kPoly) / sizeof(float);
  const Vec<float> shifted = y + C::kRound, r = y - (shifted - C::kRound);
  Vec<float> p = broadcast<float>(kPoly[kDegree - 1]);
  for (int d = kDegree - 2; d >= 0; --d) p = p * r + kPoly[d];
  return (Vec<float>)((Vec32)(p * r + 1.f) + ((Vec32)shifted << C::kMantissaBits));
}
#endif

// Replaces each x by exp(x * unit). x must be NaN or at most slightly positive.
//
// With kFull, the result is as accurate as x at any magnitude, because x * unit is not rounded. If
// the exact result is subnormal, any number from 0 to the exact result may be returned.
template <class A, Precision kPrecision = Precision::kFull, int kCount>
FUSED_ATTN_INLINE void exp_nonpositive(Vec<A> (&x)[kCount], const ExpUnit<A>& unit) {
#if defined(FUSED_ATTN_FMA)
  if constexpr (sizeof(A) == 4) {
#if defined(__AMX_BF16__)
    if constexpr (kPrecision != Precision::kFull) {
      for (Vec<A>& each : x) each = exp2_rough<kPrecision>(each * unit.high);
    } else {
      exp2_nearest<kPrecision>(x, unit);
    }
#else
    exp2_nearest<kPrecision>(x, unit);
#endif
    return;
  }
#endif
  for (Vec<A>& each : x) {
    using C = ExpConstants<A>;
#if defined(FUSED_ATTN_FMA)
    using VecU = Vec<typename C::Bits>;
    const Vec<A> shifted = each * unit.high + C::kRound;
    const Vec<A> n = shifted - C::kRound;
    const Vec<A> rest = fused_multiply_add<A>(each, broadcast<A>(unit.high), -n) + each * unit.low;
    const ReducedExp<A> e =
        expm1_near_0<A>(rest * C::kLn2, ((VecU)shifted << C::kMantissaBits) + C::kOne);
#else
    const ReducedExp<A> e = reduced_exp<A>(each * unit.natural);
#endif
    each = each * unit.high < C::kUnderflow ? Vec<A>{} : e.power * e.expm1 + e.power;
  }
}

// Returns exp(x * unit) of one vector.
template <class A, Precision kPrecision = Precision::kFull>
FUSED_ATTN_INLINE Vec<A> exp_nonpositive(Vec<A> x, const ExpUnit<A>& unit) {
  Vec<A> one[1] = {x};
  exp_nonpositive<A, kPrecision>(one, unit);
  return one[0];
}

// Returns tanh(x) = t / (t + 2) with t = expm1(2x), which is accurate to a small relative error
// near 0.
template <class T>
inline Vec<T> tanh(Vec<T> x) {
  constexpr T kOneFrom = sizeof(T) == 4 ? T(10) : T(20);  // from here on tanh rounds to 1
  const Vec<T> magnitude = x < 0 ? -x : x;
  const Vec<T> capped = magnitude > kOneFrom ? broadcast<T>(kOneFrom) : magnitude;  // keeps NaN
  const ReducedExp<T> e = reduced_exp<T>(capped + capped);
  const Vec<T> t = e.power * e.expm1 + (e.power - T(1));
  const Vec<T> value = t / (t + T(2));
  return x < 0 ? -value : value;
}

// Computes maximum * unit + log(sum). Stores the rounded value in *high and its rounding residual
// in *residual.
inline void log_sum_exp(float maximum, double unit, float sum, float* high, float* residual) {
  const double scaled = maximum * unit, log = __builtin_log(static_cast<double>(sum));
  *high = static_cast<float>(scaled + log);
  *residual = static_cast<float>((scaled - static_cast<double>(*high)) + log);
}

inline void log_sum_exp(double maximum, double unit, double sum, double* high, double* residual) {
  const long double scaled = static_cast<long double>(maximum) * unit;
  const long double log = __builtin_logl(static_cast<long double>(sum));
  *high = static_cast<double>(scaled + log);
  *residual = static_cast<double>((scaled - static_cast<long double>(*high)) + log);
}

// Converts lse = high + residual to score units. Stores the rounded value in *high_unit, and in
// *lost the factor, minus 1, that corrects exp(score - lse) for the rounding. With a bias of -1e8,
// lse is a multiple of 8, so residual is not small and would be lost if added to high.
template <class A>
inline void in_units(A high, A residual, double unit, A* high_unit, A* lost) {
  *high_unit = static_cast<A>((static_cast<Wide<A>>(high) + residual) / unit);
  const Wide<A> rest =
      (static_cast<Wide<A>>(high) - static_cast<Wide<A>>(*high_unit) * unit) + residual;
  // exp(-rest) - 1. A library call would take a tenth of the time of a backward with 128 keys and
  // head_dim 32.
  const double r = static_cast<double>(rest);
  *lost = static_cast<A>(__builtin_fabs(r) < 0x1p-18 ? r * (r / 2 - 1) : __builtin_expm1(-r));
}

}  // namespace
}  // namespace fused_attn
