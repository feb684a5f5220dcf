// Rows of a decoding block, and addresses of its keys and values. These may be contiguous, packed,
// in a paged cache, or new and not yet in the cache.
#pragma once

#include "cuda/attention_tile.cuh"

namespace fused_attn {

struct DecodeArgs {
  AttentionParams params;
  CacheParams cache;
  GpuParams gpu;
};

constexpr int kDecodeRows = 16;  // rows per block: the M dimension of the smallest MMA

// The tile of a decoding block. The query heads that share a KV head form a group. Row r of a group
// is query r % seqlen_q of head first_head + r / seqlen_q.
struct DecodeTile {
  int b, h_kv;
  int first_head, seqlen_q;  // first head of the group; queries of the sequence
  int first, count;          // rows [first, first + count) of the group
  int part;                  // index of the split

  FUSED_ATTN_DEVICE int head(int row) const { return first_head + (first + row) / seqlen_q; }
  FUSED_ATTN_DEVICE int query(int row) const { return (first + row) % seqlen_q; }
  FUSED_ATTN_DEVICE bool is_first() const { return first == 0; }
};

// Returns the number of row tiles of the query heads that share a key/value head.
inline int64_t row_tiles(const AttentionParams& p) {
  return (p.num_heads / p.num_heads_kv * p.seqlen_q + kDecodeRows - 1) / kDecodeRows;
}

// Returns the block's tile. Blocks that read the same keys have adjacent indices.
FUSED_ATTN_DEVICE DecodeTile decode_tile(const AttentionParams& p, int64_t num_splits) {
  const int group = static_cast<int>(p.num_heads / p.num_heads_kv);
  const int64_t num_m =
      (int64_t{group} * static_cast<int>(p.seqlen_q) + kDecodeRows - 1) / kDecodeRows;
  const int64_t m = block_id() % num_m, rest = block_id() / num_m;
  const int64_t bh = rest / num_splits;
  DecodeTile own;
  own.b = static_cast<int>(bh / p.num_heads_kv);
  own.h_kv = static_cast<int>(bh % p.num_heads_kv);
  own.first_head = own.h_kv * group;
  own.seqlen_q = static_cast<int>(query_rows(p, own.b).count);
  own.first = static_cast<int>(m) * kDecodeRows;
  own.count = static_cast<int>(min64(kDecodeRows, group * own.seqlen_q - own.first));
  own.part = static_cast<int>(rest % num_splits);
  return own;
}

// Queries [i_begin, i_end) and heads [h_begin, h_end) that cover the rows of a tile.
struct DecodeRange {
  int i_begin, i_end, h_begin, h_end;
};

FUSED_ATTN_DEVICE DecodeRange range_of(const DecodeTile& own) {
  const int h_begin = own.head(0), h_end = own.head(own.count - 1) + 1;
  if (h_end - h_begin > 1) return {0, own.seqlen_q, h_begin, h_end};
  return {own.query(0), own.query(own.count - 1) + 1, h_begin, h_end};
}

// Returns the thread's rows of the tile. Rows past the last one have position seqlen_q, which masks
// all keys.
FUSED_ATTN_DEVICE FragmentRows<1> fragment_rows(const AttentionParams& p, const DecodeTile& own) {
  FragmentRows<1> rows;
  FUSED_ATTN_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = r * 8 + lane_id() / 4;
    const bool inside = row < own.count;
    rows.position[r] = inside ? own.query(row) : static_cast<int>(p.seqlen_q);
    rows.head[r] = inside ? own.head(row) : own.first_head;
  }
  return rows;
}

// Classifies a tile for all heads that share the keys. The tile is skipped (full) only if it is
// skipped (full) for every head. In all other cases it is partial.
FUSED_ATTN_DEVICE Tile classify_heads(const AttentionParams& p, const GpuParams& gpu, int64_t b,
                                      const DecodeRange& range, int64_t j_begin, int64_t j_end) {
  const MaskParams& mask = p.mask;
  const auto of_head = [&](int h) {
    return classify(p, gpu, sequence_of(p, b, h), range.i_begin, range.i_end, j_begin, j_end);
  };
  const Tile kind = of_head(range.h_begin);
  if (mask.dense.strides[1] == 0 && mask.key_mask.strides[1] == 0 && mask.bias.strides[1] == 0) {
    return kind;
  }
  for (int h = range.h_begin + 1; h < range.h_end && kind != Tile::kPartial; ++h) {
    if (of_head(h) != kind) return Tile::kPartial;
  }
  return kind;
}

// Addresses of the first elements of a key and of its value.
template <class T>
struct KeyValueRow {
  const T *key, *value;
};

// Locates the keys and values of one KV head of a sequence, in the cache and in the new tensors.
template <class T>
struct KeyValueRows {
  const AttentionParams& p;
  const CacheParams& cache;
  int64_t b, h;
  int length;  // number of cached keys; the keys from index `length` on are new

  FUSED_ATTN_DEVICE KeyValueRows(const DecodeArgs& args, const DecodeTile& own)
      : p(args.params),
        cache(args.cache),
        b(own.b),
        h(own.h_kv),
        length(cache.seqlen_new == 0 ? static_cast<int>(p.seqlen_k)
                                     : load_global(cache.cache_lengths + own.b)) {}

  FUSED_ATTN_DEVICE KeyValueRow<T> in_cache(int j) const {
    SequenceRows rows = key_rows(p, b);
    int64_t row = rows.first + j;
    if (cache.block_table != nullptr) {
      const int page_size = static_cast<int>(cache.page_size);
      rows.batch = load_global(cache.block_table + b * cache.block_table_stride + j / page_size);
      row = j % page_size;
    }
    return {row_of(static_cast<const T*>(p.key), p.key_strides, rows.batch, h, row),
            row_of(static_cast<const T*>(p.value), p.value_strides, rows.batch, h, row)};
  }
  FUSED_ATTN_DEVICE KeyValueRow<T> of_new(int n) const {
    return {row_of(static_cast<const T*>(cache.new_key), cache.new_key_strides, b, h, n),
            row_of(static_cast<const T*>(cache.new_value), cache.new_value_strides, b, h, n)};
  }
  FUSED_ATTN_DEVICE KeyValueRow<T> at(int j) const {
    return j < length ? in_cache(j) : of_new(j - length);
  }

  // Appends every num_parts-th new row to the cache, starting with row `part`. This needs no
  // synchronization, because no block reads these rows from the cache in the same launch.
  template <int kHeadDim, int kThreads>
  FUSED_ATTN_DEVICE void append(int part, int num_parts) const {
    constexpr int kPerChunk = 16 / sizeof(T), kChunks = kHeadDim / kPerChunk;
    const int seqlen_new = static_cast<int>(cache.seqlen_new);
    for (int index = thread_id();; index += kThreads) {
      const int n = part + index / kChunks * num_parts, column = index % kChunks * kPerChunk;
      if (n >= seqlen_new || n >= p.seqlen_k - length) return;  // second condition: cache full
      const KeyValueRow<T> from = of_new(n), to = in_cache(length + n);
      if (column < p.head_dim) {
        store_chunk(const_cast<T*>(to.key) + column, load_chunk(from.key + column));
      }
      if (column < p.head_dim_v) {
        store_chunk(const_cast<T*>(to.value) + column, load_chunk(from.value + column));
      }
    }
  }
};

}  // namespace fused_attn
