// Reads keyword fields of Python calls into the structs of params.h.
//
// A missing field or an empty tensor is treated as absent (null or 0). Tensors that break the rule
// of their field, and unknown field names, are errors.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "tensor_rules.h"

namespace fused_attn {
namespace {

bool contiguous_from(const TensorView& view, int first_dim) {
  if (view.numel() == 0) return true;
  int64_t step = 1;
  for (int i = view.ndim - 1; i >= first_dim; --i) {
    if (view.shape[i] > 1 && view.strides[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

bool is_bool(const TensorView& view) {
  constexpr int kDLBool = 6;
  return view.bits == 8 && (view.code <= kDLUInt || view.code == kDLBool);
}

// Returns the size of a dimension of a mask's summary.
int64_t summary_size(const TensorView& mask, int dim) {
  const int64_t tile = dim == 2 ? kSummaryTileM : dim == 3 ? kSummaryTileN : 1;
  return (mask.shape[dim] + tile - 1) / tile;
}

// Throws std::invalid_argument unless the dimensions from first_dim on are contiguous, because
// kernels index them as an array.
void check_dense(const TensorView& view, const char* name, int first_dim) {
  if (contiguous_from(view, first_dim)) return;
  const char* const where = first_dim == 0 ? "" : " in its last dimension";
  throw std::invalid_argument(std::string(name) + " must be contiguous" + where);
}

// Reads a matrix in the layout that rows_in_place of base/layout.py returns: contiguous rows, in at
// most two strided dimensions. Throws if the tensor has another layout.
template <class T>
void read_matrix(const TensorView& view, const char* name, T** data, RowLayout* rows) {
  if (!view.is_present || view.numel() == 0) return;
  const int last = view.ndim - 1;
  if (last < 0 || last > 2) {
    throw std::invalid_argument(std::string(name) + " must have 1 to 3 dimensions");
  }
  check_dense(view, name, last);
  *data = static_cast<T*>(view.data);
  const int64_t length = last > 0 ? view.shape[last - 1] : 1, runs = last > 1 ? view.shape[0] : 1;
  const int64_t row = length > 1 ? view.strides[last - 1] : 0, run = runs > 1 ? view.strides[0] : 0;
  *rows = length > 1 ? RowLayout{row, 0, 0, 0} : RowLayout{run, 0, 0, 0};
  if (length == 1 || runs == 1 || run == length * row) return;
  // row_offset() divides rows by `length` with a multiplication and a shift, which is exact for
  // rows below 2^31 and length in (2^(bits - 1), 2^bits]. Source: Granlund and Montgomery 1994,
  // "Division by invariant integers using multiplication", theorem 4.2.
  if (runs > (int64_t{1} << 31) / length) {
    throw std::invalid_argument(std::string(name) +
                                " must be contiguous or have at most 2^31 rows");
  }
  uint32_t bits = 1;
  while (int64_t{1} << bits < length) ++bits;
  rows->run_step = run - length * row;
  rows->run_factor = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + length - 1) / length);
  rows->run_shift = bits - 1;
}

// Reads named fields from Python keyword arguments. finish() throws if a keyword was never read.
class Fields {
 public:
  explicit Fields(const py::kwargs& fields) : fields_(fields) {}

  Sizes sizes;  // of the call, for the rules

  template <class T, std::enable_if_t<!std::is_enum_v<T>, bool> = true>
  void number(const char* name, T* out) {
    if (const py::handle value = find(name)) *out = py::cast<T>(value);
    if constexpr (std::is_same_v<T, int64_t>) check_within(*out, name, 0, kUnlimited);
  }

  template <class Enum, std::enable_if_t<std::is_enum_v<Enum>, bool> = true>
  void number(const char* name, Enum* out) {
    auto value = static_cast<int64_t>(*out);
    number(name, &value);
    check_within(value, name, 0, 3);  // DType and Activation have four values
    *out = static_cast<Enum>(value);
    if constexpr (std::is_same_v<Enum, DType>) sizes.dtype = *out;
  }

  void size(const char* name, int64_t* out, char letter) {
    if (const py::handle value = find(name)) *out = py::cast<int64_t>(value);
    check_within(*out, name, 0, INT64_MAX);
    sizes[letter] = *out;
  }

  py::handle find(const char* name) {
    PyObject* value = PyDict_GetItemString(fields_.ptr(), name);
    if (value != nullptr) asked_.emplace_back(name);
    return value;
  }

  bool has(const char* name) const { return fields_.contains(name); }

  // Reads a tensor, which must follow the rule. An empty tensor is absent.
  template <class T>
  TensorView tensor(const char* name, const char* rule) {
    TensorView view = view_of(find(name));
    if (view.numel() == 0) view.is_present = false;
    check_rule<T>(view, name, rule, sizes);
    return view;
  }

  template <class T>
  void pointer(const char* name, T** out, const char* rule) {
    const TensorView view = tensor<T>(name, rule);
    if (!view.is_present) return;
    check_dense(view, name, 0);
    *out = static_cast<T*>(view.data);
  }

  void address(const char* name, void** out) {
    if (const py::handle value = find(name))
      *out = reinterpret_cast<void*>(py::cast<uintptr_t>(value));
  }

  template <class T>
  void rows(const char* name, T** out, int64_t (&strides)[3], const char* rule) {
    const TensorView view = tensor<T>(name, rule);
    if (!view.is_present) return;
    check_dense(view, name, 3);
    *out = static_cast<T*>(view.data);
    for (int i = 0; i < 3; ++i) strides[i] = view.strides[i];
  }

  template <class T>
  void matrix(const char* name, T** out, RowLayout* rows, const char* rule) {
    const TensorView view = tensor<T>(name, rule);
    if (!view.is_present) return;
    check_that(view.ndim > 0 && view.shape[view.ndim - 1] == sizes['C'],
               "matrices must have the columns of input");
    read_matrix(view, name, out, rows);
  }

  void four(const char* name, int64_t (&out)[4]) {
    if (const py::handle value = find(name)) {
      const auto tuple = py::cast<py::tuple>(value);
      check_that(tuple.size() == 4, "bias_sizes must have 4 elements");
      for (int i = 0; i < 4; ++i) out[i] = py::cast<int64_t>(tuple[i]);
    }
  }

  void finish() const {
    if (asked_.size() == fields_.size()) return;
    std::string unknown;
    for (const auto& [key, value] : fields_) {
      const auto name = py::cast<std::string>(key);
      bool known = false;
      for (const std::string& asked : asked_) known = known || asked == name;
      if (!known) unknown += (unknown.empty() ? "" : ", ") + name;
    }
    throw std::invalid_argument("the kernels do not read the fields " + unknown);
  }

 private:
  const py::kwargs& fields_;
  std::vector<std::string> asked_;
};

#include "fields/read.inc"

void read(Fields& fields, AttentionParams* p) {
#include "fields/attention.inc"
}

// Reads the results of the forward, for another pass.
void read_forward(Fields& fields, AttentionParams* p) {
  fields.sizes.out_dtype = p->dtype;
  read(fields, p);
  const bool rounded = p->dtype == DType::kFloat16 || p->dtype == DType::kBFloat16;
  check_that(p->lse == nullptr || p->lse_residual != nullptr, "lse_residual is missing");
  check_that(p->out == nullptr || p->out_residual != nullptr || !rounded,
             "out_residual is missing");
}

void read(Fields& fields, AttentionBwdParams* p) {
  read_forward(fields, &p->fwd);
  if (p->fwd.partial) fields.sizes.out_dtype = statistics_of(p->fwd.dtype);
#include "fields/attention_bwd.inc"
  check_that(p->grad_weights == nullptr || p->row_sums != nullptr, "row_sums is missing");
}

void read(Fields& fields, AttentionWeightsParams* p) {
  read_forward(fields, &p->fwd);
  check_that(p->fwd.cu_seqlens_q == nullptr, "weights must not be packed");
  fields.number("average", &p->average);
  fields.pointer("weights", &p->weights, p->average ? "!x:NTK" : "!x:NHTK");
}

void read(Fields& fields, NormParams* p) {
#include "fields/norm.inc"
}

[[maybe_unused]] void read(Fields& fields, NormBwdParams* p) {
  read(fields, &p->fwd);
#include "fields/norm_bwd.inc"
}

[[maybe_unused]] void read(Fields& fields, ActivationParams* p) {
#include "fields/activation.inc"
}

void read(Fields& fields, SummaryParams* p) {
  const TensorView tensor = view_of(fields.find("tensor"));
  check_that(tensor.ndim == 4 && (tensor.is_float() || is_bool(tensor)),
             "tensor must be a bool or float tensor with 4 dimensions");
  for (int i = 0; i < 4; ++i) fields.sizes["IJLM"[i]] = summary_size(tensor, i);
  p->data = tensor.data;
  p->is_bool = !tensor.is_float();
  p->dtype = tensor.dtype();
  for (int i = 0; i < 4; ++i) {
    p->sizes[i] = tensor.shape[i];
    p->strides[i] = tensor.strides[i];
  }
  fields.pointer("summary", &p->summary, "!IJLM");
  fields.number("num_threads", &p->num_threads);
}

#include "fields/end.inc"

}  // namespace
}  // namespace fused_attn
