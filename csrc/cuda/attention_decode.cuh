// Attention of a few queries to many keys (decoding). Decoding is memory bound: the lower bound on
// the time is the size of keys and values divided by the memory bandwidth.
//
// The rows of a block's tile are the queries of all heads that share a KV head. The keys are
// divided into splits, one per block (split-KV), and decode_merge.cuh merges their results. KV
// tiles are assigned to the splits round-robin, which balances the load wherever a mask leaves
// visible tiles. Each warp processes its slice of every KV tile with a separate online softmax.
//
// To saturate the memory bandwidth, bandwidth times latency bytes must be in flight. At 4.8 TB/s
// (H200, data sheet) and an assumed latency of 1 us, this is 36 KB on each of 132 multiprocessors.
// The sizes in tile_sizes.h satisfy this requirement.
//
// Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
#pragma once

#include "cuda/decode_merge.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/tile_sizes.h"

namespace fused_attn {

// Shared-memory layout of a block, in this order: queries; pipeline stages of keys and values,
// later overwritten by the results of the warps; matmul scratch of each warp; row addresses of two
// KV tiles; the tile list.
template <class T, int kHeadDim>
struct DecodeLayout {
  using Sizes = DecodeSizes<sizeof(T), kHeadDim>;
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kStages = kQuery + kDecodeRows * kRowBytes;
  static constexpr uint32_t kTileBytes = Sizes::kBlock * kRowBytes;
  static constexpr uint32_t kStagesBytes = Sizes::kStages * 2 * kTileBytes;
  static constexpr uint32_t kScratch = kStages + kStagesBytes;
  static constexpr uint32_t kScratchBytes = Product<T>::scratch_bytes(1, Sizes::kSlice);
  static constexpr uint32_t kRows = kScratch + Sizes::kWarps * kScratchBytes;
  static constexpr uint32_t kRowsBytes = Sizes::kBlock * sizeof(Chunk);
  static constexpr uint32_t kList = kRows + 2 * kRowsBytes;
  static constexpr int kBytes = kList + TileList::kBytes;
  static_assert(kBytes <= kMaxSharedBytes, "tile_sizes.h: the tiles exceed shared memory");

  // Results of a warp: 16 rows of float32 accumulators, and one Pair (maximum score, row sum) per
  // row. Rows are padded by 8 floats, so that adjacent rows begin 8 banks apart.
  static constexpr int kResultBytes = (kHeadDim + 8) * 4;
  static constexpr uint32_t kResultsBytes = kDecodeRows * (kResultBytes + sizeof(Pair));
  static_assert(Sizes::kWarps * kResultsBytes <= kStagesBytes,
                "the results of all warps must fit the stages");

  static FUSED_ATTN_DEVICE uint32_t key(int stage) { return kStages + stage * 2 * kTileBytes; }
  static FUSED_ATTN_DEVICE uint32_t value(int stage) { return key(stage) + kTileBytes; }
  static FUSED_ATTN_DEVICE uint32_t scratch() { return kScratch + warp_id() * kScratchBytes; }
  static FUSED_ATTN_DEVICE uint32_t row(int t, int row) {
    return kRows + t % 2 * kRowsBytes + row * static_cast<uint32_t>(sizeof(Chunk));
  }
  static FUSED_ATTN_DEVICE uint32_t result(int warp, int row, int column) {
    return kStages + warp * kResultsBytes + row * kResultBytes + column * 4;
  }
  static FUSED_ATTN_DEVICE uint32_t statistics(int warp, int row) {
    return result(warp, kDecodeRows, 0) + row * static_cast<uint32_t>(sizeof(Pair));
  }
};

template <class T, int kHeadDim>
struct DecodeKernel {
  using Sizes = DecodeSizes<sizeof(T), kHeadDim>;
  using Layout = DecodeLayout<T, kHeadDim>;
  using Shared = SharedTile<T, kHeadDim>;
  static constexpr int kBlock = Sizes::kBlock, kSlice = Sizes::kSlice;

