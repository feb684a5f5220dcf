// layer_norm and rms_norm of residual + dropout(input), forward and backward.
//
// Sources: Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4. A row is read from
// memory once and stays in L1 or L2 for the two passes that compute mean and variance. Two passes
// avoid the cancellation in a difference of two large sums.
#pragma once

#include <type_traits>

#include "cpu/kernels/rows.h"

namespace fused_attn {
namespace {

// The backward uses streaming stores only for rows of at least this length. 65536 rows take with
// and without them: 64 columns 7.6 and 2.0 ms, 256 columns 2.4 and 1.5 ms, 512 columns 1.8 and 1.4
// to 2.0 ms. The forward is faster with them at every length.
constexpr int64_t kStreamGradFrom = 512;  // columns

// Elements per stretch, which is summed sequentially. Stretches are added pairwise, so the rounding
// error grows with the logarithm of the row length.
constexpr int64_t kSumLength = 1024;

template <class A, int kSums>
struct Terms {
  Vec<A> of[kSums];
};

// Sums term(c, count) over the vectors of columns [begin, end). A term has kSums vectors, which are
// summed separately.
template <class A, int kSums, class Term>
__attribute__((always_inline)) inline Terms<A, kSums> sum_stretch(int64_t begin, int64_t end,
                                                                  const Term& term) {
  constexpr int64_t kLane = kLanes<A>, kUnroll = 4;
  Terms<A, kSums> part[kUnroll] = {};
  const auto add = [&](int u, const Terms<A, kSums>& terms) {
    for (int s = 0; s < kSums; ++s) part[u].of[s] += terms.of[s];
  };
  int64_t c = begin;
  for (; c + kUnroll * kLane <= end; c += kUnroll * kLane) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) add(u, term(c + u * kLane, kLane));
  }
  for_each_vector<A>(c, end, [&](int64_t at, int64_t count) { add(0, term(at, count)); });
  for (int u = 1; u < kUnroll; ++u) add(0, part[u]);
  return part[0];
}

// Sums term(c, count) over a row of n columns into kSums scalars.
template <class A, int kSums, class Term>
__attribute__((always_inline)) inline void sum_row(int64_t n, const Term& term, A* sums) {
  Terms<A, kSums> total{};
  const auto add = [](const Terms<A, kSums>& from, Terms<A, kSums>* to) {
    for (int s = 0; s < kSums; ++s) to->of[s] += from.of[s];
  };
  // level[i] is the sum of 2^i stretches if bit i of stretches is set.
  Terms<A, kSums> level[48];
  int64_t stretches = 0;
  for (int64_t begin = 0; begin < n; begin += kSumLength, ++stretches) {
    // A single call site for all lengths, because `term` is inlined several times per call site.
    Terms<A, kSums> own = sum_stretch<A, kSums>(begin, min64(begin + kSumLength, n), term);
    if (n <= kSumLength) {
      total = own;
      break;
    }
    int i = 0;
    for (; (stretches >> i & 1) != 0; ++i) add(level[i], &own);
    level[i] = own;
  }
  for (int i = 0; stretches >> i != 0; ++i) {
    if ((stretches >> i & 1) != 0) add(level[i], &total);
  }
  for (int s = 0; s < kSums; ++s) sums[s] = horizontal_sum<A>(total.of[s]);
}

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

// Rows per block. Each of the passes (sum, variance, output) runs over all rows of a block before
// the next pass begins. The dependency chain of one row, from sum to variance to square root, then
// overlaps with other rows. The result of a row does not depend on the other rows of its block.
constexpr int64_t kMaxBlockRows = 8;
constexpr int64_t kBlockBytes = int64_t{16} << 10;  // so that a block stays in L1

template <class T>
class NormFwd {
  using A = Acc<T>;

