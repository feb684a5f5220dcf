// Masking of a score tile that a warp holds in the register layout of mma.m16n8. A tile is
// (queries, keys), or (keys, queries) if kKeysFirst.
#pragma once

#include "cuda/product.cuh"
#include "cuda/tile_list.cuh"

namespace fused_attn {

// Positions and heads of the thread's rows. The thread's r-th row is row
// r / 2 * 16 + r % 2 * 8 + lane / 4 of the warp's tile.
template <int kM>
struct FragmentRows {
  int position[2 * kM];  // query index, or key index if kKeysFirst
  int head[2 * kM];
};

// Returns the thread's rows of a warp tile with positions first, first + 1, ... of head h.
template <int kM>
FUSED_ATTN_DEVICE FragmentRows<kM> rows_from(int first, int h) {
  FragmentRows<kM> rows;
  const int lane = unhoisted(lane_id());
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2 * kM; ++r) {
    rows.position[r] = first + r / 2 * 16 + r % 2 * 8 + lane / 4;
    rows.head[r] = h;
  }
  return rows;
}

// Adds the ALiBi bias to the scaled scores. column: position of the warp tile's first column.
template <bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE void add_alibi(Accumulator<kM, kN>& s, const MaskParams& mask,
                                 const Sequence& sequence, const FragmentRows<kM>& rows,
                                 int column) {
  const int first = column + 2 * (unhoisted(lane_id()) % 4);
  const int offset = static_cast<int>(sequence.bounds.alibi_offset);
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2 * kM; ++r) {
    const float slope = load_global(mask.slopes + sequence.b * mask.slopes_strides[0] +
                                    rows.head[r] * mask.slopes_strides[1]);
    const int row = kKeysFirst ? -offset + rows.position[r] : offset + rows.position[r];
    FUSED_ATTN_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      FUSED_ATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int distance = row - (first + n * 8 + e);
        float& score = s[r / 2][n][r % 2 * 2 + e];
        score -= slope * static_cast<float>(distance < 0 ? -distance : distance);
      }
    }
  }
}

// One row of a tile of a dense tensor with elements V. operator[] takes a column relative to the
// `column` passed to the constructor.
template <bool kKeysFirst, class V>
struct DenseRow {
  const V* data;
  int64_t step;

  FUSED_ATTN_DEVICE DenseRow(const DenseTensor& tensor, int64_t b, int64_t head, int64_t row,
                             int64_t column) {
    constexpr int kRow = kKeysFirst ? 3 : 2, kColumn = kKeysFirst ? 2 : 3;
    step = tensor.strides[kColumn];
    data = static_cast<const V*>(tensor.data) + b * tensor.strides[0] + head * tensor.strides[1] +
           row * tensor.strides[kRow] + column * step;
  }
  FUSED_ATTN_DEVICE V operator[](int column) const { return load_global(data + column * step); }
};

// Bit masks of the visible elements in each of the thread's rows. Bit 2 n + e is column
// 8 n + 2 t + e, with t = lane % 4.
template <int kM>
struct Visible {
  uint32_t row[2 * kM];
};

// Returns `visible` without the bits of columns for which hidden(column) is true. `column` is
// relative to the thread's first column. `hidden` is called for visible columns only.
template <int kN, class Hidden>
FUSED_ATTN_DEVICE uint32_t hide(uint32_t visible, Hidden hidden) {
  uint32_t remaining = visible;
  // Fully unrolled, the loads of a tile would exhaust the registers. A rolled loop is possible
  // because bits, unlike registers, can be indexed at run time.
  FUSED_ATTN_UNROLL_BY(4)
  for (int bit = 0; bit < kN / 4; ++bit) {
    if ((visible >> bit & 1) && hidden(bit / 2 * 8 + bit % 2)) remaining &= ~(1u << bit);
  }
  return remaining;
}

// Returns the bit mask of the columns below `end`, which is relative to the thread's first column.
template <int kN>
FUSED_ATTN_DEVICE uint32_t columns_below(int end) {
  // Columns 8 n and 8 n + 1 are bits 2 n and 2 n + 1.
  const int bits = end <= 0 ? 0 : end / 8 * 2 + (end % 8 < 2 ? end % 8 : 2);
  return bits >= 32 ? ~0u : (1u << bits) - 1;
}

template <bool kKeysFirst, class V, int kM, int kN>
FUSED_ATTN_DEVICE void add_bias_of(Accumulator<kM, kN>& s, Visible<kM>& visible,
                                   const DenseTensor& bias, int64_t b, const FragmentRows<kM>& rows,
                                   int first) {
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2 * kM; ++r) {
    const DenseRow<kKeysFirst, V> values(bias, b, rows.head[r], rows.position[r], first);
    FUSED_ATTN_UNROLL
    for (int bit = 0; bit < kN / 4; ++bit) {
      if (!(visible.row[r] >> bit & 1)) continue;
      const float added = to_float(values[bit / 2 * 8 + bit % 2]);
      s[r / 2][bit / 2][r % 2 * 2 + bit % 2] += added;
      if (added == -kInfinity) visible.row[r] &= ~(1u << bit);
    }
  }
}

