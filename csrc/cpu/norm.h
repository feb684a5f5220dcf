// layer_norm and rms_norm of residual + dropout(input), forward and backward, a row at a time.
//
// Sources: Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4. A row is read once and
// stays in L1 or L2 while mean and variance are taken in two passes, which does not cancel as the
// difference of two large sums would.
#pragma once

#include "cpu/attention_tile.h"

namespace fused_attn {
namespace {

// Elements that are summed up at a stretch; the sums of stretches are added in pairs, so that the
// error grows with the logarithm of the row, not with the row.
constexpr int64_t kSumLength = 1024;

// The first `count` of a vector's elements, the others 0.
template <class T>
inline Vec<Acc<T>> load_part(const T* src, int64_t count) {
  if (count == kLanes<Acc<T>>) return load_as<T>(src);
  T part[kLanes<Acc<T>>] = {};
  memcpy(part, src, count * sizeof(T));
  return load_as<T>(part);
}

template <class T>
inline void store_part(Vec<Acc<T>> v, int64_t count, T* dst) {
  if (count == kLanes<Acc<T>>) return store_as<T>(v, dst);
  T part[kLanes<Acc<T>>];
  store_as<T>(v, part);
  memcpy(dst, part, count * sizeof(T));
}

// Where the rows that are written do not fit into L2, writing them past the caches saves reading
// them first. It helps the backward and the forward with dropout and residual (1.86 -> 1.70 ms at
// 4096 x 768 floats), and slows the plain forward down (0.58 -> 0.72 ms).
constexpr int64_t kStreamFrom = int64_t{4} << 20;  // bytes
// In the backward, rows shorter than this are not: 65536 rows of 64 take 7.6 ms streamed and 2.0
// not, of 256 2.4 and 1.5, of 512 1.8 and 1.4 to 2.0. (The forward gains at every length.)
constexpr int64_t kStreamGradFrom = 512;  // columns

template <class T>
inline bool streams(const NormParams& p, const void* row) {
  return sizeof(T) == sizeof(Acc<T>) && reinterpret_cast<uintptr_t>(row) % kVectorBytes == 0 &&
         p.rows * p.columns * static_cast<int64_t>(sizeof(T)) >= kStreamFrom;
}

// store_part, past the caches where that is wanted.
template <class T>
inline void write_part(Vec<Acc<T>> v, int64_t count, bool streaming, T* dst) {
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    if (streaming && count == kLanes<T>) return stream(dst, v);
  }
  store_part<T>(v, count, dst);
}

// Calls use(c, count) for each vector of a row, of which the last may be a part.
template <class A, class Use>
__attribute__((always_inline)) inline void for_each_vector(int64_t begin, int64_t end,
                                                           const Use& use) {
  int64_t c = begin;
  for (; c + kLanes<A> <= end; c += kLanes<A>) use(c, kLanes<A>);
  if (c < end) use(c, end - c);
}

template <class A, int kSums>
struct Terms {
  Vec<A> of[kSums];
};

// kSums sums over a row of what term(c, count) gives for each vector.
template <class A, int kSums, class Term>
__attribute__((always_inline)) inline void sum_row(int64_t n, const Term& term, A* sums) {
  constexpr int64_t kLane = kLanes<A>, kUnroll = 4;
  Terms<A, kSums> level[48];  // level[i]: the sum of 2^i stretches, where bit i of stretches is set
  int64_t stretches = 0;
  for (int64_t begin = 0; begin < n; begin += kSumLength, ++stretches) {
    const int64_t end = min64(begin + kSumLength, n);
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
    int i = 0;
    for (int u = 1; u < kUnroll; ++u) add(0, part[u]);
    for (; (stretches >> i & 1) != 0; ++i) add(0, level[i]);
    level[i] = part[0];
  }
  Terms<A, kSums> total{};
  for (int i = 0; stretches >> i != 0; ++i) {
    for (int s = 0; s < kSums && (stretches >> i & 1) != 0; ++s) total.of[s] += level[i].of[s];
  }
  for (int s = 0; s < kSums; ++s) sums[s] = horizontal_sum<A>(total.of[s]);
}

// What dropout leaves of a row, a bit for each column.
template <class A>
class RowDropout {
  using Columns = DropoutColumns<>;

 public:
  explicit RowDropout(const NormParams& p)
      : columns_(p.dropout_p > 0 ? p.columns : 0),
        keys_(p.seed),
        threshold_(dropout_threshold(p.dropout_p)),
        scale_(static_cast<A>(dropout_scale(p.dropout_p))) {}

  void place(Arena* arena) {
    groups_ = arena->template take<Columns>(div_up(columns_, Columns::kColumns));
    kept_ = arena->template take<uint8_t>(columns_ / 8 + 16);
  }

