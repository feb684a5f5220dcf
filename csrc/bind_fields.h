// The fields of params.h by name, for both modules: pointers and strides are integers.
//
// Python checks shapes and types (backends/fields.py); here a missing field is absent (null, 0) and
// a field that does not exist is an error.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <stdexcept>
#include <string>

#include "params.h"

namespace fused_attn {
namespace {

namespace py = pybind11;

// Reads a dict of fields; finish() throws if one was never asked for.
class Fields {
 public:
  explicit Fields(const py::kwargs& fields) : fields_(fields) {}

  template <class T>
  void number(const char* name, T* out) {
    if (PyObject* value = find(name)) *out = py::cast<T>(py::handle(value));
  }

  // Negative Python integers are two's complement: a seed may be any int64.
  void bits(const char* name, uint64_t* out) {
    if (PyObject* value = find(name)) {
      *out = PyLong_AsUnsignedLongLongMask(value);
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
  }

  void dtype(const char* name, DType* out) {
    int64_t value = 0;
    number(name, &value);
    *out = static_cast<DType>(value);
  }

  template <class T>
  void pointer(const char* name, T** out) {
    uintptr_t address = 0;
    number(name, &address);
    *out = reinterpret_cast<T*>(address);
  }

  template <int kSize>
  void integers(const std::string& name, int64_t (&out)[kSize]) {
    PyObject* value = find(name.c_str());
    if (value == nullptr) return;
    const auto tuple = py::reinterpret_borrow<py::tuple>(value);
    // Strides of a tensor come whole: the last, which is 1, is not read where it has no place.
    if (tuple.size() != kSize && tuple.size() != kSize + 1) {
      throw std::invalid_argument(name + " has " + std::to_string(tuple.size()) + " integers");
    }
    for (int i = 0; i < kSize; ++i) out[i] = py::cast<int64_t>(tuple[i]);
  }

  // A tensor and its strides.
  template <class T>
  void tensor(const char* name, T** data, int64_t (&strides)[3]) {
    pointer(name, data);
    integers(std::string(name) + "_strides", strides);
  }

  void dense(const std::string& name, DenseTensor* out) {
    pointer(name.c_str(), &out->data);  // null also where the tensor has no element
    integers(name + "_strides", out->strides);
    pointer((name + "_summary").c_str(), &out->summary);
    integers(name + "_summary_strides", out->summary_strides);
  }

  void finish() const {
    if (used_ == fields_.size()) return;
    throw std::invalid_argument("there are " + std::to_string(fields_.size()) +
                                " fields, of which the kernel knows " + std::to_string(used_));
  }

 private:
  PyObject* find(const char* name) {
    PyObject* value = PyDict_GetItemString(fields_.ptr(), name);
    used_ += value != nullptr;
    return value;
  }

  const py::kwargs& fields_;
  size_t used_ = 0;
};

void read(Fields& f, MaskParams* mask) {
  f.dense("bias", &mask->bias);
  f.dtype("bias_dtype", &mask->bias_dtype);
  f.dense("dense", &mask->dense);
  f.dense("key_mask", &mask->key_mask);
  f.pointer("bounds", &mask->bounds);
  f.number("band_lo", &mask->band_lo);
  f.number("band_hi", &mask->band_hi);
  f.number("alibi_offset", &mask->alibi_offset);
  f.pointer("query_documents", &mask->query_documents);
  f.number("query_documents_stride", &mask->query_documents_stride);
  f.pointer("key_documents", &mask->key_documents);
  f.number("key_documents_stride", &mask->key_documents_stride);
  f.pointer("slopes", &mask->slopes);
  f.integers("slopes_strides", mask->slopes_strides);
}

void read(Fields& f, AttentionParams* p) {
  f.dtype("dtype", &p->dtype);
  f.number("batch", &p->batch);
  f.number("num_heads", &p->num_heads);
  f.number("num_heads_kv", &p->num_heads_kv);
  f.number("seqlen_q", &p->seqlen_q);
  f.number("seqlen_k", &p->seqlen_k);
  f.number("head_dim", &p->head_dim);
  f.number("head_dim_v", &p->head_dim_v);
  f.tensor("query", &p->query, p->query_strides);
  f.tensor("key", &p->key, p->key_strides);
  f.tensor("value", &p->value, p->value_strides);
  f.tensor("out", &p->out, p->out_strides);
  f.pointer("lse", &p->lse);
  f.pointer("lse_low", &p->lse_low);
  f.pointer("cu_seqlens_q", &p->cu_seqlens_q);
  f.pointer("cu_seqlens_k", &p->cu_seqlens_k);
  f.number("total_q", &p->total_q);
  f.number("softmax_scale", &p->softmax_scale);
  f.number("softcap", &p->softcap);
  f.number("dropout_p", &p->dropout_p);
  f.bits("seed", &p->seed);
  read(f, &p->mask);
  f.number("num_threads", &p->num_threads);
}

void read(Fields& f, AttentionBwdParams* p) {
  read(f, &p->fwd);
  f.tensor("grad_out", &p->grad_out, p->grad_out_strides);
  f.pointer("grad_lse", &p->grad_lse);
  f.tensor("grad_query", &p->grad_query, p->grad_query_strides);
  f.tensor("grad_key", &p->grad_key, p->grad_key_strides);
  f.tensor("grad_value", &p->grad_value, p->grad_value_strides);
  f.pointer("grad_bias", &p->grad_bias);
  f.tensor("grad_weights", &p->grad_weights, p->grad_weights_strides);
  f.number("grad_weights_factor", &p->grad_weights_factor);
  f.pointer("row_sums", &p->row_sums);
}

void read(Fields& f, AttentionWeightsParams* p) {
  read(f, &p->fwd);
  f.pointer("weights", &p->weights);
  f.number("average", &p->average);
}

void read(Fields& f, NormParams* p) {
  f.dtype("dtype", &p->dtype);
  f.number("rows", &p->rows);
  f.number("columns", &p->columns);
  f.number("rms", &p->rms);
  f.number("eps", &p->eps);
  f.number("dropout_p", &p->dropout_p);
  f.bits("seed", &p->seed);
  f.pointer("input", &p->input);
  f.pointer("residual", &p->residual);
  f.pointer("weight", &p->weight);
  f.pointer("bias", &p->bias);
  f.pointer("out", &p->out);
  f.pointer("total", &p->total);
  f.pointer("mean", &p->mean);
  f.pointer("rstd", &p->rstd);
  f.number("num_threads", &p->num_threads);
}

void read(Fields& f, NormBwdParams* p) {
  read(f, &p->fwd);
  f.pointer("grad_out", &p->grad_out);
  f.pointer("grad_total", &p->grad_total);
  f.pointer("grad_input", &p->grad_input);
  f.pointer("grad_residual", &p->grad_residual);
  f.pointer("grad_weight", &p->grad_weight);
  f.pointer("grad_bias", &p->grad_bias);
}

void read(Fields& f, SummaryParams* p) {
  f.pointer("data", &p->data);
  f.number("is_bool", &p->is_bool);
  f.dtype("dtype", &p->dtype);
  f.integers("sizes", p->sizes);
  f.integers("strides", p->strides);
  f.pointer("summary", &p->summary);
  f.number("num_threads", &p->num_threads);
}

template <class Params>
Params params_of(const py::kwargs& kwargs) {
  Params params{};
  Fields fields(kwargs);
  read(fields, &params);
  fields.finish();
  return params;
}

// A mask tensor whose address changes from call to call, and how it is summed up.
struct ChangingMask {
  DenseTensor MaskParams::* tensor = nullptr;  // null: every call has the same mask
  SummaryParams summary{};
  int64_t summary_size = 0;  // 0: it has none

