// The norm passes of the CPU module. As in bind_attention.h, each function validates a call,
// allocates its results and runs the kernel, or returns None to reject the call.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "bind_attention.h"
#include "cpu/simd/convert.h"

namespace fused_attn {
namespace {

// Converts the view of a non-empty tensor to a matrix whose columns are the last num_dims
// dimensions. Its rows are at most two strided dimensions, as in rows_in_place of base/layout.py.
// Returns false if the tensor would have to be copied.
bool as_matrix(int num_dims, TensorView* view) {
  constexpr int64_t kShortRow = 128, kPage = 4096;  // bytes
  const int first = view->ndim - num_dims;
  if (!contiguous_from(*view, first)) return false;
  int64_t columns = 1, rows = 1;
  for (int i = first; i < view->ndim; ++i) columns *= view->shape[i];
  int64_t sizes[2], steps[2];  // of the row dimensions after merging, innermost first
  int count = 0;
  for (int i = first - 1; i >= 0; --i) {
    const int64_t size = view->shape[i], step = view->strides[i];
    rows *= size;
    if (size == 1) continue;
    if (count > 0 && step == sizes[count - 1] * steps[count - 1]) {
      sizes[count - 1] *= size;
    } else if (count == 2) {
      return false;
    } else {
      sizes[count] = size;
      steps[count++] = step;
    }
  }
  const int64_t bytes = view->bits / 8;
  if (count > 0 && columns * bytes < kShortRow && steps[0] * bytes >= kPage) return false;
  if (count == 2 && rows > int64_t{1} << 31) return false;
  for (int i = 0; i < count; ++i) {
    view->shape[i] = sizes[count - 1 - i];
    view->strides[i] = steps[count - 1 - i];
  }
  view->ndim = count + 1;
  view->shape[count] = columns;
  view->strides[count] = 1;
  return true;
}

// A float32 copy of a 16-bit parameter, because kernels read parameters in the dtype of the
// statistics.
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

// Reads the tensors and options of a norm call. Owns converted parameters, so it must outlive the
// kernel.
class NormReader {
 public:
  // Fills *p. Returns false if these kernels do not support the call.
  bool read(const py::handle& call, int64_t num_threads, NormParams* p) {
    if (!float_view(FUSED_ATTN_ATTRIBUTE(call, "input"), &input) || input.numel() == 0 ||
        !ends_in(FUSED_ATTN_ATTRIBUTE(call, "normalized_shape"))) {
      return false;
    }
    TensorView matrix = input;
    if (!as_matrix(num_dims_, &matrix)) return false;
    read_matrix(matrix, "input", &p->input, &p->input_rows);
    if (!read_parameter(FUSED_ATTN_ATTRIBUTE(call, "weight"), &weight_, &p->weight) ||
        !read_parameter(FUSED_ATTN_ATTRIBUTE(call, "bias"), &bias_, &p->bias) ||
        !read_rows(FUSED_ATTN_ATTRIBUTE(call, "residual"), "residual", &p->residual,
                   &p->residual_rows)) {
      return false;
    }
    p->columns = matrix.shape[matrix.ndim - 1];
    p->dtype = input.dtype();
    p->rows = input.numel() / p->columns;
    check_within(num_threads, "num_threads", 0, kUnlimited);
    p->num_threads = num_threads;
    const py::object options = FUSED_ATTN_ATTRIBUTE(call, "options");
    read_options(options, p);
    read_offsets(options, p);
    read_seed(call, p);
    return true;
  }

  // Reads an optional tensor with input's dtype and shape as a matrix of rows. None is accepted and
  // leaves the outputs unset. Returns false if the tensor is unsupported.
  bool read_rows(const py::handle& tensor, const char* name, const void** data,
                 RowLayout* rows) const {
    if (tensor.is_none()) return true;
    TensorView view;
    if (!float_view(tensor, &view) || view.dtype() != input.dtype() || view.ndim != input.ndim ||
        !std::equal(view.shape, view.shape + view.ndim, input.shape) ||
        !as_matrix(num_dims_, &view)) {
      return false;
    }
    read_matrix(view, name, data, rows);
    return true;
  }

  TensorView input;

 private:
  int first() const { return input.ndim - num_dims_; }

  bool ends_in(const py::object& normalized_shape) {
    if (!PyTuple_Check(normalized_shape.ptr())) return false;
    num_dims_ = static_cast<int>(PyTuple_GET_SIZE(normalized_shape.ptr()));
    if (num_dims_ == 0 || num_dims_ > input.ndim) return false;
    for (int i = 0; i < num_dims_; ++i) {
      PyObject* const given = PyTuple_GET_ITEM(normalized_shape.ptr(), i);
      int overflow = 0;
      if (!PyLong_Check(given) ||
          PyLong_AsLongLongAndOverflow(given, &overflow) != input.shape[first() + i] ||
          overflow != 0) {
        return false;
      }
    }
    return true;
  }