 public:
  static bool run(const NormParams& p) {
    const int64_t stride = round_up(p.columns, kLanes<A>);
    const int64_t fit = kBlockBytes / max64(stride * static_cast<int64_t>(sizeof(A)), 1);
    const int64_t block = max64(min64(fit, kMaxBlockRows), 1), blocks = div_up(p.rows, block);
    return run_team(p.num_threads, blocks, [&] {
      NormFwd self(p, stride);
      const bool ok = self.allocate(block);
      const bool plain = !self.added_ && p.weight != nullptr && p.bias != nullptr;
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < blocks; ++i) {
        if (!ok) continue;
        const int64_t count = min64(block, p.rows - i * block);
        plain ? self.template rows<true>(i * block, count)
              : self.template rows<false>(i * block, count);
      }
      stream_fence();
      return ok;
    });
  }

 private:
  NormFwd(const NormParams& p, int64_t stride)
      : p_(p),
        added_(p.residual != nullptr || p.dropout_p > 0 || p.total != nullptr),
        stride_(stride),
        dropout_(p) {}

  void place(int64_t block) {
    x_ = arena_.template take<A>(block * stride_);
    dropout_.place(&arena_);
  }

  bool allocate(int64_t block) {
    if (!arena_.layout([&] { place(block); })) return false;
    dropout_.begin();
    return true;
  }

  // Normalizes rows [first, first + count). kPlain: the call has a weight and a bias but neither
  // residual nor dropout.
  template <bool kPlain>
  void rows(int64_t first, int64_t count) {
    const int64_t n = p_.columns;
    const bool in_place = sizeof(T) == sizeof(A) && (kPlain || !added_);
    // Row addresses are computed, because a list of them made 65,536 rows of 64 columns take 1.2
    // times as long.
    const bool one_run = p_.input_rows.run_step == 0;
    const T* const begin = row_of<T>(p_.input, p_.input_rows, first);
    const auto input = [&](int64_t k) {
      return one_run ? begin + k * p_.input_rows.row_stride
                     : row_of<T>(p_.input, p_.input_rows, first + k);
    };
    const auto x = [&](int64_t k) {
      return in_place ? reinterpret_cast<const A*>(input(k)) : x_ + k * stride_;
    };
    A mean[kMaxBlockRows], rstd[kMaxBlockRows];
    for (int64_t k = 0; k < count; ++k) {
      A* const own = x_ + k * stride_;
      const A sum = !kPlain && added_ ? add_up(first + k, input(k), own)
                                      : load_sum(input(k), in_place ? nullptr : own);
      mean[k] = p_.rms ? A(0) : sum / static_cast<A>(n);
    }
    for (int64_t k = 0; k < count; ++k) {
      const A variance = square_sum(x(k), mean[k]) / static_cast<A>(n);
      rstd[k] = A(1) / square_root(variance + static_cast<A>(p_.eps));
    }
    for (int64_t k = 0; k < count; ++k) {
      if (p_.mean != nullptr && !p_.rms) static_cast<A*>(p_.mean)[first + k] = mean[k];
      if (p_.rstd != nullptr) static_cast<A*>(p_.rstd)[first + k] = rstd[k];
      write<kPlain>(first + k, x(k), mean[k], rstd[k]);
    }
  }

  // Returns the sum of a row. Stores the row to x in the accumulator type, unless x is null.
  A load_sum(const T* input, A* x) const {
    A sum;
    const auto load = [&](int64_t c, int64_t count) __attribute__((always_inline)) -> Terms<A, 1> {
      const Vec<A> own = load_part(input + c, count);
      if (x != nullptr) store_part<A>(own, count, x + c);
      return {{own}};
    };
    sum_row<A, 1>(p_.columns, load, &sum);
    return sum;
  }

  // Stores residual + dropout(input) to x and, rounded to T, to total. If total is stored, x holds
  // the rounded values, because the backward starts from them. Returns the sum of the row.
  A add_up(int64_t r, const T* input, A* x) const {
    const int64_t n = p_.columns;
    const bool drops = p_.dropout_p > 0;
    const T* const residual = row_of<T>(p_.residual, p_.residual_rows, r);
    T* const total = p_.total == nullptr ? nullptr : static_cast<T*>(p_.total) + r * n;
    const bool streaming = streams<T>(p_.rows * p_.columns, total);
    const RowDropout<A> dropout = dropout_;
    const uint32_t row = drops ? dropout.counter_row(r) : 0;
    uint64_t keep_mask = 0;
    A sum;
    const auto add = [&](int64_t c, int64_t count) __attribute__((always_inline)) -> Terms<A, 1> {
      Vec<A> own = load_part(input + c, count);
      if (drops) {
        if (c % RowDropout<A>::kColumns == 0) keep_mask = dropout.keep(row, c);
        own *= dropout.factor(keep_mask, c);
      }
      if (residual != nullptr) own += load_part(residual + c, count);
      if (total != nullptr) {
        write_part<T>(own, count, streaming, total + c);
        if (sizeof(T) != sizeof(A)) own = load_part<T>(total + c, count);
      }
      store_part<A>(own, count, x + c);
      return {{own}};
    };
    sum_row<A, 1>(n, add, &sum);
    return sum;
  }

  // Returns the sum of (x - mean)^2.
  A square_sum(const A* x, A mean) const {
    A sum;
    const auto square = [&](int64_t c, int64_t count)
                            __attribute__((always_inline)) -> Terms<A, 1> {
      Vec<A> off = load_part(x + c, count) - mean;
      if (count < kLanes<A>) off = where<A>((1u << count) - 1, off, Vec<A>{});
      return {{off * off}};
    };
    sum_row<A, 1>(p_.columns, square, &sum);
    return sum;
  }

  template <bool kPlain>
  void write(int64_t r, const A* x, A mean, A rstd) const {
    const A* const weight = static_cast<const A*>(p_.weight);
    const A* const bias = static_cast<const A*>(p_.bias);
    T* const out = static_cast<T*>(p_.out) + r * p_.columns;
    const bool streaming = !kPlain && streams<T>(p_.rows * p_.columns, out);
    for_each_vector<A>(0, p_.columns, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      Vec<A> y = (load_part(x + c, count) - mean) * rstd;
      if (kPlain || weight != nullptr) y *= load_part(weight + c, count);
      if (kPlain || bias != nullptr) y += load_part(bias + c, count);
      write_part<T>(y, count, streaming, out + c);
    });
  }

  const NormParams& p_;
  const bool added_;      // there is a residual or dropout, or total is stored
  const int64_t stride_;  // row stride of x_, in elements
  Arena arena_;
  A* x_;  // (block, columns)
  RowDropout<A> dropout_;
};

