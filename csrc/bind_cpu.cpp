// The module fused_attn._cpu: the CPU kernels.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind_fields.h"
#include "cpu/debug.h"
#include "cpu/dispatch.h"
#include "cpu/workspace_pool.h"

namespace fused_attn {
namespace {

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

// Summaries of a call's masks that Python has none of, for as long as the call.
class Summaries {
 public:
  void complete(const TensorView& mask, int64_t num_threads, DenseTensor* tensor) {
    if (!mask.there || tensor->summary != nullptr) return;
    SummaryParams p{};
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      const int64_t tile = i == 2 ? kSummaryTileM : i == 3 ? kSummaryTileN : 1;
      p.sizes[i] = mask.shape[i];
      p.strides[i] = mask.strides[i];
      tensor->summary_strides[i] = mask.shape[i] == 1 ? 0 : step;
      step *= (mask.shape[i] + tile - 1) / tile;
    }
    memory_.emplace_back(step);
    p.data = mask.data;
    p.is_bool = !mask.is_float();
    p.dtype = mask.dtype();
    tensor->summary = p.summary = memory_.back().data();
    p.num_threads = num_threads;
    py::gil_scoped_release release;
    kernels().tile_summary(p);
  }

 private:
  std::vector<std::vector<uint8_t>> memory_;
};

void complete_mask(const py::handle& spec, AttentionParams* p, Summaries* summaries) {
  summaries->complete(view_of(FUSED_ATTN_ATTRIBUTE(spec, "bias")), p->num_threads, &p->mask.bias);
  summaries->complete(view_of(FUSED_ATTN_ATTRIBUTE(spec, "dense")), p->num_threads, &p->mask.dense);
}

uint64_t seed_of(const py::handle& call) {
  const TensorView seed = view_of(FUSED_ATTN_ATTRIBUTE(call, "seed"));
  return seed.data == nullptr ? 0 : static_cast<uint64_t>(*static_cast<const int64_t*>(seed.data));
}

// What of a call is looked at on the CPU alone.
void complete(const py::handle& call, AttentionParams* p, Summaries* summaries) {
  p->seed = seed_of(call);
  complete_mask(FUSED_ATTN_ATTRIBUTE(call, "mask"), p, summaries);
}
void complete(const py::handle& call, AttentionBwdParams* p, Summaries* s) {
  complete(call, &p->fwd, s);
}
void complete(const py::handle& call, AttentionWeightsParams* p, Summaries* s) {
  complete(call, &p->fwd, s);
}
void complete(const py::handle& call, NormParams* p, Summaries*) { p->seed = seed_of(call); }
void complete(const py::handle& call, NormBwdParams* p, Summaries*) { p->fwd.seed = seed_of(call); }

// A call, and the fields that a pass adds to it.
template <class Params>
void run(bool (*KernelTable::*entry)(const Params&), const py::handle& call,
         const py::kwargs& kwargs) {
  Params params{};
  Fields fields(kwargs);
  read_call(call, &params);
  read(fields, &params);
  fields.finish();
  Summaries summaries;
  complete(call, &params, &summaries);
  run_entry(entry, params);
}

void activation(const py::kwargs& kwargs) {
  ActivationParams params{};
  Fields fields(kwargs);
  read(fields, &params);
  fields.finish();
  run_entry(&KernelTable::activation, params);
}

void tile_summary(const py::kwargs& kwargs) {
  SummaryParams params{};
  Fields fields(kwargs);
  read(fields, &params);
  fields.finish();
  py::gil_scoped_release release;
  kernels().tile_summary(params);
}

void tile_kinds(const py::handle& call, const py::kwargs& kwargs) {
  TileKindsParams params{};
  Fields fields(kwargs);
  read_call(call, &params.problem);
  fields.pointer("kinds", &params.kinds);
  fields.number("num_threads", &params.problem.num_threads);
  fields.finish();
  Summaries summaries;
  complete(call, &params.problem, &summaries);
  run_entry(&KernelTable::tile_kinds, params);
}

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
// innermost: laid_out_like of core/layout.py.
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

// A forward without gradients in one call; None where the whole way has to look at it.
//
// spec: a MaskSpec for these shapes, or None; scale: None is 1 / sqrt(head_dim).
py::object attention(const py::handle& query, const py::handle& key, const py::handle& value,
                     const py::handle& spec, const py::handle& scale, bool enable_gqa,
                     bool grad_enabled, int64_t num_threads) {
  TensorView q, k, v;
  if (!short_way() || !plain_view(query, grad_enabled, &q) || !plain_view(key, grad_enabled, &k) ||
      !plain_view(value, grad_enabled, &v)) {
    return py::none();
  }
  constexpr int64_t kMaxHeadDim = 256;
  const bool fits =
      q.ndim == 4 && k.ndim == 4 && v.ndim == 4 && q.dtype() == k.dtype() &&
      q.dtype() == v.dtype() && q.numel() > 0 && k.numel() > 0 && v.numel() > 0 &&
      k.shape[0] == q.shape[0] && k.shape[3] == q.shape[3] && v.shape[0] == k.shape[0] &&
      v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2] && q.shape[3] <= kMaxHeadDim &&
      v.shape[3] <= kMaxHeadDim && q.shape[2] < kUnlimited && k.shape[2] < kUnlimited &&
      contiguous_from(q, 3) && contiguous_from(k, 3) && contiguous_from(v, 3);
  if (!fits) return py::none();
  const int64_t num_heads = q.shape[1];
  if (num_heads != k.shape[1] && !(enable_gqa && num_heads % k.shape[1] == 0)) return py::none();
  AttentionParams p{};
  read_operands(q, k, v, &p);
  p.num_threads = num_threads;
  p.softmax_scale =
      scale.is_none() ? 1.0 / std::sqrt(static_cast<double>(p.head_dim)) : py::cast<double>(scale);
  p.mask.band_lo = -kUnlimited;
  p.mask.band_hi = kUnlimited;
  Summaries summaries;
  if (!spec.is_none()) {
    read_mask(spec, &p.mask);
    complete_mask(spec, &p, &summaries);
  }
  const int64_t shape[] = {p.batch, num_heads, p.seqlen_q, p.head_dim_v};
  int64_t strides[4];
  lay_out_like(q, shape, strides);
  py::object out = new_tensor(shape, strides, 4, q.code, q.bits);
  p.out = view_of(out).data;
  for (int i = 0; i < 3; ++i) p.out_strides[i] = strides[i];
  run_entry(&KernelTable::attention_fwd, p);
  return out;
}

