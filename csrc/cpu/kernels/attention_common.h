// Helpers shared by the attention forward and backward: operand addressing, packing of K and V, and
// masked score tiles.
//
// Vector lanes hold queries. A query tile has kRows queries (two vectors), and a KV block has at
// most kBlockN keys. Score tiles are stored transposed, as S^T (keys, kRows). Row maxima, row sums
// and rescaling are then vertical vector operations, and only queries and outputs need a transpose.
#pragma once

#include "cpu/kernels/mask.h"
#include "cpu/simd/dropout.h"
#include "cpu/simd/vec_math.h"
#include "cpu/team.h"

namespace fused_attn {
namespace {

// Returns a pointer to the first row of head h of a sequence.
//
// strides: of batch, head and row, in elements.
template <class T>
inline const T* at_head(const void* data, const int64_t strides[3], const SequenceRows& rows,
                        int64_t h) {
  return static_cast<const T*>(data) + rows.batch * strides[0] + h * strides[1] +
         rows.first * strides[2];
}

// Rows of one head of a result: out, or the gradient of query, key or value. They have type T, or
// Acc<T> in a partial result.
template <class T>
struct ResultRows {
  ResultRows(void* rows, int64_t row_stride, bool is_partial)
      : data(rows), stride(row_stride), partial(is_partial && sizeof(T) < sizeof(Acc<T>)) {}
  ResultRows(const AttentionParams& p, void* result, const int64_t strides[3],
             const SequenceRows& rows, int64_t h)
      : ResultRows(result, strides[2], p.partial) {
    if (partial) {
      data = const_cast<Acc<T>*>(at_head<Acc<T>>(result, strides, rows, h));
    } else {
      data = const_cast<T*>(at_head<T>(result, strides, rows, h));
    }
  }

  // Returns row i. Not for partial results of 16-bit types.
  T* at(int64_t i) const { return static_cast<T*>(data) + i * stride; }

  // Writes the first n elements of row i.
  void store(int64_t i, const Acc<T>* row, int64_t n) const {
    if (partial) return store_row<Acc<T>>(row, n, static_cast<Acc<T>*>(data) + i * stride);
    store_row(row, n, at(i));
  }

