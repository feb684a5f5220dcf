// Calls of plain tensors that the CPU's bindings make whole: checks, results and kernel in one;
// here those of attention.
//
// Small calls spend their time on the way; None sends a call the whole way, through Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "bind_run.h"
#include "cpu/workspace_pool.h"

namespace fused_attn {
namespace {

// ---- new tensors --------------------------------------------------------------------------------

// Smaller blocks stay with malloc, which reuses them. Larger ones it may give back to the system
// at every free: norms of 300 x 768 took 150 page faults a call, and 1.3 times as long.
constexpr int64_t kPooledFrom = 1 << 17;

// An uninitialised dense tensor; a large one in memory that earlier ones have left. It needs
// torch's C functions. code, bits: its type, as DLPack has it.
py::object new_tensor(const int64_t* shape, const int64_t* strides, int ndim, uint8_t code,
                      uint8_t bits) {
  struct Managed {
    DLManagedTensorVersioned base;
    int64_t shape[TensorView::kMaxDims], strides[TensorView::kMaxDims];
    bool pooled;
  };
  auto managed = std::make_unique<Managed>();
  int64_t numel = 1;
  for (int i = 0; i < ndim; ++i) {
    managed->shape[i] = shape[i];
    managed->strides[i] = strides[i];
    numel *= shape[i];
  }
  constexpr int64_t kAlignment = 64;
  const int64_t size = (numel * bits / 8 + kAlignment) / kAlignment * kAlignment;
  managed->pooled = size >= kPooledFrom;
  void* const data = managed->pooled ? take_workspace(size) : std::aligned_alloc(kAlignment, size);
  if (data == nullptr) throw std::bad_alloc();
  managed->base = {1,
                   0,
                   nullptr,
                   [](DLManagedTensorVersioned* self) {
                     auto* const own = reinterpret_cast<Managed*>(self);
                     own->pooled ? give_workspace(self->tensor.data) : std::free(self->tensor.data);
                     delete own;
                   },
                   0,
                   {data, kDLCpu, 0, ndim, code, bits, 1, managed->shape, managed->strides, 0}};
  void* object = nullptr;
  if (exchange_api->managed_tensor_to_py_object(&managed.release()->base, &object) != 0) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

// The same by Python's shape and strides; dtype: a DType, or -1 for int16.
py::object empty_tensor(const py::tuple& shape, const py::tuple& strides, int64_t dtype) {
  int64_t sizes[TensorView::kMaxDims], steps[TensorView::kMaxDims];
  const int ndim = static_cast<int>(shape.size());
  if (ndim > TensorView::kMaxDims) throw std::invalid_argument("a tensor has too many dimensions");
  for (int i = 0; i < ndim; ++i) {
    sizes[i] = py::cast<int64_t>(shape[i]);
    steps[i] = py::cast<int64_t>(strides[i]);
  }
  if (dtype < 0) return new_tensor(sizes, steps, ndim, kDLInt, 16);
  const auto type = static_cast<DType>(dtype);
  return new_tensor(sizes, steps, ndim, type == DType::kBFloat16 ? kDLBfloat : kDLFloat,
                    type == DType::kFloat32   ? 32
                    : type == DType::kFloat64 ? 64
                                              : 16);
}

// ---- whole calls --------------------------------------------------------------------------------

// torch.Tensor and torch.nn.Parameter: what is neither may be anything.
PyObject *tensor_type = nullptr, *parameter_type = nullptr;

// Tells the module of torch: these types, and torch.Tensor.__dlpack_c_exchange_api__ or None.
void set_torch(const py::handle& tensor, const py::handle& parameter, const py::object& api) {
  tensor_type = tensor.ptr();
  parameter_type = parameter.ptr();
  set_exchange_api(api);
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

// A tensor on the CPU of one of the float types that is what it seems: neither a subclass, nor
// nested, sparse or lazily negated, nor one that a gradient is wanted of.
bool plain_view(const py::handle& tensor, bool grad_enabled, TensorView* view) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  if (type != tensor_type && type != parameter_type) return false;
  if (grad_enabled && is_true(FUSED_ATTN_ATTRIBUTE(tensor, "requires_grad"))) return false;
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  const auto negated =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), is_neg));
  DLTensor raw;
  if (!negated || is_true(negated) ||
      exchange_api->dltensor_from_py_object(tensor.ptr(), &raw) != 0) {
    PyErr_Clear();
    return false;
  }
  if (raw.ndim > TensorView::kMaxDims) return false;
  *view = view_of(raw);
  return view->device_type == kDLCpu && view->is_float() &&
         (view->data != nullptr || view->numel() == 0);
}

// Strides of a dense tensor whose dimensions lie in the order of those of `like`, the last one
// innermost: laid_out_like of base/layout.py.
void lay_out_like(const TensorView& like, const int64_t* shape, int64_t* strides) {
  int order[] = {0, 1, 2, 3};
  for (const int i : {0, 1, 0}) {     // three comparisons sort three
    if (like.strides[3] != 1) break;  // it is copied
    const int64_t stride = like.strides[order[i]];
    if (0 < stride && stride < like.strides[order[i + 1]]) std::swap(order[i], order[i + 1]);
  }
  int64_t step = 1;
  for (int i = 3; i >= 0; --i) {
    strides[order[i]] = step;
    step *= shape[order[i]];
  }
}