  const DecodeArgs& args;
  const AttentionParams& p;
  DecodeTile own;
  Units<T, true> units;
  Accumulator<1, kHeadDim> acc;
  SoftmaxState<1> softmax;

  FUSED_ATTN_DEVICE explicit DecodeKernel(const DecodeArgs& a)
      : args(a), p(a.params), own(decode_tile(p, a.gpu.num_splits)), units(p) {}

  FUSED_ATTN_DEVICE void run() {
    const int num_parts = static_cast<int>(args.gpu.num_splits);
    if (own.is_first()) {
      KeyValueRows<T>(args, own).template append<kHeadDim, Sizes::kThreads>(own.part, num_parts);
    }
    if (own.count <= 0) return;
    load_queries();
    set_zero<1, kHeadDim>(acc);
    softmax.reset();
    walk(num_parts);
    copy_wait<0>();
    sync_block();  // results overwrite the keys
    put_results();
    sync_block();
    for (int row = warp_id(); row < own.count; row += Sizes::kWarps) finish(row, num_parts);
  }

 private:
  FUSED_ATTN_DEVICE void load_queries() {
    const SequenceRows at = query_rows(p, own.b);
    for (int index = thread_id(); index < kDecodeRows * Shared::kChunks; index += Sizes::kThreads) {
      const int row = index / Shared::kChunks, chunk = index % Shared::kChunks;
      const bool read = row < own.count && chunk * Shared::kPerChunk < p.head_dim;
      const int inside = read ? row : 0;
      const T* const query = row_of(static_cast<const T*>(p.query), p.query_strides, at.batch,
                                    own.head(inside), at.first + own.query(inside));
      copy_async(Shared::at(Layout::kQuery, row, chunk),
                 query + (read ? chunk * Shared::kPerChunk : 0), read);
    }
    copy_commit();
  }

  // Loops over the KV tiles of the block's split.
  FUSED_ATTN_DEVICE void walk(int num_parts) {
    const DecodeRange range = range_of(own);
    const Sequence sequence = sequence_of(p, own.b, own.first_head);
    const SequenceBounds& bounds = sequence.bounds;
    // Load only keys in [lo, hi): the mask bounds hide all others from every row of the tile.
    const int64_t first = max64(range.i_begin, bounds.query_begin);
    const int64_t last = min64(range.i_end, bounds.query_end) - 1;
    const int lo = static_cast<int>(max64(0, visible_keys(bounds, first).lo));
    const int hi = static_cast<int>(min64(sequence.seqlen_k, visible_keys(bounds, last).hi));
    const int begin = lo / kBlock;
    const int end = first > last || lo >= hi ? begin : (hi + kBlock - 1) / kBlock;
    const int count = (end - begin - own.part + num_parts - 1) / num_parts;
    const auto j_begin = [&](int n) { return (begin + own.part + n * num_parts) * kBlock; };

    const KeyValueRows<T> keys(args, own);
    TileList list{Layout::kList, 0, 0, 0};
    // Computes the address of each row of tile t once, for all of its chunks. The addresses of tile
    // t + 1 are computed while tile t is in flight.
    const auto find_rows = [&](int t) {
      if (t >= list.num_all || thread_id() >= kBlock) return;
      const int j = j_begin(list.tile(t)) + thread_id();
      KeyValueRow<T> row{nullptr, nullptr};
      if (j >= lo && j < hi) row = keys.at(j);
      const uint64_t key = reinterpret_cast<uint64_t>(row.key);
      const uint64_t value = reinterpret_cast<uint64_t>(row.value);
      store_shared(Layout::row(t, thread_id()),
                   Chunk{{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                          static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)}});
    };
    const auto load = [&](int stage, int t) {
      if (t < Sizes::kStages - 1) sync_block();  // in the prologue, next() has not synchronized yet
      load_tile(stage, t);
      find_rows(t + 1);
    };
    for (int n = 0; n < count; n += TileList::kCapacity) {
      const int left = count - n;
      list.build(n, left < TileList::kCapacity ? left : TileList::kCapacity, Sizes::kThreads,
                 [&](int tile) {
                   const int64_t j = j_begin(tile);
                   return classify_heads(p, args.gpu, own.b, range, j, j + kBlock);
                 });
      find_rows(0);
      auto pipeline = pipeline_of<Sizes::kStages>(list.num_all, load);
      FUSED_ATTN_ROLLED
      for (int t = 0; t < list.num_full; ++t) {
        const int stage = pipeline.next(t);
        tile<false>(stage, j_begin(list.tile(t)));
      }
      FUSED_ATTN_ROLLED
      for (int t = list.num_full; t < list.num_all; ++t) {
        const int stage = pipeline.next(t);
        tile<true>(stage, j_begin(list.tile(t)));
      }
    }
  }