  void* data;
  const int64_t stride;  // in elements
  const bool partial;    // stored as Acc<T>, although T is narrower
};

// Unit of the scores that finish_scores() computes. Without softcap, bias and ALiBi slopes, the
// scores remain QK^T, and the softmax applies the scale within its exponential. Otherwise
// finish_scores() applies the scale.
struct ScoreUnits {
  explicit ScoreUnits(const AttentionParams& p) {
    const bool plain = p.softcap == 0 && p.mask.bias.data == nullptr && p.mask.slopes == nullptr;
    scaled = !plain || !(p.scale >= 0x1p-100);  // lse over a smaller scale may be infinite
    natural = scaled ? 1 : p.scale;
  }
  bool scaled;     // finish_scores() applies the scale
  double natural;  // factor from a score to the exponent of e
};

// Writes the log-sum-exp (natural log) of a row to index `at` of lse, and its rounding residual if
// requested. Fully masked rows get -inf. Does nothing if lse is null.
//
// unit: factor from `maximum` to the exponent of e.
template <class A>
inline void write_lse(const AttentionParams& p, double unit, int64_t at, A maximum, A sum) {
  if (p.lse == nullptr) return;
  A high = -static_cast<A>(__builtin_inf()), residual = 0;
  if (sum != 0) log_sum_exp(maximum, unit, sum, &high, &residual);
  static_cast<A*>(p.lse)[at] = high;
  if (p.lse_residual != nullptr) static_cast<A*>(p.lse_residual)[at] = residual;
}

// Writes the rounding residuals of rows [first, first + count) of out, if requested. These rows of
// out must be stored already.
//
// rows: the unrounded rows, `stride` elements apart.
template <class T>
inline void write_out_residual(const AttentionParams& p, const SequenceRows& queries, int64_t h,
                               int64_t first, int64_t count, const Acc<T>* rows, int64_t stride) {
  if constexpr (sizeof(T) == 2) {
    if (p.out_residual == nullptr) return;
    const T* const out = at_head<T>(p.out, p.out_strides, queries, h);
    const auto* const residuals =
        at_head<int16_t>(p.out_residual, p.out_residual_strides, queries, h);
    for (int64_t i = first; i < first + count; ++i, rows += stride) {
      store_residual_row(rows, out + i * p.out_strides[2], p.head_dim_v,
                         const_cast<int16_t*>(residuals) + i * p.out_residual_strides[2]);
    }
  }
}

// Loads lse in score units, its rounding residual (in_units) and dlse of the query row at index
// `at`, for the backward. Returns false if the row is fully masked or does not exist. Its lse is
// then +inf, so that P is 0.
//
// unit: factor from scores to the exponent of e.
template <class A>
inline bool load_lse(const AttentionBwdParams& bwd, bool exists, int64_t at, double unit, A* lse,
                     A* lse_lost, A* grad_lse) {
  *lse = static_cast<A>(__builtin_inf());
  *lse_lost = *grad_lse = 0;
  if (!exists) return false;
  const A high = static_cast<const A*>(bwd.fwd.lse)[at];
  if (high == -static_cast<A>(__builtin_inf())) return false;
  in_units(high, static_cast<const A*>(bwd.fwd.lse_residual)[at], unit, lse, lse_lost);
  if (bwd.grad_lse != nullptr) {
    *grad_lse = with_plain_nan(static_cast<const A*>(bwd.grad_lse)[at]);
  }
  return true;
}

// Returns the term that must be added to delta = rowsum(dO * O) because O is stored in 16 bits.
// Without this term, the error of delta exceeds dS in rows with few visible keys or with nearly all
// the weight on one key.
template <class T>
inline float delta_residual(const AttentionBwdParams& bwd, const SequenceRows& queries, int64_t h,
                            int64_t i) {
  const AttentionParams& p = bwd.fwd;
  return dot_residual_row(
      at_head<T>(p.out, p.out_strides, queries, h) + i * p.out_strides[2],
      at_head<int16_t>(p.out_residual, p.out_residual_strides, queries, h) +
          i * p.out_residual_strides[2],
      at_head<T>(bwd.grad_out, bwd.grad_out_strides, queries, h) + i * bwd.grad_out_strides[2],
      p.head_dim_v);
}

// Position of a score tile.
struct TileAt {
  int64_t b, h, i, j, n;  // batch, head, first query, first key, number of keys
};

// Converts QK^T of one tile, (n, kRows), to masked scores in place: applies the scale or softcap,
// then bias and mask. Sets the rows that pad n to -inf.
//
// cap_slope: with softcap, receives the derivative of the capped score with respect to the uncapped
// score, (n, kRows). May be null.
// stage: scratch for the bias, (kBlockN, kRows).
template <class T>
inline void finish_scores(const AttentionParams& p, const MaskView<Acc<T>>& mask,
                          const ScoreUnits& units, Tile kind, const TileAt& at, Acc<T>* scores,
                          Acc<T>* cap_slope, Acc<T>* stage) {
  using A = Acc<T>;
  constexpr int64_t kRows = kPanel<A>;
  if (p.softcap > 0) {
    const A cap = static_cast<A>(p.softcap), inner = static_cast<A>(p.scale / p.softcap);
    for (int64_t e = 0; e < at.n * kRows; e += kLanes<A>) {
      const Vec<A> t = tanh<A>(load(scores + e) * inner);
      store(scores + e, t * cap);
      if (cap_slope != nullptr) store(cap_slope + e, A(1) - t * t);
    }
  } else if (units.scaled) {
    const A scale = static_cast<A>(p.scale);
    for (int64_t e = 0; e < at.n * kRows; e += kLanes<A>) {
      store(scores + e, load(scores + e) * scale);
    }
  }
  if (kind == Tile::kPartial) mask.apply(at.b, at.h, at.i, at.j, at.n, scores, stage);
  const Vec<A> nothing = broadcast<A>(-static_cast<A>(__builtin_inf()));
  for (int64_t e = at.n * kRows; e < Product<T>::pad_steps(at.n) * kRows; e += kLanes<A>) {
    store(scores + e, nothing);
  }
}

// Philox counters of a tile: first key (a multiple of kDecisions), first query, and head.
struct DropoutAt {
  int64_t key;
  uint32_t query, head;
};

inline DropoutAt dropout_at(const AttentionParams& p, const TileAt& at) {
  const DropoutOffsets offsets = dropout_offsets(p, at.b);
  return {offsets.key + at.j, static_cast<uint32_t>(offsets.row + at.i),
          static_cast<uint32_t>(offsets.head + at.h)};
}

// Computes the dropout keep masks of score tiles whose lanes hold queries.
template <class A>
class ColumnDropout {
 public:
  explicit ColumnDropout(const AttentionParams& p)
      : p_(p), keys_(p.seed), threshold_(dropout_threshold(p.dropout_p)) {}