  // name: the field of its address, or ""; sizes: its own, broadcast ones as 1.
  ChangingMask(const std::string& name, const std::array<int64_t, 4>& sizes, const MaskParams& mask,
               bool summed_up_key_masks) {
    if (name == "dense") tensor = &MaskParams::dense;
    if (name == "bias") tensor = &MaskParams::bias;
    if (name == "key_mask") tensor = &MaskParams::key_mask;
    if (tensor == nullptr || (name == "key_mask" && !summed_up_key_masks)) return;
    summary.is_bool = name != "bias";
    summary.dtype = mask.bias_dtype;
    for (int i = 0; i < 4; ++i) {
      summary.sizes[i] = sizes[i];
      summary.strides[i] = (mask.*tensor).strides[i];
    }
    const auto tiles = [](int64_t n, int64_t tile) { return (n + tile - 1) / tile; };
    summary_size =
        sizes[0] * sizes[1] * tiles(sizes[2], kSummaryTileM) * tiles(sizes[3], kSummaryTileN);
  }

  // Puts a call's mask into its parameters; what makes its summary, at that address, if it has one.
  SummaryParams set(MaskParams* mask, uintptr_t address, uint8_t* to) const {
    SummaryParams of_call = summary;
    if (tensor == nullptr) return of_call;
    DenseTensor& own = mask->*tensor;
    own.data = of_call.data = reinterpret_cast<const void*>(address);
    own.summary = of_call.summary = summary_size == 0 ? nullptr : to;
    return of_call;
  }
};

}  // namespace
}  // namespace fused_attn