// Adds the bias to the visible scores, and clears the bits of `visible` where the bias is -inf.
template <bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE void add_bias(Accumulator<kM, kN>& s, Visible<kM>& visible,
                                const MaskParams& mask, int64_t b, const FragmentRows<kM>& rows,
                                int column) {
  const int first = column + 2 * (unhoisted(lane_id()) % 4);
  if (mask.bias_dtype == DType::kFloat32) {
    add_bias_of<kKeysFirst, float, kM, kN>(s, visible, mask.bias, b, rows, first);
  } else if (mask.bias_dtype == DType::kFloat16) {
    add_bias_of<kKeysFirst, Half, kM, kN>(s, visible, mask.bias, b, rows, first);
  } else {
    add_bias_of<kKeysFirst, BFloat16, kM, kN>(s, visible, mask.bias, b, rows, first);
  }
}

// Returns the elements that are visible under all masks except the bias. Kernels call this function
// before the matmuls of the tile, while the registers of the accumulators are free.
template <bool kKeysFirst, int kM, int kN>
FUSED_ATTN_DEVICE Visible<kM> visible_of(const MaskParams& mask, const Sequence& sequence,
                                         const FragmentRows<kM>& rows, int column) {
  static_assert(kN <= 128, "a thread stores its columns of a row in 32 bits");
  const int first = column + 2 * (unhoisted(lane_id()) % 4);
  const SequenceBounds& bounds = sequence.bounds;
  const int64_t b = sequence.b;
  Visible<kM> visible;
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2 * kM; ++r) {
    const int row = rows.position[r];
    Interval interval = kKeysFirst ? visible_queries(bounds, row) : visible_keys(bounds, row);
    if (!kKeysFirst && (row < bounds.query_begin || row >= bounds.query_end)) interval.hi = 0;
    visible.row[r] = columns_below<kN>(static_cast<int>(interval.hi) - first) &
                     ~columns_below<kN>(static_cast<int>(interval.lo) - first);
  }
  if (mask.query_documents != nullptr) {
    const int64_t* query_ids = mask.query_documents + b * mask.query_documents_stride;
    const int64_t* key_ids = mask.key_documents + b * mask.key_documents_stride;
    const int64_t* column_ids = (kKeysFirst ? query_ids : key_ids) + first;
    const int64_t* row_ids = kKeysFirst ? key_ids : query_ids;
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      if (visible.row[r] == 0) continue;
      const int64_t id = load_global(row_ids + rows.position[r]);
      visible.row[r] = hide<kN>(visible.row[r],
                                [&](int column) { return load_global(column_ids + column) != id; });
    }
  }
  const auto hide_by = [&](const DenseTensor& tensor) {
    if (tensor.data == nullptr) return;
    FUSED_ATTN_UNROLL
    for (int r = 0; r < 2 * kM; ++r) {
      const DenseRow<kKeysFirst, uint8_t> bytes(tensor, b, rows.head[r], rows.position[r], first);
      visible.row[r] = hide<kN>(visible.row[r], [&](int column) { return bytes[column] == 0; });
    }
  };
  hide_by(mask.key_mask);
  hide_by(mask.dense);
  return visible;
}

// Sets masked scores to -inf.
template <int kM, int kN>
FUSED_ATTN_DEVICE void apply_visible(Accumulator<kM, kN>& s, const Visible<kM>& visible) {
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2 * kM; ++r) {
    FUSED_ATTN_UNROLL
    for (int bit = 0; bit < kN / 4; ++bit) {
      float& score = s[r / 2][bit / 2][r % 2 * 2 + bit % 2];
      score = visible.row[r] >> bit & 1 ? score : -kInfinity;
    }
  }
}

// Returns the columns that are visible to any row of the warp's tile. All lanes must call it.
template <int kM>
FUSED_ATTN_DEVICE VisibleColumns visible_columns(const MaskParams& mask,
                                                 const Visible<kM>& visible) {
  if (!has_listed_masks(mask)) return ~0u;  // keys outside the bounds were loaded as 0
  VisibleColumns columns = 0;
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2 * kM; ++r) columns |= visible.row[r];
  FUSED_ATTN_UNROLL
  for (int lanes = 4; lanes < 32; lanes *= 2) columns |= shuffle_xor(columns, lanes);
  return columns;
}

}  // namespace fused_attn
