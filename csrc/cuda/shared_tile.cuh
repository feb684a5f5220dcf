// Tiles of rows in shared memory, and their copies from and to tensors in global memory.
#pragma once

#include "cuda/intrinsics.cuh"

namespace fused_attn {

// Returns element e of a chunk with elements of type T, as float32.
template <class T>
FUSED_ATTN_DEVICE float element(const Chunk& chunk, int e) {
  if constexpr (sizeof(T) == 4) {
    return bits_float(chunk.word[e]);
  } else {
    return to_float(T{static_cast<uint16_t>(chunk.word[e / 2] >> (e % 2 * 16))});
  }
}

// Layout of a tile with rows of kHeadDim elements in shared memory. The 16-byte chunks of each row
// are swizzled, so that the same chunk of 8 adjacent rows, which ldmatrix reads together, covers
// all 32 banks.
template <class T, int kHeadDim>
struct SharedTile {
  static constexpr int kPerChunk = 16 / sizeof(T);
  static constexpr int kChunks = kHeadDim / kPerChunk;
  static constexpr int kRowBytes = kHeadDim * sizeof(T);
  static_assert(kChunks % 2 == 0, "a row must be a multiple of two chunks");

  static FUSED_ATTN_DEVICE uint32_t at(uint32_t tile, int row, int chunk) {
    // Rows whose size is not a multiple of 128 bytes start at different banks anyway, so the
    // swizzle needs fewer bits of the row.
    const int swizzled = kChunks % 8 == 0   ? chunk ^ (row & 7)
                         : kChunks % 4 == 0 ? chunk ^ (row >> 1 & 3)
                                            : chunk ^ (row >> 2 & 1);
    return tile + row * kRowBytes + swizzled * 16;
  }
  static FUSED_ATTN_DEVICE uint32_t element(uint32_t tile, int row, int column) {
    return at(tile, row, column / kPerChunk) + column % kPerChunk * sizeof(T);
  }
};

struct AllRows {
  FUSED_ATTN_DEVICE bool operator()(int) const { return true; }
};

// Starts the copies of kRows rows of a tensor to a tile. Rows outside [begin, end), rows for which
// valid(row) is false, and elements from head_dim on are not read, and become 0 in the tile. The
// caller commits the copies.
template <class T, int kHeadDim, int kRows, int kThreads, class Valid = AllRows>
FUSED_ATTN_DEVICE void load_rows_async(uint32_t tile, const T* source, int64_t row_stride,
                                       int begin, int end, int head_dim, Valid valid = {}) {
  using Tile = SharedTile<T, kHeadDim>;
  static_assert(kRows * Tile::kChunks % kThreads == 0, "threads must copy equally many chunks");
  const int thread = unhoisted(thread_id());
  // Unrolled further, the addresses would occupy registers that the surrounding loop needs.
  FUSED_ATTN_UNROLL_BY(2)
  for (int c = 0; c < kRows * Tile::kChunks / kThreads; ++c) {
    const int index = c * kThreads + thread;
    const int row = index / Tile::kChunks, chunk = index % Tile::kChunks;
    const bool inside = row >= begin && row < end && chunk * Tile::kPerChunk < head_dim;
    const bool read = inside && valid(row);
    // The host guarantees that offsets within a tile fit into 32 bits.
    const int offset = row * static_cast<int>(row_stride) + chunk * Tile::kPerChunk;
    copy_async(Tile::at(tile, row, chunk), source + (read ? offset : 0), read);
  }
}

// Returns two floats converted to T, as a pair of adjacent elements.
template <class T>
FUSED_ATTN_DEVICE auto pair_of(float low, float high) {
  if constexpr (sizeof(T) == 4) {
    return Pair{low, high};
  } else {
    return pack<T>(low, high);
  }
}

// Stores columns [kFirst, kFirst + kHeadDim) of the warp's rows of an accumulator tile to a tensor,
// staged through the warp's rows of `tile` in shared memory. Only rows [0, end) of the tile and the
// first head_dim of these columns are stored. result(r, low, high) converts two adjacent elements
// of the thread's r-th row to the type of pair_of.
template <class T, int kHeadDim, int kM, int kFirst = 0, int kFragments, class Result>
FUSED_ATTN_DEVICE void store_rows(uint32_t tile, int warp_row,
                                  const float (&acc)[kM][kFragments][4], T* target,
                                  int64_t row_stride, int end, int head_dim, Result result) {
  using Tile = SharedTile<T, kHeadDim>;
  const int lane = unhoisted(lane_id()), g = lane / 4, t = lane % 4;
  FUSED_ATTN_UNROLL
  for (int m = 0; m < kM; ++m) {
    FUSED_ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + m * 16 + half * 8 + g;
      const int r = 2 * m + half;
      FUSED_ATTN_UNROLL
      for (int n = 0; n < kHeadDim / 8; ++n) {
        store_shared(
            Tile::element(tile, row, n * 8 + 2 * t),
            result(r, acc[m][kFirst / 8 + n][2 * half], acc[m][kFirst / 8 + n][2 * half + 1]));
      }
    }
  }
  sync_warp();
  const uint64_t misaligned = reinterpret_cast<uint64_t>(target) | row_stride * sizeof(T);
  const bool whole_chunks = misaligned % 16 == 0 && head_dim % Tile::kPerChunk == 0;
  FUSED_ATTN_ROLLED
  for (int index = lane; index < kM * 16 * Tile::kChunks; index += 32) {
    const int row = warp_row + index / Tile::kChunks, chunk = index % Tile::kChunks;
    const int column = chunk * Tile::kPerChunk;
    if (row >= end || column >= head_dim) continue;
    T* const to = target + row * row_stride + column;
    if (whole_chunks) {
      store_chunk(to, load_shared<Chunk>(Tile::at(tile, row, chunk)));
    } else {
      FUSED_ATTN_ROLLED
      for (int e = 0; e < Tile::kPerChunk && column + e < head_dim; ++e) {
        to[e] = load_shared<T>(Tile::element(tile, row, column + e));
      }
    }
  }
}

// Stores the warp's rows of an accumulator tile to a tensor of floats, as store_rows does. The
// thread's r-th row is multiplied by factor(r).
//
// `tile` has rows of kHeadDim 16-bit elements, so each half of the columns is staged in turn.
// Stores directly from the registers would need more registers for addresses, and spill.
template <int kHeadDim, int kM, class Factor>
FUSED_ATTN_DEVICE void store_float_rows(uint32_t tile, int warp_row,
                                        const float (&acc)[kM][kHeadDim / 8][4], float* target,
                                        int64_t row_stride, int end, int head_dim, Factor factor) {
  constexpr int kHalf = kHeadDim / 2;
  const auto result = [&](int r, float low, float high) {
    return Pair{low * factor(r), high * factor(r)};
  };
  store_rows<float, kHalf, kM>(tile, warp_row, acc, target, row_stride, end, head_dim, result);
  sync_warp();  // the second half overwrites the first in shared memory
  store_rows<float, kHalf, kM, kHalf>(tile, warp_row, acc, target + kHalf, row_stride, end,
                                      head_dim - kHalf, result);
}

}  // namespace fused_attn
