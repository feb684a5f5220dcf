// Forward and backward of attention in the CPU module. Each function validates a call, allocates
// its results and runs the kernel.
//
// A call is an AttentionCall or an UncheckedAttention (fused_attn/call). A pass returns None to
// reject a call. Python then validates it, or copies its tensors to layouts that kernels support.
#pragma once

#include <algorithm>
#include <cmath>

#include "bind_new.h"
#include "bind_run.h"

namespace fused_attn {
namespace {

// Computes the strides of a dense tensor of the given shape whose dimension order is that of
// `like`, with the last dimension innermost. Implements laid_out_like of base/layout.py.
void lay_out_like(const TensorView& like, const int64_t* shape, int64_t* strides) {
  int order[] = {0, 1, 2, 3};
  for (const int i : {0, 1, 0}) {     // a sorting network for three dimensions
    if (like.strides[3] != 1) break;  // kernels then read a contiguous copy of `like`
    const int64_t stride = like.strides[order[i]];
    if (0 < stride && stride < like.strides[order[i + 1]]) std::swap(order[i], order[i + 1]);
  }
  int64_t step = 1;
  for (int i = 3; i >= 0; --i) {
    strides[order[i]] = step;
    step *= shape[order[i]];
  }
}

// Allocates a tensor of shape (batch, num_heads, rows, dim) with the dimension order and the first
// three sizes of `like`. Stores its address in *data and the strides of its first three dimensions
// in rows_strides.
template <class T>
py::object new_rows(const TensorView& like, int64_t dim, NumberType type, T** data,
                    int64_t (&rows_strides)[3]) {
  const int64_t shape[] = {like.shape[0], like.shape[1], like.shape[2], dim};
  int64_t strides[4];
  lay_out_like(like, shape, strides);
  py::object tensor = new_tensor(shape, strides, 4, type);
  *data = static_cast<T*>(view_of(tensor).data);
  std::copy(strides, strides + 3, rows_strides);
  return tensor;
}

// Converts a view of packed sequences from (total, num_heads, dim) to (1, num_heads, total, dim).
void as_one_sequence(TensorView* view) {
  const int64_t shape[] = {1, view->shape[1], view->shape[0], view->shape[2]};
  const int64_t strides[] = {0, view->strides[1], view->strides[0], view->strides[2]};
  copy_shape(shape, strides, 4, view);
}

void set_no_mask(const py::object& spec) { no_mask = spec.inc_ref().ptr(); }

// Reads the tensors, mask and options of an attention call.
struct AttentionReader {
  TensorView query, key, value;
  Sizes sizes;
  // True for packed sequences in (total, num_heads, head_dim) tensors. The CPU passes support them
  // only without a backward.
  bool three_dims = false;

