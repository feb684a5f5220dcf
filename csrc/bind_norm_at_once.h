// Norms of plain tensors that the CPU's bindings make whole, see bind_at_once.h.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "bind_at_once.h"
#include "cpu/convert.h"

namespace fused_attn {
namespace {

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
  constexpr int64_t kShortRow = 128, kPage = 4096;  // bytes, see rows_in_place
  const int64_t bytes = view->bits / 8, step = first > 0 ? view->strides[first - 1] : 0;
  if (columns * bytes < kShortRow && step * bytes >= kPage) return false;
  if (first == 2 && rows > int64_t{1} << 31) return false;
  view->ndim = first + 1;
  view->shape[first] = columns;
  view->strides[first] = 1;
  return true;
}

// A new dense tensor; data is told.
py::object new_dense(const int64_t* shape, int ndim, uint8_t code, uint8_t bits, void** data) {
  int64_t strides[TensorView::kMaxDims], step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  py::object tensor = new_tensor(shape, strides, ndim, code, bits);
  *data = view_of(tensor).data;
  return tensor;
}

DType statistics_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// A copy of 16-bit numbers in the type of statistics.
class Widened {
 public:
  const float* of(const TensorView& view) {
    const int64_t count = view.numel();
    numbers_ = std::make_unique<float[]>(count);
    view.dtype() == DType::kBFloat16 ? widen<BFloat16>(view, count) : widen<Half>(view, count);
    return numbers_.get();
  }

 private:
  template <class T>
  void widen(const TensorView& view, int64_t count) {
    const T* const from = static_cast<const T*>(view.data);
    for (int64_t i = 0; i < count; ++i) numbers_[i] = to_acc(from[i]);
  }

