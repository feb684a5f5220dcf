// Reads and creates torch tensors without including torch's headers. Used by both extension
// modules.
//
// Since 2.10, torch.Tensor exports a C API for this (__dlpack_c_exchange_api__, DLPack 1.2). With
// older versions, each attribute is read through Python. The structs below match DLPack's dlpack.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace fused_attn {
namespace {

namespace py = pybind11;

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLManagedTensorVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor tensor;
};

struct DLPackExchangeAPI {
  uint32_t major, minor;
  DLPackExchangeAPI* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  int (*managed_tensor_to_py_object)(DLManagedTensorVersioned*, void**);
  int (*dltensor_from_py_object)(void*, DLTensor*);
  void* current_work_stream;
};

constexpr int kDLCpu = 1, kDLCuda = 2, kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4;

// Device whose memory the kernels of the current call access. The CUDA binding sets it for each
// call; the CPU binding keeps the default.
struct Device {
  int32_t type = kDLCpu, id = 0;
};
inline thread_local Device call_device;

// DLPack exchange API of torch. Null if torch does not export it or its use is disabled.
inline const DLPackExchangeAPI* exchange_api = nullptr;

// torch.Tensor. Null until set_exchange_api(); the reference is never released.
inline PyTypeObject* tensor_type = nullptr;

// Registers torch.Tensor.__dlpack_c_exchange_api__. None disables the C API.
void set_exchange_api(const py::object& capsule) {
  const py::object type = py::module_::import("torch").attr("Tensor");
  if (tensor_type == nullptr) tensor_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  exchange_api = nullptr;
  if (capsule.is_none()) return;
  auto* api = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->major == 1 && api->dltensor_from_py_object != nullptr) exchange_api = api;
}

// Keeps the tensors of a call and their storages alive until its kernel has run, even if other
// threads replace them. It is the call guard of each function of the module.
class CallScope {
 public:
  CallScope() : begin_(held_.size()) {}
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  ~CallScope() {
    while (held_.size() > begin_) {
      const py::object last = std::move(held_.back());
      held_.pop_back();
    }
  }
  static void hold(py::object object) { held_.push_back(std::move(object)); }

 private:
  inline static thread_local std::vector<py::object> held_;
  const size_t begin_;
};

// Reads a Python attribute. The attribute name is interned once per call site.
#define FUSED_ATTN_ATTRIBUTE(owner, name)                               \
  [&](const py::handle& of) {                                           \
    static PyObject* const interned = PyUnicode_InternFromString(name); \
    PyObject* const value = PyObject_GetAttr(of.ptr(), interned);       \
    if (value == nullptr) throw py::error_already_set();                \
    return py::reinterpret_steal<py::object>(value);                    \
  }(owner)

// A non-owning view of a tensor's memory, valid while the tensor is alive.
struct TensorView {
  static constexpr int kMaxDims = 8;
  void* data = nullptr;
  Device device{0, 0};
  int ndim = 0;
  uint8_t code = 0, bits = 0;
  int64_t shape[kMaxDims], strides[kMaxDims];
  bool is_present = false;  // false if the Python object is None

  DType dtype() const {
    if (code == kDLBfloat) return DType::kBFloat16;
    return bits == 32 ? DType::kFloat32 : bits == 64 ? DType::kFloat64 : DType::kFloat16;
  }
  // Returns true if the element type is one of the floating-point types in DType. Otherwise, the
  // result of dtype() is meaningless.
  bool is_float() const {
    return code == kDLBfloat ? bits == 16
                             : code == kDLFloat && (bits == 16 || bits == 32 || bits == 64);
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    return count;
  }
  // Returns the stride of a dimension, or 0 if its size is 1. The stride of a dimension of size 1
  // is arbitrary, so such a dimension is treated as broadcast.
  int64_t broadcast_stride(int dim) const { return shape[dim] == 1 ? 0 : strides[dim]; }
};

void copy_shape(const int64_t* shape, const int64_t* strides, int ndim, TensorView* view) {
  if (ndim > TensorView::kMaxDims) {
    throw std::invalid_argument("tensors must have at most " +
                                std::to_string(TensorView::kMaxDims) + " dimensions");
  }
  int64_t numel = 1;  // of dimensions that are not empty
  for (int i = 0; i < ndim; ++i) {
    const int64_t size = shape[i] > 1 ? shape[i] : 1;
    if (shape[i] < 0 || __builtin_mul_overflow(numel, size, &numel)) {
      throw std::invalid_argument("tensors must have fewer than 2^63 elements");
    }
  }
  view->ndim = ndim;
  std::memcpy(view->shape, shape, ndim * sizeof(int64_t));
  std::memcpy(view->strides, strides, ndim * sizeof(int64_t));
}

