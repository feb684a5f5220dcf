// The module fused_attn._cpu: the CPU kernels, by the fields of params.h.
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_fields.h"
#include "cpu/debug.h"
#include "cpu/dispatch.h"
#include "cpu/workspace_pool.h"

namespace fused_attn {
namespace {

void read(Fields& f, TileKindsParams* p) {
  read(f, &p->problem);
  f.pointer("kinds", &p->kinds);
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
  // mask, sizes: as of ChangingMask.
  AttentionCall(const std::string& mask, const std::array<int64_t, 4>& sizes,
                const py::kwargs& fields)
      : params_(params_of<AttentionParams>(fields)), mask_(mask, sizes, params_.mask, false) {}

  void run(uintptr_t query, uintptr_t key, uintptr_t value, uintptr_t out, uintptr_t mask,
           int64_t threads) const {
    AttentionParams params = params_;
    std::vector<uint8_t> summary(mask_.summary_size);
    SummaryParams of_mask = mask_.set(&params.mask, mask, summary.data());
    if (mask_.summary_size > 0) {
      py::gil_scoped_release release;
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
  ChangingMask mask_;
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
