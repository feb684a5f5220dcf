// AVX-512 and AVX-512 BF16, emulated to test their kernels on CPUs that have only AVX2 (`make
// x86-test`).
//
// CMakeLists.txt includes this file before each source of the kernels. It defines the macros that
// the kernels test and the intrinsics that they use. The intrinsics are in the namespace of the
// kernels, where they hide the compiler's. If a kernel uses another one, the compiler reports
// "target specific option mismatch": add it here.
//
// Results agree with Intel's manual bit for bit. Where the manual leaves a choice, they have the
// largest error that it permits (rcp14). Misaligned addresses abort. A vector is stored in two AVX2
// registers. Functions that are not a single operator compute lane by lane.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FUSED_ATTN_EMULATED
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#if !defined(FUSED_ATTN_EMULATES_avx512)
#define __AVX512BF16__ 1
#if !defined(FUSED_ATTN_EMULATES_avx512_bf16)
#define __AMX_BF16__ 1
#if !defined(FUSED_ATTN_EMULATES_amx)
#define FUSED_ATTN_AMX_FP16
#endif
#endif
#endif

// Each source uses only some of the functions. They are not `inline`, because GCC would then expand
// the long ones, which multiplies the code size.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"

namespace fused_attn {
namespace {

// ---- lanes --------------------------------------------------------------------------------------

template <class T>
struct EmulatedVector {
  typedef T type __attribute__((vector_size(64)));
};
template <class T>
using Of = typename EmulatedVector<T>::type;

// Returns element l of an array, which may be misaligned.
template <class T>
T element(const void* p, int64_t l) {
  T x;
  memcpy(&x, static_cast<const T*>(p) + l, sizeof(x));
  return x;
}

// Returns lane l of a vector, interpreted as a vector of T.
template <class T, class V>
T at(const V& v, int64_t l) {
  return element<T>(&v, l);
}

// Returns the vector whose lane l is f(l).
template <class V, class T, class F>
V lanes(const F& f) {
  T lane[sizeof(V) / sizeof(T)];
  for (int l = 0; l < static_cast<int>(sizeof(V) / sizeof(T)); ++l) lane[l] = f(l);
  V v;
  memcpy(&v, lane, sizeof(v));
  return v;
}

// Returns the mask whose bit l is f(l).
template <class Mask, class F>
Mask bits(const F& f) {
  uint64_t mask = 0;
  for (int l = 0; l < static_cast<int>(8 * sizeof(Mask)); ++l) mask |= uint64_t{f(l)} << l;
  return static_cast<Mask>(mask);
}

bool bit(uint64_t mask, int l) { return (mask >> l & 1) != 0; }

// Returns lane l of a if bit l is set, and of b otherwise.
template <class T, class V>
V blend(uint64_t mask, V a, V b) {
  return lanes<V, T>([&](int l) { return bit(mask, l) ? at<T>(a, l) : at<T>(b, l); });
}

template <class To, class From>
To reinterpret(From from) {
  return at<To>(from, 0);
}

// ---- loads and stores ---------------------------------------------------------------------------

__m512i _mm512_loadu_si512(const void* p) { return element<__m512i>(p, 0); }
__m512 _mm512_loadu_ps(const void* p) { return element<__m512>(p, 0); }
void _mm512_storeu_si512(void* p, __m512i v) { memcpy(p, &v, sizeof(v)); }
void _mm512_storeu_ps(void* p, __m512 v) { memcpy(p, &v, sizeof(v)); }

template <class P>
P* aligned(P* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) abort();
  return p;
}
__m512i _mm512_load_si512(const void* p) { return _mm512_loadu_si512(aligned(p)); }
__m512 _mm512_load_ps(const void* p) { return _mm512_loadu_ps(aligned(p)); }
void _mm512_store_si512(void* p, __m512i v) { _mm512_storeu_si512(aligned(p), v); }
void _mm512_store_ps(void* p, __m512 v) { _mm512_storeu_ps(aligned(p), v); }
void _mm512_stream_si512(__m512i* p, __m512i v) { _mm512_storeu_si512(aligned(p), v); }

// Reads only the lanes whose bit is set, and returns 0 in the others.
template <class V, class T>
V load_lanes(uint64_t mask, const void* p) {
  return lanes<V, T>([&](int l) { return bit(mask, l) ? element<T>(p, l) : T{}; });
}
__m512 _mm512_maskz_loadu_ps(__mmask16 k, const void* p) { return load_lanes<__m512, float>(k, p); }
__m512i _mm512_maskz_loadu_epi16(__mmask32 k, const void* p) {
  return load_lanes<__m512i, uint16_t>(k, p);
}
__m512i _mm512_maskz_loadu_epi8(__mmask64 k, const void* p) {
  return load_lanes<__m512i, uint8_t>(k, p);
}
__m256i _mm256_maskz_loadu_epi16(__mmask16 k, const void* p) {
  return load_lanes<__m256i, uint16_t>(k, p);
}
void _mm512_mask_storeu_ps(void* p, __mmask16 k, __m512 v) {
  for (int l = 0; l < 16; ++l) {
    const float x = v[l];
    if (bit(k, l)) memcpy(static_cast<float*>(p) + l, &x, sizeof(x));
  }
}
__m512 _mm512_i32gather_ps(__m512i index, const void* p, int scale) {
  return lanes<__m512, float>([&](int l) {
    return element<float>(static_cast<const char*>(p) + int64_t{scale} * at<int32_t>(index, l), 0);
  });
}

// ---- constants, casts and moves of lanes --------------------------------------------------------

__m512 _mm512_castpd_ps(__m512d v) { return (__m512)v; }
__m512d _mm512_castps_pd(__m512 v) { return (__m512d)v; }
__m512i _mm512_castps_si512(__m512 v) { return (__m512i)v; }

__m512i _mm512_setzero_si512() { return __m512i{}; }
__m512 _mm512_set1_ps(float x) { return x - __m512{}; }
__m512i _mm512_set1_epi16(int16_t x) { return (__m512i)(Of<int16_t>{} + x); }
__m512i _mm512_set1_epi32(int32_t x) { return (__m512i)(Of<int32_t>{} + x); }
__m512i _mm512_set4_epi32(int32_t d, int32_t c, int32_t b, int32_t a) {
  const int32_t four[4] = {a, b, c, d};
  return lanes<__m512i, int32_t>([&](int l) { return four[l % 4]; });
}

__m512 _mm512_mask_blend_ps(__mmask16 k, __m512 a, __m512 b) { return blend<float>(k, b, a); }
__m512d _mm512_mask_blend_pd(__mmask8 k, __m512d a, __m512d b) { return blend<double>(k, b, a); }
__m512i _mm512_mask_blend_epi16(__mmask32 k, __m512i a, __m512i b) {
  return blend<int16_t>(k, b, a);
}
__m512i _mm512_mask_mov_epi32(__m512i a, __mmask16 k, __m512i b) { return blend<int32_t>(k, b, a); }
__m512i _mm512_mask_mov_epi64(__m512i a, __mmask8 k, __m512i b) { return blend<int64_t>(k, b, a); }
__m512i _mm512_maskz_set1_epi32(__mmask16 k, int32_t x) {
  return blend<int32_t>(k, _mm512_set1_epi32(x), __m512i{});
}
__m512 _mm512_mask_moveldup_ps(__m512 other, __mmask16 k, __m512 v) {
  return lanes<__m512, float>([&](int l) { return bit(k, l) ? v[l & ~1] : other[l]; });
}

// Interleaves the lower or upper halves of each 128-bit part of a and b.
template <class T, bool kUpper, class V>
V unpack(V a, V b) {
  constexpr int kCount = 16 / sizeof(T);
  return lanes<V, T>([&](int l) {
    const int from = l / kCount * kCount + (kUpper ? kCount / 2 : 0) + l % kCount / 2;
    return l % 2 == 0 ? at<T>(a, from) : at<T>(b, from);
  });
}
__m512 _mm512_unpacklo_ps(__m512 a, __m512 b) { return unpack<float, false>(a, b); }
__m512 _mm512_unpackhi_ps(__m512 a, __m512 b) { return unpack<float, true>(a, b); }
__m512d _mm512_unpacklo_pd(__m512d a, __m512d b) { return unpack<double, false>(a, b); }
__m512d _mm512_unpackhi_pd(__m512d a, __m512d b) { return unpack<double, true>(a, b); }
__m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return unpack<int64_t, false>(a, b); }
__m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return unpack<int64_t, true>(a, b); }

