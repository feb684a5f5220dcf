// Dispatches a pass on the storage dtype of a tensor.
#pragma once

#include "cpu/isa.h"
#include "cpu/simd/convert.h"

namespace fused_attn {
namespace {

// True if this instruction set compiles kernels for T instead of calling its base.
template <class T>
constexpr bool kIsOwn =
#if defined(FUSED_ATTN_AMX_FP16)
    kIsHalf<T>;
#elif defined(__AMX_BF16__)
    sizeof(T) < 8;
#elif defined(__AVX512BF16__)
    kIsBFloat16<T>;
#else
    true;
#endif

template <class Op, bool kOwnType, class Base, class... Args>
auto run_own(const Base& base, const Args&... args) {
  if constexpr (kOwnType) {
    return Op::run(args...);
  } else {
    return base(args...);
  }
}

// Returns Op<T>::run(args...) for the type T of `dtype`, or base(args...) if this instruction set
// does not compile kernels for T.
template <template <class> class Op, class Base, class... Args>
auto run_as(DType dtype, const Base& base, const Args&... args) {
  switch (dtype) {
    case DType::kFloat32:
      return run_own<Op<float>, kIsOwn<float>>(base, args...);
    case DType::kFloat64:
      return run_own<Op<double>, kIsOwn<double>>(base, args...);
    case DType::kFloat16:
      return run_own<Op<Half>, kIsOwn<Half>>(base, args...);
    case DType::kBFloat16:
      break;
  }
  return run_own<Op<BFloat16>, kIsOwn<BFloat16>>(base, args...);
}

}  // namespace
}  // namespace fused_attn
