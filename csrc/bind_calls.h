// Reads Python calls (fused_attn/call) into the structs of params.h: masks, operands and options.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>

#include "bind_fields.h"

namespace fused_attn {
namespace {

void read_broadcast(const TensorView& view, DenseTensor* out) {
  if (!view.is_present) return;
  out->data = view.data;
  for (int i = 0; i < 4; ++i) out->strides[i] = view.broadcast_stride(i);
}

// Reads the summary of a mask. All tiles along a broadcast dimension share one entry, so its stride
// is 0. The mask's size decides this, because a dimension of the summary may have size 1 without
// being broadcast.
void read_summary(const TensorView& mask, const TensorView& summary, DenseTensor* out) {
  if (!mask.is_present || !summary.is_present || mask.numel() == 0) return;
  Sizes sizes;
  for (int i = 0; i < 4; ++i) sizes["IJLM"[i]] = summary_size(mask, i);
  check_rule<uint8_t>(summary, "the summary of a mask", "IJLM", sizes);
  out->summary = static_cast<const uint8_t*>(summary.data);
  for (int i = 0; i < 4; ++i) {
    out->summary_strides[i] = mask.shape[i] == 1 ? 0 : summary.strides[i];
  }
}

// Reads a MaskSpec (fused_attn/masks/spec.py). Writes the sizes of bias to *sizes.
void read_mask(const py::handle& spec, Sizes* sizes, MaskParams* p) {
#define FIELD(type, name)                                      \
  p->name = py::cast<type>(FUSED_ATTN_ATTRIBUTE(spec, #name)); \
  check_within(p->name, #name, -2 * kUnlimited, 2 * kUnlimited);
#define POINTER(type, name, rule)                                                            \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_rule<type>(view, #name, rule, *sizes);                                             \
    check_dense(view, #name, 0);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
  }
#define ROWS(type, name, rule)                                                               \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_rule<type>(view, #name, rule, *sizes);                                             \
    check_dense(view, #name, 3);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
    for (int i = 0; i < 3; ++i) p->name##_strides[i] = view.broadcast_stride(i);             \
  }
#define SIZES(name)
#define BROADCAST(name, rule)                                         \
  const TensorView name = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); \
  check_shape(name, #name, Rule(rule), *sizes);                       \
  read_broadcast(name, &p->name);
#define BY_SEQUENCE(type, name, rule)                                                        \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_rule<type>(view, #name, rule, *sizes);                                             \
    check_dense(view, #name, 1);                                                             \
    p->name = static_cast<type*>(view.data);                                                 \
    p->name##_stride = view.broadcast_stride(0);                                             \
  }
#define BY_HEAD(type, name, rule)                                                            \
  if (const TensorView view = view_of(FUSED_ATTN_ATTRIBUTE(spec, #name)); view.is_present) { \
    check_rule<type>(view, #name, rule, *sizes);                                             \
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
    sizes->set("IJLM", bias);
  }
  check_that(!dense.is_present || is_bool(dense), "dense must be a bool tensor");
  check_that(!key_mask.is_present || is_bool(key_mask), "key_mask must be a bool tensor");
  check_that((p->query_documents == nullptr) == (p->key_documents == nullptr) ||
                 (*sizes)['K'] * (*sizes)['Q'] == 0,
             "query_documents and key_documents must be set together");
  const auto* const bounds = reinterpret_cast<const int64_t*>(p->bounds);
  const bool is_readable = bounds != nullptr && call_device.type == kDLCpu;
  for (int64_t i = 0; is_readable && i < 8 * sizes->at('B'); ++i) {
    check_within(bounds[i], "bounds", -2 * kUnlimited, 2 * kUnlimited);
  }
  if (dense.is_present) {
    read_summary(dense, view_of(FUSED_ATTN_ATTRIBUTE(spec, "dense_summary")), &p->dense);
  }
}

// Location of the keys. By default, they are all rows of `key`. Alternatives are its first seqlen_k
// rows, or pages, which are then the first dimension of key and value.
struct KeyRows {
  int64_t seqlen_k = -1;
  bool paged = false;
};

// Stores the sizes of query, key and value in *sizes. Returns false if they are inconsistent.
bool operands_fit(const TensorView& query, const TensorView& key, const TensorView& value,
                  const KeyRows& rows, Sizes* sizes) {
  if (query.ndim != 4 || key.ndim != 4 || value.ndim != 4 || !query.is_float()) return false;
  Sizes& s = *sizes;
  s.set("BHQD", query);
  s.set("NHTD", query);
  s.set("PGSV", value);
  s.dtype = query.dtype();
  if (!rows.paged) s['P'] = s['B'];
  s['K'] = rows.seqlen_k < 0 ? s['S'] : rows.seqlen_k;
  return key.is_float() && value.is_float() && key.dtype() == s.dtype && value.dtype() == s.dtype &&
         Rule("PGSD").fits(key, s) && Rule("PGSV").fits(value, s) &&
         (s['H'] == s['G'] || (s['G'] > 0 && s['H'] % s['G'] == 0)) && s['Q'] < kUnlimited &&
         s['S'] < kUnlimited && (rows.paged || s['K'] <= s['S']) && contiguous_from(query, 3) &&
         contiguous_from(key, 3) && contiguous_from(value, 3);
}

// Reads the sizes, addresses and row strides of query, key and value, after operands_fit().
void read_operands(const TensorView& query, const TensorView& key, const TensorView& value,
                   const Sizes& sizes, AttentionParams* p) {
  p->dtype = query.dtype();
  p->batch = query.shape[0];
  p->num_heads = query.shape[1];
  p->num_heads_kv = key.shape[1];
  p->seqlen_q = p->total_q = query.shape[2];
  p->seqlen_k = sizes.at('K');
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

// Throws std::invalid_argument unless cu_seqlens divides `total` rows into sequences of at most
// max_seqlen rows. Does not read the values on a GPU.
void check_cu_seqlens(const TensorView& view, const char* name, int64_t max_seqlen, int64_t total) {
  if (view.device.type != kDLCpu) return;
  const int64_t *const ends = static_cast<const int64_t*>(view.data), batch = view.shape[0] - 1;
  check_within(ends[0], name, 0, 0);
  for (int64_t b = 0; b < batch; ++b) {
    check_within(ends[b + 1], name, ends[b], std::min(ends[b] + max_seqlen, total));
  }
  check_within(ends[batch], name, total, total);
}

// Reads cu_seqlens and the maximum lengths of packed sequences, if the MaskSpec has them.
void read_packing(const py::handle& spec, Sizes* sizes, AttentionParams* p) {
  const TensorView ends_q = view_of(FUSED_ATTN_ATTRIBUTE(spec, "cu_seqlens_q"));
  if (!ends_q.is_present) return;
  const TensorView ends_k = view_of(FUSED_ATTN_ATTRIBUTE(spec, "cu_seqlens_k"));
  check_that(ends_q.ndim == 1 && ends_q.shape[0] > 0 && (*sizes)['N'] == 1,
             "packed sequences must have one batch and cu_seqlens of shape (batch + 1,)");
  sizes->set("A", ends_q);
  check_rule<int64_t>(ends_q, "cu_seqlens_q", "!A", *sizes);
  check_rule<int64_t>(ends_k, "cu_seqlens_k", "!A", *sizes);
  check_dense(ends_q, "cu_seqlens_q", 0);
  check_dense(ends_k, "cu_seqlens_k", 0);
  p->cu_seqlens_q = static_cast<const int64_t*>(ends_q.data);
  p->cu_seqlens_k = static_cast<const int64_t*>(ends_k.data);
  p->batch = ends_q.shape[0] - 1;
  p->seqlen_q = py::cast<int64_t>(FUSED_ATTN_ATTRIBUTE(spec, "max_seqlen_q"));
  p->seqlen_k = py::cast<int64_t>(FUSED_ATTN_ATTRIBUTE(spec, "max_seqlen_k"));
  check_within(p->seqlen_q, "max_seqlen_q", 0, kUnlimited - 1);
  check_within(p->seqlen_k, "max_seqlen_k", 0, kUnlimited - 1);
  check_cu_seqlens(ends_q, "cu_seqlens_q", p->seqlen_q, (*sizes)['T']);
  check_cu_seqlens(ends_k, "cu_seqlens_k", p->seqlen_k, (*sizes)['S']);
  (*sizes)['B'] = p->batch;
  (*sizes)['Q'] = p->seqlen_q;
  (*sizes)['K'] = p->seqlen_k;
}

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

// The MaskSpec singleton of unmasked calls, whose attributes need not be read. Null until
// set_no_mask(); the reference is never released.
inline PyObject* no_mask = nullptr;

// Reads an attention call except for its dropout seed. The caller has already viewed the tensors,
// and operands_fit() has set the sizes.
void read_call(const py::handle& call, const TensorView& query, const TensorView& key,
               const TensorView& value, Sizes* sizes, AttentionParams* p) {
  read_operands(query, key, value, *sizes, p);
  const py::object options = FUSED_ATTN_ATTRIBUTE(call, "options");
  read_options(options, p);
  const py::object spec = FUSED_ATTN_ATTRIBUTE(call, "mask");
  if (spec.ptr() == no_mask) {
    p->mask.band_lo = -kUnlimited;
    p->mask.band_hi = kUnlimited;
  } else {
    read_packing(spec, sizes, p);
    (*sizes)['W'] = (p->seqlen_k + 63) / 64;
    read_mask(spec, sizes, &p->mask);
  }
  if (p->dropout_p > 0) read_offsets(options, p);
  sizes->out_dtype = p->partial ? statistics_of(p->dtype) : p->dtype;
}
Sizes read_call(const py::handle& call, AttentionParams* p, const KeyRows& rows = {}) {
  const TensorView query = view_of(FUSED_ATTN_ATTRIBUTE(call, "query")),
                   key = view_of(FUSED_ATTN_ATTRIBUTE(call, "key")),
                   value = view_of(FUSED_ATTN_ATTRIBUTE(call, "value"));
  Sizes sizes;
  check_that(operands_fit(query, key, value, rows, &sizes),
             "query, key and value must be float tensors whose shapes and layouts fit");
  read_call(call, query, key, value, &sizes, p);
  return sizes;
}
Sizes read_call(const py::handle& call, AttentionBwdParams* p) { return read_call(call, &p->fwd); }
Sizes read_call(const py::handle& call, AttentionWeightsParams* p) {
  return read_call(call, &p->fwd);
}

// Reads a NormCall except for its dropout seed.
Sizes read_call(const py::handle& call, NormParams* p) {
  const TensorView input = view_of(FUSED_ATTN_ATTRIBUTE(call, "input"));
  check_that(input.ndim > 0 && input.is_float(), "input must be a float tensor with rows");
  p->dtype = input.dtype();
  p->columns = input.shape[input.ndim - 1];
  p->rows = input.numel() / std::max<int64_t>(p->columns, 1);
  read_matrix(input, "input", &p->input, &p->input_rows);
  Sizes sizes;
  sizes.dtype = p->dtype;
  sizes['R'] = p->rows;
  sizes['C'] = p->columns;
  const TensorView residual = view_of(FUSED_ATTN_ATTRIBUTE(call, "residual"));
  check_rule<void>(residual, "residual", "x:*RC", sizes);
  check_that(!residual.is_present ||
                 (residual.ndim > 0 && residual.shape[residual.ndim - 1] == p->columns),
             "residual must have the shape of input");
  read_matrix(residual, "residual", &p->residual, &p->residual_rows);
  const auto read_parameter = [&](const TensorView& view, const char* name, const void** data) {
    if (!view.is_present) return;
    check_rule<void>(view, name, "s:C", sizes);
    check_dense(view, name, 0);
    *data = view.data;
  };
  read_parameter(view_of(FUSED_ATTN_ATTRIBUTE(call, "weight")), "weight", &p->weight);
  read_parameter(view_of(FUSED_ATTN_ATTRIBUTE(call, "bias")), "bias", &p->bias);
  const py::object options = FUSED_ATTN_ATTRIBUTE(call, "options");
  read_options(options, p);
  read_offsets(options, p);
  return sizes;
}

[[maybe_unused]] Sizes read_call(const py::handle& call, NormBwdParams* p) {
  return read_call(call, &p->fwd);
}

// Returns the field names that the bindings read from calls, as listed in fields/*.inc. Python
// checks that its own list is the same.
py::list field_names() {
  py::list names;
#define DERIVED(type, name) names.append(#name);
#define SIZE(name, letter) names.append(#name);
#define FIELD(type, name) names.append(#name);
#define POINTER(type, name, rule) names.append(#name);
#define ROWS(type, name, rule) names.append(#name);
#define MATRIX(type, name, rule) names.append(#name);
#define SIZES(name) names.append(#name);
#define BROADCAST(name, rule) \
  names.append(#name);        \
  names.append(#name "_summary");
#define BY_SEQUENCE(type, name, rule) names.append(#name);
#define BY_HEAD(type, name, rule) names.append(#name);
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