// No backend is asked for in the environment, and torch has C functions.
bool short_way() {
  const char* const wanted = std::getenv("FUSED_ATTN_BACKEND");
  return exchange_api != nullptr && (wanted == nullptr || *wanted == '\0');
}

// (total, num_heads, dim) of packed sequences as (1, num_heads, total, dim).
void as_one_sequence(TensorView* view) {
  const int64_t shape[] = {1, view->shape[1], view->shape[0], view->shape[2]};
  const int64_t strides[] = {0, view->strides[1], view->strides[0], view->strides[2]};
  copy_shape(shape, strides, 4, view);
}

// The numbers of a call's dropout; draw is asked for a seed where there is any.
template <class Params>
void read_dropout(double dropout_p, const py::handle& draw, Params* p) {
  p->dropout_p = dropout_p;
  if (dropout_p > 0) p->seed = py::cast<uint64_t>(draw());
}

// query, key and value, the mask and the scale of a call; False: the whole way has to look at it.
//
// spec: a MaskSpec for these shapes, or None. Where it packs, query, key and value are (total,
// num_heads, dim), and its lengths are checked. scale: None is 1 / sqrt(head_dim).
bool read_problem(TensorView (&views)[3], const py::handle& spec, const py::handle& scale,
                  bool enable_gqa, int64_t num_threads, Summaries* summaries, AttentionParams* p) {
  auto& [q, k, v] = views;
  const bool packed = !spec.is_none() && !FUSED_ATTN_ATTRIBUTE(spec, "cu_seqlens_q").is_none();
  if (packed) {
    if (q.ndim != 3 || k.ndim != 3 || v.ndim != 3) return false;
    for (TensorView* const view : {&q, &k, &v}) as_one_sequence(view);
  }
  constexpr int64_t kMaxHeadDim = 256;
  const bool fits =
      q.ndim == 4 && k.ndim == 4 && v.ndim == 4 && q.dtype() == k.dtype() &&
      q.dtype() == v.dtype() && q.numel() > 0 && k.numel() > 0 && v.numel() > 0 &&
      k.shape[0] == q.shape[0] && k.shape[3] == q.shape[3] && v.shape[0] == k.shape[0] &&
      v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2] && q.shape[3] <= kMaxHeadDim &&
      v.shape[3] <= kMaxHeadDim && q.shape[2] < kUnlimited && k.shape[2] < kUnlimited &&
      contiguous_from(q, 3) && contiguous_from(k, 3) && contiguous_from(v, 3);
  if (!fits) return false;
  const int64_t num_heads = q.shape[1];
  if (num_heads != k.shape[1] && !(enable_gqa && num_heads % k.shape[1] == 0)) return false;
  read_operands(q, k, v, p);
  p->num_threads = num_threads;
  p->softmax_scale =
      scale.is_none() ? 1.0 / std::sqrt(static_cast<double>(p->head_dim)) : py::cast<double>(scale);
  p->mask.band_lo = -kUnlimited;
  p->mask.band_hi = kUnlimited;
  if (spec.is_none()) return true;
  read_mask(spec, &p->mask);
  read_packing(spec, p);
  complete_mask(spec, p, summaries);
  return true;
}

// A new tensor laid out as `like`, a matrix of rows for each batch and head; data and strides are
// told.
template <class T>
py::object new_rows(const TensorView& like, int64_t dim, uint8_t code, uint8_t bits, T** data,
                    int64_t (&rows_strides)[3]) {
  const int64_t shape[] = {like.shape[0], like.shape[1], like.shape[2], dim};
  int64_t strides[4];
  lay_out_like(like, shape, strides);
  py::object tensor = new_tensor(shape, strides, 4, code, bits);
  *data = static_cast<T*>(view_of(tensor).data);
  std::copy(strides, strides + 3, rows_strides);
  return tensor;
}