  // Reads weight or bias in the dtype of the statistics. 16-bit parameters are converted to float32
  // in *widened. None leaves *data null. Returns false if the parameter is unsupported.
  bool read_parameter(const py::handle& parameter, Widened* widened, const void** data) const {
    if (parameter.is_none()) return true;
    TensorView view;
    if (!float_view(parameter, &view) || view.ndim != num_dims_ || !contiguous_from(view, 0) ||
        !std::equal(view.shape, view.shape + num_dims_, input.shape + first())) {
      return false;
    }
    *data = view.data;
    if (view.dtype() == statistics_of(input.dtype())) return true;
    if (input.bits == 64 || view.bits != 16) return false;
    *data = widened->of(view);
    return true;
  }

  int num_dims_ = 0;
  Widened weight_, bias_;
};

// Runs the forward. Returns (out, total, mean, rstd). total is None if it equals input, or if it is
// neither requested nor needed. mean and rstd are None unless a backward follows; mean is also None
// for RMS norms.
py::object norm_fwd(const py::handle& call, bool for_backward, bool want_total,
                    int64_t num_threads) {
  NormReader reader;
  NormParams p{};
  if (!reader.read(call, num_threads, &p)) return py::none();
  const TensorView& x = reader.input;
  const NumberType type{x.code, x.bits}, statistics = type_of(statistics_of(p.dtype));
  py::object out = new_dense(x.shape, x.ndim, type, &p.out);
  py::object total = py::none(), mean = py::none(), rstd = py::none();
  // 16-bit sums are always stored. The norm is computed from the rounded sum, with or without a
  // backward.
  const bool added = p.residual != nullptr || p.dropout_p > 0;
  if (added && (want_total || for_backward || x.bits == 16)) {
    total = new_dense(x.shape, x.ndim, type, &p.total);
  }
  if (for_backward) {
    rstd = new_dense(&p.rows, 1, statistics, &p.rstd);
    if (!p.rms) mean = new_dense(&p.rows, 1, statistics, &p.mean);
  }
  run_entry(&KernelTable::norm_fwd, p);
  return py::make_tuple(out, total, mean, rstd);
}

// Runs the backward from the saved mean and rstd. `input` of the call is the sum that was
// normalized. grad_total, the gradient of that sum, may be None.
//
// Returns the gradients of the input, the sum, weight and bias. The input gradient is None if it
// equals that of the sum. The gradients of weight and bias have the dtype of the statistics and are
// None unless needed.
py::object norm_bwd(const py::handle& call, const py::handle& mean, const py::handle& rstd,
                    const py::handle& grad_out, const py::handle& grad_total, bool needs_weight,
                    bool needs_bias, int64_t num_threads) {
  NormReader reader;
  NormBwdParams p{};
  if (!reader.read(call, num_threads, &p.fwd) ||
      !reader.read_rows(grad_out, "grad_out", &p.grad_out, &p.grad_out_rows) ||
      !reader.read_rows(grad_total, "grad_total", &p.grad_total, &p.grad_total_rows)) {
    return py::none();
  }
  const TensorView& x = reader.input;
  // Validate both: saved-tensor hooks may return tensors other than the saved ones.
  for (const auto& [tensor, data] : {std::pair{mean, &p.fwd.mean}, std::pair{rstd, &p.fwd.rstd}}) {
    if (p.fwd.rms && data == &p.fwd.mean) continue;
    TensorView view;
    if (!float_view(tensor, &view) || view.dtype() != statistics_of(x.dtype()) ||
        view.numel() != p.fwd.rows || !contiguous_from(view, 0)) {
      return py::none();
    }
    *data = view.data;
  }
  const NumberType type{x.code, x.bits}, sums = type_of(statistics_of(p.fwd.dtype));
  py::object of_input = py::none(), of_weight = py::none(), of_bias = py::none();
  py::object of_sum = new_dense(x.shape, x.ndim, type, &p.grad_residual);
  if (p.fwd.dropout_p > 0) of_input = new_dense(x.shape, x.ndim, type, &p.grad_input);
  if (needs_weight) of_weight = new_dense(&p.fwd.columns, 1, sums, &p.grad_weight);
  if (needs_bias) of_bias = new_dense(&p.fwd.columns, 1, sums, &p.grad_bias);
  run_entry(&KernelTable::norm_bwd, p);
  return py::make_tuple(of_input, of_sum, of_weight, of_bias);
}

}  // namespace
}  // namespace fused_attn
