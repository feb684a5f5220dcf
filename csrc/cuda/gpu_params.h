// What kernels on a GPU get besides the structs of params.h.
#pragma once

#include "params.h"

namespace fused_attn {

// Ids of documents are summed up by so many positions.
constexpr int64_t kIdRangeTile = 32;
// The most queries of a tile in the backward.
constexpr int64_t kStatisticsTile = 128;
// The widest heads whose gradient of queries may be added up atomically.
constexpr int64_t kMaxAddedHeadDim = 128;

// Workspaces are the caller's, and hold nothing before the call.
struct GpuParams {
  void* stream;
  bool tf32;                   // products of float32 may round their operands to TF32
  bool deterministic;          // nothing is added in an order that changes from run to run
  const int64_t* seed;         // of dropout, read when the kernels run; null without dropout
  uint32_t dropout_threshold;  // both of dropout_p (philox.h), by whoever starts the kernels
  float dropout_scale;
  // Workspaces of document masks, int32 (batch or 1, ceil(seqlen / kIdRangeTile), 2): the smallest
  // and the largest id of each kIdRangeTile positions. Null without documents.
  int32_t *query_id_ranges, *key_id_ranges;
  // Workspace of the backward, float (3, num_heads, rows): lse in the units of scores, what its
  // rounding scales weights by, and delta. Each sequence begins at a multiple of kStatisticsTile:
  // rows is batch * seqlen_q rounded up to one, or (total_q / kStatisticsTile + batch + 1) of them.
  float* row_statistics;
  // Workspace of the backward that is not deterministic: float (batch, num_heads, total_q, head_dim
  // rounded up to 8).
  float* grad_query_sums;
  // Workspace of the gradient of a bias, float (num_bias_parts, bias_sizes[0], bias_sizes[1], rows,
  // columns), which the caller adds up: parts of the heads, and of broadcast (size 1) queries or
  // keys one row or column for each tile of score_tile(size of dtype) of them.
  float* grad_bias_parts;
  int64_t num_bias_parts;
  int64_t bias_sizes[4];  // own sizes: broadcast dimensions have 1
  // Workspace of decoding, float (batch, num_heads, total_q, num_splits, 2 + head_dim_v): the
  // largest score, the sum of weights, and the sums of weighted values of each part of the keys.
  float* splits;
  int64_t num_splits;
};

// A cache of keys and values for decoding.
struct CacheParams {
  // Page of the keys [i * page_size, (i + 1) * page_size) of each sequence, (batch, max_pages); the
  // batch of key and value counts pages then, and their rows are those of a page. Null: no pages.
  const int32_t* block_table;
  int64_t block_table_stride;  // of batch
  int64_t page_size;
  const int32_t* lengths;  // (batch), keys in the cache before the new ones; null: seqlen_k
  // New keys and values (batch, num_heads_kv, seqlen_new, ...), written behind those of the cache.
  const void *new_key, *new_value;
  int64_t new_key_strides[3], new_value_strides[3];
  int64_t seqlen_new;
};

}  // namespace fused_attn