  // Fills *p. Returns false if these kernels do not support the call.
  bool read(const py::handle& call, bool for_backward, int64_t num_threads, AttentionParams* p,
            const KeyRows& rows = {}) {
    if (!float_view(FUSED_ATTN_ATTRIBUTE(call, "query"), &query) ||
        !float_view(FUSED_ATTN_ATTRIBUTE(call, "key"), &key) ||
        !float_view(FUSED_ATTN_ATTRIBUTE(call, "value"), &value)) {
      return false;
    }
    if (!for_backward && query.ndim == 3 && key.ndim == 3 && value.ndim == 3) {
      const py::object spec = FUSED_ATTN_ATTRIBUTE(call, "mask");
      three_dims = !FUSED_ATTN_ATTRIBUTE(spec, "cu_seqlens_q").is_none();
    }
    if (three_dims) {
      for (TensorView* const view : {&query, &key, &value}) as_one_sequence(view);
    }
    if (!operands_fit(query, key, value, rows, &sizes) ||
        (key.shape[1] != query.shape[1] &&
         !py::cast<bool>(FUSED_ATTN_ATTRIBUTE(call, "enable_gqa")))) {
      return false;
    }
    check_within(num_threads, "num_threads", 0, kUnlimited);
    p->num_threads = num_threads;
    read_call(call, query, key, value, &sizes, p);
    read_seed_and_summaries(call, p);
    return true;
  }
};

// Runs the forward of a call that has been read. Returns (out, lse, lse_residual, out_residual).
// lse is None unless it is requested or a backward follows. lse_residual is None unless a backward
// follows. out_residual is None unless a backward follows and out has a 16-bit type.
py::object run_forward(const AttentionReader& reader, bool for_backward, bool want_lse,
                       AttentionParams p) {
  const TensorView& q = reader.query;
  const NumberType of_lse = type_of(statistics_of(p.dtype));
  const NumberType type = p.partial ? of_lse : NumberType{q.code, q.bits};
  py::object out, lse = py::none(), lse_residual = py::none(), out_residual = py::none();
  if (reader.three_dims) {
    const int64_t shape[] = {q.shape[2], p.num_heads, p.head_dim_v};
    out = new_dense(shape, 3, type, &p.out);
    p.out_strides[1] = p.head_dim_v;
    p.out_strides[2] = p.num_heads * p.head_dim_v;
  } else {
    out = new_rows(q, p.head_dim_v, type, &p.out, p.out_strides);
  }
  if (want_lse || for_backward) {
    const int first = reader.three_dims ? 1 : 0;
    lse = new_dense(q.shape + first, 3 - first, of_lse, &p.lse);
  }
  if (for_backward) {
    lse_residual = new_dense(q.shape, 3, of_lse, &p.lse_residual);
    if (type.bits == 16)
      out_residual = new_rows(q, p.head_dim_v, kInt16, &p.out_residual, p.out_residual_strides);
  }
  run_pass(attention_forward, p);
  return py::make_tuple(out, lse, lse_residual, out_residual);
}

// Reads a call and runs its forward.
py::object attention_fwd(const py::handle& call, bool for_backward, bool want_lse,
                         int64_t num_threads) {
  AttentionReader reader;
  AttentionParams p{};
  if (!reader.read(call, for_backward, num_threads, &p)) return py::none();
  return run_forward(reader, for_backward, want_lse, p);
}

// Copies the first p.max_pages columns of a block table, (batch, columns) of int32 or int64,
// because another thread may change the tensor during the call. Sequence b has ends[b] rows.
// Entries beyond its end are not read, and are 0 in the copy. Returns an empty table if another
// entry is not a page.
std::vector<int32_t> read_pages(const TensorView& table, int64_t num_pages,
                                const std::vector<int64_t>& ends, const AttentionParams& p) {
  check_that(table.is_present && table.device.type == kDLCpu && table.code == kDLInt &&
                 (table.bits == 32 || table.bits == 64) && table.ndim == 2 &&
                 table.shape[0] == p.batch && table.shape[1] >= p.max_pages,
             "block_table must be int32 or int64, with a row for each sequence and seqlen_k keys");
  std::vector<int32_t> pages(p.batch * p.max_pages);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i * p.page_size < ends[b]; ++i) {
      const int64_t at = b * table.strides[0] + i * table.strides[1];
      const int64_t page = table.bits == 32 ? static_cast<const int32_t*>(table.data)[at]
                                            : static_cast<const int64_t*>(table.data)[at];
      if (page < 0 || page >= num_pages || page > INT32_MAX) return {};
      pages[b * p.max_pages + i] = static_cast<int32_t>(page);
    }
  }
  return pages;
}

// Returns true if the memory between the first and the last elements of two tensors overlaps.
bool may_overlap(const TensorView& a, const TensorView& b) {
  const auto end = [](const TensorView& view) {
    int64_t last = 0;
    for (int i = 0; i < view.ndim; ++i) last += (view.shape[i] - 1) * view.strides[i];
    return static_cast<char*>(view.data) + (last + 1) * (view.bits / 8);
  };
  return a.numel() > 0 && b.numel() > 0 && a.data < end(b) && b.data < end(a);
}

// New rows of a KV cache, (batch, num_heads_kv, count, dim): the last rows of each sequence.
struct NewRows {
  TensorView rows;
  const TensorView* cache;

