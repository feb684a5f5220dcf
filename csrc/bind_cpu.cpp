// The module fused_attn._cpu: fields of params.h by name, pointers and strides as integers.
//
// Python checks shapes and types (backends/cpp.py); here a missing field is absent (null, 0) and a
// field that does not exist is an error.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/workspace_pool.h"
#include "params.h"

namespace py = pybind11;

namespace fused_attn {
namespace {

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

void read(Fields& f, TileKindsParams* p) {
  read(f, &p->problem);
  f.pointer("kinds", &p->kinds);
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

template <class Params>
const KernelTable& kernels_for(const Params&) {
  return kernels();
}
const KernelTable& kernels_for(const AttentionParams& p) { return attention_kernels(p); }
const KernelTable& kernels_for(const AttentionBwdParams& p) { return attention_kernels(p.fwd); }
const KernelTable& kernels_for(const AttentionWeightsParams& p) { return attention_kernels(p.fwd); }
const KernelTable& kernels_for(const TileKindsParams& p) { return attention_kernels(p.problem); }

// Runs an entry of the table without the GIL.
template <class Params>
void run_entry(bool (*KernelTable::*entry)(const Params&), const Params& params) {
  py::gil_scoped_release release;
  if (!(kernels_for(params).*entry)(params)) throw std::bad_alloc();
}

template <class Params>
void run(bool (*KernelTable::*entry)(const Params&), const py::kwargs& kwargs) {
  run_entry(entry, params_of<Params>(kwargs));
}

// A forward whose fields are read once, for calls that differ in their tensors' addresses alone.
class AttentionCall {
 public:
  // mask: which field the address of a mask tensor goes into, and its sizes, broadcast ones as 1;
  // "" if every call has the same mask.
  AttentionCall(const std::string& mask, const std::array<int64_t, 4>& sizes,
                const py::kwargs& fields)
      : params_(params_of<AttentionParams>(fields)) {
    if (mask == "dense") mask_ = &MaskParams::dense;
    if (mask == "bias") mask_ = &MaskParams::bias;
    if (mask == "key_mask") mask_ = &MaskParams::key_mask;
    if (mask_ == nullptr || mask_ == &MaskParams::key_mask) return;
    const DenseTensor& tensor = params_.mask.*mask_;
    summary_.is_bool = mask == "dense";
    summary_.dtype = params_.mask.bias_dtype;
    for (int i = 0; i < 4; ++i) {
      summary_.sizes[i] = sizes[i];
      summary_.strides[i] = tensor.strides[i];
    }
    const auto tiles = [](int64_t n, int64_t tile) { return (n + tile - 1) / tile; };
    summary_size_ =
        sizes[0] * sizes[1] * tiles(sizes[2], kSummaryTileM) * tiles(sizes[3], kSummaryTileN);
  }

  void run(uintptr_t query, uintptr_t key, uintptr_t value, uintptr_t out, uintptr_t mask,
           int64_t threads) const {
    AttentionParams params = params_;
    std::vector<uint8_t> summary(summary_size_);
    if (mask_ != nullptr) {
      DenseTensor& tensor = params.mask.*mask_;
      tensor.data = reinterpret_cast<const void*>(mask);
      tensor.summary = summary_size_ == 0 ? nullptr : summary.data();
    }
    if (summary_size_ > 0) {
      py::gil_scoped_release release;
      SummaryParams of_mask = summary_;
      of_mask.data = reinterpret_cast<const void*>(mask);
      of_mask.summary = summary.data();
      of_mask.num_threads = threads;
      kernels().tile_summary(of_mask);
    }
    params.query = reinterpret_cast<const void*>(query);
    params.key = reinterpret_cast<const void*>(key);
    params.value = reinterpret_cast<const void*>(value);
    params.out = reinterpret_cast<void*>(out);
    params.num_threads = threads;
    run_entry(&KernelTable::attention_fwd, params);
  }

 private:
  AttentionParams params_;
  DenseTensor MaskParams::* mask_ = nullptr;
  SummaryParams summary_{};
  int64_t summary_size_ = 0;
};

// The same for a norm's forward; mean and rstd are not kept.
class NormCall {
 public:
  explicit NormCall(const py::kwargs& fields) : params_(params_of<NormParams>(fields)) {}

  void run(uintptr_t input, uintptr_t weight, uintptr_t bias, uintptr_t out,
           int64_t threads) const {
    NormParams params = params_;
    params.input = reinterpret_cast<const void*>(input);
    params.weight = reinterpret_cast<const void*>(weight);
    params.bias = reinterpret_cast<const void*>(bias);
    params.out = reinterpret_cast<void*>(out);
    params.num_threads = threads;
    run_entry(&KernelTable::norm_fwd, params);
  }

 private:
  NormParams params_;
};

// The parts of DLPack's interface (dlpack.h, version 0.8) that a tensor on the CPU needs.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

// An uninitialised tensor in pooled memory, as a capsule for torch.from_dlpack. dtype: as DType.
py::capsule pooled_tensor(const py::tuple& shape, const py::tuple& strides, int64_t dtype) {
  constexpr int kMaxDims = 4, kCpu = 1, kFloat = 2, kBfloat = 4;
  struct Managed {
    DLManagedTensor base;
    int64_t shape[kMaxDims], strides[kMaxDims];
  };
  const bool is_bfloat = static_cast<DType>(dtype) == DType::kBFloat16;
  const int bits = dtype == 0 ? 32 : dtype == 1 ? 64 : 16;
  auto managed = std::make_unique<Managed>();
  const int ndim = static_cast<int>(shape.size());
  if (ndim > kMaxDims) throw std::invalid_argument("a pooled tensor has up to 4 dimensions");
  int64_t last = 0;
  for (int i = 0; i < ndim; ++i) {
    managed->shape[i] = py::cast<int64_t>(shape[i]);
    managed->strides[i] = py::cast<int64_t>(strides[i]);
    last += (managed->shape[i] - 1) * managed->strides[i];
  }
  void* const data = take_workspace((last + 1) * bits / 8);
  if (data == nullptr) throw std::bad_alloc();
  managed->base = {{data, kCpu, 0, ndim, static_cast<uint8_t>(is_bfloat ? kBfloat : kFloat),
                    static_cast<uint8_t>(bits), 1, managed->shape, managed->strides, 0},
                   nullptr,
                   [](DLManagedTensor* self) {
                     give_workspace(self->tensor.data);
                     delete reinterpret_cast<Managed*>(self);
                   }};
  // Whoever takes the tensor renames the capsule, and calls the deleter.
  return py::capsule(managed.release(), "dltensor", [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    auto* const self = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    self->deleter(self);
  });
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of fused_attn; call them through fused_attn.backends.cpp.";
  m.attr("SUMMARY_TILE") = py::make_tuple(kSummaryTileM, kSummaryTileN);
  m.def("attention_fwd", [](const py::kwargs& f) { run(&KernelTable::attention_fwd, f); });
  m.def("attention_bwd", [](const py::kwargs& f) { run(&KernelTable::attention_bwd, f); });
  m.def("attention_weights", [](const py::kwargs& f) { run(&KernelTable::attention_weights, f); });
  m.def("norm_fwd", [](const py::kwargs& f) { run(&KernelTable::norm_fwd, f); });
  m.def("norm_bwd", [](const py::kwargs& f) { run(&KernelTable::norm_bwd, f); });
  m.def("tile_summary", [](const py::kwargs& f) {
    const SummaryParams params = params_of<SummaryParams>(f);
    py::gil_scoped_release release;
    kernels().tile_summary(params);
  });
  m.def("tile_kinds", [](const py::kwargs& f) { run(&KernelTable::tile_kinds, f); });
  m.def("tile_size", [](int64_t dtype) {
    return py::make_tuple(kernels().panel(static_cast<DType>(dtype)), kernels().block);
  });
  py::class_<AttentionCall>(m, "AttentionCall")
      .def(py::init<const std::string&, const std::array<int64_t, 4>&, const py::kwargs&>())
      .def("run", &AttentionCall::run);
  py::class_<NormCall>(m, "NormCall").def(py::init<const py::kwargs&>()).def("run", &NormCall::run);
  m.def("multiply_add_peak", [](int64_t threads) { return kernels().multiply_add_peak(threads); });
  m.def("pair_peak", [](int64_t threads) { return kernels().pair_peak(threads); });
  m.def("pooled_tensor", &pooled_tensor);
  m.def("release_workspace", &release_workspace);
  m.def("isa", [] { return kernels().isa; });
  m.def("set_isa", &set_isa, py::arg("isa").none(false));
}

}  // namespace fused_attn