__m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which) {
  return lanes<__m512, float>([&](int l) {
    const int from = (which >> l / 4 * 2 & 3) * 4 + l % 4;
    return l < 8 ? a[from] : b[from];
  });
}
__m512i _mm512_shuffle_epi8(__m512i v, __m512i index) {
  return lanes<__m512i, uint8_t>([&](int l) {
    const uint8_t from = at<uint8_t>(index, l);
    return from >= 0x80 ? uint8_t{0} : at<uint8_t>(v, l / 16 * 16 + from % 16);
  });
}

// Returns the vector whose lane l is lane index[l] of the concatenation of a and b.
template <class T>
__m512i permute(__m512i a, __m512i index, __m512i b) {
  constexpr int kCount = 64 / sizeof(T);
  return lanes<__m512i, T>([&](int l) {
    const T from = at<T>(index, l);
    return at<T>((from & kCount) != 0 ? b : a, from % kCount);
  });
}
__m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return permute<uint16_t>(a, index, b);
}
__m512i _mm512_maskz_permutex2var_epi8(__mmask64 k, __m512i a, __m512i index, __m512i b) {
  return blend<uint8_t>(k, permute<uint8_t>(a, index, b), __m512i{});
}

// ---- integers -----------------------------------------------------------------------------------

__m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
__m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
__m512i _mm512_ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result{};
  for (int row = 0; row < 8; ++row) {  // the bits of `row` are those of a, b and c
    const __m512i match = (bit(row, 2) ? a : ~a) & (bit(row, 1) ? b : ~b) & (bit(row, 0) ? c : ~c);
    if (bit(table, row)) result |= match;
  }
  return result;
}
__m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return (__m512i)((Of<uint16_t>)a + (Of<uint16_t>)b);
}
__m512i _mm512_sub_epi16(__m512i a, __m512i b) {
  return (__m512i)((Of<uint16_t>)a - (Of<uint16_t>)b);
}
__m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return (__m512i)((Of<uint32_t>)a - (Of<uint32_t>)b);
}
__m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  return (__m512i)(((Of<uint64_t>)a & 0xFFFFFFFFu) * ((Of<uint64_t>)b & 0xFFFFFFFFu));
}
__m512i _mm512_slli_epi32(__m512i v, unsigned n) { return (__m512i)((Of<uint32_t>)v << n); }
__m512i _mm512_srli_epi32(__m512i v, unsigned n) { return (__m512i)((Of<uint32_t>)v >> n); }