// Rows whose gradients are computed together, so that they share the loads of the weight and of the
// accumulators of its gradient. Compilers fuse different multiply-adds for four rows than for one,
// so the last bit of a gradient may depend on the group of its row, but not on the number of
// threads.
constexpr int kGradRows = 4;

// Calls use(r, constant) for groups of kGradRows rows, then for single rows. `constant` is the
// number of rows, as a std::integral_constant.
template <class Use>
inline void for_rows(int64_t begin, int64_t end, const Use& use) {
  int64_t r = begin;
  for (; r + kGradRows <= end; r += kGradRows) use(r, std::integral_constant<int, kGradRows>());
  for (; r < end; ++r) use(r, std::integral_constant<int, 1>());
}

// Backward of the norm. With x the normalized row and g = weight * grad_out:
//   d(sum) = rstd (g - mean(g) - x mean(g x)) + grad_total, without mean(g) for rms.
template <class T>
class NormBwd {
  using A = Acc<T>;

  // Rows are divided into parts, and the weight gradients of the parts are added in order. The
  // division depends on the shape alone, so the result is the same for any number of threads.
  static constexpr int64_t kMaxParts = 64, kMinRows = 16;

 public:
  static bool run(const NormBwdParams& bwd) {
    const NormParams& p = bwd.fwd;
    const int64_t per_part = max64(kMinRows, div_up(p.rows, kMaxParts));
    const int64_t parts = div_up(p.rows, per_part), n = p.columns;
    Arena arena;  // holds sums (parts, 2, columns): gradients of weight and bias
    A* sums;
    if (!arena.layout([&] { sums = arena.template take<A>(parts * 2 * n); })) return false;
    const bool done = run_team(p.num_threads, parts, [&] {
      NormBwd self(bwd);
      const bool ok = self.allocate();
      const bool affine =
          p.weight != nullptr && bwd.grad_weight != nullptr && bwd.grad_bias != nullptr;
#pragma omp for schedule(static) nowait
      for (int64_t part = 0; part < parts; ++part) {
        if (!ok) continue;
        A* const own = sums + part * 2 * n;
        memset(own, 0, 2 * n * sizeof(A));
        const int64_t begin = part * per_part;
        for_rows(begin, min64(begin + per_part, p.rows), [&](int64_t r, auto rows) {
          if (rows() == kGradRows && affine) {
            self.template differentiate<true, kGradRows>(r, own, own + n);
          } else {
            self.template differentiate<false, rows()>(r, own, own + n);
          }
        });
      }
      stream_fence();
      return ok;
    });
    if (done) {
      add_up(sums, parts, n, static_cast<A*>(bwd.grad_weight));
      add_up(sums + n, parts, n, static_cast<A*>(bwd.grad_bias));
    }
    return done;
  }

 private:
  explicit NormBwd(const NormBwdParams& bwd) : bwd_(bwd), p_(bwd.fwd), dropout_(bwd.fwd) {}

  void place() { dropout_.place(&arena_); }

  bool allocate() {
    if (!arena_.layout([&] { place(); })) return false;
    dropout_.begin();
    return true;
  }

