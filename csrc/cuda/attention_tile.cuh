// Building blocks of the attention kernels: dispatch by type, storing results, storing and loading
// lse, and the loop over KV tiles in a block that owns a tile of query rows.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/softmax.cuh"

namespace fused_attn {

struct AttentionArgs {
  AttentionParams params;
  GpuParams gpu;
};

// Returns the offset of a row in a tensor, in elements.
FUSED_ATTN_DEVICE int64_t row_start(const int64_t (&strides)[3], int64_t batch, int64_t head,
                                    int64_t row) {
  return batch * strides[0] + head * strides[1] + row * strides[2];
}
template <class T>
FUSED_ATTN_DEVICE T* row_of(T* data, const int64_t (&strides)[3], int64_t batch, int64_t head,
                            int64_t row) {
  return data + row_start(strides, batch, head, row);
}

inline Stream stream_of(const GpuParams& gpu) { return static_cast<Stream>(gpu.stream); }

// Largest head_dim and head_dim_v for which plain kernels are compiled (see is_general). For wider
// heads, plain kernels are not worth the compile time.
constexpr int kMaxPlainHeadDim = 128;

// Returns true if a call requires the general kernel: if its scores are not QK^T times a positive
// factor, if it has dropout, or if no plain kernel is compiled for its head_dim.
inline bool is_general(const AttentionParams& p) {
  // Units multiplies masked scores, -inf, by the factor: NaN if it underflows to 0.
  const bool positive = static_cast<float>(p.scale * 1.4426950408889634) > 0.0f;
  return p.softcap > 0.0 || p.dropout_p > 0.0 || !positive || p.mask.slopes != nullptr ||
         p.mask.bias.data != nullptr || p.head_dim > kMaxPlainHeadDim ||
         p.head_dim_v > kMaxPlainHeadDim;
}

// Calls f(T(), general), where `general` is std::true_type in the general case and std::false_type
// in the plain case. float32 always uses the general case, because the rounding error of
// scale * log2(e) would be visible in its results.
template <int kHeadDim, class F>
void for_type(const AttentionParams& p, F f) {
  for_element(p.dtype, [&](auto element) {
    if constexpr (sizeof(element) == 2 && kHeadDim <= kMaxPlainHeadDim) {
      if (!is_general(p)) return f(element, std::false_type());
    }
    f(element, std::true_type());
  });
}

// Returns the rounding residual of `value` in T, as an element of out_residual in the lower 16
// bits: the float32 bit pattern of `value` minus that of the rounded value, clamped.
template <class T>
FUSED_ATTN_DEVICE uint32_t lost_bits(float value) {
  const int rounded = static_cast<int>(float_bits(to_float(from_float<T>(value))));
  const int lost = static_cast<int>(float_bits(value)) - rounded;
  return static_cast<uint32_t>(lost > 0x7fff ? 0x7fff : lost < -0x7fff ? -0x7fff : lost) & 0xffffu;
}

// Stores the log-sum-exp of a row (natural log) to element `at` of lse, and its rounding residual
// to lse_residual unless that is null. exponent: the maximum score, from Units::exponent. sum: the
// row sum of the weights; 0 if the row is fully masked.
template <class U>
FUSED_ATTN_DEVICE void store_lse(const AttentionParams& p, int64_t at, float exponent, float sum,
                                 const U& units) {
  const double scaled = units.to_natural(exponent), log = log_exact(sum);
  const float high = sum == 0.0f ? -kInfinity : static_cast<float>(scaled + log);
  static_cast<float*>(p.lse)[at] = high;
  if (p.lse_residual == nullptr) return;
  // The order matters: if the maximum is the lowest float32 value, scaled + log loses the log.
  static_cast<float*>(p.lse_residual)[at] =
      sum == 0.0f ? 0.0f : static_cast<float>((scaled - high) + log);
}

// Log-sum-exp of a row for Units::power: an exponent, and the factor that corrects the weights for
// the rounding of that exponent.
struct LogSum {
  float exponent, factor;
};
// The LogSum of a fully masked row. Units::power then returns 0 for every score.
constexpr LogSum kFullyMasked{kInfinity, 0.0f};

// Loads the log-sum-exp that store_lse stored to element `at`. Requires lse_residual.
template <class U>
FUSED_ATTN_DEVICE LogSum load_lse(const AttentionParams& p, int64_t at, const U& units) {
  const float high = static_cast<const float*>(p.lse)[at];
  if (high == -kInfinity) return kFullyMasked;
  const double residual = static_cast<const float*>(p.lse_residual)[at];
  const float exponent = static_cast<float>(units.from_natural(high + residual));
  const double lost = (units.to_natural(exponent) - high) - residual;
  return {exponent, units.power_of(static_cast<float>(units.from_natural(lost)))};
}

// The tile that a block owns: rows [begin, begin + count) of head h of sequence b.
struct OwnedTile {
  int b, h, begin, count;
};

// Returns true if results are float although query, key and value have type T.
template <class T>
FUSED_ATTN_DEVICE bool is_unrounded(const AttentionParams& p) {
  return sizeof(T) < sizeof(float) && p.partial;
}

// Stores element `at` of a result, as T or, in a partial result, as float.
template <class T>
FUSED_ATTN_DEVICE void store_result(const AttentionParams& p, void* result, int64_t at,
                                    float value) {
  if (is_unrounded<T>(p)) {
    static_cast<float*>(result)[at] = value;
  } else {
    static_cast<T*>(result)[at] = from_float<T>(value);
  }
}

// Stores the warp's rows of an accumulator tile to the owned rows of a result, as T or, in a
// partial result, as float. The thread's r-th row is multiplied by factor(r).
//
// tile: shared memory of the block's rows, through which the rows are staged.
// strides: of the batch, head and row dimensions. rows: location of the sequence in the result.
template <class T, int kHeadDim, int kM, class Factor>
FUSED_ATTN_DEVICE void store_result_rows(const AttentionParams& p, uint32_t tile,
                                         const float (&acc)[kM][kHeadDim / 8][4], void* result,
                                         const int64_t (&strides)[3], const SequenceRows& rows,
                                         const OwnedTile& own, int64_t head_dim, Factor factor) {
  const int warp_row = warp_id() * kM * 16, columns = static_cast<int>(head_dim);
  const int64_t at = row_start(strides, rows.batch, own.h, rows.first + own.begin);
  if constexpr (sizeof(T) < sizeof(float)) {
    if (is_unrounded<T>(p)) {
      store_float_rows<kHeadDim, kM>(tile, warp_row, acc, static_cast<float*>(result) + at,
                                     strides[2], own.count, columns, factor);
      return;
    }
  }
  store_rows<T, kHeadDim, kM>(
      tile, warp_row, acc, static_cast<T*>(result) + at, strides[2], own.count, columns,
      [&](int r, float low, float high) { return pair_of<T>(low * factor(r), high * factor(r)); });
}

// Returns the block's tile of up to `block` query rows. Its count is 0 or negative past the end of
// a packed sequence. The last tiles of each head are scheduled first, because under a causal mask
// they take longest.
FUSED_ATTN_DEVICE OwnedTile owned_queries(const AttentionParams& p, int block) {
  const int64_t num_m = (p.seqlen_q + block - 1) / block;
  const int64_t m = num_m - 1 - block_id() % num_m, bh = block_id() / num_m;
  OwnedTile own{static_cast<int>(bh / p.num_heads), static_cast<int>(bh % p.num_heads),
                static_cast<int>(m * block), 0};
  own.count = static_cast<int>(min64(block, query_rows(p, own.b).count - own.begin));
  return own;
}

// Shared-memory layout of a block that owns query rows, in this order: kOwnedTiles tiles of its
// rows (query and, in the backward, grad_out); the pipeline stages of keys and values; matmul
// scratch of each warp; the tile list.
template <class T, int kHeadDim, class Sizes, int kOwnedTiles>
struct QueryOwnerLayout {
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr uint32_t kOwned = 0, kOwnedBytes = Sizes::kRows * kRowBytes;
  static constexpr uint32_t kStages = kOwned + kOwnedTiles * kOwnedBytes;
  static constexpr uint32_t kTileBytes = Sizes::kBlock * kRowBytes;
  static constexpr uint32_t kScratch = kStages + Sizes::kStages * 2 * kTileBytes;
  static constexpr uint32_t kScratchBytes =
      Product<T>::scratch_bytes(Sizes::kRowTiles, Sizes::kBlock);
  static constexpr uint32_t kList = kScratch + Sizes::kWarps * kScratchBytes;
  static constexpr int kBytes = kList + TileList::kBytes;

