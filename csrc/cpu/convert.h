// Storage types and their conversion, a row at a time, to the type that is computed in.
#pragma once

#include "cpu/simd.h"

namespace fused_attn {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What a storage type is computed in.
template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_acc(float x) { return x; }
inline double to_acc(double x) { return x; }
inline float to_acc(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }

inline float to_acc(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // Exponent and mantissa moved into place and the bias corrected by a product, which handles
  // subnormals too; infinity and NaN get the largest exponent back.
  const uint32_t magnitude = uint32_t{x.bits & 0x7FFFu} << 13;
  float value = bit_cast<float>(magnitude) * 0x1p112f;
  if ((x.bits & 0x7C00u) == 0x7C00u) value = bit_cast<float>(magnitude | 0x7F800000u);
  return bit_cast<float>(bit_cast<uint32_t>(value) | uint32_t{x.bits & 0x8000u} << 16);
#endif
}

inline void from_acc(float x, float* out) { *out = x; }
inline void from_acc(double x, double* out) { *out = x; }

// Round to nearest even; a NaN stays one.
inline void from_acc(float x, BFloat16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(x != x ? 0x7FC0u : rounded);
}

inline void from_acc(float x, Half* out) {
#if defined(__F16C__)
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // rounds to 65536 or more
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: the sum with 0.5 rounds at its last bit
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(half | sign);
#endif
}

template <class T>
inline void load_row(const T* src, int64_t n, Acc<T>* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = to_acc(src[i]);
}

template <class T>
inline void store_row(const Acc<T>* src, int64_t n, T* dst) {
  for (int64_t i = 0; i < n; ++i) from_acc(src[i], &dst[i]);
}

#if defined(__F16C__)
template <>
inline void load_row<Half>(const Half* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + i))));
  }
  for (; i < n; ++i) dst[i] = to_acc(src[i]);
}

template <>
inline void store_row<Half>(const float* src, int64_t n, Half* dst) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i*)(dst + i), half);
  }
  for (; i < n; ++i) from_acc(src[i], &dst[i]);
}
#endif

}  // namespace
}  // namespace fused_attn
