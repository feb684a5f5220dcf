// dropout(activation(input + bias)) and its backward, in one pass.
#pragma once

#include <type_traits>

#include "cpu/kernels/rows.h"
#include "cpu/simd/activation_functions.h"

namespace fused_attn {
namespace {

template <class T>
class ActivationPass {
  using A = Acc<T>;
  // Prefetch distance in bytes. The loop executes 45 instructions between loads, so the core has
  // few loads in flight, and the hardware prefetcher stops at the page boundary. GELU of 28 MB
  // takes 0.77 ns per element without prefetching and 0.38 ns with any distance from 1024 to 4096
  // bytes. ReLU takes 0.30 ns with or without it.
  static constexpr int64_t kAhead = 2048;

 public:
  static bool run(const ActivationParams& p) {
    switch (p.activation) {
      case Activation::kRelu:
        // out is positive only where both ReLU and dropout passed the value, so the backward need
        // not draw the dropout mask again.
        return p.grad_out == nullptr ? run_as<Relu<A>>(p) : in_parallel(p, differentiate_relu);
      case Activation::kGelu:
        return run_as<Gelu<A>>(p);
      case Activation::kGeluTanh:
        return run_as<GeluTanh<A>>(p);
      case Activation::kIdentity:
        break;
    }
    return run_as<Identity<A>>(p);
  }

 private:
  using Rows = void (*)(const ActivationPass&, int64_t r);

  template <class F>
  static bool run_as(const ActivationParams& p) {
    if constexpr (!std::is_same_v<F, Relu<A>>) {
      if (p.grad_out != nullptr) {
        return in_parallel(p, p.dropout_p > 0 ? &differentiate<F, true> : &differentiate<F, false>);
      }
    }
    return in_parallel(p, p.dropout_p > 0 ? &compute<F, true> : &compute<F, false>);
  }

  static bool in_parallel(const ActivationParams& p, Rows one_row) {
    return run_team(p.num_threads, p.rows, [&] {
      ActivationPass self(p);
      const bool ok = self.allocate();
#pragma omp for schedule(static) nowait
      for (int64_t r = 0; r < p.rows; ++r) {
        if (ok) one_row(self, r);
      }
      stream_fence();
      return ok;
    });
  }

  explicit ActivationPass(const ActivationParams& p)
      : p_(p), dropout_(p.columns, p.dropout_p, p.seed, nullptr, 0) {}

  bool allocate() {
    if (!arena_.layout([&] { dropout_.place(&arena_); })) return false;
    dropout_.begin();
    return true;
  }

  template <class F, bool kDropout>
  static void compute(const ActivationPass& self, int64_t r) {
    const ActivationParams& p = self.p_;
    const T *const x = self.row(p.input, r), *const bias = static_cast<const T*>(p.bias);
    const F function;
    self.write<kDropout>(r, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + c) + kAhead);
      Vec<A> sum = load_part(x + c, count);
      if (bias != nullptr) sum += load_part(bias + c, count);
      return function.value(sum);
    });
  }

  template <class F, bool kDropout>
  static void differentiate(const ActivationPass& self, int64_t r) {
    const ActivationParams& p = self.p_;
    const T *const x = self.row(p.input, r), *const bias = static_cast<const T*>(p.bias);
    const T* const grad_out = self.row(p.grad_out, r);
    const F function;
    self.write<kDropout>(r, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + c) + kAhead);
      Vec<A> sum = load_part(x + c, count);
      if (bias != nullptr) sum += load_part(bias + c, count);
      __builtin_prefetch(reinterpret_cast<const char*>(grad_out + c) + kAhead);
      return load_part(grad_out + c, count) * function.slope(sum);
    });
  }

  static void differentiate_relu(const ActivationPass& self, int64_t r) {
    const ActivationParams& p = self.p_;
    const T *const out = self.row(p.input, r), *const grad_out = self.row(p.grad_out, r);
    const A scale = static_cast<A>(dropout_scale(p.dropout_p));
    self.write<false>(r, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Vec<A> scaled = load_part(grad_out + c, count) * scale;
      return load_part(out + c, count) <= A(0) ? Vec<A>{} : scaled;
    });
  }

  // Stores row r of the result, with dropout if kDropout. compute(c, count) returns its elements
  // [c, c + count) before dropout.
  template <bool kDropout, class Compute>
  FUSED_ATTN_INLINE void write(int64_t r, const Compute& compute) const {
    T* const out = const_cast<T*>(row(p_.out, r));
    const bool streaming = p_.out != p_.input && streams<T>(p_.rows * p_.columns, out);
    const RowDropout<A> dropout = dropout_;
    const uint32_t counter = dropout.counter_row(r);
    uint64_t keep_mask = 0;
    for_each_vector<A>(0, p_.columns, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      Vec<A> result = compute(c, count);
      if constexpr (kDropout) {
        if (c % RowDropout<A>::kColumns == 0) keep_mask = dropout.keep(counter, c);
        result = dropout.left(keep_mask, c, result);
      }
      write_part<T>(result, count, streaming, out + c);
    });
  }

  const T* row(const void* matrix, int64_t r) const {
    return static_cast<const T*>(matrix) + r * p_.columns;
  }

  const ActivationParams& p_;
  RowDropout<A> dropout_;
  Arena arena_;
};

}  // namespace
}  // namespace fused_attn
