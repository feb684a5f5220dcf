// Rotary position embedding and its backward: rotates pairs of dimensions, in one pass.
//
// Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation
// 34.
#pragma once

#include "cpu/kernels/rows.h"

namespace fused_attn {
namespace {

template <class T>
class RotaryPass {
  using A = Acc<T>;

 public:
  static bool run(const RotaryParams& p) {
    return p.table_dtype == p.dtype ? in_parallel<T>(p) : in_parallel<A>(p);
  }

 private:
  // Cosines and sines of a token, for the first and for the second dimension of each pair.
  template <class Table>
  struct Factors {
    const Table *cos, *cos_second, *sin, *sin_second;
  };

  template <class Table>
  static bool in_parallel(const RotaryParams& p) {
    const int64_t tokens = p.batch * p.seqlen;
    return run_team(p.num_threads, tokens, [&] {
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < tokens; ++i) rotate_token<Table>(p, i / p.seqlen, i % p.seqlen);
      return true;
    });
  }

  template <class Table>
  static void rotate_token(const RotaryParams& p, int64_t b, int64_t i) {
    const int64_t position = p.positions == nullptr ? i : p.positions[b * p.seqlen + i];
    const Table* const cos =
        static_cast<const Table*>(p.cos) + b * p.cos_strides[0] + position * p.cos_strides[1];
    const Table* const sin =
        static_cast<const Table*>(p.sin) + b * p.sin_strides[0] + position * p.sin_strides[1];
    const int64_t second = !p.per_dimension ? 0 : p.interleaved ? 1 : p.pairs;
    const Factors<Table> factors = {cos, cos + second, sin, sin + second};
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const T* const x = static_cast<const T*>(p.input) + offset(p.input_strides, b, h, i);
      T* const out = static_cast<T*>(p.out) + offset(p.out_strides, b, h, i);
      if (p.interleaved) {
        rotate_neighbors(p, factors, x, out);
      } else {
        rotate_halves(p, factors, x, out);
      }
      const int64_t rotated = 2 * p.pairs;
      if (x != out && rotated < p.head_dim) {
        memcpy(out + rotated, x + rotated, (p.head_dim - rotated) * sizeof(T));
      }
    }
  }

  template <class Table>
  static void rotate_halves(const RotaryParams& p, const Factors<Table>& f, const T* x, T* out) {
    for_each_vector<A>(0, p.pairs, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Vec<A> first = load_part(x + c, count), second = load_part(x + p.pairs + c, count);
      const Vec<A> cos = load_part(f.cos + c, count),
                   cos_second = load_part(f.cos_second + c, count);
      const Vec<A> sin = load_part(f.sin + c, count),
                   sin_second = load_part(f.sin_second + c, count);
      const auto [a, b] = rotated(p, first, second, cos, cos_second, sin, sin_second);
      store_part<T>(a, count, out + c);
      store_part<T>(b, count, out + p.pairs + c);
    });
  }

  template <class Table>
  static void rotate_neighbors(const RotaryParams& p, const Factors<Table>& f, const T* x, T* out) {
    const int64_t step = p.per_dimension ? 2 : 1;  // between the factors of two pairs
    for (int64_t c = 0; c < p.pairs; ++c) {
      const auto [a, b] = rotated(p, to_acc(x[2 * c]), to_acc(x[2 * c + 1]),
                                  A(to_acc(f.cos[step * c])), A(to_acc(f.cos_second[step * c])),
                                  A(to_acc(f.sin[step * c])), A(to_acc(f.sin_second[step * c])));
      from_acc(a, &out[2 * c]);
      from_acc(b, &out[2 * c + 1]);
    }
  }

  template <class V>
  struct Pair {
    V first, second;
  };

  // The matrix of a pair is [cos, -sin; sin_second, cos_second].
  template <class V>
  FUSED_ATTN_INLINE static Pair<V> rotated(const RotaryParams& p, V first, V second, V cos,
                                           V cos_second, V sin, V sin_second) {
    if (p.backward) return {first * cos + second * sin_second, second * cos_second - first * sin};
    return {first * cos - second * sin, second * cos_second + first * sin_second};
  }

  static int64_t offset(const int64_t (&strides)[3], int64_t b, int64_t h, int64_t i) {
    return b * strides[0] + h * strides[1] + i * strides[2];
  }
};

}  // namespace
}  // namespace fused_attn
