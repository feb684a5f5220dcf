// Vectors of one instruction set, in GCC's vector extensions: arithmetic, comparisons and selects
// are operators, so a kernel is written once for float and double and every width.
//
// kernels.cpp is compiled once an instruction set. All is in an unnamed namespace: an inline
// function with external linkage, compiled here for AVX-512, could be the copy that the linker
// keeps for an older CPU.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fused_attn {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kMicroRows = 8;  // x 2 vectors = 16 accumulators of 32 registers; 16 rows spill
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kMicroRows = 6;  // x 2 vectors = 12 accumulators of 16 registers
#else
constexpr int kVectorBytes = 16;
constexpr int kMicroRows = 4;  // no fused multiply-add: products need registers too
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// The integer as wide as T: the type of comparison results and of positions.
template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class T>
using Int = typename IntOf<T>::type;

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <class T>
inline void store(T* p, Vec<T> v) {
  memcpy(p, &v, sizeof(v));
}

template <class T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // x - 0 is x, also for -0 and NaN, and needs no instruction
}

template <class T>
inline Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// a * b + c rounded as the vector products of this instruction set round it: once where it has
// fused multiply-add. (Left to itself, the compiler may vectorise a scalar sum's products apart.)
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline double multiply_add(double a, double b, double c) {
#if defined(__FMA__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Any lane of a comparison is true.
template <class V>
inline bool any(V mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int64_t words[kVectorBytes / 8];
  memcpy(words, &mask, sizeof(mask));
  return (words[0] | words[1]) != 0;
#endif
}

template <class T>
inline T horizontal_sum(Vec<T> v) {
  T sum = v[0];
  for (int i = 1; i < kLanes<T>; ++i) sum += v[i];
  return sum;
}

}  // namespace
}  // namespace fused_attn