  // Computes the keep masks of keys [0, steps) of a tile. Bit l of words[t] is set if the weight of
  // query l and key t is kept. The caller applies dropout_scale. `words` must have room for a
  // multiple of 8 keys, because eight consecutive keys share a Philox counter.
  void keep(const TileAt& at, int64_t steps, uint32_t* words) const {
    const DropoutAt first = dropout_at(p_, at);
    const DropoutRows<kPanel<A>> rows(&keys_, threshold_, first.query, first.head, 0);
    for (int64_t t = 0; t < steps; t += kDecisions) rows.keep(first.key + t, words + t);
  }

 private:
  const AttentionParams& p_;
  const PhiloxKeys keys_;
  const uint32_t threshold_;
};

// Returns true if all elements of n rows are finite.
template <class T>
inline bool rows_finite(const T* rows, int64_t stride, int64_t n, int64_t dim) {
  using A = Acc<T>;
  constexpr int64_t kLane = kLanes<A>;
  Vec<A> zero{};
  A rest = 0;
  for (int64_t t = 0; t < n; ++t) {
    const T* const row = rows + t * stride;
    int64_t d = 0;
    for (; d + kLane <= dim; d += kLane) zero += load_as<T>(row + d) * A(0);
    for (; d < dim; ++d) rest += to_acc(row[d]) * A(0);
  }
  return rest + horizontal_sum<A>(zero) == 0;
}

// A block of K or V of one head, packed for use as the transposed left operand of a matmul.
//
// Masked keys have weight 0, but 0 * NaN is NaN. Non-finite rows are therefore packed as 0 and
// listed in `nonfinite`. After each matmul with the block, the kernels call add_nonfinite().
//
// kInGroups: packed by Product<T>::column_groups() instead of columns().
template <class T, bool kInGroups = false>
struct KeyColumns {
  using A = Acc<T>;
  typename Product<T>::Left left{};
  const T* rows = nullptr;  // the source rows, not owned
  int64_t stride = 0, count = 0;
  int64_t nonfinite[kBlockN];  // indices of the `count` non-finite rows

  // Packs n rows of src. With `guard`, non-finite rows are packed as 0 and listed. `src` must
  // remain valid for add_nonfinite().
  //
  // stage: scratch, (kBlockN, pad_dim(dim)).
  // buffer: receives the packed rows, unless they are used in place.
  void load(const T* src, int64_t row_stride, int64_t n, int64_t dim, bool guard, T* stage,
            typename Product<T>::LeftElement* buffer) {
    rows = src;
    stride = row_stride;
    count = 0;
    for (int64_t t = 0; guard && t < n; ++t) {
      if (!rows_finite(src + t * stride, stride, 1, dim)) nonfinite[count++] = t;
    }
    if (count > 0) {
      const int64_t wide = Product<T>::pad_dim(dim);
      copy_rows(src, stride, n, dim, stage, Product<T>::pad_steps(n), wide);
      for (int64_t s = 0; s < count; ++s) memset(stage + nonfinite[s] * wide, 0, wide * sizeof(T));
      src = stage;
      row_stride = wide;
    }
    left = kInGroups ? Product<T>::column_groups(src, row_stride, n, dim, stage, buffer)
                     : Product<T>::columns(src, row_stride, n, dim, stage, buffer);
  }