  void begin() {
    for (int64_t c = 0; c < columns_; c += Columns::kColumns) {
      groups_[c / Columns::kColumns] = Columns(&keys_, threshold_, c, 0, 1);
    }
  }

  // Draws for a row. Meanwhile the rows that are needed next are on their way from memory, null or
  // not.
  template <class T>
  void row(int64_t r, const T* next, const T* other = nullptr) {
    constexpr int64_t kStep = Columns::kColumns;
    for (int64_t c = 0; c < columns_; c += kStep) {
      for (int64_t e = c; e < min64(c + kStep, columns_); e += 64 / sizeof(T)) {
        if (next != nullptr) __builtin_prefetch(next + e);
        if (other != nullptr) __builtin_prefetch(other + e);
      }
      const uint64_t kept = groups_[c / kStep].keep(static_cast<uint32_t>(r));
      memcpy(kept_ + c / 8, &kept, sizeof(kept));
    }
  }

  // Of a vector of columns from c on.
  Vec<A> factor(int64_t c) const {
    uint16_t bits;
    memcpy(&bits, kept_ + c / 8, sizeof(bits));
    return where<A>(static_cast<uint32_t>(bits >> (c % 8)), broadcast<A>(scale_), Vec<A>{});
  }

 private:
  const int64_t columns_;
  const PhiloxKeys keys_;
  const uint32_t threshold_;
  const A scale_;
  Columns* groups_;
  uint8_t* kept_;  // a bit for each column
};

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

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
      const bool added = p.residual != nullptr || p.dropout_p > 0 || p.total != nullptr;
      const bool plain = !added && p.weight != nullptr && p.bias != nullptr;
#pragma omp for schedule(static)
      for (int64_t r = 0; r < p.rows; ++r) {
        if (!ok) continue;
        plain ? self.template row<true>(r) : self.template row<false>(r);
      }
      stream_fence();
    }
    return ok;
  }

 private:
  explicit NormFwd(const NormParams& p) : p_(p), dropout_(p) {}

  void place() {
    x_ = arena_.template take<A>(p_.columns);
    dropout_.place(&arena_);
  }

  bool allocate() {
    place();
    if (!arena_.allocate()) return false;
    place();
    dropout_.begin();
    return true;
  }

  // kPlain: the row is the input's alone, and weight and bias are there.
  template <bool kPlain>
  void row(int64_t r) {
    const int64_t n = p_.columns, at = r * n;
    const T* const input = static_cast<const T*>(p_.input) + at;
    const A* x = x_;
    if constexpr (kPlain && sizeof(T) == sizeof(A)) {
      x = input;
    } else if constexpr (kPlain) {
      load_row(input, n, x_);
    } else {
      add_up(r, input);
    }
    A mean;
    const auto plain = [&](int64_t c, int64_t count) -> Terms<A, 1> {
      return {{load_part(x + c, count)}};
    };
    sum_row<A, 1>(n, plain, &mean);
    mean = p_.rms ? A(0) : mean / static_cast<A>(n);
    const auto square = [&](int64_t c, int64_t count) -> Terms<A, 1> {
      Vec<A> off = load_part(x + c, count) - mean;
      if (count < kLanes<A>) off = where<A>((1u << count) - 1, off, Vec<A>{});
      return {{off * off}};
    };
    A variance;
    sum_row<A, 1>(n, square, &variance);
    const A rstd = A(1) / square_root(variance / static_cast<A>(n) + static_cast<A>(p_.eps));
    if (p_.mean != nullptr && !p_.rms) static_cast<A*>(p_.mean)[r] = mean;
    if (p_.rstd != nullptr) static_cast<A*>(p_.rstd)[r] = rstd;
    const A* const weight = static_cast<const A*>(p_.weight);
    const A* const bias = static_cast<const A*>(p_.bias);
    T* const out = static_cast<T*>(p_.out) + at;
    for_each_vector<A>(0, n, [&](int64_t c, int64_t count) {
      Vec<A> y = (load_part(x + c, count) - mean) * rstd;
      if (kPlain || weight != nullptr) y *= load_part(weight + c, count);
      if (kPlain || bias != nullptr) y += load_part(bias + c, count);
      write_part<T>(y, count, !kPlain && streams<T>(p_, out), out + c);
    });
  }

  // residual + dropout(input) into x_, and into total as it is stored: the norm is that of what
  // the backward starts from.
  void add_up(int64_t r, const T* input) {
    const int64_t n = p_.columns, at = r * n;
    const bool dropout = p_.dropout_p > 0;
    const T* const residual = static_cast<const T*>(p_.residual);
    T* const total = static_cast<T*>(p_.total);
    if (dropout) dropout_.row(r, input, residual == nullptr ? nullptr : residual + at);
    const bool streaming = streams<T>(p_, total + at);
    for_each_vector<A>(0, n, [&](int64_t c, int64_t count) {
      Vec<A> x = load_part(input + c, count);
      if (dropout) x *= dropout_.factor(c);
      if (residual != nullptr) x += load_part(residual + at + c, count);
      if (total != nullptr) {
        write_part<T>(x, count, streaming, total + at + c);
        if (sizeof(T) != sizeof(A)) x = load_part<T>(total + at + c, count);
      }
      store_part<A>(x, count, x_ + c);
    });
  }

  const NormParams& p_;
  Arena arena_;
  A* x_;  // (columns)
  RowDropout<A> dropout_;
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
      const bool affine =
          p.weight != nullptr && bwd.grad_weight != nullptr && bwd.grad_bias != nullptr;
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts; ++part) {
        A* const own = sums + part * 2 * n;
        memset(own, 0, 2 * n * sizeof(A));
        for (int64_t r = part * per_part; r < min64((part + 1) * per_part, p.rows); ++r) {
          if (!ok) continue;
          affine ? self.template row<true>(r, own, own + n)
                 : self.template row<false>(r, own, own + n);
        }
      }
      stream_fence();
