// AMX-BF16 and AMX-FP16, with thread-local arrays as tile registers. intrinsics.h includes this
// file.
//
// Tiles have 16 rows of 64 bytes, the only shape that the kernels configure. Other shapes and tiles
// that are not configured abort.
#pragma once

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

namespace fused_attn {
namespace {

struct Tiles {
  bool configured;
  alignas(64) uint32_t rows[8][16][16];
};
thread_local Tiles tiles;

void _tile_loadconfig(const void* config) {
  bool supported = element<uint8_t>(config, 0) == 1;  // palette
  for (int t = 0; t < 8; ++t) {
    supported &= element<uint16_t>(config, 8 + t) == 64 && element<uint8_t>(config, 48 + t) == 16;
  }
  if (!supported) abort();
  tiles = Tiles{};
  tiles.configured = true;
}
void _tile_release() { tiles = Tiles{}; }

uint32_t* tile_row(int tile, int r) {
  if (!tiles.configured) abort();
  return tiles.rows[tile][r];
}
void _tile_zero(int tile) { memset(tile_row(tile, 0), 0, sizeof(tiles.rows[tile])); }
void _tile_loadd(int tile, const void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    memcpy(tile_row(tile, r), static_cast<const char*>(p) + r * stride, 64);
  }
}
void _tile_stored(int tile, void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r) memcpy(static_cast<char*>(p) + r * stride, tile_row(tile, r), 64);
}

// Sums the products of the first elements of the pairs, and those of the second elements, starting
// from 0. Then adds both sums, and adds the result to the tile.
template <class ToFloat>
void multiply_tiles(int sum, int left, int right, const ToFloat& to_float) {
  alignas(32) float a[2][16][16], b[2][16][16];
  for (int e = 0; e < 2; ++e) {
    for (int i = 0; i < 256; ++i) {
      a[e][i / 16][i % 16] = to_float(element<uint16_t>(tile_row(left, i / 16), i % 16 * 2 + e));
      b[e][i / 16][i % 16] = to_float(element<uint16_t>(tile_row(right, i / 16), i % 16 * 2 + e));
    }
  }
  const FlushSubnormals flush;
  for (int r = 0; r < 16; ++r) {
    for (int column = 0; column < 16; column += 8) {
      __m256 parts[2] = {};
      for (int k = 0; k < 16; ++k) {
        for (int e = 0; e < 2; ++e) {
          flush.multiply_add(_mm256_set1_ps(a[e][r][k]), _mm256_load_ps(&b[e][k][column]),
                             &parts[e]);
        }
      }
      float* const out = reinterpret_cast<float*>(tile_row(sum, r) + column);
      _mm256_store_ps(out, flush.add(_mm256_load_ps(out), flush.add(parts[0], parts[1])));
    }
  }
}
void _tile_dpbf16ps(int sum, int left, int right) {
  multiply_tiles(sum, left, right,
                 [](uint16_t x) { return reinterpret<float>(uint32_t{x} << 16); });
}

// Replacements for the assembly functions of csrc/cpu/amx/amx.h.
template <int kTile>
void tile_load(const void* tile, int64_t stride = 64) {
  _tile_loadd(kTile, tile, stride);
}
template <int kTile>
void tile_stream(const void* tile) {
  _tile_loadd(kTile, tile, 64);
}
template <int kTile>
void tile_store(void* tile) {
  _tile_stored(kTile, tile, 64);
}
template <int kTile>
void tile_zero() {
  _tile_zero(kTile);
}
template <int kSum, int kLeft, int kRight>
void tile_multiply_bfloat16() {
  _tile_dpbf16ps(kSum, kLeft, kRight);
}
// Subnormal float16 operands are not flushed to 0, because they are normal in float32.
template <int kSum, int kLeft, int kRight>
void tile_multiply_half() {
  multiply_tiles(kSum, kLeft, kRight, [](uint16_t x) { return _cvtsh_ss(x); });
}
template <class V>
V in_register(V x) {
  return x;
}

}  // namespace
}  // namespace fused_attn
