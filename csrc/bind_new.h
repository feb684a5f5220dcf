// Allocates the result tensors of the CPU passes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "bind_calls.h"
#include "cpu/workspace_pool.h"

namespace fused_attn {
namespace {

// Tensors of at least this many bytes come from the workspace pool, smaller ones from malloc, which
// reuses small blocks. malloc may return large blocks to the system at every free. Norms of 300 x
// 768 then caused 150 page faults per call and took 1.3 times as long.
constexpr int64_t kPooledFrom = 1 << 17;

// Python function that allocates a tensor if torch has no C API for it. Null until set_torch().
PyObject* empty_strided = nullptr;

// Registers the allocators of torch. `api` is torch.Tensor.__dlpack_c_exchange_api__ or None.
// `empty` is the Python function empty(shape, strides, dtype), where dtype is a DType, -1 for int16
// or -2 for uint8.
void set_torch(const py::object& api, const py::object& empty) {
  set_exchange_api(api);
  Py_XDECREF(empty_strided);
  empty_strided = empty.inc_ref().ptr();
}

// A DLPack element type: type code and number of bits.
struct NumberType {
  uint8_t code, bits;
};
constexpr NumberType kInt16{kDLInt, 16}, kUInt8{kDLUInt, 8};

NumberType type_of(DType dtype) {
  return {dtype == DType::kBFloat16 ? uint8_t{kDLBfloat} : uint8_t{kDLFloat},
          dtype == DType::kFloat32   ? uint8_t{32}
          : dtype == DType::kFloat64 ? uint8_t{64}
                                     : uint8_t{16}};
}

py::object new_tensor_of_torch(const int64_t* shape, const int64_t* strides, int ndim,
                               NumberType type) {
  py::tuple sizes(ndim), steps(ndim);
  for (int i = 0; i < ndim; ++i) {
    sizes[i] = shape[i];
    steps[i] = strides[i];
  }
  TensorView view;
  view.code = type.code;
  view.bits = type.bits;
  const int64_t dtype = type.code == kDLInt    ? -1
                        : type.code == kDLUInt ? -2
                                               : static_cast<int64_t>(view.dtype());
  return py::handle(empty_strided)(sizes, steps, dtype);
}

// Allocates an uninitialized CPU tensor, which must be dense. Large tensors reuse pooled memory;
// their deleter returns it to the pool. Throws std::bad_alloc if out of memory.
py::object new_tensor(const int64_t* shape, const int64_t* strides, int ndim, NumberType type) {
  if (exchange_api == nullptr) return new_tensor_of_torch(shape, strides, ndim, type);
  struct Managed {
    DLManagedTensorVersioned base;
    int64_t shape[TensorView::kMaxDims], strides[TensorView::kMaxDims];
    bool pooled;
  };
  auto managed = std::make_unique<Managed>();
  int64_t bytes = type.bits / 8;
  for (int i = 0; i < ndim; ++i) {
    managed->shape[i] = shape[i];
    managed->strides[i] = strides[i];
    if (shape[i] < 0) throw std::invalid_argument("sizes of tensors must not be negative");
    if (__builtin_mul_overflow(bytes, shape[i], &bytes)) throw std::bad_alloc();
  }
  constexpr int64_t kAlignment = 64;
  if (bytes > INT64_MAX / 2) throw std::bad_alloc();
  const int64_t size = (bytes + kAlignment) / kAlignment * kAlignment;
  managed->pooled = size >= kPooledFrom;
  void* const data =
      managed->pooled ? acquire_workspace(size) : std::aligned_alloc(kAlignment, size);
  if (data == nullptr) throw std::bad_alloc();
  managed->base = {
      1,
      0,
      nullptr,
      [](DLManagedTensorVersioned* self) {
        auto* const own = reinterpret_cast<Managed*>(self);
        own->pooled ? return_workspace(self->tensor.data) : std::free(self->tensor.data);
        delete own;
      },
      0,
      {data, kDLCpu, 0, ndim, type.code, type.bits, 1, managed->shape, managed->strides, 0}};
  void* object = nullptr;
  if (exchange_api->managed_tensor_to_py_object(&managed.release()->base, &object) != 0) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

// Exposes new_tensor to Python. dtype is a DType, or -1 for int16.
py::object empty_tensor(const py::tuple& shape, const py::tuple& strides, int64_t dtype) {
  int64_t sizes[TensorView::kMaxDims], steps[TensorView::kMaxDims];
  const int ndim = static_cast<int>(shape.size());
  if (ndim > TensorView::kMaxDims || strides.size() != shape.size()) {
    throw std::invalid_argument("tensors must have at most " +
                                std::to_string(TensorView::kMaxDims) +
                                " dimensions, and a stride for each");
  }
  int64_t numel = 1, end = 1;
  for (int i = 0; i < ndim; ++i) {
    sizes[i] = py::cast<int64_t>(shape[i]);
    steps[i] = py::cast<int64_t>(strides[i]);
    int64_t last = 0;
    if (sizes[i] < 0 || steps[i] < 0 || __builtin_mul_overflow(numel, sizes[i], &numel) ||
        __builtin_mul_overflow(sizes[i] - 1, steps[i], &last) ||
        __builtin_add_overflow(end, last, &end)) {
      throw std::invalid_argument("sizes and strides must not be negative or overflow");
    }
  }
  if (numel > 0 && end > numel) throw std::invalid_argument("strides must leave no gaps");
  check_within(dtype, "dtype", -1, 3);
  return new_tensor(sizes, steps, ndim, dtype < 0 ? kInt16 : type_of(static_cast<DType>(dtype)));
}

// Allocates a contiguous tensor and stores its address in *data.
template <class T>
py::object new_dense(const int64_t* shape, int ndim, NumberType type, T** data) {
  int64_t strides[TensorView::kMaxDims], step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  py::object tensor = new_tensor(shape, strides, ndim, type);
  *data = static_cast<T*>(view_of(tensor).data);
  return tensor;
}

// Views a dense CPU tensor of a floating-point dtype. Returns false for other tensors, and for
// tensors with a lazy negation.
bool float_view(const py::handle& tensor, TensorView* view) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  check_tensor(tensor);
  if (call_method(tensor, is_neg).ptr() == Py_True) return false;
  if (exchange_api == nullptr) {
    if (py::cast<bool>(tensor.attr("is_nested")) || py::cast<bool>(tensor.attr("is_sparse"))) {
      return false;
    }
    *view = view_by_attributes(tensor);
  } else {
    DLTensor raw;
    if (exchange_api->dltensor_from_py_object(tensor.ptr(), &raw) != 0) {  // nested or sparse
      PyErr_Clear();
      return false;
    }
    if (raw.ndim > TensorView::kMaxDims || raw.bits < 8 || raw.lanes != 1) return false;
    *view = view_of(raw);
  }
  if (view->device.type != kDLCpu || !view->is_float()) return false;
  hold_storage(tensor, *view);
  return true;
}

}  // namespace
}  // namespace fused_attn
