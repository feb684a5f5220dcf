// dropout(activation(input)) in one pass, forward and backward.
//
// Where ReLU and dropout leave something, out is positive: so their backward asks out alone, and
// draws nothing.
#pragma once

#include "cpu/rows.h"

namespace fused_attn {
namespace {

template <class T>
class DroppedActivation {
  using A = Acc<T>;

 public:
  static bool run(const ActivationParams& p) {
    const bool by_out = p.relu && p.grad_out != nullptr;
    bool ok = true;
#pragma omp parallel num_threads(clamp_threads(p.num_threads, p.rows)) reduction(&& : ok)
    {
      DroppedActivation self(p, by_out);
      ok = self.allocate();
#pragma omp for schedule(static)
      for (int64_t r = 0; r < p.rows; ++r) {
        if (!ok) continue;
        by_out ? self.differentiate_relu(r) : p.relu ? self.drop<true>(r) : self.drop<false>(r);
      }
      stream_fence();
    }
    return ok;
  }

 private:
  DroppedActivation(const ActivationParams& p, bool by_out)
      : p_(p), dropout_(by_out ? 0 : p.columns, p.dropout_p, p.seed, nullptr, 0) {}

  bool allocate() {
    dropout_.place(&arena_);
    if (!arena_.allocate()) return false;
    dropout_.place(&arena_);
    dropout_.begin();
    return true;
  }

  template <bool kRelu>
  void drop(int64_t r) const {
    const T* const x = row(p_.grad_out == nullptr ? p_.input : p_.grad_out, r);
    T* const out = const_cast<T*>(row(p_.out, r));
    const bool streaming = streams<T>(p_.rows * p_.columns, out);
    const RowDropout<A> dropout = dropout_;
    const uint32_t counter = dropout.counter_row(r);
    uint64_t kept = 0;
    for_each_vector<A>(0, p_.columns, [&](int64_t c, int64_t count) {
      if (c % RowDropout<A>::kColumns == 0) kept = dropout.keep(counter, c);
      Vec<A> y = load_part(x + c, count);
      if (kRelu) y = y <= A(0) ? Vec<A>{} : y;  // NaN stays
      write_part<T>(dropout.left(kept, c, y), count, streaming, out + c);
    });
  }

  void differentiate_relu(int64_t r) const {
    const T *const y = row(p_.input, r), *const grad_out = row(p_.grad_out, r);
    T* const grad = const_cast<T*>(row(p_.out, r));
    const bool streaming = streams<T>(p_.rows * p_.columns, grad);
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    for_each_vector<A>(0, p_.columns, [&](int64_t c, int64_t count) {
      const Vec<A> scaled = load_part(grad_out + c, count) * scale;
      const Vec<A> left = load_part(y + c, count) <= A(0) ? Vec<A>{} : scaled;
      write_part<T>(left, count, streaming, grad + c);
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
