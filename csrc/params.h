// What crosses the boundary between Python and the kernels: raw pointers, sizes, strides.
//
// Strides are in elements, and the last dimension of every tensor that is not listed with a stride
// for it is contiguous. A null pointer means that the tensor is absent.
#pragma once

#include <cstdint>

namespace fused_attn {

enum class DType : int64_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

// The grid of TileSummary: fine enough for every backend's tiles, which are multiples or parts.
constexpr int64_t kSummaryTileM = 32;
constexpr int64_t kSummaryTileN = 64;

// Positions stay below this, so that sums of a few fit into int32 (masks/mask.py, UNLIMITED).
constexpr int64_t kUnlimited = int64_t{1} << 29;

// What a summary says of one tile of a dense mask or bias.
enum SummaryValue : uint8_t {
  kNoneVisible = 0,  // every position masked
  kSomeVisible = 1,  // has to be read
  kAllVisible = 2,   // every position visible and nothing to add: need not be read
};

// One row of MaskSpec.bounds (masks/spec.py, BOUNDS).
struct SequenceBounds {
  int64_t key_begin, key_end;      // keys outside are invisible
  int64_t query_begin, query_end;  // queries outside see nothing
  int64_t band_lo, band_hi;        // visible where band_lo <= j - i <= band_hi
  int64_t prefix_end;              // > 0: visible where j < prefix_end or j <= i
  int64_t alibi_offset;            // ALiBi adds -slope * |i + alibi_offset - j|
};

// A dense mask or bias, broadcast by strides of 0.
struct DenseTensor {
  const void* data;        // (batch, num_heads, seqlen_q, seqlen_k)
  int64_t strides[4];      // of these four dimensions
  const uint8_t* summary;  // SummaryValue (batch, num_heads, ceil(seqlen_q / 32), ceil(. / 64))
  int64_t summary_strides[4];
};

struct MaskParams {
  DenseTensor bias;  // of bias_dtype, added to the scores
  DType bias_dtype;
  DenseTensor dense;             // bool, nonzero = visible
  DenseTensor key_mask;          // bool, does not depend on the query (stride 0); a summary on GPUs
  const SequenceBounds* bounds;  // (batch); null: the scalars below
  int64_t band_lo, band_hi, alibi_offset;
  const int64_t* query_documents;  // (batch, seqlen_q)
  int64_t query_documents_stride;  // of batch
  const int64_t* key_documents;    // (batch, seqlen_k)
  int64_t key_documents_stride;    // of batch
  const float* slopes;             // (batch, num_heads), ALiBi
  int64_t slopes_strides[2];
};

struct AttentionParams {
  DType dtype;  // of query, key, value, out and their gradients
  int64_t batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  const void* query;  // (batch, num_heads, seqlen_q, head_dim)
  const void* key;    // (batch, num_heads_kv, seqlen_k, head_dim)
  const void* value;  // (batch, num_heads_kv, seqlen_k, head_dim_v)
  void* out;          // (batch, num_heads, seqlen_q, head_dim_v)
  // (batch, num_heads, total_q), float or double, contiguous. lse + lse_low is the log-sum-exp to
  // twice the precision: rounding lse alone would scale all weights that the backward computes
  // anew. Null: not wanted; without lse_low, no backward follows.
  void* lse;
  void* lse_low;
  // Strides of (batch, head, row).
  int64_t query_strides[3], key_strides[3], value_strides[3], out_strides[3];
  // Packed sequences: the tensors have one batch, in which sequence b is the rows
  // [cu_seqlens[b], cu_seqlens[b + 1]); batch, seqlen_q and seqlen_k are the number of sequences
  // and the most rows that one has. Masks see each sequence for itself. Null: not packed.
  const int64_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  int64_t total_q;                             // rows of a head in lse: seqlen_q if not packed
  double softmax_scale;
  double softcap;    // 0: none
  double dropout_p;  // 0: none
  uint64_t seed;
  MaskParams mask;
  int64_t num_threads;
};

struct AttentionBwdParams {
  AttentionParams fwd;   // out and lse are inputs here
  const void* grad_out;  // (batch, num_heads, seqlen_q, head_dim_v)
  const void* grad_lse;  // (batch, num_heads, seqlen_q), float or double, contiguous; null: 0
  void* grad_query;      // as query
  void* grad_key;        // as key
  void* grad_value;      // as value
  // Contiguous, float or double: the shape of bias with its broadcast dimensions as 1. Null: not
  // wanted.
  void* grad_bias;
  int64_t grad_out_strides[3], grad_query_strides[3], grad_key_strides[3], grad_value_strides[3];
  // Gradient of the weights times this factor, (batch, num_heads, seqlen_q, seqlen_k) of dtype,
  // added to that by out; null: none, and no row_sums.
  const void* grad_weights;
  int64_t grad_weights_strides[3];
  double grad_weights_factor;
  void* row_sums;  // workspace like lse: the sum of that gradient times the weights, by row
};

// The weights P that the forward multiplied values with, after dropout, from its lse and lse_low;
// out and value have head_dim_v 0. Sequences are not packed.
struct AttentionWeightsParams {
  AttentionParams fwd;
  void* weights;  // (batch, 1 if average else num_heads, seqlen_q, seqlen_k) of dtype, contiguous
  bool average;   // over the heads
};

// norm(residual + dropout(input)); every matrix is (rows, columns), contiguous.
struct NormParams {
  DType dtype;  // of input, residual, out, total and their gradients
  int64_t rows, columns;
  bool rms;  // rms_norm instead of layer_norm
  double eps;
  double dropout_p;
  uint64_t seed;
  const void* input;
  const void* residual;  // null: none
  const void* weight;    // (columns), float or double; null: 1
  const void* bias;      // (columns), float or double; null: 0
  void* out;
  void* total;  // residual + dropout(input); null: not wanted
  void* mean;   // (rows), float or double; null for rms, or where it is not wanted
  void* rstd;   // (rows), float or double; null: not wanted
  int64_t num_threads;
};

struct NormBwdParams {
  NormParams fwd;          // total, mean, rstd and weight are inputs here
  const void* grad_out;    // (rows, columns)
  const void* grad_total;  // (rows, columns); null: 0
  void* grad_input;        // null where it is grad_residual (no dropout)
  void* grad_residual;
  void* grad_weight;  // (columns), float or double; null: not wanted
  void* grad_bias;    // (columns), float or double; null: not wanted
};

// Classifies the tiles of a dense mask (bool) or bias (of dtype).
struct SummaryParams {
  const void* data;
  bool is_bool;
  DType dtype;       // where it is no bool
  int64_t sizes[4];  // own sizes: broadcast dimensions have 1
  int64_t strides[4];
  uint8_t* summary;  // (sizes[0], sizes[1], ceil(sizes[2] / 32), ceil(sizes[3] / 64)), contiguous
  int64_t num_threads;
};

}  // namespace fused_attn