// Views a tensor through Python attributes, for torch versions before 2.10.
TensorView view_by_attributes(const py::handle& tensor) {
  TensorView view;
  view.is_present = true;
  view.data = reinterpret_cast<void*>(py::cast<uintptr_t>(tensor.attr("data_ptr")()));
  const py::tuple shape = tensor.attr("shape"), strides = tensor.attr("stride")();
  int64_t sizes[TensorView::kMaxDims], steps[TensorView::kMaxDims];
  const int ndim = static_cast<int>(shape.size());
  for (int i = 0; i < ndim && i < TensorView::kMaxDims; ++i) {
    sizes[i] = py::cast<int64_t>(shape[i]);
    steps[i] = py::cast<int64_t>(strides[i]);
  }
  copy_shape(sizes, steps, ndim, &view);
  view.bits = static_cast<uint8_t>(8 * py::cast<int>(tensor.attr("element_size")()));
  const auto dtype = py::str(tensor.attr("dtype")).cast<std::string>();
  view.code = dtype == "torch.bfloat16"                            ? kDLBfloat
              : py::cast<bool>(tensor.attr("is_floating_point")()) ? kDLFloat
              : dtype == "torch.uint8"                             ? kDLUInt
                                                                   : kDLInt;
  if (py::cast<bool>(tensor.attr("is_cpu"))) {
    view.device = {kDLCpu, 0};
  } else if (py::cast<bool>(tensor.attr("is_cuda"))) {
    view.device = {kDLCuda, py::cast<int32_t>(tensor.attr("get_device")())};
  }
  return view;
}

TensorView view_of(const DLTensor& raw) {
  TensorView view;
  view.is_present = true;
  view.data = static_cast<char*>(raw.data) + raw.byte_offset;
  view.device = {raw.device_type, raw.device_id};
  view.code = raw.code;
  view.bits = raw.bits;
  copy_shape(raw.shape, raw.strides, raw.ndim, &view);
  return view;
}

TensorView view_on_any_device(const py::handle& tensor) {
  if (exchange_api == nullptr) return view_by_attributes(tensor);
  DLTensor raw;
  if (exchange_api->dltensor_from_py_object(tensor.ptr(), &raw) != 0) throw py::error_already_set();
  if (raw.bits < 8 || raw.lanes != 1) {
    throw std::invalid_argument("elements must have a whole number of bytes");
  }
  return view_of(raw);
}

py::object call_method(const py::handle& object, PyObject* name) {
  PyObject* const result = PyObject_CallMethodNoArgs(object.ptr(), name);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Holds the storage of a tensor until the kernel has run. Throws std::invalid_argument unless the
// tensor lies within it, because torch does not check tensors when their storage is resized.
void hold_storage(const py::handle& tensor, const TensorView& view) {
  static PyObject* const untyped_storage = PyUnicode_InternFromString("untyped_storage");
  static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
  static PyObject* const storage_offset = PyUnicode_InternFromString("storage_offset");
  if (view.numel() == 0) return;
  py::object storage = call_method(tensor, untyped_storage);
  int64_t end = py::cast<int64_t>(call_method(tensor, storage_offset)) + 1;
  bool overflows = false;
  for (int i = 0; i < view.ndim; ++i) {
    int64_t last = 0;
    overflows |= __builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &last) ||
                 __builtin_add_overflow(end, last, &end);
  }
  const auto size = py::cast<int64_t>(call_method(storage, nbytes));
  if (view.data == nullptr || overflows || end > size / (view.bits / 8)) {
    throw std::invalid_argument("tensors of a call must have storage, got one of " +
                                std::to_string(size) + " bytes for a larger tensor");
  }
  CallScope::hold(std::move(storage));
}

void check_tensor(const py::handle& object) {
  if (PyObject_TypeCheck(object.ptr(), tensor_type)) return;
  throw py::type_error("expected a tensor, got " + std::string(Py_TYPE(object.ptr())->tp_name));
}

// Views a tensor, None or null. Throws std::invalid_argument if the tensor is not on call_device,
// because kernels would access memory that does not exist there.
TensorView view_of(const py::handle& tensor) {
  if (!tensor || tensor.is_none()) return {};
  check_tensor(tensor);
  const TensorView view = view_on_any_device(tensor);
  if (view.device.type == call_device.type && view.device.id == call_device.id) {
    hold_storage(tensor, view);
    return view;
  }
  const auto device = py::str(tensor.attr("device")).cast<std::string>();
  throw std::invalid_argument("all tensors of a call must be on one device, got one on " + device);
}

}  // namespace
}  // namespace fused_attn