// A tensor as a matrix, whose columns are its last num_dims dimensions. False: only the whole way
// finds its runs, or copies it.
bool as_matrix(int num_dims, TensorView* view) {
  const int first = view->ndim - num_dims;
  int64_t columns = 1;
  for (int i = first; i < view->ndim; ++i) columns *= view->shape[i];
  const int64_t rows = view->numel() / columns;
  if (contiguous_from(*view, 0)) {
    const int64_t shape[] = {rows, columns}, strides[] = {columns, 1};
    copy_shape(shape, strides, 2, view);
    return true;
  }
  if (first > 2 || !contiguous_from(*view, first)) return false;
  view->ndim = first + 1;
  view->shape[first] = columns;
  view->strides[first] = 1;
  return true;
}

// The same for a norm over the last dimensions, whose sizes are normalized_shape; with_total: and
// the sum that was normalised.
py::object norm(const py::handle& input, const py::tuple& normalized_shape,
                const py::handle& weight, const py::handle& bias, const py::handle& residual,
                double eps, bool rms, bool with_total, bool grad_enabled, int64_t num_threads) {
  TensorView x;
  if (!short_way() || !plain_view(input, grad_enabled, &x)) return py::none();
  const int num_dims = static_cast<int>(normalized_shape.size());
  if (num_dims == 0 || num_dims > x.ndim || x.numel() == 0) return py::none();
  NormParams p{};
  p.columns = 1;
  for (int i = 0; i < num_dims; ++i) {
    const int64_t size = x.shape[x.ndim - num_dims + i];
    PyObject* const given = PyTuple_GET_ITEM(normalized_shape.ptr(), i);
    int overflow = 0;
    if (!PyLong_Check(given) || PyLong_AsLongLongAndOverflow(given, &overflow) != size ||
        overflow != 0) {
      return py::none();
    }
    p.columns *= size;
  }
  TensorView matrix = x;
  if (!as_matrix(num_dims, &matrix)) return py::none();
  read_matrix(matrix, "input", &p.input, &p.input_rows);
  p.dtype = x.dtype();
  p.rows = x.numel() / p.columns;
  p.rms = rms;
  p.eps = eps;
  p.num_threads = num_threads;
  const DType statistics = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  for (const auto& [parameter, data] : {std::pair{weight, &p.weight}, std::pair{bias, &p.bias}}) {
    if (parameter.is_none()) continue;
    TensorView view;
    if (!plain_view(parameter, grad_enabled, &view) || view.dtype() != statistics ||
        view.ndim != num_dims || !contiguous_from(view, 0)) {
      return py::none();
    }
    for (int i = 0; i < num_dims; ++i) {
      if (view.shape[i] != x.shape[x.ndim - num_dims + i]) return py::none();
    }
    *data = view.data;
  }
  if (!residual.is_none()) {
    TensorView view;
    if (!plain_view(residual, grad_enabled, &view) || view.dtype() != p.dtype ||
        view.ndim != x.ndim || !std::equal(x.shape, x.shape + x.ndim, view.shape) ||
        !as_matrix(num_dims, &view)) {
      return py::none();
    }
    read_matrix(view, "residual", &p.residual, &p.residual_rows);
  }
  int64_t strides[TensorView::kMaxDims], step = 1;
  for (int i = x.ndim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= x.shape[i];
  }
  py::object out = new_tensor(x.shape, strides, x.ndim, x.code, x.bits), total;
  p.out = view_of(out).data;
  // The norm is that of the sum as it is rounded where it is stored, with a backward or without.
  if (p.residual != nullptr && (with_total || p.dtype != statistics)) {
    total = new_tensor(x.shape, strides, x.ndim, x.code, x.bits);
    p.total = view_of(total).data;
  }
  run_entry(&KernelTable::norm_fwd, p);
  if (!with_total) return out;
  return py::make_tuple(out, total ? total : py::reinterpret_borrow<py::object>(input));
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of fused_attn; call them through fused_attn.backends.cpp.";
  m.attr("SUMMARY_TILE") = py::make_tuple(kSummaryTileM, kSummaryTileN);
  m.attr("CALL_FIELDS") = call_fields();
#define FUSED_ATTN_PASS(name)                                         \
  m.def(#name, [](const py::object& call, const py::kwargs& fields) { \
    run(&KernelTable::name, call, fields);                            \
  })
  FUSED_ATTN_PASS(attention_fwd);
  FUSED_ATTN_PASS(attention_bwd);
  FUSED_ATTN_PASS(attention_weights);
  FUSED_ATTN_PASS(norm_fwd);
  FUSED_ATTN_PASS(norm_bwd);
#undef FUSED_ATTN_PASS
  m.def("attention", &attention);
  m.def("norm", &norm);
  m.def("set_torch", &set_torch);
  m.def("empty_tensor", &empty_tensor);
  m.def("activation", &activation);
  m.def("tile_summary", &tile_summary);
  m.def("tile_kinds", &tile_kinds);
  m.def("tile_size", [](int64_t dtype) {
    return py::make_tuple(kernels().panel(static_cast<DType>(dtype)), kernels().block);
  });
  m.def("multiply_add_peak", [](int64_t threads) { return kernels().multiply_add_peak(threads); });
  m.def("product_peak", [](int64_t dtype, int64_t threads) {
    return kernels().product_peak(static_cast<DType>(dtype), threads);
  });
  m.def("release_workspace", &release_workspace);
  m.def("isa", [] { return kernels().isa; });
  m.def("set_isa", &set_isa, py::arg("isa").none(false));
}

}  // namespace fused_attn
