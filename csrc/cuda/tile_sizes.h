// Tile sizes of the attention kernels for each head dimension, and the limits on them.
//
// A block can use 163 KiB of shared memory on sm_80, 99 KiB on sm_86 and sm_89, and 227 KiB on
// sm_90 and sm_100 (CUDA C programming guide, compute capabilities). All blocks therefore use at
// most 99 KiB. A thread can use 255 registers.
#pragma once

namespace fused_attn {

constexpr int kMaxSharedBytes = 99 << 10;

// Tile sizes of a kernel. A block of kWarps warps owns a tile with kRowTiles * 16 rows per warp. It
// loops over tiles of kBlock positions of the other sequence (keys if it owns queries, and vice
// versa), of which kStages are in shared memory. kBlocks: number of blocks whose registers must fit
// on a multiprocessor (__launch_bounds__).
template <int kWarps_, int kRowTiles_, int kBlock_, int kStages_, int kBlocks_>
struct TileSizes {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kRowTiles = kRowTiles_;
  static constexpr int kRows = kWarps * kRowTiles * 16;  // rows of the owned tile
  static constexpr int kBlock = kBlock_, kStages = kStages_, kBlocks = kBlocks_;
};

// Forward: a block owns queries and loops over keys.

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

// Backward, dQ: a block owns queries and loops over keys.

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

// Backward, dK and dV: a block owns keys and loops over queries.

// kAddsDq: the kernel also adds to dQ, which needs additional registers.
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

// Decoding: a block owns 16 rows and loops over keys.

// Tile sizes of a decoding kernel. Each of kWarps warps processes kSlice keys of a KV tile, and
// kStages KV tiles are in shared memory. Two blocks fit on a multiprocessor of sm_80, sm_90 and
// sm_100. Together they have 2 * (kStages - 1) KV tiles in flight, at least 48 KiB. With wide heads
// in float32 there is room for only one stage, so one block waits for its tile while the other
// computes.
template <int kWarps_, int kSlice_, int kStages_>
struct DecodeTileSizes {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kBlocks = 2;
  static constexpr int kSlice = kSlice_, kBlock = kWarps * kSlice, kStages = kStages_;
};

// Trailing comments give the size of a KV tile, keys and values together. With wide heads, a tile
// of 64 keys leaves no room for another stage, so tiles have 32 keys. Blocks then have two warps,
// because the slice of a warp is at least 16 keys, the K dimension of one 16-bit MMA.
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
struct DecodeSizes<2, 192> : DecodeTileSizes<2, 16, 2> {};  // 24 KiB; 3 stages: only one block fits
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
struct DecodeSizes<4, 256> : DecodeTileSizes<2, 16, 1> {};  // 64 KiB; only one block fits on sm_80

// Bias gradient and attention weights: a block owns a tile of scores.

// Returns the number of queries, and of keys, of a score tile. With head_dim 256, the two operands
// then occupy 64 KiB in either case: 64 rows each of 16-bit elements, or 32 rows each of float32.
constexpr int score_tile(int element_size) { return element_size == 4 ? 32 : 64; }

// Sizes of score tiles. Each warp processes 16 queries and 32 keys. With 64 keys, the bias gradient
// spilled registers on sm_80 and took longer to compile. In 16-bit types, two blocks per
// multiprocessor would leave 128 registers per thread, which spills 24 bytes at head_dim 128.
template <int kElementSize>
struct ScoreSizes {
  static constexpr int kTile = score_tile(kElementSize), kColumns = 32;
  static constexpr int kRowWarps = kTile / 16, kColumnWarps = kTile / kColumns;
  static constexpr int kWarps = kRowWarps * kColumnWarps, kThreads = kWarps * 32;
  static constexpr int kBlocks = kElementSize == 4 ? 6 : 1;
};

}  // namespace fused_attn
