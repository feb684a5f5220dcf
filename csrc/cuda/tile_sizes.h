// Tile sizes of the kernels, one line per head dimension, and the limits on them.
//
// Shared memory of a block: 163 KiB on sm_80, 99 on sm_86 and sm_89, 227 on sm_90 and sm_100 (CUDA
// C programming guide, compute capabilities), so blocks stay below 99 KiB. A thread has 255
// registers.
#pragma once

namespace fused_attn {

constexpr int kMaxSharedBytes = 99 << 10;

// A block of kWarps warps owns kRowTiles times 16 rows per warp, and loops over tiles of kBlock
// positions of the other side, with kStages of them in shared memory. kBlocks: blocks that fit on a
// multiprocessor, by registers.
template <int kWarps_, int kRowTiles_, int kBlock_, int kStages_, int kBlocks_>
struct TileSizes {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kRowTiles = kRowTiles_;
  static constexpr int kRows = kWarps * kRowTiles * 16;  // of the tile that a block owns
  static constexpr int kBlock = kBlock_, kStages = kStages_, kBlocks = kBlocks_;
};

// ---- forward: owns queries, walks keys ----------------------------------------------------------

template <int kElementSize, int kHeadDim, bool kGeneral>
struct FwdSizes;
template <bool kGeneral>
struct FwdSizes<2, 32, kGeneral> : TileSizes<4, 2, 64, 2, 2> {};
template <>
struct FwdSizes<2, 64, false> : TileSizes<4, 2, 64, 3, 2> {};
template <>
struct FwdSizes<2, 64, true> : TileSizes<4, 2, 64, 2, 2> {};
template <>
struct FwdSizes<2, 96, false> : TileSizes<8, 1, 64, 2, 1> {};
template <>
struct FwdSizes<2, 96, true> : TileSizes<4, 1, 64, 2, 1> {};
template <bool kGeneral>
struct FwdSizes<2, 128, kGeneral> : TileSizes<8, 1, 64, 2, 1> {};
template <bool kGeneral>
struct FwdSizes<2, 192, kGeneral> : TileSizes<8, 1, 32, 1, 1> {};
template <bool kGeneral>
struct FwdSizes<2, 256, kGeneral> : TileSizes<4, 1, 32, 1, 1> {};
template <bool kGeneral>
struct FwdSizes<4, 32, kGeneral> : TileSizes<4, 1, 32, 2, 2> {};
template <bool kGeneral>
struct FwdSizes<4, 64, kGeneral> : TileSizes<4, 1, 32, 2, 1> {};
template <bool kGeneral>
struct FwdSizes<4, 96, kGeneral> : TileSizes<4, 1, 32, 1, 1> {};
template <bool kGeneral>
struct FwdSizes<4, 128, kGeneral> : TileSizes<4, 1, 16, 1, 1> {};
template <bool kGeneral>
struct FwdSizes<4, 192, kGeneral> : TileSizes<2, 1, 8, 1, 1> {};
template <bool kGeneral>
struct FwdSizes<4, 256, kGeneral> : TileSizes<2, 1, 8, 1, 1> {};

// ---- backward: owns queries, walks keys ---------------------------------------------------------

template <int kElementSize, int kHeadDim, bool kGeneral>
struct DqSizes;
template <bool kGeneral>
struct DqSizes<2, 32, kGeneral> : TileSizes<8, 1, 64, 2, 1> {};
template <bool kGeneral>
struct DqSizes<2, 64, kGeneral> : TileSizes<8, 1, 64, 2, 1> {};
template <>
struct DqSizes<2, 96, false> : TileSizes<4, 1, 64, 1, 1> {};
template <>
struct DqSizes<2, 96, true> : TileSizes<4, 1, 32, 2, 1> {};
template <>
struct DqSizes<2, 128, false> : TileSizes<8, 1, 32, 2, 1> {};
template <>
struct DqSizes<2, 128, true> : TileSizes<8, 1, 32, 1, 1> {};
template <bool kGeneral>
struct DqSizes<2, 192, kGeneral> : TileSizes<4, 1, 32, 1, 1> {};
template <bool kGeneral>
struct DqSizes<2, 256, kGeneral> : TileSizes<4, 1, 16, 1, 1> {};
template <bool kGeneral>
struct DqSizes<4, 32, kGeneral> : TileSizes<4, 1, 32, 2, 2> {};
template <bool kGeneral>
struct DqSizes<4, 64, kGeneral> : TileSizes<4, 1, 32, 1, 1> {};
template <bool kGeneral>
struct DqSizes<4, 96, kGeneral> : TileSizes<2, 1, 32, 1, 1> {};
template <bool kGeneral>
struct DqSizes<4, 128, kGeneral> : TileSizes<2, 1, 16, 1, 1> {};
template <bool kGeneral>
struct DqSizes<4, 192, kGeneral> : TileSizes<2, 1, 16, 1, 1> {};
template <bool kGeneral>
struct DqSizes<4, 256, kGeneral> : TileSizes<2, 1, 8, 1, 1> {};

// ---- backward: owns keys, walks queries ---------------------------------------------------------

// kAddsDq: dQ takes registers too.
template <int kElementSize, int kHeadDim, bool kGeneral, bool kAddsDq>
struct DkdvSizes;
template <bool kGeneral>
struct DkdvSizes<2, 32, kGeneral, false> : TileSizes<8, 1, 64, 2, 1> {};
template <bool kGeneral>
struct DkdvSizes<2, 32, kGeneral, true> : TileSizes<4, 1, 32, 2, 2> {};
template <>
struct DkdvSizes<2, 64, false, false> : TileSizes<8, 1, 64, 2, 1> {};
template <>
struct DkdvSizes<2, 64, true, false> : TileSizes<8, 1, 32, 2, 1> {};
template <>
struct DkdvSizes<2, 64, false, true> : TileSizes<8, 1, 32, 2, 1> {};
template <>
struct DkdvSizes<2, 64, true, true> : TileSizes<4, 1, 16, 3, 2> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<2, 96, kGeneral, kAddsDq> : TileSizes<4, 1, 32, 2, 1> {};
template <bool kGeneral>
struct DkdvSizes<2, 128, kGeneral, false> : TileSizes<8, 1, 32, 1, 1> {};
template <bool kGeneral>
struct DkdvSizes<2, 128, kGeneral, true> : TileSizes<8, 1, 16, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<2, 192, kGeneral, kAddsDq> : TileSizes<4, 1, 16, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<2, 256, kGeneral, kAddsDq> : TileSizes<4, 1, 16, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<4, 32, kGeneral, kAddsDq> : TileSizes<4, 1, 32, 2, 2> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<4, 64, kGeneral, kAddsDq> : TileSizes<4, 1, 32, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<4, 96, kGeneral, kAddsDq> : TileSizes<2, 1, 8, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<4, 128, kGeneral, kAddsDq> : TileSizes<2, 1, 16, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<4, 192, kGeneral, kAddsDq> : TileSizes<2, 1, 8, 1, 1> {};
template <bool kGeneral, bool kAddsDq>
struct DkdvSizes<4, 256, kGeneral, kAddsDq> : TileSizes<2, 1, 8, 1, 1> {};

// ---- decoding: 16 rows, walks keys --------------------------------------------------------------

// Each of kWarps warps processes kSlice keys of a tile; kStages tiles are in shared memory. Two
// blocks fit on a multiprocessor of sm_80, sm_90 and sm_100, with 2 (kStages - 1) tiles of keys and
// values in flight: 48 KiB or more. For wide heads in float only one tile fits: a block waits for
// it while the other computes.
template <int kWarps_, int kSlice_, int kStages_>
struct DecodeTileSizes {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kBlocks = 2;
  static constexpr int kSlice = kSlice_, kBlock = kWarps * kSlice, kStages = kStages_;
};

// Trailing comments give the tile size in bytes. With wide heads, a tile of 64 keys leaves no room
// for another stage, so tiles have 32 keys and blocks two warps: the slice of a warp is at least 16
// keys, the K of one 16-bit MMA.
template <int kElementSize, int kHeadDim>
struct DecodeSizes;
template <>
struct DecodeSizes<2, 32> : DecodeTileSizes<4, 32, 3> {};  // 16 KiB
template <>
struct DecodeSizes<2, 64> : DecodeTileSizes<4, 16, 3> {};  // 16 KiB
template <>
struct DecodeSizes<2, 96> : DecodeTileSizes<4, 16, 3> {};  // 24 KiB
template <>
struct DecodeSizes<2, 128> : DecodeTileSizes<4, 16, 2> {};  // 32 KiB
template <>
struct DecodeSizes<2, 192> : DecodeTileSizes<2, 16, 2> {};  // 24 KiB; three stages: one block
template <>
struct DecodeSizes<2, 256> : DecodeTileSizes<2, 16, 2> {};  // 32 KiB
template <>
struct DecodeSizes<4, 32> : DecodeTileSizes<4, 16, 3> {};  // 16 KiB
template <>
struct DecodeSizes<4, 64> : DecodeTileSizes<4, 16, 2> {};  // 32 KiB
template <>
struct DecodeSizes<4, 96> : DecodeTileSizes<2, 16, 2> {};  // 24 KiB
template <>
struct DecodeSizes<4, 128> : DecodeTileSizes<2, 16, 2> {};  // 32 KiB
template <>
struct DecodeSizes<4, 192> : DecodeTileSizes<2, 16, 1> {};  // 48 KiB
template <>
struct DecodeSizes<4, 256> : DecodeTileSizes<2, 16, 1> {};  // 64 KiB; one block on sm_80

// ---- gradient of a bias, weights: tiles of scores at a position ---------------------------------

// Queries of a tile, and as many keys. Two tiles of 64 rows of 256 16-bit elements, or of 32 rows
// of as many floats, take 64 KiB.
constexpr int score_tile(int element_size) { return element_size == 4 ? 32 : 64; }

// Each warp processes 16 queries and 32 keys: with twice as many keys, the bias gradient spilled on
// sm_80 and took longer to compile. Two blocks of 16-bit types would leave 128 registers a thread,
// with spills of 24 bytes at head_dim 128.
template <int kElementSize>
struct ScoreSizes {
  static constexpr int kTile = score_tile(kElementSize), kColumns = 32;
  static constexpr int kRowWarps = kTile / 16, kColumnWarps = kTile / kColumns;
  static constexpr int kWarps = kRowWarps * kColumnWarps, kThreads = kWarps * 32;
  static constexpr int kBlocks = kElementSize == 4 ? 6 : 1;
};

}  // namespace fused_attn
