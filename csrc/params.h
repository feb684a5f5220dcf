// Structs that cross the boundary between Python and the kernels: raw pointers, sizes, strides.
//
// Strides are in elements. The last dimension of a tensor is contiguous unless a stride for it is
// listed. A null pointer means that the tensor is absent.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fused_attn {

enum class DType : int64_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

// Same order as ACTIVATIONS of backends/base.py.
enum class Activation : int64_t { kIdentity, kRelu, kGelu, kGeluTanh };

// The grid of TileSummary. Fine enough for every backend: their tiles are multiples or divisors.
constexpr int64_t kSummaryTileM = 32;
constexpr int64_t kSummaryTileN = 64;

// Positions stay below this, so that sums of a few fit into int32 (masks/mask.py, UNLIMITED).
constexpr int64_t kUnlimited = int64_t{1} << 29;

// Summary of one tile of a dense mask or bias.
enum SummaryValue : uint8_t {
  kNoneVisible = 0,  // every position masked
  kSomeVisible = 1,  // must be read
  kAllVisible = 2,   // every position visible and nothing to add: need not be read
};

// One row of MaskSpec.bounds (masks/spec.py, BOUNDS).
struct SequenceBounds {
  int64_t key_begin, key_end;      // keys outside are masked
  int64_t query_begin, query_end;  // queries outside are fully masked
  int64_t band_lo, band_hi;        // visible where band_lo <= j - i <= band_hi
  int64_t prefix_end;              // > 0: visible where j < prefix_end or j <= i
  int64_t alibi_offset;            // ALiBi adds -slope * |i + alibi_offset - j|
};

// One row of AttentionCall.dropout_offsets: the position of a sequence in the global tensor, whose
// positions are dropout's counters.
struct DropoutOffsets {
  int64_t row;   // of its first query
  int64_t key;   // of its first key, a multiple of kDecisions (philox.h)
  int64_t head;  // counter of its first head
};

// A dense mask or bias, broadcast by strides of 0.
struct DenseTensor {
  const void* data;        // (batch, num_heads, seqlen_q, seqlen_k)
  int64_t strides[4];      // of these four dimensions
  const uint8_t* summary;  // SummaryValue (batch, num_heads, ceil(seqlen_q / 32), ceil(. / 64))
  int64_t summary_strides[4];
};

// Row offsets of a matrix: row_stride apart within runs of equally many rows.
struct RowLayout {
  int64_t row_stride;
  int64_t run_step;  // added at the start of each further run; 0 with a single run
  // Row r is in run r * run_factor >> 32 >> run_shift, which avoids a division.
  uint32_t run_factor, run_shift;
};

namespace {  // each instruction set has a copy

FUSED_ATTN_HOST_DEVICE int64_t row_offset(const RowLayout& rows, int64_t row) {
  const uint64_t product = uint64_t{static_cast<uint32_t>(row)} * rows.run_factor;
  const uint32_t run = static_cast<uint32_t>(product >> 32) >> rows.run_shift;
  return row * rows.row_stride + run * rows.run_step;
}

}  // namespace

// fields/*.inc list the fields of these structs. The bindings' reader (bind_fields.h) and its
// messages are generated from them too: a new field is one line there.
#include "fields/declare.inc"

struct MaskParams {
#include "fields/mask.inc"
  DType bias_dtype;
};

struct AttentionParams {
#include "fields/attention.inc"
#include "fields/attention_options.inc"
  MaskParams mask;
};

struct AttentionBwdParams {
  AttentionParams fwd;
#include "fields/attention_bwd.inc"
};

// The weights P that the forward multiplied by value, after dropout, recomputed from its lse and
// lse_residual. out and value have head_dim_v 0. Sequences are not packed.
struct AttentionWeightsParams {
  AttentionParams fwd;
  void* weights;  // (batch, 1 if average else num_heads, seqlen_q, seqlen_k) of dtype, contiguous
  bool average;   // over the heads
};

// norm(residual + dropout(input)). Every matrix is (rows, columns), contiguous unless it has a
// RowLayout.
struct NormParams {
#include "fields/norm.inc"
#include "fields/norm_options.inc"
};

struct NormBwdParams {
  NormParams fwd;
#include "fields/norm_bwd.inc"
};

// dropout(activation(input + bias)), and its backward.
struct ActivationParams {
#include "fields/activation.inc"
};

#include "fields/end.inc"

// Classifies the tiles of a dense mask (bool) or bias (of dtype).
struct SummaryParams {
  const void* data;
  bool is_bool;
  DType dtype;       // unless is_bool
  int64_t sizes[4];  // of the tensor: broadcast dimensions have 1
  int64_t strides[4];
  uint8_t* summary;  // (sizes[0], sizes[1], ceil(sizes[2] / 32), ceil(sizes[3] / 64)), contiguous
  int64_t num_threads;
};

}  // namespace fused_attn