#pragma omp single
      {
        add_up(sums, parts, n, static_cast<A*>(bwd.grad_weight));
        add_up(sums + n, parts, n, static_cast<A*>(bwd.grad_bias));
      }
    }
    return ok;
  }

 private:
  explicit NormBwd(const NormBwdParams& bwd) : bwd_(bwd), p_(bwd.fwd), dropout_(bwd.fwd) {}

  void place() { dropout_.place(&arena_); }

  bool allocate() {
    place();
    if (!arena_.allocate()) return false;
    place();
    dropout_.begin();
    return true;
  }

  // kAffine: weight is there, and its gradient and that of bias are wanted.
  template <bool kAffine>
  void row(int64_t r, A* weight_sum, A* bias_sum) {
    const int64_t n = p_.columns, at = r * n;
    const A* const weight = static_cast<const A*>(p_.weight);
    const T* const total = static_cast<const T*>(p_.total) + at;
    const T* const grad_out = static_cast<const T*>(bwd_.grad_out) + at;
    const A mean = p_.rms ? A(0) : static_cast<const A*>(p_.mean)[r];
    const A rstd = static_cast<const A*>(p_.rstd)[r], size = static_cast<A>(n);
    const bool needs_weight = kAffine || bwd_.grad_weight != nullptr;
    const bool needs_bias = kAffine || bwd_.grad_bias != nullptr;
    const auto normalised = [&](int64_t c, int64_t count) -> Vec<A> {
      const Vec<A> x = (load_part(total + c, count) - mean) * rstd;
      return count == kLanes<A> ? x : where<A>((1u << count) - 1, x, Vec<A>{});
    };
    const auto weighted = [&](int64_t c, int64_t count, Vec<A> grad) -> Vec<A> {
      return kAffine || weight != nullptr ? grad * load_part(weight + c, count) : grad;
    };
    const auto add = [](Vec<A> x, int64_t count, A* sum) {
      store_part<A>(load_part(sum, count) + x, count, sum);
    };
    const auto terms = [&](int64_t c, int64_t count) -> Terms<A, 2> {
      const Vec<A> x = normalised(c, count), grad = load_part(grad_out + c, count);
      if (needs_weight) add(grad * x, count, weight_sum + c);
      if (needs_bias) add(grad, count, bias_sum + c);
      const Vec<A> g = weighted(c, count, grad);
      return {{g * x, g}};
    };
    A sums[2];
    sum_row<A, 2>(n, terms, sums);
    const A along = sums[0] / size, across = p_.rms ? A(0) : sums[1] / size;
    const bool dropout = bwd_.grad_input != nullptr;
    if (dropout) dropout_.row(r, static_cast<const T*>(nullptr));
    const T* const grad_total =
        bwd_.grad_total == nullptr ? nullptr : static_cast<const T*>(bwd_.grad_total) + at;
    T* const grad_residual = static_cast<T*>(bwd_.grad_residual) + at;
    T* const grad_input = dropout ? static_cast<T*>(bwd_.grad_input) + at : nullptr;
    const bool wide = n >= kStreamGradFrom;
    const bool streaming = wide && streams<T>(p_, grad_residual);
    const bool streaming_input = wide && streams<T>(p_, grad_input);
    for_each_vector<A>(0, n, [&](int64_t c, int64_t count) {
      const Vec<A> g = weighted(c, count, load_part(grad_out + c, count));
      Vec<A> grad = rstd * (g - across - normalised(c, count) * along);
      if (grad_total != nullptr) grad += load_part(grad_total + c, count);
      write_part<T>(grad, count, streaming, grad_residual + c);
      if (dropout) {
        write_part<T>(grad * dropout_.factor(c), count, streaming_input, grad_input + c);
      }
    });
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