  FUSED_ATTN_DEVICE void load_tile(int stage, int t) {
    static_assert(kBlock <= Sizes::kThreads, "each thread looks up at most one row");
    static_assert(kBlock * Shared::kChunks % Sizes::kThreads == 0,
                  "threads must copy equally many chunks");
    FUSED_ATTN_UNROLL_BY(2)
    for (int c = 0; c < kBlock * Shared::kChunks / Sizes::kThreads; ++c) {
      const int index = c * Sizes::kThreads + thread_id();
      const int row = index / Shared::kChunks, chunk = index % Shared::kChunks;
      const Chunk found = load_shared<Chunk>(Layout::row(t, row));
      copy_chunk(Shared::at(Layout::key(stage), row, chunk), found.word[0], found.word[1], chunk,
                 p.head_dim);
      copy_chunk(Shared::at(Layout::value(stage), row, chunk), found.word[2], found.word[3], chunk,
                 p.head_dim_v);
    }
  }
  FUSED_ATTN_DEVICE void copy_chunk(uint32_t to, uint32_t low, uint32_t high, int chunk,
                                    int64_t head_dim) {
    const uint64_t row = uint64_t{high} << 32 | low;
    const bool read = row != 0 && chunk * Shared::kPerChunk < head_dim;
    // copy_async requires a valid address even if it reads nothing.
    const T* const source = read ? reinterpret_cast<const T*>(row) + chunk * Shared::kPerChunk
                                 : static_cast<const T*>(p.query);
    copy_async(to, source, read);
  }

  template <bool kPartial>
  FUSED_ATTN_DEVICE void tile(int stage, int j_begin) {
    // Recomputed for each tile. Kept live across tiles, `sequence` would cause register spills with
    // wide heads.
    const Sequence sequence = sequence_of(p, own.b, own.first_head);
    const FragmentRows<1> rows = fragment_rows(p, own);
    const int slice = warp_id() * kSlice, column = j_begin + slice;
    Visible<1> visible{};
    if constexpr (kPartial) visible = visible_of<false, 1, kSlice>(p.mask, sequence, rows, column);
    Accumulator<1, kSlice> s;
    set_zero<1, kSlice>(s);
    Product<T>::template rows_by_rows<1, kSlice, kHeadDim>(
        s, Layout::kQuery, 0, Layout::key(stage) + slice * Layout::kRowBytes, args.gpu.tf32);
    finish_scores<true, kPartial, false, 1, kSlice>(s, visible, p, sequence, rows, column);
    float rescale[2];
    softmax.template update<kPartial, kSlice>(s, units, rescale);
    for_each(acc, [&](float& sum, int, int, int e) { sum *= rescale[e / 2]; });
    if (p.dropout_p > 0.0) {
      drop<false, 1, kSlice>(s, dropout_of(p, args.gpu, sequence.b), rows, column);
    }
    Product<T>::template weights_by_columns<kPartial, 1, kHeadDim, kSlice>(
        acc, s, Layout::value(stage) + slice * Layout::kRowBytes,
        kPartial ? visible_columns(p.mask, visible) : ~0u, Layout::scratch(), args.gpu.tf32);
  }