  static FUSED_ATTN_DEVICE uint32_t key(int stage) { return kStages + stage * 2 * kTileBytes; }
  static FUSED_ATTN_DEVICE uint32_t value(int stage) { return key(stage) + kTileBytes; }
  static FUSED_ATTN_DEVICE uint32_t scratch() { return kScratch + warp_id() * kScratchBytes; }
};

// Starts the copies of the block's rows of a tensor to shared memory. strides: of the batch, head
// and row dimensions. rows: location of the sequence in the tensor. own.h: head index in the
// tensor.
template <class T, int kHeadDim, class Sizes>
FUSED_ATTN_DEVICE void load_owned(uint32_t tile, const void* tensor, const int64_t (&strides)[3],
                                  const SequenceRows& rows, const OwnedTile& own,
                                  int64_t head_dim) {
  const T* source =
      row_of(static_cast<const T*>(tensor), strides, rows.batch, own.h, rows.first + own.begin);
  load_rows_async<T, kHeadDim, Sizes::kRows, Sizes::kThreads>(
      tile, source, strides[2], 0, own.count, static_cast<int>(head_dim));
  copy_commit();
}

// Software pipeline that keeps kStages - 1 tiles in flight to shared memory while one is processed.
// load(stage, t) starts the copies of the t-th tile. With kStages = 1, copies do not overlap
// computation.
template <int kStages, class Load>
struct Pipeline {
  int count;
  Load load;

