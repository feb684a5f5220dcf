// The tile registers of AMX: 16 rows of 64 bytes each, and what multiplies them.
//
// Of the eight, 0 to 3 are sums (float32), 4 and 5 left operands, 6 and 7 right ones. In memory a
// tile is 1 KiB, contiguous.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/simd/convert.h"

namespace fused_attn {
namespace {

constexpr int64_t kTileRows = 16, kTileSteps = 32;  // steps: 16-bit numbers of a row
constexpr int64_t kTileNumbers = kTileRows * kTileSteps, kTileSums = kTileRows * 16;
// Left operands and sums have two rows of tiles, which lie side by side: 32 rows in a row.
constexpr int64_t kPairNumbers = 2 * kTileNumbers, kPairSums = 2 * kTileSums;

// The tile registers of this thread, for as long as it lives.
class TileRegisters {
 public:
  TileRegisters() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // or config would not be stored in time
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// stride: bytes from row to row.
template <int kTile>
FUSED_ATTN_INLINE void tile_load(const void* tile, int64_t stride = 64) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(tile), "r"(stride), "i"(kTile) : "memory");
}

// For what streams through: with the hint, what L1 holds besides no longer matters (19.7 cycles a
// product instead of up to 26.6).
template <int kTile>
FUSED_ATTN_INLINE void tile_stream(const void* tile) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
               :
               : "r"(tile), "r"(int64_t{64}), "i"(kTile)
               : "memory");
}

template <int kTile>
FUSED_ATTN_INLINE void tile_store(void* tile) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(tile), "r"(int64_t{64}), "i"(kTile)
               : "memory");
}

template <int kTile>
FUSED_ATTN_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kSum, int kLeft, int kRight>
FUSED_ATTN_INLINE void tile_multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

#if defined(FUSED_ATTN_AMX_FP16)
// GCC has an intrinsic and a flag for it from 13 on only.
template <int kSum, int kLeft, int kRight>
FUSED_ATTN_INLINE void tile_multiply_half() {
  asm volatile("tdpfp16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}
#endif

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