template <class T>
__m512i larger(__m512i a, __m512i b) {
  return lanes<__m512i, T>([&](int l) {
    const T x = at<T>(a, l), y = at<T>(b, l);
    return x > y ? x : y;
  });
}
__m512i _mm512_max_epu16(__m512i a, __m512i b) { return larger<uint16_t>(a, b); }
__m512i _mm512_max_epu32(__m512i a, __m512i b) { return larger<uint32_t>(a, b); }

__m512i _mm512_cvtepu16_epi32(__m256i v) {
  return lanes<__m512i, uint32_t>([&](int l) { return at<uint16_t>(v, l); });
}
__m256i _mm512_cvtepi32_epi16(__m512i v) {
  return lanes<__m256i, uint16_t>([&](int l) { return at<uint16_t>(v, 2 * l); });
}
__m512i _mm512_packus_epi32(__m512i a, __m512i b) {
  return lanes<__m512i, uint16_t>([&](int l) {
    const int32_t x = at<int32_t>(l % 8 < 4 ? a : b, l / 8 * 4 + l % 4);
    return static_cast<uint16_t>(x < 0 ? 0 : x > 0xFFFF ? 0xFFFF : x);
  });
}

// ---- masks --------------------------------------------------------------------------------------

__mmask8 _mm512_test_epi64_mask(__m512i a, __m512i b) {
  return bits<__mmask8>([&](int l) { return (a[l] & b[l]) != 0; });
}
__mmask8 _mm512_testn_epi64_mask(__m512i a, __m512i b) {
  return bits<__mmask8>([&](int l) { return (a[l] & b[l]) == 0; });
}
__mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  return bits<__mmask16>([&](int l) { return at<int32_t>(a & b, l) != 0; });
}
__mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
  return bits<__mmask64>([&](int l) { return at<int8_t>(a & b, l) != 0; });
}
__mmask16 _mm512_movepi32_mask(__m512i v) {
  return bits<__mmask16>([&](int l) { return at<int32_t>(v, l) < 0; });
}
__mmask8 _mm512_movepi64_mask(__m512i v) {
  return bits<__mmask8>([&](int l) { return v[l] < 0; });
}
__mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
  return bits<__mmask32>([&](int l) { return at<uint16_t>(a, l) == at<uint16_t>(b, l); });
}
__mmask32 _mm512_cmpgt_epu16_mask(__m512i a, __m512i b) {
  return bits<__mmask32>([&](int l) { return at<uint16_t>(a, l) > at<uint16_t>(b, l); });
}
__mmask32 _mm512_cmpge_epu16_mask(__m512i a, __m512i b) {
  return bits<__mmask32>([&](int l) { return at<uint16_t>(a, l) >= at<uint16_t>(b, l); });
}
__mmask16 _mm512_cmpgt_epu32_mask(__m512i a, __m512i b) {
  return bits<__mmask16>([&](int l) { return at<uint32_t>(a, l) > at<uint32_t>(b, l); });
}
__mmask32 _mm512_kunpackw(__mmask32 a, __mmask32 b) { return a << 16 | (b & 0xFFFF); }
unsigned char _kortestz_mask16_u8(__mmask16 a, __mmask16 b) { return (a | b) == 0; }

__mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  if (how == _CMP_GE_OQ) return bits<__mmask16>([&](int l) { return a[l] >= b[l]; });
  if (how == _CMP_GT_OQ) return bits<__mmask16>([&](int l) { return a[l] > b[l]; });
  if (how == _CMP_NLE_UQ) return bits<__mmask16>([&](int l) { return !(a[l] <= b[l]); });
  if (how == _CMP_UNORD_Q) return bits<__mmask16>([&](int l) { return isunordered(a[l], b[l]); });
  abort();
}
__mmask16 _mm512_fpclass_ps_mask(__m512 v, int classes) {
  return bits<__mmask16>([&](int l) {
    const uint32_t x = at<uint32_t>(v, l), size = x & 0x7FFFFFFFu;
    const bool negative = size != x;
    if (size > 0x7F800000u) return bit(classes, (size & 0x400000u) != 0 ? 0 : 7);
    if (size == 0x7F800000u) return bit(classes, negative ? 4 : 3);
    if (size == 0) return bit(classes, negative ? 2 : 1);
    return (size < 0x00800000u && bit(classes, 5)) || (negative && bit(classes, 6));
  });
}

// ---- floating point -----------------------------------------------------------------------------

__m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
__m512 _mm512_max_ps(__m512 a, __m512 b) {
  return lanes<__m512, float>([&](int l) { return a[l] > b[l] ? a[l] : b[l]; });
}
__m512 _mm512_min_ps(__m512 a, __m512 b) {
  return lanes<__m512, float>([&](int l) { return a[l] < b[l] ? a[l] : b[l]; });
}
__m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return lanes<__m512, float>([&](int l) { return __builtin_fmaf(a[l], b[l], c[l]); });
}
__m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
  return lanes<__m512d, double>([&](int l) { return __builtin_fma(a[l], b[l], c[l]); });
}
// Adds in the same order as GCC.
float _mm512_reduce_add_ps(__m512 v) {
  float part[16];
  memcpy(part, &v, sizeof(v));
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) part[l] += part[l + half];
  }
  return part[0];
}
// Rounds to 13 fraction bits, the largest error that the manual permits (2^-14).
__m512 _mm512_rcp14_ps(__m512 v) {
  return lanes<__m512, float>([&](int l) {
    return reinterpret<float>((reinterpret<uint32_t>(1 / v[l]) + 512) & ~uint32_t{1023});
  });
}
// Returns x - floor(x), rounded down. Other modes abort.
__m512 _mm512_reduce_ps(__m512 v, int how) {
  if (how != 0x09) abort();
  return lanes<__m512, float>([&](int l) {
    const double exact = static_cast<double>(v[l]) - floor(static_cast<double>(v[l]));
    const float rest = static_cast<float>(exact);
    if (isinf(v[l])) return 0.f;
    if (rest == 0) return -0.f;
    return rest >= 1 || static_cast<double>(rest) > exact ? nextafterf(rest, 0) : rest;
  });
}
// Returns a * 2^floor(b). If b is infinite, a quiet NaN in a is ignored.
__m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return lanes<__m512, float>([&](int l) {
    const float x = a[l], y = b[l], shift = floorf(y);
    if (isnan(y)) return y;
    if (isinf(y) && isnan(x)) return y > 0 ? y : 0.f;
    if (isinf(y)) return y > 0 ? x * y : x / -y;
    return static_cast<float>(
        ldexp(static_cast<double>(x), static_cast<int>(shift < -999  ? -999
                                                       : shift > 999 ? 999
                                                                     : shift)));
  });
}