  FUSED_ATTN_DEVICE Pipeline(int count, Load load) : count(count), load(load) {
    FUSED_ATTN_ROLLED
    for (int t = 0; t < kStages - 1; ++t) {
      if (t < count) load(t, t);
      copy_commit();
    }
  }
  // Waits for the t-th tile, starts the copies of tile t + kStages - 1, and returns the stage of
  // the t-th tile. All threads of the block must call it.
  FUSED_ATTN_DEVICE int next(int t) {
    if constexpr (kStages == 1) {
      sync_block();  // the copies overwrite the previous tile
      load(0, t);
      copy_commit();
      copy_wait<0>();
      sync_block();
      return 0;
    } else {
      copy_wait<kStages - 2>();
      sync_block();  // tile t is complete, and no thread still reads tile t - 1
      const int ahead = t + kStages - 1;
      if (ahead < count) load(ahead % kStages, ahead);
      copy_commit();
      return t % kStages;
    }
  }
};

template <int kStages, class Load>
FUSED_ATTN_DEVICE Pipeline<kStages, Load> pipeline_of(int count, Load load) {
  return {count, load};
}

// Calls tile(partial, key, value, j_begin) for each KV tile that is visible to the owned queries.
// partial: std::true_type if the tile is partially masked, otherwise std::false_type. key, value:
// shared-memory addresses. Copies that the caller has committed before are complete in `tile`.
template <class T, int kHeadDim, class Sizes, class Layout, class F>
FUSED_ATTN_DEVICE void walk_keys(const AttentionParams& p, const GpuParams& gpu,
                                 const OwnedTile& own, F tile) {
  constexpr int kBlock = Sizes::kBlock, kStages = Sizes::kStages;
  const Sequence sequence = sequence_of(p, own.b, own.h);
  const SequenceBounds& bounds = sequence.bounds;
  // Load only keys in [lo, hi): the mask bounds hide all others from every row of the tile.
  const int64_t i_end = own.begin + own.count;
  const int64_t first = max64(own.begin, bounds.query_begin);
  const int64_t last = min64(i_end, bounds.query_end) - 1;
  const int lo = static_cast<int>(max64(0, visible_keys(bounds, first).lo));
  const int hi = static_cast<int>(min64(sequence.seqlen_k, visible_keys(bounds, last).hi));
  const int num_tiles_begin = lo / kBlock;
  const int num_tiles_end = first > last || lo >= hi ? 0 : (hi + kBlock - 1) / kBlock;

  const SequenceRows rows = key_rows(p, own.b);
  const int64_t h_kv = own.h / (p.num_heads / p.num_heads_kv);
  const T* const keys =
      row_of(static_cast<const T*>(p.key), p.key_strides, rows.batch, h_kv, rows.first);
  const T* const values =
      row_of(static_cast<const T*>(p.value), p.value_strides, rows.batch, h_kv, rows.first);
  const auto load = [&](int stage, int j_begin) {
    load_rows_async<T, kHeadDim, kBlock, Sizes::kThreads>(
        Layout::key(stage), keys + j_begin * p.key_strides[2], p.key_strides[2], lo - j_begin,
        hi - j_begin, static_cast<int>(p.head_dim));
    load_rows_async<T, kHeadDim, kBlock, Sizes::kThreads>(
        Layout::value(stage), values + j_begin * p.value_strides[2], p.value_strides[2],
        lo - j_begin, hi - j_begin, static_cast<int>(p.head_dim_v));
  };

  TileList list{Layout::kList, 0, 0, 0};
  FUSED_ATTN_ROLLED
  for (int begin = num_tiles_begin; begin < num_tiles_end; begin += TileList::kCapacity) {
    const int count = num_tiles_end - begin;
    list.build(begin, count < TileList::kCapacity ? count : TileList::kCapacity, Sizes::kThreads,
               [&](int n) {
                 return classify(p, gpu, sequence_of(p, own.b, own.h), own.begin, i_end,
                                 int64_t{n} * kBlock, int64_t{n + 1} * kBlock);
               });
    auto pipeline = pipeline_of<kStages>(
        list.num_all, [&](int stage, int t) { load(stage, list.tile(t) * kBlock); });
    FUSED_ATTN_ROLLED
    for (int t = 0; t < list.num_full; ++t) {
      const int stage = pipeline.next(t);
      tile(std::false_type(), Layout::key(stage), Layout::value(stage), list.tile(t) * kBlock);
    }
    FUSED_ATTN_ROLLED
    for (int t = list.num_full; t < list.num_all; ++t) {
      const int stage = pipeline.next(t);
      tile(std::true_type(), Layout::key(stage), Layout::value(stage), list.tile(t) * kBlock);
    }
  }
  copy_wait<0>();
  sync_block();
}

}  // namespace fused_attn