  // Returns true if the rows match and do not overlap the cache, and each sequence is long enough.
  bool fit(const std::vector<int64_t>& ends) const {
    const int64_t batch = static_cast<int64_t>(ends.size()), *const of = cache->shape;
    return rows.ndim == 4 && rows.dtype() == cache->dtype() && rows.shape[0] == batch &&
           rows.shape[1] == of[1] && rows.shape[3] == of[3] && contiguous_from(rows, 3) &&
           !may_overlap(rows, *cache) &&
           std::all_of(ends.begin(), ends.end(), [&](int64_t n) { return n >= rows.shape[2]; });
  }

  void write(const std::vector<int64_t>& ends, const AttentionParams& p) const {
    const int64_t count = rows.shape[2], bytes = rows.bits / 8;
    const auto at = [&](const TensorView& view, int64_t i, int64_t head, int64_t row) {
      const int64_t* const steps = view.strides;
      return static_cast<char*>(view.data) +
             (i * steps[0] + head * steps[1] + row * steps[2]) * bytes;
    };
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t i = 0; i < count; ++i) {
        int64_t holder = b, row = ends[b] - count + i;
        if (p.block_table != nullptr) {
          holder = p.block_table[b * p.max_pages + row / p.page_size];
          row %= p.page_size;
        }
        for (int64_t h = 0; h < p.num_heads_kv; ++h) {
          std::memmove(at(*cache, holder, h, row), at(rows, b, h, i), rows.shape[3] * bytes);
        }
      }
    }
  }
};

// Appends new keys and values, unless they are None, to the sequences of a KV cache, which then
// have ends[b] rows. Runs the forward and returns (out, lse) like attention_fwd. The key and value
// of the call are the caches, or the pages with a block table; its mask covers seqlen_k keys.
// Returns None to reject the call, before anything is written.
py::object attention_decode(const py::handle& call, const py::handle& block_table, int64_t seqlen_k,
                            const py::tuple& end_of_each, const py::handle& new_key,
                            const py::handle& new_value, bool want_lse, int64_t num_threads) {
  AttentionReader reader;
  AttentionParams p{};
  const bool paged = !block_table.is_none();
  check_within(seqlen_k, "seqlen_k", 0, kUnlimited - 1);
  if (!reader.read(call, false, num_threads, &p, {seqlen_k, paged}) || !p.decoding ||
      p.cu_seqlens_q != nullptr) {
    return py::none();
  }
  std::vector<int64_t> ends;
  for (const py::handle end : end_of_each) {
    ends.push_back(py::cast<int64_t>(end));
    check_within(ends.back(), "ends", 0, seqlen_k);
  }
  check_within(static_cast<int64_t>(ends.size()), "the number of ends", p.batch, p.batch);
  NewRows added[] = {{{}, &reader.key}, {{}, &reader.value}};
  if (!new_key.is_none() &&
      !(float_view(new_key, &added[0].rows) && float_view(new_value, &added[1].rows) &&
        added[0].fit(ends) && added[1].fit(ends))) {
    return py::none();
  }
  std::vector<int32_t> pages;
  if (paged) {
    p.page_size = reader.key.shape[2];
    if (p.seqlen_q < 1 || p.seqlen_q > kMaxPagedQueries || seqlen_k == 0 || p.page_size == 0 ||
        reader.key.shape[0] == 0) {
      return py::none();
    }
    p.max_pages = (seqlen_k + p.page_size - 1) / p.page_size;
    pages = read_pages(view_of(block_table), reader.key.shape[0], ends, p);
    if (pages.empty()) return py::none();
    p.block_table = pages.data();
  }
  for (const NewRows& rows : added) {
    if (rows.rows.is_present) rows.write(ends, p);
  }
  const py::tuple results = run_forward(reader, false, want_lse, p);
  return py::make_tuple(results[0], results[1]);
}

// Reads the strides of a tensor of shape (q.shape[0], q.shape[1], q.shape[2], dim). Returns false
// if the shape differs or the last dimension is not contiguous.
bool read_rows_like(const TensorView& q, int64_t dim, const TensorView& view, int64_t* strides) {
  if (view.ndim != 4 || !std::equal(q.shape, q.shape + 3, view.shape) || view.shape[3] != dim ||
      !contiguous_from(view, 3)) {
    return false;
  }
  std::copy(view.strides, view.strides + 3, strides);
  return true;
}