  // Computes the gradients of kRows rows. kAffine: weight is not null, and the gradients of weight
  // and bias are needed.
  template <bool kAffine, int kRows>
  void differentiate(int64_t first, A* weight_sum, A* bias_sum) {
    const int64_t n = p_.columns;
    const A* const weight = static_cast<const A*>(p_.weight);
    const T *total[kRows], *grad_out[kRows];
    A mean[kRows], rstd[kRows];
    for (int k = 0; k < kRows; ++k) {
      total[k] = row_of<T>(p_.input, p_.input_rows, first + k);
      grad_out[k] = row_of<T>(bwd_.grad_out, bwd_.grad_out_rows, first + k);
      mean[k] = p_.rms ? A(0) : static_cast<const A*>(p_.mean)[first + k];
      rstd[k] = static_cast<const A*>(p_.rstd)[first + k];
    }
    const bool needs_weight = kAffine || bwd_.grad_weight != nullptr;
    const bool needs_bias = kAffine || bwd_.grad_bias != nullptr;
    const auto normalised = [&](int k, int64_t c, int64_t count) -> Vec<A> {
      const Vec<A> x = (load_part(total[k] + c, count) - mean[k]) * rstd[k];
      return count == kLanes<A> ? x : where<A>((1u << count) - 1, x, Vec<A>{});
    };
    const auto weight_at = [&](int64_t c, int64_t count) -> Vec<A> {
      return kAffine || weight != nullptr ? load_part(weight + c, count) : broadcast<A>(1);
    };
    const auto add = [](Vec<A> x, int64_t count, A* sum) {
      store_part<A>(load_part(sum, count) + x, count, sum);
    };
    // Returns g * x of each row, followed by g of each row. Accumulates the gradients of weight and
    // bias.
    const auto terms = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      Terms<A, 2 * kRows> terms;
      const Vec<A> factor = weight_at(c, count);
      Vec<A> of_weight{}, of_bias{};
      for (int k = 0; k < kRows; ++k) {
        const Vec<A> x = normalised(k, c, count), grad = load_part(grad_out[k] + c, count);
        of_weight += grad * x;
        of_bias += grad;
        const Vec<A> g = grad * factor;
        terms.of[k] = g * x;
        terms.of[kRows + k] = g;
      }
      if (needs_weight) add(of_weight, count, weight_sum + c);
      if (needs_bias) add(of_bias, count, bias_sum + c);
      return terms;
    };
    A sums[2 * kRows];
    sum_row<A, 2 * kRows>(n, terms, sums);
    A along[kRows], across[kRows];
    for (int k = 0; k < kRows; ++k) {
      along[k] = sums[k] / static_cast<A>(n);
      across[k] = p_.rms ? A(0) : sums[kRows + k] / static_cast<A>(n);
    }
    // Writes one row after another, because streaming stores that alternate between rows take
    // longer per cache line.
#pragma GCC unroll 1
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = (first + k) * n;
      const bool drops = bwd_.grad_input != nullptr, wide = n >= kStreamGradFrom;
      const T* const grad_total = row_of<T>(bwd_.grad_total, bwd_.grad_total_rows, first + k);
      T* const grad_residual = static_cast<T*>(bwd_.grad_residual) + row;
      T* const grad_input = drops ? static_cast<T*>(bwd_.grad_input) + row : nullptr;
      const bool streaming = wide && streams<T>(p_.rows * p_.columns, grad_residual);
      const bool streaming_input = wide && streams<T>(p_.rows * p_.columns, grad_input);
      const uint32_t counter = drops ? dropout_.counter_row(first + k) : 0;
      uint64_t keep_mask = 0;
      for_each_vector<A>(0, n, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
        const Vec<A> g = weight_at(c, count) * load_part(grad_out[k] + c, count);
        Vec<A> grad = rstd[k] * (g - across[k] - normalised(k, c, count) * along[k]);
        if (grad_total != nullptr) grad += load_part(grad_total + c, count);
        write_part<T>(grad, count, streaming, grad_residual + c);
        if (!drops) return;
        if (c % RowDropout<A>::kColumns == 0) keep_mask = dropout_.keep(counter, c);
        write_part<T>(grad * dropout_.factor(keep_mask, c), count, streaming_input, grad_input + c);
      });
    }
  }

  static void add_up(const A* sums, int64_t parts, int64_t n, A* out) {
    if (out == nullptr) return;
    for (int64_t c = 0; c < n; ++c) out[c] = 0;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t c = 0; c < n; ++c) out[c] += sums[part * 2 * n + c];
    }
  }

  const NormBwdParams& bwd_;
  const NormParams& p_;
  Arena arena_;
  RowDropout<A> dropout_;
};

}  // namespace
}  // namespace fused_attn