// A forward in one call; None where the whole way has to look at it.
//
// Without gradients, the result is out. for_backward: it is (out, lse, lse_low, out_low), of which
// the last is None where out is not rounded; packed sequences go the whole way. grad_enabled: what
// requires a gradient goes the whole way, unless for_backward.
py::object attention(const py::handle& query, const py::handle& key, const py::handle& value,
                     const py::handle& spec, const py::handle& scale, bool enable_gqa,
                     bool grad_enabled, int64_t num_threads, bool for_backward, double dropout_p,
                     const py::handle& draw) {
  TensorView views[3];
  const bool refuse_grads = grad_enabled && !for_backward;
  if (!short_way() || !plain_view(query, refuse_grads, &views[0]) ||
      !plain_view(key, refuse_grads, &views[1]) || !plain_view(value, refuse_grads, &views[2])) {
    return py::none();
  }
  AttentionParams p{};
  Summaries summaries;
  if (!read_problem(views, spec, scale, enable_gqa, num_threads, &summaries, &p)) return py::none();
  const TensorView& q = views[0];
  if (p.cu_seqlens_q != nullptr) {
    if (for_backward) return py::none();
    const int64_t shape[] = {p.total_q, p.num_heads, p.head_dim_v};
    const int64_t strides[] = {p.num_heads * p.head_dim_v, p.head_dim_v, 1};
    py::object out = new_tensor(shape, strides, 3, q.code, q.bits);
    p.out = view_of(out).data;
    p.out_strides[1] = strides[1];
    p.out_strides[2] = strides[0];
    run_entry(&KernelTable::attention_fwd, p);
    return out;
  }
  read_dropout(dropout_p, draw, &p);
  py::object out = new_rows(q, p.head_dim_v, q.code, q.bits, &p.out, p.out_strides);
  if (!for_backward) {
    run_entry(&KernelTable::attention_fwd, p);
    return out;
  }
  const int64_t rows[] = {p.batch, p.num_heads, p.seqlen_q};
  const int64_t steps[] = {p.num_heads * p.seqlen_q, p.seqlen_q, 1};
  const uint8_t bits = p.dtype == DType::kFloat64 ? 64 : 32;
  py::object lse = new_tensor(rows, steps, 3, kDLFloat, bits);
  py::object lse_low = new_tensor(rows, steps, 3, kDLFloat, bits), out_low = py::none();
  p.lse = view_of(lse).data;
  p.lse_low = view_of(lse_low).data;
  if (q.bits == 16) {
    out_low = new_rows(q, p.head_dim_v, kDLInt, 16, &p.out_low, p.out_low_strides);
  }
  run_entry(&KernelTable::attention_fwd, p);
  return py::make_tuple(out, lse, lse_low, out_low);
}

// The gradients of query, key and value under grad_out, from the results of `attention` and what
// that was given; None where the whole way has to look at grad_out.
py::object attention_gradients(const py::handle& grad_out, const py::tuple& outputs,
                               const py::handle& query, const py::handle& key,
                               const py::handle& value, const py::handle& spec,
                               const py::handle& scale, int64_t num_threads, double dropout_p,
                               const py::handle& draw) {
  TensorView views[3], grad, out;
  if (!plain_view(grad_out, false, &grad) || !plain_view(outputs[0], false, &out) ||
      !plain_view(query, false, &views[0]) || !plain_view(key, false, &views[1]) ||
      !plain_view(value, false, &views[2])) {
    return py::none();
  }
  AttentionBwdParams p{};
  Summaries summaries;
  if (!read_problem(views, spec, scale, true, num_threads, &summaries, &p.fwd)) return py::none();
  if (grad.dtype() != p.fwd.dtype || out.dtype() != p.fwd.dtype || grad.ndim != 4 ||
      out.ndim != 4 || out.shape[0] != p.fwd.batch || out.shape[1] != p.fwd.num_heads ||
      out.shape[2] != p.fwd.seqlen_q || out.shape[3] != p.fwd.head_dim_v ||
      !std::equal(out.shape, out.shape + 4, grad.shape) || !contiguous_from(grad, 3) ||
      !contiguous_from(out, 3)) {
    return py::none();
  }
  // Hooks on saved tensors may give back others than they took.
  const TensorView lse = view_of(outputs[1]), lse_low = view_of(outputs[2]);
  const TensorView out_low = view_of(outputs[3]);
  for (const TensorView* const view : {&lse, &lse_low}) {
    if (view->dtype() != (grad.bits == 64 ? DType::kFloat64 : DType::kFloat32) ||
        !contiguous_from(*view, 0) || view->numel() * p.fwd.head_dim_v != out.numel()) {
      return py::none();
    }
  }
  if (out_low.there != (grad.bits == 16)) return py::none();
  if (out_low.there &&
      (out_low.code != kDLInt || out_low.bits != 16 || out_low.ndim != 4 ||
       !std::equal(out.shape, out.shape + 4, out_low.shape) || !contiguous_from(out_low, 3))) {
    return py::none();
  }
  p.fwd.out = out.data;
  p.fwd.lse = lse.data;
  p.fwd.lse_low = lse_low.data;
  p.fwd.out_low = static_cast<int16_t*>(out_low.data);
  p.grad_out = grad.data;
  for (int i = 0; i < 3; ++i) {
    p.fwd.out_strides[i] = out.strides[i];
    p.fwd.out_low_strides[i] = out_low.there ? out_low.strides[i] : 0;
    p.grad_out_strides[i] = grad.strides[i];
  }
  read_dropout(dropout_p, draw, &p.fwd);
  const auto& [q, k, v] = views;
  py::object grad_q =
      new_rows(q, p.fwd.head_dim, q.code, q.bits, &p.grad_query, p.grad_query_strides);
  py::object grad_k = new_rows(k, p.fwd.head_dim, k.code, k.bits, &p.grad_key, p.grad_key_strides);
  py::object grad_v =
      new_rows(v, p.fwd.head_dim_v, v.code, v.bits, &p.grad_value, p.grad_value_strides);
  run_entry(&KernelTable::attention_bwd, p);
  return py::make_tuple(grad_q, grad_k, grad_v);
}

}  // namespace
}  // namespace fused_attn