  // Accumulates weights * rows into out for the non-finite rows among keys [lo, hi). Skips zero
  // weights.
  //
  // weights: (hi - lo, kRows).
  // out: (dim, kRows).
  void add_nonfinite(int64_t lo, int64_t hi, int64_t dim, const A* weights, A* out) const {
    for (int64_t s = 0; s < count; ++s) {
      if (nonfinite[s] < lo || nonfinite[s] >= hi) continue;
      for (int v = 0; v < 2; ++v) {
        const Vec<A> weight =
            fused_attn::load(weights + (nonfinite[s] - lo) * kPanel<A> + v * kLanes<A>);
        for (int64_t d = 0; d < dim; ++d) {
          A* const at = out + d * kPanel<A> + v * kLanes<A>;
          const A x = to_acc(rows[nonfinite[s] * stride + d]);
          store(at, fused_attn::load(at) + (weight == 0 ? Vec<A>{} : weight * x));
        }
      }
    }
  }
};

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns true if operands of this size stay in the cores' caches between calls, provided that each
// thread runs the same tasks in every call (static scheduling). For 8 heads with 32 queries and
// head_dim 64, static scheduling reduces the time from 17 us to 14 us.
inline bool fit_caches(int64_t bytes) { return bytes <= int64_t{1} << 20; }

// Returns true if every query attends to every key. All tasks then take equally long, so static
// scheduling is as fast as dynamic scheduling, and less sensitive to other processes: with one or
// two busy processes, the 90th-percentile time is 0.8 to 1.2 times torch's with static scheduling
// and 0.5 to 1.6 times with dynamic scheduling (batch 8, 12 heads, 128 tokens, head_dim 32 in
// float32, AMD Zen 3).
inline bool is_unmasked(const AttentionParams& p) {
  const MaskParams& mask = p.mask;
  return p.cu_seqlens_q == nullptr && mask.bias.data == nullptr && mask.dense.data == nullptr &&
         mask.key_mask.data == nullptr && mask.bounds == nullptr &&
         mask.query_documents == nullptr && mask.intervals == nullptr && mask.bits == nullptr &&
         mask.band_lo <= -p.seqlen_q && mask.band_hi >= p.seqlen_k;
}

// Heads whose operands and results have at most this size are short: the current one and the next
// fit in L2.
constexpr int64_t kShortHeadBytes = int64_t{256} << 10;

inline bool has_short_heads(int64_t bytes, int64_t heads) {
  return !fit_caches(bytes) && bytes / max64(heads, 1) <= kShortHeadBytes;
}

// Returns how tasks of this problem, which are heads or parts of heads, are distributed.
//
// bytes: size of all operands and results of `heads` heads.
inline Tasks tasks_of(int64_t bytes, int64_t heads) {
  return fit_caches(bytes)               ? Tasks::kCached
         : has_short_heads(bytes, heads) ? Tasks::kShort
                                         : Tasks::kLong;
}

// Returns the total size of query, key, value and out in bytes.
template <class T>
inline int64_t operand_bytes(const AttentionParams& p) {
  const int64_t dims = p.head_dim + p.head_dim_v, size = static_cast<int64_t>(sizeof(T));
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.cu_seqlens_q[p.batch] : p.batch * p.seqlen_q;
  const int64_t keys = packed ? p.cu_seqlens_k[p.batch] : p.batch * p.seqlen_k;
  return (p.num_heads * queries + p.num_heads_kv * keys) * dims * size;
}

// Transposes a query tile (dim, kRows) and writes its first `rows` queries to out, converted to T.
//
// scratch: (kRows, dim). For 16-bit T, it receives the unrounded rows.
// first: row of `out` that the first query of the tile is written to.
template <class T>
inline void write_query_tile(const Acc<T>* query_tile, int64_t dim, int64_t rows, Acc<T>* scratch,
                             const ResultRows<T>& out, int64_t first) {
  constexpr int64_t kRows = kPanel<Acc<T>>;
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    if (rows == kRows) return transpose(query_tile, kRows, dim, kRows, out.at(first), out.stride);
  }
  transpose(query_tile, kRows, dim, kRows, scratch, dim);
  for (int64_t l = 0; l < rows; ++l) out.store(first + l, scratch + l * dim, dim);
}

}  // namespace
}  // namespace fused_attn
