// Storage types and their conversion to and from the accumulator type.
#pragma once

#include "cpu/simd/simd.h"

namespace fused_attn {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Accumulator type of a storage type: double for double, float for all others.
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

template <class T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<Half> = true;
template <class T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast requires types of equal size");
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
#elif defined(FUSED_ATTN_NEON)
  return static_cast<float>(bit_cast<__fp16>(x.bits));
#else
  // Moves exponent and mantissa into place and corrects the exponent bias by a multiplication,
  // which also handles subnormals. Infinity and NaN then get the largest exponent.
  const uint32_t magnitude = uint32_t{x.bits & 0x7FFFu} << 13;
  float value = bit_cast<float>(magnitude) * 0x1p112f;
  if ((x.bits & 0x7C00u) == 0x7C00u) value = bit_cast<float>(magnitude | 0x7F800000u);
  return bit_cast<float>(bit_cast<uint32_t>(value) | uint32_t{x.bits & 0x8000u} << 16);
#endif
}

inline void from_acc(float x, float* out) { *out = x; }
inline void from_acc(double x, double* out) { *out = x; }

// Rounds to nearest, ties to even. NaN stays NaN.
inline void from_acc(float x, BFloat16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(x != x ? 0x7FC0u : rounded);
}

inline void from_acc(float x, Half* out) {
#if defined(__F16C__)
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(FUSED_ATTN_NEON)
  out->bits = bit_cast<uint16_t>(static_cast<__fp16>(x));
#else
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // would round to 65536 or more, so it becomes infinity
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds at its last bit
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(half | sign);
#endif
}

// Loads kLanes<Acc<T>> elements as the accumulator type.
template <class T>
inline Vec<Acc<T>> load_as(const T* src) {
  Vec<Acc<T>> v;
  for (int i = 0; i < kLanes<Acc<T>>; ++i) v[i] = to_acc(src[i]);
  return v;
}
template <>
inline Vec<float> load_as<float>(const float* src) {
  return load(src);
}
template <>
inline Vec<double> load_as<double>(const double* src) {
  return load(src);
}

template <class T>
inline void store_as(Vec<Acc<T>> v, T* dst) {
  for (int i = 0; i < kLanes<Acc<T>>; ++i) from_acc(v[i], &dst[i]);
}
template <>
inline void store_as<float>(Vec<float> v, float* dst) {
  store(dst, v);
}
template <>
inline void store_as<double>(Vec<double> v, double* dst) {
  store(dst, v);
}

typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

// Returns words whose upper halves are v rounded to bfloat16. NaN stays NaN.
inline Vec32 rounded_to_bfloat16(Vec<float> v) {
  const Vec32 bits = (Vec32)v;
  return v != v ? Vec32{} + 0x7FC00000u : bits + 0x7FFFu + (bits >> 16 & 1u);
}

#if defined(__AVX512F__)
// Uses intrinsics, because the compiler's conversions take twice as many instructions.
template <>
inline Vec<float> load_as<BFloat16>(const BFloat16* src) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)src));
  return (Vec<float>)_mm512_slli_epi32(bits, 16);
}
template <>
inline void store_as<BFloat16>(Vec<float> v, BFloat16* dst) {
  const __m512i high = _mm512_srli_epi32((__m512i)rounded_to_bfloat16(v), 16);
  _mm256_storeu_si256((__m256i*)dst, _mm512_cvtepi32_epi16(high));
}
#elif defined(__AVX2__)
template <>
inline Vec<float> load_as<BFloat16>(const BFloat16* src) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)src));
  return (Vec<float>)_mm256_slli_epi32(bits, 16);
}
template <>
inline void store_as<BFloat16>(Vec<float> v, BFloat16* dst) {
  const __m256i high = _mm256_srli_epi32((__m256i)rounded_to_bfloat16(v), 16);
  const __m128i upper = _mm256_extracti128_si256(high, 1);
  _mm_storeu_si128((__m128i*)dst, _mm_packus_epi32(_mm256_castsi256_si128(high), upper));
}
#else
template <>
inline Vec<float> load_as<BFloat16>(const BFloat16* src) {
  Shorts bits;
  memcpy(&bits, src, sizeof(bits));
  return (Vec<float>)(__builtin_convertvector(bits, Vec32) << 16);
}
template <>
inline void store_as<BFloat16>(Vec<float> v, BFloat16* dst) {
  const Shorts high = __builtin_convertvector(rounded_to_bfloat16(v) >> 16, Shorts);
  memcpy(dst, &high, sizeof(high));
}
#endif

