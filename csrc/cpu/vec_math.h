// exp, expm1-based tanh on vectors: one polynomial each for float and double.
#pragma once

#include "cpu/convert.h"

namespace fused_attn {
namespace {

// expm1(r) = r + r^2 p(r) on |r| <= ln(2) / 2; p interpolates at Chebyshev nodes.
template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  // Relative error of exp: 1.0e-8.
  static constexpr float kPoly[] = {0.5f, 0.16666576989698776f, 0.041666554617204574f,
                                    0.0083631790527225774f, 0.0013926183587713495f};
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kLn2Hi = 0.693145751953125f, kLn2Lo = 1.4286068203094172e-6f;
  static constexpr float kRound = 12582912.0f;     // 1.5 * 2^23: x + kRound rounds x to an integer
  static constexpr float kUnderflow = -87.33654f;  // below it the result would be subnormal: 0
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
  static constexpr double kUnderflow = -708.39641853226408;
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
inline ReducedExp<T> reduced_exp(Vec<T> x) {
  using C = ExpConstants<T>;
  using VecU = Vec<typename ExpConstants<T>::Bits>;
  const Vec<T> shifted = x * C::kLog2E + C::kRound;
  const Vec<T> n = shifted - C::kRound;
  Vec<T> r = x - n * C::kLn2Hi;
  r = r - n * C::kLn2Lo;
  constexpr int kDegree = sizeof(C::kPoly) / sizeof(C::kPoly[0]) - 1;
  Vec<T> p = broadcast<T>(C::kPoly[kDegree]);
  for (int i = kDegree - 1; i >= 0; --i) p = p * r + C::kPoly[i];
  const VecU power = ((VecU)shifted << C::kMantissaBits) + C::kOne;
  return {(Vec<T>)power, (r * r) * p + r};
}

// For x <= 0 (a little more does no harm) or NaN; what would be subnormal is 0.
template <class T>
inline Vec<T> exp_nonpositive(Vec<T> x) {
  const ReducedExp<T> e = reduced_exp<T>(x);
  const Vec<T> value = e.power * e.expm1 + e.power;
  return x < ExpConstants<T>::kUnderflow ? Vec<T>{} : value;
}

// tanh(x) = t / (t + 2) with t = expm1(2x), which keeps the relative precision near 0.
template <class T>
inline Vec<T> tanh(Vec<T> x) {
  constexpr T kOneFrom = sizeof(T) == 4 ? T(10) : T(20);  // tanh is 1 there in this precision
  const Vec<T> magnitude = x < 0 ? -x : x;
  const Vec<T> capped = magnitude > kOneFrom ? broadcast<T>(kOneFrom) : magnitude;  // NaN stays
  const ReducedExp<T> e = reduced_exp<T>(capped + capped);
  const Vec<T> t = e.power * e.expm1 + (e.power - T(1));
  const Vec<T> value = t / (t + T(2));
  return x < 0 ? -value : value;
}

// The type that a few long sums are taken in.
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

// maximum + log(sum), and what its rounding loses.
inline void log_sum_exp(float maximum, float sum, float* high, float* low) {
  const double whole = maximum + __builtin_log(static_cast<double>(sum));
  *high = static_cast<float>(whole);
  *low = static_cast<float>(whole - static_cast<double>(*high));
}

inline void log_sum_exp(double maximum, double sum, double* high, double* low) {
  const long double whole = maximum + __builtin_logl(static_cast<long double>(sum));
  *high = static_cast<double>(whole);
  *low = static_cast<double>(whole - static_cast<long double>(*high));
}

}  // namespace
}  // namespace fused_attn
