// layer_norm and rms_norm of residual + dropout(input), forward and backward, a row at a time.
//
// Sources: Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4. A row is read once and
// stays in L1 or L2 while mean and variance are taken in two passes, which does not cancel as the
// difference of two large sums would.
#pragma once

#include "cpu/attention_tile.h"

namespace fused_attn {
namespace {

// Elements that are summed up at a stretch; longer sums are halved, so that the error grows with
// the logarithm of the row, not with the row.
constexpr int64_t kSumLength = 1024;

// Sum of f over n elements of x and y; f takes vectors and scalars.
template <class A, class F>
A reduce(int64_t n, const A* x, const A* y, const F& f) {
  if (n > kSumLength) {
    const int64_t half = n / 2 / kSumLength * kSumLength;
    const int64_t first = half == 0 ? kSumLength : half;
    return reduce(first, x, y, f) + reduce(n - first, x + first, y + first, f);
  }
  Vec<A> sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes<A> <= n; c += 4 * kLanes<A>) {
    for (int v = 0; v < 4; ++v) {
      sums[v] += f(load(x + c + v * kLanes<A>), load(y + c + v * kLanes<A>));
    }
  }
  A sum = horizontal_sum<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; c < n; ++c) sum += f(x[c], y[c]);
  return sum;
}

// What dropout multiplies a row by: 0 or 1 / (1 - p).
template <class A>
inline void dropout_row(const NormParams& p, int64_t row, A* factor) {
  constexpr int64_t kQuads = 16;  // counters at a time, a vector of words each
  const uint32_t threshold = dropout_threshold(p.dropout_p);
  const A kept = static_cast<A>(dropout_scale(p.dropout_p));
  for (int64_t begin = 0; begin < p.columns; begin += 4 * kQuads) {
    uint32_t words[4][kQuads];
    for (int64_t t = 0; t < kQuads; ++t) {
      const Philox4 r = philox4x32(static_cast<uint32_t>(begin / 4 + t), static_cast<uint32_t>(row),
                                   0, 1, p.seed);
      for (int w = 0; w < 4; ++w) words[w][t] = r.word[w] >> 8;
    }
    for (int64_t c = 0; c < min64(4 * kQuads, p.columns - begin); ++c) {
      factor[begin + c] = words[c % 4][c / 4] >= threshold ? kept : A(0);
    }
  }
}

template <class T>
class NormFwd {
  using A = Acc<T>;

 public:
  static bool run(const NormParams& p) {
    bool ok = true;
#pragma omp parallel num_threads(clamp_threads(p.num_threads, p.rows)) reduction(&& : ok)
    {
      NormFwd self(p);
      ok = self.allocate();
#pragma omp for schedule(static)
      for (int64_t r = 0; r < p.rows; ++r) {
        if (ok) self.row(r);
      }
    }
    return ok;
  }

 private:
  explicit NormFwd(const NormParams& p) : p_(p) {}

  void place() {
    sum_ = arena_.template take<A>(p_.columns);
    other_ = arena_.template take<A>(p_.columns);
  }

  bool allocate() {
    place();
    if (!arena_.allocate()) return false;
    place();
    return true;
  }

  void row(int64_t r) {
    const int64_t n = p_.columns, at = r * n;
    load_row(static_cast<const T*>(p_.input) + at, n, sum_);
    if (p_.dropout_p > 0) {
      dropout_row(p_, r, other_);
      for (int64_t c = 0; c < n; ++c) sum_[c] *= other_[c];
    }
    if (p_.residual != nullptr) {
      load_row(static_cast<const T*>(p_.residual) + at, n, other_);
      for (int64_t c = 0; c < n; ++c) sum_[c] += other_[c];
    }
    if (p_.total != nullptr) {
      // The norm is that of the sum as it is stored: the backward starts from it.
      store_row(sum_, n, static_cast<T*>(p_.total) + at);
      if (sizeof(T) != sizeof(A)) load_row(static_cast<const T*>(p_.total) + at, n, sum_);
    }
    const A size = static_cast<A>(n);
    A mean = 0;
    if (!p_.rms) {
      mean = reduce(n, sum_, sum_, [](auto x, auto) { return x; }) / size;
      static_cast<A*>(p_.mean)[r] = mean;
    }
    const auto square = [mean](auto x, auto) { return (x - mean) * (x - mean); };
    const A variance = reduce(n, sum_, sum_, square) / size;
    const A rstd = A(1) / square_root(variance + static_cast<A>(p_.eps));
    static_cast<A*>(p_.rstd)[r] = rstd;
    const A* const weight = static_cast<const A*>(p_.weight);
    const A* const bias = static_cast<const A*>(p_.bias);
    for (int64_t c = 0; c < n; ++c) sum_[c] = (sum_[c] - mean) * rstd;
    if (weight != nullptr) {
      for (int64_t c = 0; c < n; ++c) sum_[c] *= weight[c];
    }
    if (bias != nullptr) {
      for (int64_t c = 0; c < n; ++c) sum_[c] += bias[c];
    }
    store_row(sum_, n, static_cast<T*>(p_.out) + at);
  }