  // Stores the accumulators, maximum scores and row sums of the warp to shared memory.
  FUSED_ATTN_DEVICE void put_results() {
    const int g = lane_id() / 4, t = lane_id() % 4;
    softmax.reduce();
    FUSED_ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + g;
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kHeadDim / 8; ++n) {
        store_shared(Layout::result(warp_id(), row, n * 8 + 2 * t),
                     Pair{acc[0][n][2 * half], acc[0][n][2 * half + 1]});
      }
      if (t == 0) {
        store_shared(Layout::statistics(warp_id(), row),
                     Pair{units.exponent(softmax.maximum[half]), softmax.sum[half]});
      }
    }
  }

  // Merges the results of the warps for a row. Stores out and lse if there is a single split, and
  // the result of this split to the workspace otherwise.
  FUSED_ATTN_DEVICE void finish(int row, int num_parts) {
    Pair of_warp[Sizes::kWarps];
    Merged<T> merged(units);
    FUSED_ATTN_UNROLL
    for (int w = 0; w < Sizes::kWarps; ++w) {
      of_warp[w] = load_shared<Pair>(Layout::statistics(w, row));
      merged.largest = larger(merged.largest, of_warp[w].low);
    }
    FUSED_ATTN_UNROLL
    for (int w = 0; w < Sizes::kWarps; ++w) {
      const float share = merged.share(of_warp[w].low);
      merged.sum = multiply_add(of_warp[w].high, share, merged.sum);
      of_warp[w].low = share;
    }
    const int head_dim_v = static_cast<int>(p.head_dim_v);
    const auto value = [&](int column) {
      float sum = 0.0f;
      FUSED_ATTN_UNROLL
      for (int w = 0; w < Sizes::kWarps; ++w) {
        sum = multiply_add(load_shared<float>(Layout::result(w, row, column)), of_warp[w].low, sum);
      }
      return sum;
    };
    const DecodedRow to = decoded_row(p, own.b, own.head(row), own.query(row));
    if (num_parts == 1) {
      store_decoded<T>(p, args.gpu, to, merged, units, lane_id(), 32, value);
      return;
    }
    float* const part = args.gpu.splits + (to.lse * num_parts + own.part) * (2 + p.head_dim_v);
    if (lane_id() == 0) {
      part[0] = merged.largest;
      part[1] = merged.sum;
    }
    for (int column = lane_id(); column < head_dim_v; column += 32)
      part[2 + column] = value(column);
  }
};

template <class T, int kHeadDim>
FUSED_ATTN_KERNEL((DecodeSizes<sizeof(T), kHeadDim>::kThreads),
                  (DecodeSizes<sizeof(T), kHeadDim>::kBlocks))
attention_decode_kernel(FUSED_ATTN_ARGUMENT DecodeArgs args) {
  DecodeKernel<T, kHeadDim>(args).run();
}

template <int kHeadDim>
void run_attention_decode(const AttentionParams& p, const CacheParams& cache,
                          const GpuParams& gpu) {
  // Only the general case is compiled: loading keys dominates and hides its extra arithmetic.
  for_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    using Kernel = DecodeKernel<T, kHeadDim>;
    const DecodeArgs args{p, cache, gpu};
    const int64_t blocks = row_tiles(p) * gpu.num_splits * p.batch * p.num_heads_kv;
    launch("attention_decode_kernel", attention_decode_kernel<T, kHeadDim>, blocks,
           Kernel::Sizes::kThreads, Kernel::Layout::kBytes, args, stream_of(gpu));
    if (gpu.num_splits > 1) run_decode_merge<T, kHeadDim>(p, gpu);
  });
}

}  // namespace fused_attn
