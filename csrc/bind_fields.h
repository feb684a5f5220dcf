// Converts Python calls (fused_attn/call/calls.py) and keyword fields to the structs of params.h.
//
// Python validates shapes and dtypes. Here, a missing field or an empty tensor is treated as absent
// (null or 0), and an unknown field name is an error.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "tensors.h"

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

// Throws std::invalid_argument unless the dimensions from first_dim on are contiguous, because
// kernels index them as an array.
void check_dense(const TensorView& view, const char* name, int first_dim) {
  if (contiguous_from(view, first_dim)) return;
  const char* const where = first_dim == 0 ? "" : " in its last dimension";
  throw std::invalid_argument(std::string(name) + " must be contiguous" + where);
}

// Throws std::invalid_argument unless a table has the elements that kernels read as T: floats, or
// int64 for indices and structs of them.
template <class T>
void check_elements(const TensorView& view, const char* name) {
  constexpr bool kFloat = std::is_floating_point_v<T>;
  constexpr int kBits = kFloat ? 8 * sizeof(T) : 64;
  if (view.code == (kFloat ? kDLFloat : kDLInt) && view.bits == kBits) return;
  const std::string wanted = (kFloat ? "float" : "int") + std::to_string(kBits);
  throw std::invalid_argument(std::string(name) + " must be " + wanted);
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
  if (runs * length > int64_t{1} << 31) {
    throw std::invalid_argument(std::string(name) +
                                " must be contiguous or have at most 2^31 rows");
  }
  uint32_t bits = 1;
  while (int64_t{1} << bits < length) ++bits;
  rows->run_step = run - length * row;
  rows->run_factor = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + length - 1) / length);
  rows->run_shift = bits - 1;
}

// Reads named fields from Python keyword arguments. Pointer fields may be tensors or integer
// addresses. finish() throws if a keyword was never read.
class Fields {
 public:
  explicit Fields(const py::kwargs& fields) : fields_(fields) {}

  template <class T, std::enable_if_t<!std::is_enum_v<T>, bool> = true>
  void number(const char* name, T* out) {
    if (PyObject* value = find(name)) *out = py::cast<T>(py::handle(value));
  }

  template <class Enum, std::enable_if_t<std::is_enum_v<Enum>, bool> = true>
  void number(const char* name, Enum* out) {
    auto value = static_cast<int64_t>(*out);
    number<int64_t>(name, &value);
    *out = static_cast<Enum>(value);
  }

  TensorView tensor(const char* name) {
    PyObject* value = find(name);
    return value == nullptr ? TensorView{} : view_of(value);
  }

  template <class T>
  void pointer(const char* name, T** out) {
    PyObject* const value = find(name);
    if (value == nullptr) return;
    if (PyLong_Check(value)) {
      *out = static_cast<T*>(PyLong_AsVoidPtr(value));
      return;
    }
    const TensorView view = view_of(py::handle(value));
    if (!view.is_present || view.numel() == 0) return;
    check_dense(view, name, 0);
    *out = static_cast<T*>(view.data);
  }

  template <class T>
  void rows(const char* name, T** out, int64_t (&strides)[3]) {
    const TensorView view = tensor(name);
    if (!view.is_present || view.numel() == 0) return;
    check_dense(view, name, 3);
    *out = static_cast<T*>(view.data);
    for (int i = 0; i < 3; ++i) strides[i] = view.strides[i];
  }

  template <class T>
  void matrix(const char* name, T** out, RowLayout* rows) {
    read_matrix(tensor(name), name, out, rows);
  }

