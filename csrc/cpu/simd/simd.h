// Vector types and operations of one instruction set, based on GCC's vector extensions. Arithmetic,
// comparisons and selects are operators, so one source serves float, double and every vector width.
//
// The kernel sources are compiled once per instruction set. Everything is in an unnamed namespace.
// If an inline function had external linkage, the linker could use its AVX-512 copy on older CPUs.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(FUSED_ATTN_NEON)
#include <arm_neon.h>
#endif

// Defined if there are dot products of bfloat16 pairs with float32 accumulation.
#if defined(__AVX512BF16__) || defined(FUSED_ATTN_NEON_BF16)
#define FUSED_ATTN_BF16_PAIRS
#endif

// Forces inlining in inner loops and between MMAs, where a call would spill all vector registers.
#define FUSED_ATTN_INLINE inline __attribute__((always_inline))
#define FUSED_ATTN_LAMBDA __attribute__((always_inline))

namespace fused_attn {
namespace {

// Default callback of matmuls and packing functions; does nothing.
struct Nothing {
  void operator()() const {}
};

// Rows of C per step in micro_gemm.h: kMicroRows for a single sum, kTotalRows for totals of partial
// sums.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kMicroRows = 8, kTotalRows = 8;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kMicroRows = 6, kTotalRows = 4;  // 6 x 2 sums in 16 registers
#elif defined(FUSED_ATTN_NEON)
constexpr int kVectorBytes = 16;
constexpr int kMicroRows = 8, kTotalRows = 8;  // 8 x 2 sums; with 12 rows, GCC spills four
#else
constexpr int kVectorBytes = 16;
// Without fused multiply-add, the products need registers too.
constexpr int kMicroRows = 4, kTotalRows = 4;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// Signed integer type as wide as T, for comparison results and positions.
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

using Vec32 = Vec<uint32_t>;

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

// Stores a vector with a non-temporal store, which does not read the cache line first. p must be
// aligned to kVectorBytes. Another thread may read the data only after stream_fence().
template <class T>
inline void stream(T* p, Vec<T> v) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256((__m256i*)p, (__m256i)v);
#else
  store(p, v);
#endif
}

inline void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <class T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // x - 0 is x, also for -0 and NaN, and compiles to nothing
}

// Returns the larger of a and b in each lane, or b if either is NaN.
template <class T>
inline Vec<T> max(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
  }
#endif
  return a > b ? a : b;
}

// Returns 1 / x with an error of about one ulp, for x far from 0 and infinity. Avoids a division,
// which takes 16 cycles.
template <class T>
FUSED_ATTN_INLINE Vec<T> reciprocal(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    // The error is 2^-14, and a Newton step squares it.
    const Vec<T> rough = (Vec<T>)_mm512_rcp14_ps((__m512)x);
    return rough + rough * (T(1) - x * rough);
  }
#endif
  return T(1) / x;
}

#if defined(__FMA__) || defined(FUSED_ATTN_NEON)
#define FUSED_ATTN_FMA
// Returns a * b + c, rounded once. The compiler does not fuse a product that has another use.
template <class T>
inline Vec<T> fused_multiply_add(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  } else {
    return (Vec<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  }
#elif defined(FUSED_ATTN_NEON)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  } else {
    return (Vec<T>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  }
#else
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  } else {
    return (Vec<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  }
#endif
}
#endif

// Returns true if any lane of a comparison is true.
template <class V>
inline bool any(V mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(FUSED_ATTN_NEON)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  int64_t words[kVectorBytes / 8];
  memcpy(words, &mask, sizeof(mask));
  return (words[0] | words[1]) != 0;
#endif
}

// Returns a bit mask in which bit l is set if lane l of a comparison is true.
template <class V>
inline uint32_t to_bits(V mask) {
  constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(mask[0]));
#if defined(__AVX512DQ__)
  if constexpr (kCount == 16) return _mm512_movepi32_mask((__m512i)mask);
  if constexpr (kCount == 8) return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  if constexpr (kCount == 8) return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
  if constexpr (kCount == 4) return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)mask));
#elif defined(FUSED_ATTN_NEON)
  if constexpr (kCount == 4) return vaddvq_u32((uint32x4_t)mask & uint32x4_t{1, 2, 4, 8});
  if constexpr (kCount == 2) {
    return static_cast<uint32_t>(vaddvq_u64((uint64x2_t)mask & uint64x2_t{1, 2}));
  }
#endif
  uint32_t bits = 0;
  for (int l = 0; l < kCount; ++l) bits |= static_cast<uint32_t>(mask[l] != 0) << l;
  return bits;
}

// Returns a vector with lane l of a if bit l is set, and of b otherwise.
template <class T>
inline Vec<T> where(uint32_t bits, Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_mask_blend_ps(static_cast<__mmask16>(bits), (__m512)b, (__m512)a);
  } else {
    return (Vec<T>)_mm512_mask_blend_pd(static_cast<__mmask8>(bits), (__m512d)b, (__m512d)a);
  }
#else
  Vec<Int<T> > lane_bit;
  for (int l = 0; l < kLanes<T>; ++l) lane_bit[l] = Int<T>{1} << l;
  return ((lane_bit & static_cast<Int<T> >(bits)) != 0) ? a : b;
#endif
}

// Returns the 64-bit products of the low halves of the 64-bit lanes.
inline Vec<uint64_t> multiply_wide(Vec<uint64_t> a, Vec<uint64_t> b) {
#if defined(__AVX512F__)
  return (Vec<uint64_t>)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Vec<uint64_t>)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(FUSED_ATTN_NEON)
  return (Vec<uint64_t>)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// Returns a ^ b ^ c. AVX-512 has one instruction for it (vpternlog), which the compiler does not
// emit. It reduces the time of Philox for 128 numbers from 198 to 177 cycles.
inline Vec<uint64_t> exclusive_or(Vec<uint64_t> a, Vec<uint64_t> b, Vec<uint64_t> c) {
#if defined(__AVX512F__)
  return (Vec<uint64_t>)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// Returns the sum of all lanes. Adds the upper half to the lower half repeatedly.
template <class T>
inline T horizontal_sum(Vec<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)v);
#endif
  T part[kLanes<T>];
  store(part, v);
  for (int half = kLanes<T> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

}  // namespace
}  // namespace fused_attn