#if defined(__AVX512F__)
template <>
inline Vec<float> load_as<Half>(const Half* src) {
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)src));
}
template <>
inline void store_as<Half>(Vec<float> v, Half* dst) {
  _mm256_storeu_si256((__m256i*)dst, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
template <>
inline Vec<float> load_as<Half>(const Half* src) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)src));
}
template <>
inline void store_as<Half>(Vec<float> v, Half* dst) {
  _mm_storeu_si128((__m128i*)dst, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(FUSED_ATTN_NEON)
template <>
inline Vec<float> load_as<Half>(const Half* src) {
  return (Vec<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&src->bits)));
}
template <>
inline void store_as<Half>(Vec<float> v, Half* dst) {
  vst1_u16(&dst->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
#endif

template <class T>
inline void load_row(const T* src, int64_t n, Acc<T>* dst) {
  constexpr int64_t kLane = kLanes<Acc<T>>;
  int64_t i = 0;
  for (; i + kLane <= n; i += kLane) store(dst + i, load_as<T>(src + i));
  for (; i < n; ++i) dst[i] = to_acc(src[i]);
}

template <class T>
inline void store_row(const Acc<T>* src, int64_t n, T* dst) {
  constexpr int64_t kLane = kLanes<Acc<T>>;
  int64_t i = 0;
  for (; i + kLane <= n; i += kLane) store_as<T>(load(src + i), dst + i);
  for (; i < n; ++i) from_acc(src[i], &dst[i]);
}

#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
// vcvtne2ps2bf16 takes a fifth of the instructions, but flushes subnormals to 0. Vectors with
// subnormals therefore take the general path.
template <>
inline void store_row<BFloat16>(const float* src, int64_t n, BFloat16* dst) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512 a = _mm512_loadu_ps(src + i), b = _mm512_loadu_ps(src + i + 16);
    constexpr int kSubnormal = 0x20;
    if (__builtin_expect(!_kortestz_mask16_u8(_mm512_fpclass_ps_mask(a, kSubnormal),
                                              _mm512_fpclass_ps_mask(b, kSubnormal)),
                         0)) {
      store_as<BFloat16>((Vec<float>)a, dst + i);
      store_as<BFloat16>((Vec<float>)b, dst + i + 16);
      continue;
    }
    _mm512_storeu_si512(dst + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  for (; i + 16 <= n; i += 16) store_as<BFloat16>(load(src + i), dst + i);
  for (; i < n; ++i) from_acc(src[i], &dst[i]);
}
#endif

// Residuals of rounding to 16 bits are differences of float32 bit patterns
// (AttentionParams::out_residual).

typedef int16_t Residuals __attribute__((vector_size(kVectorBytes / 2)));

// Stores the rounding residuals of a row of n elements. `rounded` is the row after rounding, and
// must already be written in full. Residuals saturate at 16 bits.
template <class T>
inline void store_residual_row(const float* src, const T* rounded, int64_t n, int16_t* dst) {
  constexpr int32_t kMost = 0x7FFF;
  int64_t i = 0;
  for (; i + kLanes<float> <= n; i += kLanes<float>) {
    Vec<int32_t> residual = (Vec<int32_t>)load(src + i) - (Vec<int32_t>)load_as<T>(rounded + i);
    residual = residual > kMost ? Vec<int32_t>{} + kMost : residual;
    residual = residual < -kMost ? Vec<int32_t>{} - kMost : residual;
    const Residuals residuals = __builtin_convertvector(residual, Residuals);
    memcpy(dst + i, &residuals, sizeof(residuals));
  }
  for (; i < n; ++i) {
    const int32_t residual = bit_cast<int32_t>(src[i]) - bit_cast<int32_t>(to_acc(rounded[i]));
    dst[i] = static_cast<int16_t>(residual > kMost ? kMost : residual < -kMost ? -kMost : residual);
  }
}

// Returns the dot product of the rounding residuals of one row and the elements of another row.
template <class T>
inline float dot_residual_row(const T* rounded, const int16_t* residual, const T* other,
                              int64_t n) {
  Vec<float> sum{};
  int64_t i = 0;
  for (; i + kLanes<float> <= n; i += kLanes<float>) {
    Residuals residuals;
    memcpy(&residuals, residual + i, sizeof(residuals));
    const Vec<float> x = load_as<T>(rounded + i);
    const Vec<int32_t> unrounded =
        (Vec<int32_t>)x + __builtin_convertvector(residuals, Vec<int32_t>);
    sum += ((Vec<float>)unrounded - x) * load_as<T>(other + i);
  }
  float result = horizontal_sum<float>(sum);
  for (; i < n; ++i) {
    const float x = to_acc(rounded[i]);
    result += (bit_cast<float>(bit_cast<int32_t>(x) + residual[i]) - x) * to_acc(other[i]);
  }
  return result;
}

}  // namespace
}  // namespace fused_attn