  void sizes(const char* name, int64_t (&out)[4]) {
    if (PyObject* value = find(name)) {
      const auto tuple = py::reinterpret_borrow<py::tuple>(value);
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
  PyObject* find(const char* name) {
    PyObject* value = PyDict_GetItemString(fields_.ptr(), name);
    if (value != nullptr) asked_.emplace_back(name);
    return value;
  }

  const py::kwargs& fields_;
  std::vector<std::string> asked_;
};

#include "fields/read.inc"

void read(Fields& fields, AttentionParams* p) {
#include "fields/attention.inc"
}

void read(Fields& fields, AttentionBwdParams* p) {
  read(fields, &p->fwd);
#include "fields/attention_bwd.inc"
}

void read(Fields& fields, AttentionWeightsParams* p) {
  read(fields, &p->fwd);
  fields.pointer("weights", &p->weights);
  fields.number("average", &p->average);
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
  const TensorView tensor = fields.tensor("tensor");
  p->data = tensor.data;
  p->is_bool = !tensor.is_float();
  p->dtype = tensor.dtype();
  for (int i = 0; i < 4; ++i) {
    p->sizes[i] = tensor.shape[i];
    p->strides[i] = tensor.strides[i];
  }
  fields.pointer("summary", &p->summary);
  fields.number("num_threads", &p->num_threads);
}

#include "fields/end.inc"

// ---- masks and operands -------------------------------------------------------------------------

void read_broadcast(const TensorView& view, DenseTensor* out) {
  if (!view.is_present) return;
  out->data = view.data;
  for (int i = 0; i < 4; ++i) out->strides[i] = view.broadcast_stride(i);
}

// Reads the summary of a mask. All tiles along a broadcast dimension share one entry, so its stride
// is 0. The mask's size decides this, because a dimension of the summary may have size 1 without
// being broadcast.
void read_summary(const TensorView& mask, const TensorView& summary, DenseTensor* out) {
  if (!mask.is_present || !summary.is_present) return;
  out->summary = static_cast<const uint8_t*>(summary.data);
  for (int i = 0; i < 4; ++i) {
    out->summary_strides[i] = mask.shape[i] == 1 ? 0 : summary.strides[i];
  }
}

template <class T>
T integer(const py::handle& value) {
  return static_cast<T>(py::cast<int64_t>(value));
}

// Reads a MaskSpec (fused_attn/masks/spec.py).
void read_mask(const py::handle& spec, MaskParams* p) {
#define FIELD(type, name) p->name = integer<type>(FUSED_ATTN_ATTRIBUTE(spec, #name));
#define POINTER(type, name)                                                                  \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_elements<std::remove_const_t<type>>(view, #name);                                  \
    check_dense(view, #name, 0);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
  }
#define ROWS(type, name)                                                                     \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_elements<std::remove_const_t<type>>(view, #name);                                  \
    check_dense(view, #name, 3);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
    for (int i = 0; i < 3; ++i) p->name##_strides[i] = view.broadcast_stride(i);             \
  }
#define SIZES(name)
#define BROADCAST(name)                                               \
  const TensorView name = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); \
  read_broadcast(name, &p->name);
#define BY_SEQUENCE(type, name)                                                              \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_elements<std::remove_const_t<type>>(view, #name);                                  \
    check_dense(view, #name, 1);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
    p->name##_stride = view.broadcast_stride(0);                                             \
  }
#define BY_HEAD(type, name)                                                                  \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_elements<std::remove_const_t<type>>(view, #name);                                  \
    check_dense(view, #name, 2);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
    for (int i = 0; i < 2; ++i) {                                                            \
      const int64_t bytes = view.broadcast_stride(i) * (view.bits / 8);                      \
      p->name##_strides[i] = bytes / static_cast<int64_t>(sizeof(type));                     \
    }                                                                                        \
  }
  // clang-format off: the order matters
#include "fields/mask.inc"
#include "fields/end.inc"
  // clang-format on
  if (bias.is_present) {
    if (!bias.is_float()) throw std::invalid_argument("bias must be a float tensor");
    p->bias_dtype = bias.dtype();
    read_summary(bias, view_of(FUSED_ATTN_ATTRIBUTE(spec, "bias_summary")), &p->bias);
  }
  if (dense.is_present) {
    read_summary(dense, view_of(FUSED_ATTN_ATTRIBUTE(spec, "dense_summary")), &p->dense);
  }
}

// Reads the sizes, addresses and row strides of query, key and value.
void read_operands(const TensorView& query, const TensorView& key, const TensorView& value,
                   AttentionParams* p) {
  for (const TensorView* view : {&query, &key, &value}) {
    if (!view->is_float()) {
      throw std::invalid_argument("query, key and value must be float tensors");
    }
    if (view->data == nullptr && view->numel() > 0) {
      throw std::invalid_argument("query, key and value must have storage");
    }
  }
  check_dense(query, "query", 3);
  check_dense(key, "key", 3);
  check_dense(value, "value", 3);
  p->dtype = query.dtype();
  p->batch = query.shape[0];
  p->num_heads = query.shape[1];
  p->num_heads_kv = key.shape[1];
  p->seqlen_q = p->total_q = query.shape[2];
  p->seqlen_k = key.shape[2];
  p->head_dim = query.shape[3];
  p->head_dim_v = value.shape[3];
  p->query = query.data;
  p->key = key.data;
  p->value = value.data;
  for (int i = 0; i < 3; ++i) {
    p->query_strides[i] = query.strides[i];
    p->key_strides[i] = key.strides[i];
    p->value_strides[i] = value.strides[i];
  }
}

// Reads cu_seqlens and the maximum lengths of packed sequences. Returns false if the MaskSpec has
// none.
bool read_packing(const py::handle& spec, AttentionParams* p) {
  const TensorView ends_q = view_of(FUSED_ATTN_ATTRIBUTE(spec, "cu_seqlens_q"));
  if (!ends_q.is_present) return false;
  const TensorView ends_k = view_of(FUSED_ATTN_ATTRIBUTE(spec, "cu_seqlens_k"));
  check_dense(ends_q, "cu_seqlens_q", 0);
  check_dense(ends_k, "cu_seqlens_k", 0);
  p->cu_seqlens_q = static_cast<const int64_t*>(ends_q.data);
  p->cu_seqlens_k = static_cast<const int64_t*>(ends_k.data);
  p->batch = ends_q.shape[0] - 1;
  p->seqlen_q = integer<int64_t>(FUSED_ATTN_ATTRIBUTE(spec, "max_seqlen_q"));
  p->seqlen_k = integer<int64_t>(FUSED_ATTN_ATTRIBUTE(spec, "max_seqlen_k"));
  return true;
}

// ---- options ------------------------------------------------------------------------------------

// Reads an option. In an unvalidated call it may be None, which leaves the field at 0.
template <class T>
void read_option(const py::object& value, T* out) {
  if (!value.is_none()) *out = py::cast<T>(value);
}

#define FIELD(type, name) read_option(FUSED_ATTN_ATTRIBUTE(options, #name), &p->name);

void read_options(const py::handle& options, AttentionParams* p) {
#include "fields/attention_options.inc"
}

void read_options(const py::handle& options, NormParams* p) {
#include "fields/norm_options.inc"
}

#undef FIELD

// Reads dropout_offsets as an array. Throws unless it is a contiguous int64 tensor of `numel`
// elements.
template <class Offsets>
void read_offsets(const TensorView& view, int64_t numel, const Offsets** offsets) {
  check_dense(view, "dropout_offsets", 0);
  if (view.code != kDLInt || view.bits != 64 || view.numel() != numel) {
    throw std::invalid_argument("dropout_offsets must be int64 with " + std::to_string(numel) +
                                " elements");
  }
  *offsets = static_cast<const Offsets*>(view.data);
}

// Reads dropout_offsets from the options. The sizes in *p must be set already.
void read_offsets(const py::handle& options, AttentionParams* p) {
  const TensorView offsets = view_of(FUSED_ATTN_ATTRIBUTE(options, "dropout_offsets"));
  if (offsets.is_present) read_offsets(offsets, p->batch * 3, &p->dropout_offsets);
}
void read_offsets(const py::handle& options, NormParams* p) {
  const TensorView offsets = view_of(FUSED_ATTN_ATTRIBUTE(options, "dropout_offsets"));
  if (!offsets.is_present || p->rows == 0) return;
  const int64_t runs = offsets.ndim == 1 ? offsets.numel() : 0;
  if (runs == 0 || p->rows % runs != 0) {
    throw std::invalid_argument("dropout_offsets must have one dimension, whose size divides " +
                                std::to_string(p->rows) + " rows");
  }
  read_offsets(offsets, runs, &p->dropout_offsets);
  p->dropout_run = p->rows / runs;
}

// ---- calls --------------------------------------------------------------------------------------

// The MaskSpec singleton of unmasked calls, whose attributes need not be read. Null until
// set_no_mask(); the reference is never released.
inline PyObject* no_mask = nullptr;

// Reads an attention call except for its dropout seed. The caller has already viewed the tensors.
void read_call(const py::handle& call, const TensorView& query, const TensorView& key,
               const TensorView& value, AttentionParams* p) {
  read_operands(query, key, value, p);
  const py::object options = FUSED_ATTN_ATTRIBUTE(call, "options");
  read_options(options, p);
  const py::object spec = FUSED_ATTN_ATTRIBUTE(call, "mask");
  if (spec.ptr() == no_mask) {
    p->mask.band_lo = -kUnlimited;
    p->mask.band_hi = kUnlimited;
  } else {
    read_mask(spec, &p->mask);
    read_packing(spec, p);
  }
  if (p->dropout_p > 0) read_offsets(options, p);
}
void read_call(const py::handle& call, AttentionParams* p) {
  read_call(call, view_of(FUSED_ATTN_ATTRIBUTE(call, "query")),
            view_of(FUSED_ATTN_ATTRIBUTE(call, "key")),
            view_of(FUSED_ATTN_ATTRIBUTE(call, "value")), p);
}
void read_call(const py::handle& call, AttentionBwdParams* p) { read_call(call, &p->fwd); }
void read_call(const py::handle& call, AttentionWeightsParams* p) { read_call(call, &p->fwd); }

// Reads a NormCall except for its dropout seed.
void read_call(const py::handle& call, NormParams* p) {
  const TensorView input = view_of(FUSED_ATTN_ATTRIBUTE(call, "input"));
  p->dtype = input.dtype();
  p->columns = input.shape[input.ndim - 1];
  p->rows = input.numel() / std::max<int64_t>(p->columns, 1);
  read_matrix(input, "input", &p->input, &p->input_rows);
  read_matrix(view_of(FUSED_ATTN_ATTRIBUTE(call, "residual")), "residual", &p->residual,
              &p->residual_rows);
  p->weight = view_of(FUSED_ATTN_ATTRIBUTE(call, "weight")).data;
  p->bias = view_of(FUSED_ATTN_ATTRIBUTE(call, "bias")).data;
  const py::object options = FUSED_ATTN_ATTRIBUTE(call, "options");
  read_options(options, p);
  read_offsets(options, p);
}

[[maybe_unused]] void read_call(const py::handle& call, NormBwdParams* p) {
  read_call(call, &p->fwd);
}

// Returns the field names that the bindings read from calls, as listed in fields/*.inc. Python
// checks that its own list is the same.
py::list field_names() {
  py::list names;
#define FIELD(type, name) names.append(#name);
#define POINTER(type, name) names.append(#name);
#define ROWS(type, name) names.append(#name);
#define MATRIX(type, name) names.append(#name);
#define SIZES(name) names.append(#name);
#define BROADCAST(name) \
  names.append(#name);  \
  names.append(#name "_summary");
#define BY_SEQUENCE(type, name) names.append(#name);
#define BY_HEAD(type, name) names.append(#name);
  // clang-format off: the order matters
#include "fields/attention.inc"
#include "fields/attention_options.inc"
#include "fields/mask.inc"
#include "fields/norm.inc"
#include "fields/norm_options.inc"
#include "fields/end.inc"
  // clang-format on
  return names;
}

}  // namespace
}  // namespace fused_attn
