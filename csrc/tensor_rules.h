// Checks tensors against the rules beside the fields in fields/*.inc, so that no kernel accesses
// memory outside of a tensor.
//
// A rule is "[!][dtype:][*]dims". ! marks a required tensor. If the field has no type, dtype is x
// (of the call), o (of out, see `partial`) or s (of the statistics). A letter of dims is one of
// Sizes, exact if upper-case; if lower-case, 1 is also permitted (broadcast). A digit is a
// constant. With *, only the number of elements must match. masks/fields.py uses the same letters.
#pragma once

#include <type_traits>

#include "tensors.h"

namespace fused_attn {
namespace {

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16"};
  return kNames[static_cast<int>(dtype)];
}

// Returns the dtype of lse, mean and rstd, in which parameter gradients are also accumulated.
DType statistics_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Sizes of a call: A batch + 1, B batch, C columns, D head_dim, G num_heads_kv, H num_heads, IJLM
// sizes of bias, K seqlen_k, N and P first dimension of query and of key, Q seqlen_q, R rows, S and
// T rows of key and of query, V head_dim_v, W words of 64 keys. On GPUs, see set_gpu_sizes().
struct Sizes {
  int64_t of_letter[26] = {};
  DType dtype = DType::kFloat32, out_dtype = DType::kFloat32;

  int64_t& operator[](char letter) { return of_letter[(letter | 32) - 'a']; }
  int64_t at(char dim) const { return dim <= '9' ? dim - '0' : of_letter[(dim | 32) - 'a']; }
  void set(const char* letters, const TensorView& view) {
    for (int i = 0; letters[i] != '\0'; ++i) (*this)[letters[i]] = view.shape[i];
  }
};

struct Rule {
  explicit Rule(const char* text)
      : needed(*text == '!'),
        dtype(text[needed]),
        dims(text + needed + (dtype != '\0' && text[needed + 1] == ':' ? 2 : 0)),
        is_count(*dims == '*') {
    dims += is_count;
  }

  int64_t numel(const Sizes& sizes) const {
    int64_t count = 1;
    for (const char* dim = dims; *dim != '\0'; ++dim) {
      if (__builtin_mul_overflow(count, sizes.at(*dim), &count)) return -1;
    }
    return count;
  }

  bool fits(const TensorView& view, const Sizes& sizes) const {
    if (is_count) return view.numel() == numel(sizes);
    const char* dim = dims;
    for (int i = 0; i < view.ndim; ++i, ++dim) {
      const bool fits = *dim != '\0' && view.shape[i] == sizes.at(*dim);
      if (!fits && !(*dim >= 'a' && view.shape[i] == 1)) return false;
    }
    return *dim == '\0';
  }

  bool needed;
  char dtype;
  const char* dims;
  bool is_count;
};

// Throws std::invalid_argument unless a tensor has the elements that kernels read as T (structs are
// rows of int64), or, for void, the dtype of the rule.
template <class T>
void check_elements(const TensorView& view, const std::string& name, const Rule& rule,
                    const Sizes& sizes) {
  constexpr bool kVoid = std::is_void_v<T>, kFloat = std::is_floating_point_v<T>;
  constexpr int kBits =
      std::is_arithmetic_v<T> ? 8 * sizeof(std::conditional_t<kVoid, char, T>) : 64;
  if constexpr (kVoid) {
    const DType dtype = rule.dtype == 's'   ? statistics_of(sizes.dtype)
                        : rule.dtype == 'o' ? sizes.out_dtype
                                            : sizes.dtype;
    if (view.is_float() && view.dtype() == dtype) return;
    throw std::invalid_argument(name + " must be " + name_of(dtype));
  }
  const int code = kFloat ? kDLFloat : kBits == 8 ? kDLUInt : kDLInt;
  if (view.code == code && view.bits == kBits) return;
  const char* const kind = kFloat       ? " must be float"
                           : kBits == 8 ? " must be uint"
                                        : " must be int";
  throw std::invalid_argument(name + kind + std::to_string(kBits));
}

// Throws std::invalid_argument unless a tensor has the dimensions of a rule.
void check_shape(const TensorView& view, const std::string& name, const Rule& rule,
                 const Sizes& sizes) {
  if (!view.is_present) {
    if (!rule.needed || rule.numel(sizes) == 0) return;
    throw std::invalid_argument(name + " is missing");
  }
  if (rule.fits(view, sizes)) return;
  std::string expected, got;
  for (const char* dim = rule.dims; *dim != '\0'; ++dim) {
    expected += std::to_string(sizes.at(*dim)) + (*dim >= 'a' ? " or 1, " : ", ");
  }
  for (int i = 0; i < view.ndim; ++i) got += std::to_string(view.shape[i]) + ", ";
  throw std::invalid_argument(name + " must have shape (" + expected + "), got (" + got + ")");
}

// Throws std::invalid_argument unless a tensor follows the rule of its field.
template <class T>
void check_rule(const TensorView& view, const char* name, const char* text, const Sizes& sizes) {
  const Rule rule(text);
  check_shape(view, name, rule, sizes);
  if (view.is_present) check_elements<std::remove_const_t<T>>(view, name, rule, sizes);
}

// Throws std::invalid_argument unless low <= value <= high.
void check_within(int64_t value, const char* name, int64_t low, int64_t high) {
  if (low <= value && value <= high) return;
  throw std::invalid_argument(std::string(name) + " must be in [" + std::to_string(low) + ", " +
                              std::to_string(high) + "], got " + std::to_string(value));
}

void check_that(bool condition, const char* requirement) {
  if (!condition) throw std::invalid_argument(requirement);
}

}  // namespace
}  // namespace fused_attn