  static float square_root(float x) { return __builtin_sqrtf(x); }
  static double square_root(double x) { return __builtin_sqrt(x); }

  const NormParams& p_;
  Arena arena_;
  A *sum_, *other_;  // (columns)
};

// With x the normalised row and g = weight * grad_out:
//   d(sum) = rstd (g - mean(g) - x mean(g x)) + grad_total, without mean(g) for rms.
template <class T>
class NormBwd {
  using A = Acc<T>;

  // Rows whose parts of the weight gradient are added up in order. The parts depend on the shape
  // alone, so the result is the same for any number of threads.
  static constexpr int64_t kMaxParts = 64, kMinRows = 16;

 public:
  static bool run(const NormBwdParams& bwd) {
    const NormParams& p = bwd.fwd;
    const int64_t per_part = max64(kMinRows, div_up(p.rows, kMaxParts));
    const int64_t parts = div_up(p.rows, per_part), n = p.columns;
    Arena arena;  // (parts, 2, columns): weight, bias
    arena.template take<A>(parts * 2 * n);
    if (!arena.allocate()) return false;
    A* const sums = arena.template take<A>(parts * 2 * n);
    bool ok = true;
#pragma omp parallel num_threads(clamp_threads(p.num_threads, parts)) reduction(&& : ok)
    {
      NormBwd self(bwd);
      ok = self.allocate();
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts; ++part) {
        A* const own = sums + part * 2 * n;
        for (int64_t c = 0; c < 2 * n; ++c) own[c] = 0;
        for (int64_t r = part * per_part; r < min64((part + 1) * per_part, p.rows); ++r) {
          if (ok) self.row(r, own, own + n);
        }
      }
#pragma omp single
      {
        add_up(sums, parts, n, static_cast<A*>(bwd.grad_weight));
        add_up(sums + n, parts, n, static_cast<A*>(bwd.grad_bias));
      }
    }
    return ok;
  }

 private:
  explicit NormBwd(const NormBwdParams& bwd) : bwd_(bwd), p_(bwd.fwd) {}

  void place() {
    x_ = arena_.template take<A>(p_.columns);
    grad_ = arena_.template take<A>(p_.columns);
    other_ = arena_.template take<A>(p_.columns);
  }

  bool allocate() {
    place();
    if (!arena_.allocate()) return false;
    place();
    return true;
  }

  void row(int64_t r, A* weight_sum, A* bias_sum) {
    const int64_t n = p_.columns, at = r * n;
    const A* const weight = static_cast<const A*>(p_.weight);
    load_row(static_cast<const T*>(p_.total) + at, n, x_);
    load_row(static_cast<const T*>(bwd_.grad_out) + at, n, grad_);
    const A mean = p_.rms ? A(0) : static_cast<const A*>(p_.mean)[r];
    const A rstd = static_cast<const A*>(p_.rstd)[r], size = static_cast<A>(n);
    for (int64_t c = 0; c < n; ++c) x_[c] = (x_[c] - mean) * rstd;
    if (bwd_.grad_weight != nullptr) {
      for (int64_t c = 0; c < n; ++c) weight_sum[c] += grad_[c] * x_[c];
    }
    if (bwd_.grad_bias != nullptr) {
      for (int64_t c = 0; c < n; ++c) bias_sum[c] += grad_[c];
    }
    if (weight != nullptr) {
      for (int64_t c = 0; c < n; ++c) grad_[c] *= weight[c];
    }
    const A along = reduce(n, grad_, x_, [](auto g, auto x) { return g * x; }) / size;
    const A across = p_.rms ? A(0) : reduce(n, grad_, x_, [](auto g, auto) { return g; }) / size;
    for (int64_t c = 0; c < n; ++c) grad_[c] = rstd * (grad_[c] - across - x_[c] * along);
    if (bwd_.grad_total != nullptr) {
      load_row(static_cast<const T*>(bwd_.grad_total) + at, n, other_);
      for (int64_t c = 0; c < n; ++c) grad_[c] += other_[c];
    }
    store_row(grad_, n, static_cast<T*>(bwd_.grad_residual) + at);
    if (bwd_.grad_input == nullptr) return;
    dropout_row(p_, r, other_);
    for (int64_t c = 0; c < n; ++c) grad_[c] *= other_[c];
    store_row(grad_, n, static_cast<T*>(bwd_.grad_input) + at);
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
  A *x_, *grad_, *other_;  // (columns)
};

}  // namespace
}  // namespace fused_attn
