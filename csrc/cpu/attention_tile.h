// What forward and backward of attention share: operands, packing, one tile of masked scores.
//
// Vector lanes are queries. A panel is two vectors of queries, a block up to kBlockN keys; a tile
// of scores is S^T, (keys, panel). Row maximum, sum and rescaling are then vertical operations,
// keys and values are read as they are stored, and only queries and outputs are transposed.
#pragma once

#include "cpu/mask.h"
#include "cpu/vec_math.h"

namespace fused_attn {
namespace {

template <class T>
inline const T* at_head(const void* data, const int64_t strides[3], int64_t b, int64_t h) {
  return static_cast<const T*>(data) + b * strides[0] + h * strides[1];
}

// Rows of key or value as the type that is computed in.
template <class A>
struct Rows {
  const A* data;
  int64_t stride;
};

// In place where nothing has to be converted, else by way of buffer (n, dim).
template <class T>
inline Rows<Acc<T>> load_block(const T* head, int64_t stride, int64_t begin, int64_t n, int64_t dim,
                               Acc<T>* buffer) {
  const T* const first = head + begin * stride;
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    (void)buffer, (void)n, (void)dim;
    return {first, stride};
  } else {
    for (int64_t j = 0; j < n; ++j) load_row(first + j * stride, dim, buffer + j * dim);
    return {buffer, dim};
  }
}

// A panel of rows from `begin`, times factor, as (dim, panel); missing rows are 0.
template <class T>
inline void pack_transposed(const T* head, int64_t stride, int64_t begin, int64_t rows, int64_t dim,
                            Acc<T> factor, Acc<T>* row_buffer, Acc<T>* out) {
  constexpr int64_t kRows = kPanel<Acc<T>>;
  for (int64_t l = 0; l < kRows; ++l) {
    if (l < rows) {
      load_row(head + (begin + l) * stride, dim, row_buffer);
      for (int64_t d = 0; d < dim; ++d) out[d * kRows + l] = row_buffer[d] * factor;
    } else {
      for (int64_t d = 0; d < dim; ++d) out[d * kRows + l] = 0;
    }
  }
}

// Rows of out from (dim, panel), times factor.
template <class T>
inline void unpack_transposed(const Acc<T>* panel, int64_t dim, int64_t rows, Acc<T> factor,
                              Acc<T>* row_buffer, T* out, int64_t stride) {
  constexpr int64_t kRows = kPanel<Acc<T>>;
  for (int64_t l = 0; l < rows; ++l) {
    for (int64_t d = 0; d < dim; ++d) row_buffer[d] = panel[d * kRows + l] * factor;
    store_row(row_buffer, dim, out + l * stride);
  }
}

// Where a tile lies.
struct TileAt {
  int64_t b, h, i, j, n;  // batch, head, first query, first key, number of keys
};

// Masked scores of one tile into scores (n, panel).
//
// query: (head_dim, panel), times softmax_scale. cap_slope: with softcap, the derivative of the
// capped score by the uncapped one, (n, panel); null: not wanted.
template <class A>
inline void score_tile(const AttentionParams& p, const MaskView<A>& mask, Tile kind,
                       const TileAt& at, const A* query, const Rows<A>& key, A* scores,
                       A* cap_slope, A* stage) {
  constexpr int64_t kRows = kPanel<A>;
  gemm<Layout::kRowMajor, Into::kStore>(at.n, p.head_dim, key.data, key.stride, query, kRows,
                                        scores, kRows);
  if (p.softcap > 0) {
    const A cap = static_cast<A>(p.softcap), inverse = static_cast<A>(1 / p.softcap);
    for (int64_t e = 0; e < at.n * kRows; e += kLanes<A>) {
      const Vec<A> t = tanh<A>(load(scores + e) * inverse);
      store(scores + e, t * cap);
      if (cap_slope != nullptr) store(cap_slope + e, A(1) - t * t);
    }
  }
  if (kind == Tile::kPartial) mask.apply(at.b, at.h, at.i, at.j, at.n, scores, stage);
}

// Which weights of a tile dropout keeps: (n, panel) of 1 or 0; dropout_scale is applied by the
// caller.
//
// Four keys share a counter, so at.j must be a multiple of 4, as every block's is.
template <class A>
inline void dropout_tile(const AttentionParams& p, const TileAt& at, A* keep) {
  constexpr int64_t kRows = kPanel<A>;
  const uint32_t threshold = dropout_threshold(p.dropout_p);
  const uint32_t head = static_cast<uint32_t>(at.b * p.num_heads + at.h);
  for (int64_t t = 0; t < at.n; t += 4) {
    const uint32_t quad = static_cast<uint32_t>((at.j + t) / 4);
    uint32_t words[4][kRows];
    for (int64_t l = 0; l < kRows; ++l) {
      const Philox4 r = philox4x32(quad, static_cast<uint32_t>(at.i + l), head, 0, p.seed);
      for (int w = 0; w < 4; ++w) words[w][l] = r.word[w] >> 8;
    }
    for (int64_t w = 0; w < min64(4, at.n - t); ++w) {
      for (int64_t l = 0; l < kRows; ++l) {
        keep[(t + w) * kRows + l] = words[w][l] >= threshold ? A(1) : A(0);
      }
    }
  }
}

// Calls run(begin, end) for each run of nonzero flags: only keys that somebody sees are multiplied
// with their value, since 0 * NaN would not be 0.
template <class Run>
inline void for_each_run(const uint8_t* flags, int64_t n, const Run& run) {
  for (int64_t begin = 0; begin < n;) {
    if (flags[begin] == 0) {
      ++begin;
      continue;
    }
    int64_t end = begin + 1;
    while (end < n && flags[end] != 0) ++end;
    run(begin, end);
    begin = end;
  }
}

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int clamp_threads(int64_t num_threads, int64_t tasks) {
  return static_cast<int>(max64(1, min64(num_threads, tasks)));
}

}  // namespace
}  // namespace fused_attn