// Reads the saved results of the forward and the gradients of out and lse. Returns false if one of
// them is unsupported. Validates all of them, because saved-tensor hooks may return tensors other
// than the saved ones.
bool read_results(const py::tuple& outputs, const py::handle& grad_out, const py::handle& grad_lse,
                  const TensorView& q, AttentionBwdParams* p) {
  check_that(outputs.size() == 4, "outputs must have 4 tensors");
  TensorView grad, out, lse, lse_residual, of_lse;
  if (!float_view(grad_out, &grad) || !float_view(outputs[0], &out) ||
      !float_view(outputs[1], &lse) || !float_view(outputs[2], &lse_residual) ||
      (!grad_lse.is_none() && !float_view(grad_lse, &of_lse))) {
    return false;
  }
  const DType dtype = p->fwd.dtype, statistics = statistics_of(dtype);
  const int64_t dim = p->fwd.head_dim_v;
  if (grad.dtype() != dtype || !read_rows_like(q, dim, grad, p->grad_out_strides) ||
      out.dtype() != dtype || !read_rows_like(q, dim, out, p->fwd.out_strides)) {
    return false;
  }
  for (const TensorView* const view : {&lse, &lse_residual, &of_lse}) {
    if (view->is_present &&
        (view->dtype() != statistics || view->ndim != 3 ||
         !std::equal(q.shape, q.shape + 3, view->shape) || !contiguous_from(*view, 0))) {
      return false;
    }
  }
  if (q.bits == 16) {
    const TensorView out_residual = view_of(outputs[3]);
    if (!out_residual.is_present || out_residual.code != kDLInt || out_residual.bits != 16 ||
        !read_rows_like(q, dim, out_residual, p->fwd.out_residual_strides)) {
      return false;
    }
    p->fwd.out_residual = static_cast<int16_t*>(out_residual.data);
  }
  p->fwd.out = out.data;
  p->fwd.lse = lse.data;
  p->fwd.lse_residual = lse_residual.data;
  p->grad_out = grad.data;
  p->grad_lse = of_lse.data;
  return true;
}

// Runs the backward. Returns the gradients of query, key, value and bias. grad_lse may be None. The
// gradient of bias is None unless needs_bias; otherwise it has the dtype of lse and the shape of
// bias.
py::object attention_bwd(const py::handle& call, const py::tuple& outputs,
                         const py::handle& grad_out, const py::handle& grad_lse, bool needs_bias,
                         int64_t num_threads) {
  AttentionReader reader;
  AttentionBwdParams p{};
  if (!reader.read(call, true, num_threads, &p.fwd)) return py::none();
  const auto &q = reader.query, &k = reader.key, &v = reader.value;
  if (!read_results(outputs, grad_out, grad_lse, q, &p)) return py::none();
  const NumberType sums = type_of(statistics_of(p.fwd.dtype));
  const NumberType type = p.fwd.partial ? sums : NumberType{q.code, q.bits};
  py::object grad_q = new_rows(q, p.fwd.head_dim, type, &p.grad_query, p.grad_query_strides);
  py::object grad_k = new_rows(k, p.fwd.head_dim, type, &p.grad_key, p.grad_key_strides);
  py::object grad_v = new_rows(v, p.fwd.head_dim_v, type, &p.grad_value, p.grad_value_strides);
  py::object grad_bias = py::none();
  if (needs_bias) {
    const py::object spec = FUSED_ATTN_ATTRIBUTE(call, "mask");
    const TensorView bias = view_of(FUSED_ATTN_ATTRIBUTE(spec, "bias"));
    check_that(bias.is_present, "needs_bias requires a mask with a bias");
    check_shape(bias, "bias", Rule("IJLM"), reader.sizes);
    grad_bias = new_dense(bias.shape, 4, sums, &p.grad_bias);
    std::fill_n(static_cast<char*>(p.grad_bias), bias.numel() * sums.bits / 8, 0);
  }
  run_pass(attention_backward, p);
  return py::make_tuple(grad_q, grad_k, grad_v, grad_bias);
}

}  // namespace
}  // namespace fused_attn
