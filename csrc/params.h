// Parameter structs that the Python bindings pass to the kernels: raw pointers, sizes and strides.
//
// Strides are in elements. The last dimension of a tensor is contiguous unless it has a stride. A
// null pointer means that the tensor is absent. The structs own no memory.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fused_attn {

enum class DType : int64_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

// The order matches ACTIVATIONS of backends/base.py.
enum class Activation : int64_t { kIdentity, kRelu, kGelu, kGeluTanh };

// Largest number of queries for which the CPU kernels read the pages of a KV cache in place. The
// kernels for few queries support this many queries on every instruction set.
constexpr int64_t kMaxPagedQueries = 4;

// Tile size of mask summaries: queries by keys. The tile sizes of every backend are multiples or
// divisors of it.
constexpr int64_t kSummaryTileM = 32;
constexpr int64_t kSummaryTileN = 64;

// Upper bound on positions, so that sums of a few positions fit in int32. Equals UNLIMITED of
// masks/mask.py.
constexpr int64_t kUnlimited = int64_t{1} << 29;

// Visibility summary of one tile of a dense mask or bias.
enum SummaryValue : uint8_t {
  kNoneVisible = 0,  // every position is masked
  kSomeVisible = 1,  // the tile must be read
  kAllVisible = 2,   // every position is visible and the bias is 0; not read
};

// One row of MaskSpec.bounds (masks/spec.py, BOUNDS).
struct SequenceBounds {
  int64_t key_begin, key_end;      // keys outside this range are masked
  int64_t query_begin, query_end;  // queries outside this range are fully masked
  int64_t band_lo, band_hi;        // key j is visible to query i if band_lo <= j - i <= band_hi
  int64_t prefix_end;              // if > 0: key j is visible if j < prefix_end or j <= i
  int64_t alibi_offset;            // ALiBi adds -slope * |i + alibi_offset - j|
};

// Keys [lo, hi) of one query. Empty if lo >= hi.
struct Interval {
  int64_t lo, hi;
};

// One row of AttentionOptions.dropout_offsets: the position of a shard's sequence in the global
// tensor. Dropout uses global positions as counters.
struct DropoutOffsets {
  int64_t row;   // global index of the first query
  int64_t key;   // global index of the first key, a multiple of kDecisions (philox.h)
  int64_t head;  // counter of the first head
};

// A dense mask or bias. Broadcast dimensions have stride 0.
struct DenseTensor {
  const void* data;    // (batch, num_heads, seqlen_q, seqlen_k)
  int64_t strides[4];  // of the four dimensions of data
  // SummaryValues, (batch, num_heads, ceil(seqlen_q / 32), ceil(seqlen_k / 64)).
  const uint8_t* summary;
  int64_t summary_strides[4];
};

// Row layout of a matrix. Rows form runs of equal length and are row_stride apart within a run.
struct RowLayout {
  int64_t row_stride;
  int64_t run_step;  // offset added per run after the first; 0 if there is a single run
  // Row r belongs to run r * run_factor >> 32 >> run_shift, which replaces a division.
  uint32_t run_factor, run_shift;
};

namespace {  // internal linkage: each instruction set compiles a copy

FUSED_ATTN_HOST_DEVICE int64_t row_offset(const RowLayout& rows, int64_t row) {
  const uint64_t product = uint64_t{static_cast<uint32_t>(row)} * rows.run_factor;
  const uint32_t run = static_cast<uint32_t>(product >> 32) >> rows.run_shift;
  return row * rows.row_stride + run * rows.run_step;
}

}  // namespace

// fields/*.inc list the fields of these structs. The readers in bind_fields.h are generated from
// the same lists, so a new field needs one line there.
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

// Parameters of the pass that recomputes the attention weights, after dropout. It uses the
// forward's lse and lse_residual. out and value have head_dim_v 0. Sequences are not packed.
struct AttentionWeightsParams {
  AttentionParams fwd;
  void* weights;  // (batch, 1 if average else num_heads, seqlen_q, seqlen_k) of dtype, contiguous
  bool average;   // average the weights over the heads
};

// Parameters of norm(residual + dropout(input)). Every matrix is (rows, columns), and contiguous
// unless it has a RowLayout.
struct NormParams {
#include "fields/norm.inc"
#include "fields/norm_options.inc"
};

struct NormBwdParams {
  NormParams fwd;
#include "fields/norm_bwd.inc"
};

// Parameters of dropout(activation(input + bias)) and its backward.
struct ActivationParams {
#include "fields/activation.inc"
};

#include "fields/end.inc"

// Parameters of the rotary position embedding and its backward. Strides are those of (batch,
// num_heads, seqlen) and of (batch, position).
struct RotaryParams {
  DType dtype;        // of input and out
  DType table_dtype;  // of cos and sin: dtype, or float (double for double)
  int64_t batch, num_heads, seqlen, head_dim;
  int64_t pairs;       // rotary_dim / 2; dimensions from 2 * pairs on are copied
  bool interleaved;    // pair i is dimensions 2 * i and 2 * i + 1; otherwise i and i + pairs
  bool per_dimension;  // tables have a factor for each dimension; otherwise for each pair
  bool backward;       // multiply by the transposed matrix, to get the gradient of input
  const void* input;
  void* out;  // may be input
  int64_t input_strides[3], out_strides[3];
  const void *cos, *sin;  // (batch or 1, positions, 2 * pairs if per_dimension, else pairs)
  int64_t cos_strides[2], sin_strides[2];
  const int64_t* positions;  // (batch, seqlen), rows of the tables; null: row i for token i
  int64_t num_threads;
};

// Parameters of the pass that classifies the tiles of a dense mask (bool) or bias (of dtype).
struct SummaryParams {
  const void* data;
  bool is_bool;
  DType dtype;       // of the bias; unused if is_bool
  int64_t sizes[4];  // of the tensor; broadcast dimensions have size 1
  int64_t strides[4];
  uint8_t* summary;  // (sizes[0], sizes[1], ceil(sizes[2] / 32), ceil(sizes[3] / 64)), contiguous
  int64_t num_threads;
};

}  // namespace fused_attn