  std::unique_ptr<float[]> numbers_;
};

// weight or bias in the type of statistics, widened if need be; null for None. False: the whole way
// has to look at it.
bool read_parameter(const py::handle& parameter, const TensorView& x, int num_dims,
                    bool refuse_grads, Widened* widened, const void** data) {
  if (parameter.is_none()) return true;
  TensorView view;
  if (!plain_view(parameter, refuse_grads, &view) || view.ndim != num_dims ||
      !contiguous_from(view, 0) ||
      !std::equal(view.shape, view.shape + num_dims, x.shape + x.ndim - num_dims)) {
    return false;
  }
  *data = view.data;
  if (view.dtype() == statistics_of(x.dtype())) return true;
  if (x.bits == 64 || view.bits != 16) return false;
  *data = widened->of(view);
  return true;
}

// A tensor of input's type and shape, by rows; false: the whole way has to look at it.
bool read_rows(const py::handle& tensor, const TensorView& x, int num_dims, bool refuse_grads,
               const char* name, const void** data, RowLayout* rows) {
  TensorView view;
  if (!plain_view(tensor, refuse_grads, &view) || view.dtype() != x.dtype() ||
      view.ndim != x.ndim || !std::equal(x.shape, x.shape + x.ndim, view.shape) ||
      !as_matrix(num_dims, &view)) {
    return false;
  }
  read_matrix(view, name, data, rows);
  return true;
}

// What a norm over the last num_dims dimensions of x is, forward and backward.
void read_norm(const TensorView& x, int num_dims, double eps, bool rms, int64_t num_threads,
               double dropout_p, const py::handle& draw, NormParams* p) {
  p->columns = 1;
  for (int i = x.ndim - num_dims; i < x.ndim; ++i) p->columns *= x.shape[i];
  p->dtype = x.dtype();
  p->rows = x.numel() / p->columns;
  p->rms = rms;
  p->eps = eps;
  p->num_threads = num_threads;
  read_dropout(dropout_p, draw, p);
}

// A norm over the last dimensions, whose sizes are normalized_shape, in one call; None where the
// whole way has to look at it.
//
// Without gradients, the result is out, with_total: and the sum that was normalised. for_backward:
// it is (out, total, mean, rstd), total None where it is input, mean None for rms.
py::object norm(const py::handle& input, const py::tuple& normalized_shape,
                const py::handle& weight, const py::handle& bias, const py::handle& residual,
                double eps, bool rms, bool with_total, bool grad_enabled, int64_t num_threads,
                bool for_backward, double dropout_p, const py::handle& draw) {
  TensorView x;
  const bool refuse_grads = grad_enabled && !for_backward;
  if (!short_way() || !plain_view(input, refuse_grads, &x)) return py::none();
  const int num_dims = static_cast<int>(normalized_shape.size());
  if (num_dims == 0 || num_dims > x.ndim || x.numel() == 0) return py::none();
  for (int i = 0; i < num_dims; ++i) {
    PyObject* const given = PyTuple_GET_ITEM(normalized_shape.ptr(), i);
    int overflow = 0;
    if (!PyLong_Check(given) ||
        PyLong_AsLongLongAndOverflow(given, &overflow) != x.shape[x.ndim - num_dims + i] ||
        overflow != 0) {
      return py::none();
    }
  }
  NormParams p{};
  TensorView matrix = x;
  if (!as_matrix(num_dims, &matrix)) return py::none();
  read_matrix(matrix, "input", &p.input, &p.input_rows);
  Widened wide_weight, wide_bias;
  if (!read_parameter(weight, x, num_dims, refuse_grads, &wide_weight, &p.weight) ||
      !read_parameter(bias, x, num_dims, refuse_grads, &wide_bias, &p.bias)) {
    return py::none();
  }
  if (!residual.is_none() &&
      !read_rows(residual, x, num_dims, refuse_grads, "residual", &p.residual, &p.residual_rows)) {
    return py::none();
  }
  read_norm(x, num_dims, eps, rms, num_threads, dropout_p, draw, &p);
  py::object out = new_dense(x.shape, x.ndim, x.code, x.bits, &p.out), total = py::none();
  // The norm is that of the sum as it is rounded where it is stored, with a backward or without.
  const bool added = p.residual != nullptr || p.dropout_p > 0;
  if (added && (with_total || for_backward || p.dtype != statistics_of(p.dtype))) {
    total = new_dense(x.shape, x.ndim, x.code, x.bits, &p.total);
  }
  if (!for_backward) {
    run_entry(&KernelTable::norm_fwd, p);
    if (!with_total) return out;
    return py::make_tuple(out, added ? total : py::reinterpret_borrow<py::object>(input));
  }
  const uint8_t bits = p.dtype == DType::kFloat64 ? 64 : 32;
  py::object mean = py::none(), rstd = new_dense(&p.rows, 1, kDLFloat, bits, &p.rstd);
  if (!rms) mean = new_dense(&p.rows, 1, kDLFloat, bits, &p.mean);
  run_entry(&KernelTable::norm_fwd, p);
  return py::make_tuple(out, total, mean, rstd);
}

// The gradients of a norm over the last dimension under grad_out and that of the sum, or None, from
// the sum and what `norm` gave: (of input, None where it is that of the sum; of the sum; of weight
// and of bias in the type of statistics, None where they are not needed). None where the whole way
// has to look at it.
py::object norm_gradients(const py::handle& grad_out, const py::handle& grad_total,
                          const py::handle& total, const py::handle& mean, const py::handle& rstd,
                          const py::handle& weight, double eps, bool rms, bool needs_weight,
                          bool needs_bias, int64_t num_threads, double dropout_p,
                          const py::handle& draw) {
  TensorView x;
  if (!plain_view(total, false, &x) || x.ndim == 0 || x.numel() == 0) return py::none();
  NormBwdParams p{};
  Widened wide_weight;
  if (!read_rows(total, x, 1, false, "total", &p.fwd.input, &p.fwd.input_rows) ||
      !read_rows(grad_out, x, 1, false, "grad_out", &p.grad_out, &p.grad_out_rows) ||
      !read_parameter(weight, x, 1, false, &wide_weight, &p.fwd.weight)) {
    return py::none();
  }
  if (!grad_total.is_none() &&
      !read_rows(grad_total, x, 1, false, "grad_total", &p.grad_total, &p.grad_total_rows)) {
    return py::none();
  }
  const int64_t rows = x.numel() / x.shape[x.ndim - 1];
  // Hooks on saved tensors may give back others than they took.
  for (const auto& [tensor, data] : {std::pair{mean, &p.fwd.mean}, std::pair{rstd, &p.fwd.rstd}}) {
    if (tensor.is_none() && rms && data == &p.fwd.mean) continue;
    TensorView view;
    if (!plain_view(tensor, false, &view) || view.dtype() != statistics_of(x.dtype()) ||
        view.numel() != rows || !contiguous_from(view, 0)) {
      return py::none();
    }
    *data = view.data;
  }
  read_norm(x, 1, eps, rms, num_threads, dropout_p, draw, &p.fwd);
  py::object of_input = py::none(), of_weight = py::none(), of_bias = py::none();
  py::object of_sum = new_dense(x.shape, x.ndim, x.code, x.bits, &p.grad_residual);
  if (p.fwd.dropout_p > 0) {
    of_input = new_dense(x.shape, x.ndim, x.code, x.bits, &p.grad_input);
  }
  const uint8_t bits = p.fwd.dtype == DType::kFloat64 ? 64 : 32;
  if (needs_weight) of_weight = new_dense(&p.fwd.columns, 1, kDLFloat, bits, &p.grad_weight);
  if (needs_bias) of_bias = new_dense(&p.fwd.columns, 1, kDLFloat, bits, &p.grad_bias);
  run_entry(&KernelTable::norm_bwd, p);
  return py::make_tuple(of_input, of_sum, of_weight, of_bias);
}

}  // namespace
}  // namespace fused_attn