__m512 _mm512_cvtph_ps(__m256i v) {
  return lanes<__m512, float>([&](int l) { return _cvtsh_ss(at<uint16_t>(v, l)); });
}
__m256i _mm512_cvtps_ph(__m512 v, int) {  // always to nearest even
  return lanes<__m256i, uint16_t>(
      [&](int l) { return _cvtss_sh(v[l], _MM_FROUND_TO_NEAREST_INT); });
}
__m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  return lanes<__m512bh, uint16_t>([&](int l) {
    const uint32_t x = at<uint32_t>(l < 16 ? lower : upper, l % 16), size = x & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return static_cast<uint16_t>(x >> 16 | 0x40);     // NaN
    if (size < 0x00800000u) return static_cast<uint16_t>(x >> 16 & 0x8000u);  // subnormal
    return static_cast<uint16_t>((x + 0x7FFFu + (x >> 16 & 1)) >> 16);
  });
}

// Arithmetic that flushes subnormal operands and results to 0, and rounds to nearest even. Objects
// change MXCSR for their lifetime. Volatile keeps the compiler from reordering the instructions.
class FlushSubnormals {
 public:
  FlushSubnormals() {
    const unsigned flushing = 0x9FC0;
    asm volatile("stmxcsr %0" : "=m"(before_));
    asm volatile("ldmxcsr %0" : : "m"(flushing));
  }
  ~FlushSubnormals() { asm volatile("ldmxcsr %0" : : "m"(before_)); }

  void multiply_add(__m256 a, __m256 b, __m256* sum) const {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
  }
  __m256 add(__m256 a, __m256 b) const {
    asm volatile("vaddps %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
  }

 private:
  unsigned before_;
};

// Adds the products of the second elements of the pairs first.
__m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const __m256i second = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  __m256 half[2] = {at<__m256>(sum, 0), at<__m256>(sum, 1)};
  const FlushSubnormals flush;
  for (int h = 0; h < 2; ++h) {
    const __m256i x = at<__m256i>(a, h), y = at<__m256i>(b, h);
    flush.multiply_add((__m256)(x & second), (__m256)(y & second), &half[h]);
    flush.multiply_add((__m256)_mm256_slli_epi32(x, 16), (__m256)_mm256_slli_epi32(y, 16),
                       &half[h]);
  }
  return element<__m512>(half, 0);
}

}  // namespace
}  // namespace fused_attn

#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

#pragma GCC diagnostic pop
