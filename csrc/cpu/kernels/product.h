// The matmuls of attention, in the operand format that this instruction set multiplies.
//
// Left operands (rows, steps) are broadcast or read in tiles of rows. Right operands (steps, lanes)
// hold a panel of queries or features in their lanes. Product<T> packs and multiplies both.
#pragma once

#include "cpu/amx/tile_gemm.h"
#include "cpu/simd/micro_gemm.h"
#include "cpu/simd/mmla_gemm.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vec_math.h"

namespace fused_attn {
namespace {

constexpr Nothing kNothing;

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Copies a matrix (rows, dim) from src, whose rows are `stride` elements apart, to dst (rows_to,
// dim_to). Fills the padding with 0.
template <class T>
inline void copy_rows(const T* src, int64_t stride, int64_t rows, int64_t dim, T* dst,
                      int64_t rows_to, int64_t dim_to) {
  for (int64_t r = 0; r < rows_to; ++r) {
    const int64_t from_src = r < rows ? dim : 0;
    T* const row = dst + r * dim_to;
    if (from_src > 0) memcpy(row, src + r * stride, from_src * sizeof(T));  // src may be null
    memset(row + from_src, 0, (dim_to - from_src) * sizeof(T));
  }
}

// Steps per partial sum. The rounding error of a sum grows with its length, and sums over keys
// round at the magnitude of the accumulated weights.
//
// If one key dominates, 32 steps instead of 128 halve the error of out. With 32, a row of 40 keys,
// two of them large, still exceeded the error limit by 15 %.
constexpr int64_t kSumSteps = 16;
// Steps per partial sum of dO V^T, whose large rounding error remains if dS is a small difference.
// With 8, the error of dQ halves in rows that one key dominates.
constexpr int64_t kShortSumSteps = 8;
// Steps per partial sum for type T. Rounding to 16 bits loses more than a float32 sum of any
// length, and partial sums made the 16-bit forward 12 to 17 % slower (AVX2).
template <class T, int64_t kSteps>
constexpr int64_t kStepsOf = sizeof(T) == 2 ? kAllSteps : kSteps;

template <class T>
class NumberProduct {
 public:
  using A = Acc<T>;
  using LeftElement = A;
  using RightElement = A;
  static constexpr int64_t kRows = kPanel<A>;
  static constexpr bool kPairs = false;
  static constexpr int kParts = 1;
  // Query tiles per matmul of the backward. The weights of one tile fill half of L1.
  static constexpr int64_t kGroup = 1, kRowGap = 0;

  struct Left {
    const A* data;
    int64_t stride;
    Left from_row(int64_t r) const { return {data + r * stride, stride}; }
    Left from_key(int64_t t) const { return from_row(t); }  // here, columns() returns rows
    Left group_from_key(int64_t t) const {
      return kInGroups ? Left{data + t * kGroupRows, stride} : from_key(t);
    }
  };
  struct Right {
    const A* data;
    int64_t stride;
    Right from_lane(int64_t l) const { return {data + l, stride}; }
  };
  struct Registers {};  // vector registers need no setup

  static int64_t pad_rows(int64_t rows) { return rows; }
  static constexpr int64_t pad_steps(int64_t steps) { return round_up(steps, 4); }
  static int64_t pad_dim(int64_t dim) { return round_up(dim, kRows); }
  static int64_t left_size(int64_t rows, int64_t dim) { return rows * dim; }
  static int64_t columns_size(int64_t keys, int64_t dim) {
    return left_size(keys, round_up(dim, kGroupRows));
  }
  static constexpr int64_t right_size(int64_t steps, int64_t lanes) { return steps * lanes; }

  // Returns rows of key or value as a left operand, in place if they are adjacent and need no
  // conversion. Rows of (batch, seqlen, heads, dim) tensors are a power of two apart, in few cache
  // sets: the forward of 32 heads of 1024 x 64 takes 98 ms in place, 78 ms with a copy (Zen 3).
  static Left rows(const T* src, int64_t stride, int64_t n, int64_t dim, T*, A* buffer) {
    if constexpr (sizeof(T) == sizeof(A)) {
      if (stride == dim) return {src, stride};
    }
    for (int64_t r = 0; r < n; ++r) load_row(src + r * stride, dim, buffer + r * dim);
    return {buffer, dim};
  }

  // Returns rows as a left operand that is used transposed. multiply() reads it as
  // Layout::kColumnMajor.
  static Left columns(const T* src, int64_t stride, int64_t n, int64_t dim, T* stage, A* buffer) {
    return rows(src, stride, n, dim, stage, buffer);
  }

  // Packs rows like columns(), but in groups of features, (group, key, kGroupRows), which
  // multiply() reads sequentially. With columns(), if rows are a power of two apart, one feature of
  // all keys maps to few L1 sets. The forward is 3 to 12 % faster (AVX2, Zen 3); the backward is
  // not, because its blocks serve fewer query tiles.
  static constexpr int64_t kGroupRows = micro_rows(kStepsOf<T, kSumSteps>);
  static constexpr bool kInGroups = sizeof(T) == sizeof(A);
  static constexpr Layout kGroups = kInGroups ? Layout::kColumnGroups : Layout::kColumnMajor;
  static Left column_groups(const T* src, int64_t stride, int64_t n, int64_t dim, T* stage,
                            A* buffer) {
    if constexpr (!kInGroups) return columns(src, stride, n, dim, stage, buffer);
    constexpr int64_t kLane = kLanes<A>, kPiece = kGroupRows < kLane ? kGroupRows : kLane;
    for (int64_t t = 0; t < n; ++t) {
      const T* const row = src + t * stride;
      const auto at = [=](int64_t d) FUSED_ATTN_LAMBDA {
        const int64_t in_group = d % kGroupRows;
        return buffer + (d - in_group) * n + t * kGroupRows + in_group;
      };
      int64_t d = 0;
      for (; d + kPiece <= dim; d += kPiece) memcpy(at(d), row + d, kPiece * sizeof(A));
      for (; d < dim; ++d) *at(d) = to_acc(row[d]);
    }
    return {buffer, n};
  }

  // Packs kRows rows of pad_dim(dim) elements as a right operand with features as steps and rows as
  // lanes.
  static Right right_columns(const T* rows, int64_t stride, int64_t dim, A* scratch, A* buffer) {
    if constexpr (sizeof(T) == sizeof(A)) {
      (void)scratch;
      transpose(rows, stride, kRows, dim, buffer, kRows);
    } else {
      const int64_t wide = pad_dim(dim);
      for (int64_t r = 0; r < kRows; ++r) load_row(rows + r * stride, wide, scratch + r * wide);
      transpose(scratch, wide, kRows, dim, buffer, kRows);
    }
    return columns_view(buffer, dim);
  }
  static Right columns_view(const A* buffer, int64_t) { return {buffer, kRows}; }

  // Packs a panel as a right operand with rows as steps and features as lanes.
  static Right right_rows(const T* panel, int64_t dim, A* buffer, int64_t) {
    for (int64_t r = 0; r < kRows; ++r) {
      load_row(panel + r * pad_dim(dim), pad_dim(dim), buffer + r * pad_dim(dim));
    }
    return rows_view(buffer, dim, 1);
  }
  static Right rows_view(const A* buffer, int64_t dim, int64_t) { return {buffer, pad_dim(dim)}; }
  static int64_t scratch_size(int64_t dim) { return kRows * pad_dim(dim); }

  // A vector of weights, convertible to the format of either operand.
  struct Weight {
    Vec<A> value;
  };
  static Weight weight(Vec<A> value) { return {value}; }
  static constexpr bool kRoundsWeights = false;
  // Stores one row of a left operand (keys, queries), which is two vectors wide, at `row`.
  static void store_left(A* row, int64_t, const Weight& v0, const Weight& v1) {
    store(row, v0.value);
    store(row + kLanes<A>, v1.value);
  }
  // Stores vector v of steps t and t + 1 in a right operand (keys, queries). t must be even.
  static void store_right(A* operand, int64_t, int64_t t, int v, const Weight& a, const Weight& b) {
    store(operand + t * kRows + v * kLanes<A>, a.value);
    store(operand + (t + 1) * kRows + v * kLanes<A>, b.value);
  }
  static Left left_view(const A* data, int64_t stride, int64_t) { return {data, stride}; }
  static Right right_view(const A* data, int64_t) { return {data, kRows}; }

  // True if Into::kStoreMaximum is faster than a second pass over the product. It is slower here,
  // because totals are spilled.
  static constexpr bool kFindsMaxima = false;
  // Returns the number of row groups in which multiply() computes m rows.
  static int64_t groups(int64_t m) { return (m + kGroupRows - 1) / kGroupRows; }
  // between: called before each group of rows.
  template <Layout kLayout, Into kInto, int64_t kSteps = kSumSteps, class Between = const Nothing>
  static void multiply(int64_t m, int64_t k, const Left& a, const Right& b, A* c, int64_t ldc,
                       A* columns = nullptr, Between& between = kNothing) {
    gemm<Numbers<A>, kLayout, kInto, kStepsOf<T, kSteps>>(m, k, a.data, a.stride, b.data, b.stride,
                                                          c, ldc, columns, between);
  }
};

#if defined(FUSED_ATTN_BF16_PAIRS)
// Multiplies pairs of bfloat16 parts. Each element is split into kParts bfloat16 parts, stored in
// planes that are `part` elements apart. A 32-bit word holds two neighboring features or keys, or
// queries l and l + kLane of a group of 2 * kLane queries.
//
// With vdpbf16ps, columns() stores the words by keys, (keys / 2, dim), so value need not be
// transposed. Row tiles (AMX, BFMMLA) need them by features, (dim, keys / 2).
template <class T>
class PairProduct {
 public:
  using A = float;
  using LeftElement = uint16_t;
  using RightElement = uint32_t;
  static constexpr int64_t kRows = kPanel<float>;
  static constexpr int64_t kLane = kLanes<float>;
  static constexpr bool kPairs = true;
  static constexpr int kParts = sizeof(T) == 4 ? 3 : kIsHalf<T> ? 2 : 1;
#if defined(__AMX_BF16__) || defined(FUSED_ATTN_NEON_BF16)
  static constexpr bool kByKeys = false;
#else
  static constexpr bool kByKeys = true;
#endif
  // Query tiles per matmul of the backward, so that accumulators over queries stay in registers.
  // The weights of 128 queries by 128 keys in three parts take 96 KiB of L2. 8 tiles are 3 % slower
  // than 4.
  static constexpr int64_t kGroup = 4;

  struct Left {
    const uint16_t* data;
    int64_t stride, part;  // the stride is in words if columns() stores words by keys
    Left from_row(int64_t r) const { return {data + r * stride, stride, part}; }
    Left from_key(int64_t t) const { return {data + (kByKeys ? t * stride : t), stride, part}; }
    Left group_from_key(int64_t t) const { return from_key(t); }
  };
  struct Right {
    const uint32_t* data;
    int64_t stride, part;
    Right from_lane(int64_t l) const { return {data + l, stride, part}; }
  };
#if defined(__AMX_BF16__)
  using Registers = TileRegisters;
#else
  struct Registers {};
#endif

  static int64_t pad_rows(int64_t rows) { return kByKeys ? rows : round_up(rows, kLane); }
  static constexpr int64_t pad_steps(int64_t steps) {
    return round_up(steps, kByKeys ? 4 : 2 * kLane);
  }
  static int64_t pad_dim(int64_t dim) { return round_up(dim, 2 * kLane); }
  // Padding between rows of the left operand, so that the 16 rows of a tile map to different L1
  // sets. It makes the matmul with three parts 10 % faster.
  static constexpr int64_t kRowGap = 32;
  static int64_t left_size(int64_t rows, int64_t dim) {
    return kParts * pad_rows(rows) * (pad_dim(dim) + kRowGap);
  }
  static int64_t columns_size(int64_t keys, int64_t dim) {
    return kParts * pad_dim(dim) * (pad_steps(keys) + kRowGap);
  }
  static constexpr int64_t right_size(int64_t steps, int64_t lanes) {
    return kParts * pad_steps(steps) / 2 * lanes;
  }

  // stage: workspace (pad_steps(n), pad_dim(dim)) of T. Rows of a type with one part are used in
  // place if they need no padding and their stride is even, so that rows begin at whole words.
  static Left rows(const T* src, int64_t stride, int64_t n, int64_t dim, T* stage,
                   uint16_t* buffer) {
    const int64_t wide = pad_dim(dim), high = pad_rows(n);
    const bool in_words = kParts > 1 || stride % 2 == 0;
    if (kParts == 1 && wide == dim && high == n && in_words) {
      return {reinterpret_cast<const uint16_t*>(src), stride, 0};
    }
    if (wide != dim || high != n || !in_words) {
      copy_rows(src, stride, n, dim, stage, high, wide);
      src = stage;
      stride = wide;
    }
    const int64_t apart = wide + kRowGap;
    for (int64_t r = 0; r < high; ++r) {
      split_row(src + r * stride, wide, buffer + r * apart, high * apart);
    }
    return {buffer, apart, high * apart};
  }

  static Left columns(const T* src, int64_t stride, int64_t n, int64_t dim, T* stage,
                      uint16_t* buffer) {
    const int64_t wide = pad_dim(dim), high = pad_steps(n);
    if (wide != dim || high != n) {
      copy_rows(src, stride, n, dim, stage, high, wide);
      src = stage;
      stride = wide;
    }
    if constexpr (kByKeys) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(buffer);
      for (int64_t t = 0; t < high; t += 2) {
        for (int64_t d = 0; d < wide; d += kLane) {
          const T* const row = src + t * stride + d;
          store(words + t / 2 * wide + d,
                pair((Vec32)load_as<T>(row), (Vec32)load_as<T>(row + stride)));
        }
      }
      return {buffer, wide, 0};
    }
    const int64_t apart = high + kRowGap;
    for (int64_t t = 0; t < high; t += 2 * kLane) {
      for (int64_t d = 0; d < wide; d += kLane) {
        uint32_t words[kParts][kLane][kLane];
        for (int64_t i = 0; i < kLane; ++i) {
          const T* const row = src + (t + 2 * i) * stride + d;
          const Weight a = number(load_as<T>(row)), b = number(load_as<T>(row + stride));
          for (int p = 0; p < kParts; ++p) store(words[p][i], pair(a.part[p], b.part[p]));
        }
        for (int p = 0; p < kParts; ++p) {
          transpose_tile(words[p], kLane, buffer + (p * wide + d) * apart + t, apart / 2);
        }
      }
    }
    return {buffer, apart, wide * apart};
  }

  static constexpr Layout kGroups = Layout::kColumnMajor;
  static Left column_groups(const T* src, int64_t stride, int64_t n, int64_t dim, T* stage,
                            uint16_t* buffer) {
    return columns(src, stride, n, dim, stage, buffer);
  }

  // The stride must be even.
  static Right right_columns(const T* rows, int64_t stride, int64_t dim, uint32_t* scratch,
                             uint32_t* buffer) {
    const int64_t wide = pad_dim(dim);
    if constexpr (kParts == 1) {
      (void)scratch;
      transpose(reinterpret_cast<const uint32_t*>(rows), stride / 2, kRows, wide / 2, buffer,
                kRows);
      return columns_view(buffer, dim);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      split_row(rows + r * stride, wide, reinterpret_cast<uint16_t*>(scratch) + r * wide,
                kRows * wide);
    }
    for (int p = 0; p < kParts; ++p) {
      transpose(scratch + p * kRows * wide / 2, wide / 2, kRows, wide / 2,
                buffer + p * kRows * wide / 2, kRows);
    }
    return columns_view(buffer, dim);
  }
  static Right columns_view(const uint32_t* buffer, int64_t dim) {
    return {buffer, kRows, kRows * pad_dim(dim) / 2};
  }
  static int64_t scratch_size(int64_t dim) { return kParts * kRows * pad_dim(dim) / 2; }

  // The buffer has one plane for each part of a number. Each plane holds `panels` panels.
  static Right right_rows(const T* panel, int64_t dim, uint32_t* buffer, int64_t panels) {
    const int64_t wide = pad_dim(dim);
    for (int64_t l = 0; l < kLane; ++l) {
      for (int64_t d = 0; d < wide; d += kLane) {
        const T* const row = panel + l * wide + d;
        const Weight a = number(load_as<T>(row)), b = number(load_as<T>(row + kLane * wide));
        for (int p = 0; p < kParts; ++p) {
          store(buffer + (p * panels * kLane + l) * wide + d, pair(a.part[p], b.part[p]));
        }
      }
    }
    return rows_view(buffer, dim, panels);
  }
  static Right rows_view(const uint32_t* buffer, int64_t dim, int64_t panels) {
    return {buffer, pad_dim(dim), panels * kLane * pad_dim(dim)};
  }

  struct Weight {
    Vec32 part[kParts];  // each in the upper halves of its words
  };

  // Splits weights into parts. All parts but the last are truncated, so that the remainder is
  // exact. The last part is rounded, unless it is the third, which is exact.
  static Weight weight(Vec<float> x) {
    Weight w;
    for (int p = 0; p < kParts - 1; ++p) {
      w.part[p] = (Vec32)x & 0xFFFF0000u;
      x -= (Vec<float>)w.part[p];
    }
    w.part[kParts - 1] = kParts == 3 ? (Vec32)x : (Vec32)x + 0x8000u;
    return w;
  }

  // True if the weights are rounded for the matmul.
  static constexpr bool kRoundsWeights = kParts < 3;
  // Returns sum + a + b for rounded weights, with one instruction per part. Unrounded weights need
  // two.
  static Vec<float> add_rounded(Vec<float> sum, const Weight& a, const Weight& b) {
    constexpr uint32_t kOnes = 0x3F803F80u;
    for (int p = 0; p < kParts; ++p) {
      sum = BFloat16Pairs::multiply_add(kOnes, pair(a.part[p], b.part[p]), sum);
    }
    return sum;
  }

  static void store_left(uint16_t* row, int64_t part, const Weight& v0, const Weight& v1) {
    for (int p = 0; p < kParts; ++p) {
      store(reinterpret_cast<uint32_t*>(row + p * part), pair(v0.part[p], v1.part[p]));
    }
  }
  static void store_right(uint32_t* operand, int64_t part, int64_t t, int v, const Weight& a,
                          const Weight& b) {
    for (int p = 0; p < kParts; ++p) {
      store(operand + p * part + t / 2 * kRows + v * kLane, pair(a.part[p], b.part[p]));
    }
  }
  static Left left_view(const uint16_t* data, int64_t stride, int64_t part) {
    return {data, stride, part};
  }
  static Right right_view(const uint32_t* data, int64_t part) { return {data, kRows, part}; }

#if defined(__AMX_BF16__)
  static constexpr bool kFindsMaxima = false;  // tiles include padding
  static int64_t groups(int64_t m) { return (m + 31) / 32; }
#else
  static constexpr bool kFindsMaxima = true;
  static int64_t groups(int64_t m) { return kByKeys ? (m + kMicroRows - 1) / kMicroRows : 1; }
#endif
  template <Layout kLayout, Into kInto, int64_t kSteps = kSumSteps, class Between = const Nothing>
  static void multiply(int64_t m, int64_t k, const Left& a, const Right& b, float* c, int64_t ldc,
                       float* columns = nullptr, Between& between = kNothing) {
#if defined(__AMX_BF16__)
    int64_t r = 0;
    for (; r + 16 < m; r += 32) {
      between();
      tile_block<kParts, true, kInto>(k, a.data + r * a.stride, a.stride, a.part, b.data, b.stride,
                                      b.part, c + r * ldc, ldc, columns);
    }
    if (r < m) {
      between();
      tile_block<kParts, false, kInto>(k, a.data + r * a.stride, a.stride, a.part, b.data, b.stride,
                                       b.part, c + r * ldc, ldc, columns);
    }
#elif defined(FUSED_ATTN_NEON_BF16)
    static_assert(kParts == 1, "float32 in three parts is no faster with BFMMLA than with FMLA");
    between();
    mmla_gemm<kInto>(m, pad_steps(k) / 2, reinterpret_cast<const uint32_t*>(a.data), a.stride / 2,
                     b.data, b.stride, c, ldc, columns);
#else
    static_assert(kParts == 1, "float32 in three parts is slower with VDPBF16PS than with FMA");
    gemm<BFloat16Pairs, kLayout, kInto, kAllSteps>(
        m, (k + 1) / 2, reinterpret_cast<const uint32_t*>(a.data),
        kLayout == Layout::kRowMajor ? a.stride / 2 : a.stride, b.data, b.stride, c, ldc, columns,
        between);
#endif
  }

 private:
  static Vec32 pair(Vec32 low, Vec32 high) { return low >> 16 | (high & 0xFFFF0000u); }

  // Splits values like weight(), but preserves infinity and NaN.
  static Weight number(Vec<float> x) {
    Weight w = weight(x);
    const Vec<int32_t> nonfinite = ((Vec32)x & 0x7F800000u) == 0x7F800000u;
    if (__builtin_expect(any(nonfinite), 0)) {
      const Vec32 quiet = x == x ? (Vec32)x & 0xFFFF0000u : Vec32{} + 0x7FC00000u;
      for (int p = 0; p < kParts; ++p) {
        w.part[p] = nonfinite ? (p == 0 ? quiet : Vec32{}) : w.part[p];
      }
    }
    return w;
  }

  static void split_row(const T* src, int64_t n, uint16_t* dst, int64_t part) {
    for (int64_t i = 0; i < n; i += kLane) {
      const Weight w = number(load_as<T>(src + i));
      for (int p = 0; p < kParts; ++p) {
        const Shorts high = __builtin_convertvector(w.part[p] >> 16, Shorts);
        memcpy(dst + p * part + i, &high, sizeof(high));
      }
    }
  }
};
#endif

// AMX multiplies every type except float64. vdpbf16ps and BFMMLA multiply bfloat16 only.
template <class T>
struct ProductOf {
  using type = NumberProduct<T>;
};
#if defined(FUSED_ATTN_BF16_PAIRS)
template <>
struct ProductOf<BFloat16> {
  using type = PairProduct<BFloat16>;
};
#endif
#if defined(__AMX_BF16__)
template <>
struct ProductOf<Half> {
  using type = PairProduct<Half>;
};
template <>
struct ProductOf<float> {
  using type = PairProduct<float>;
};
#endif
template <class T>
using Product = typename ProductOf<T>::type;

// The precision that exp needs. It is lower if Product<T> rounds the softmax weights for the
// matmul.
template <class T>
constexpr Precision kPrecision = Precision::kFull;
template <>
constexpr Precision kPrecision<BFloat16> =
    Product<BFloat16>::kPairs ? Precision::kBFloat16 : Precision::kFull;
template <>
constexpr Precision kPrecision<Half> = Product<Half>::kPairs ? Precision::kHalf : Precision::kFull;

}  // namespace
}  // namespace fused_attn
