// AMX tile registers (16 rows of 64 bytes) and the instructions that load, store and multiply them.
//
// Registers 0 to 3 hold float32 accumulators, 4 and 5 left operands, 6 and 7 right operands. In
// memory, a tile is 1 KiB and contiguous.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/simd/convert.h"

namespace fused_attn {
namespace {

constexpr int64_t kTileRows = 16, kTileSteps = 32;  // kTileSteps: 16-bit elements per row
constexpr int64_t kTileNumbers = kTileRows * kTileSteps, kTileSums = kTileRows * 16;
// Left operands and accumulators are stored as two adjacent tiles, which hold 32 consecutive rows.
constexpr int64_t kPairNumbers = 2 * kTileNumbers, kPairSums = 2 * kTileSums;

// Returns the number of tiles for `dim` features. Heads without features have a tile of zeros.
constexpr int64_t tile_steps(int64_t dim) {
  return dim <= kTileSteps ? 1 : (dim + kTileSteps - 1) / kTileSteps;
}

// Configures the tile registers of the calling thread. The destructor releases them.
class TileRegisters {
 public:
  TileRegisters() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // forces the stores to config
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

#if !defined(FUSED_ATTN_EMULATED)  // otherwise tests/x86_emulator defines these functions
// Loads a tile whose rows are `stride` bytes apart.
template <int kTile>
FUSED_ATTN_INLINE void tile_load(const void* tile, int64_t stride = 64) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(tile), "r"(stride), "i"(kTile) : "memory");
}

// Loads a tile of streamed data with the t1 hint. The time of a tile MMA then does not depend on
// the other contents of L1: 19.7 cycles instead of up to 26.6.
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
// Uses inline assembly, because GCC before 13 lacks the intrinsic and its compiler flag.
template <int kSum, int kLeft, int kRight>
FUSED_ATTN_INLINE void tile_multiply_half() {
  asm volatile("tdpfp16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}
#endif

// Hides the value of a vector from the compiler, which would reload a constant at each use, and
// would turn a loop that stores zeros into memset.
template <class V>
FUSED_ATTN_INLINE V in_register(V x) {
  asm("" : "+v"(x));
  return x;
}
#endif

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
