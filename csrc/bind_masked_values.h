// Checks if torch's attention computes a masked call with the same result as these kernels.
//
// torch adds -inf to masked scores and multiplies masked values by 0. NaN and infinities at masked
// positions therefore propagate to its result. The result of a fully masked row depends on torch's
// backend. If neither occurs, the results agree.
#pragma once

#include "tensors.h"

namespace fused_attn {
namespace {

// Upper bound on the magnitude of elements. A dot product of 2^20 such elements is finite in
// float32. It stays finite after multiplication by a scale of at most 1, which the caller
// guarantees.
constexpr float kLargestFactor = 1e15f;

// Calls row(pointer) for each row of the last dimension and stops at the first that returns false.
// Returns true if all returned true. Visits dimensions of stride 0 once.
template <class T, class Row>
bool all_rows(const TensorView& t, const T* data, int dim, Row row) {
  if (dim >= t.ndim - 1) return row(data);
  const int64_t count = t.strides[dim] == 0 ? 1 : t.shape[dim];
  for (int64_t i = 0; i < count; ++i) {
    if (!all_rows(t, data + i * t.strides[dim], dim + 1, row)) return false;
  }
  return true;
}

// Returns true if all elements of a float32 tensor are at most kLargestFactor in magnitude.
//
// Compares the bits without the sign as integers, where NaN is larger than any number, so that
// `limit` minus the bits is negative. Uses vectors because a scalar loop over 2^15 + 2^14 elements
// takes 25 us, compared with 70 us for their attention.
bool magnitudes_are_small(const TensorView& t) {
  typedef uint32_t Vec4 __attribute__((vector_size(16)));
  constexpr uint32_t kMagnitude = 0x7fffffff;
  const int64_t count = t.shape[t.ndim - 1], stride = t.strides[t.ndim - 1];
  const int64_t in_vectors = stride == 1 ? count / 4 * 4 : 0;
  uint32_t limit;
  std::memcpy(&limit, &kLargestFactor, sizeof limit);
  return all_rows(t, static_cast<const uint32_t*>(t.data), 0, [=](const uint32_t* row) {
    Vec4 signs = {};
    for (int64_t i = 0; i < in_vectors; i += 4) {
      Vec4 bits;
      std::memcpy(&bits, row + i, sizeof bits);
      signs |= limit - (bits & kMagnitude);
    }
    uint32_t sign = signs[0] | signs[1] | signs[2] | signs[3];
    for (int64_t i = in_vectors; i < count; ++i) sign |= limit - (row[i * stride] & kMagnitude);
    return sign >> 31 == 0;
  });
}

bool every_row_has_a_key(const TensorView& mask) {
  const int64_t count = mask.shape[mask.ndim - 1], stride = mask.strides[mask.ndim - 1];
  return all_rows(mask, static_cast<const bool*>(mask.data), 0, [=](const bool* row) {
    for (int64_t i = 0; i < count; ++i) {
      if (row[i * stride]) return true;
    }
    return false;
  });
}

// Returns true if torch's attention and these kernels agree for these float32 tensors and this bool
// mask. The gradient of out is unknown at this point. If it is infinite, gradients of masked keys
// may be NaN.
bool masks_like_torch(const py::handle& query, const py::handle& key, const py::handle& value,
                      const py::handle& mask) {
  const TensorView visible = view_of(mask);
  if (visible.ndim == 0 || !every_row_has_a_key(visible)) return false;
  for (const py::handle& tensor : {query, key, value}) {
    const TensorView view = view_of(tensor);
    if (view.ndim == 0 || !magnitudes_are_small(view)) return false;
  }
  return true;
}

}  // namespace
}  // namespace fused_attn
