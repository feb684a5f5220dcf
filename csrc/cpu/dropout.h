// Dropout masks, a vector of counters at a time.
#pragma once

#include "cpu/simd.h"
#include "philox.h"

namespace fused_attn {
namespace {

// A round takes 7 cycles from its first product to its last xor, but only 3 of the vector units: so
// many vectors of counters go through the rounds side by side.
constexpr int kPhiloxVectors = 4;
constexpr int kPhiloxCounters = kPhiloxVectors * kLanes<uint64_t>;

// Which of kPhiloxCounters counters, `first` and its successors, dropout keeps: bit l of kept[w] is
// word w of counter first + l. kComponent of Philox's counter, 0 or 1, runs; the other is fixed.
template <int kComponent>
inline void keep_bits(uint32_t first, uint32_t fixed, uint32_t c2, uint32_t c3, uint64_t seed,
                      uint32_t threshold, uint32_t kept[4]) {
  constexpr int kCount = kLanes<uint64_t>;
  // As philox4x32, a counter in each 64-bit lane; the upper halves do not matter.
  Vec<uint64_t> word[4][kPhiloxVectors];
  Vec<uint64_t> even{};
  for (int l = 0; l < kCount; ++l) even[l] = 2 * static_cast<uint64_t>(l);
  for (int v = 0; v < kPhiloxVectors; ++v) {
    const uint64_t start = first + static_cast<uint64_t>(v / 2 * 2 * kCount + v % 2);
    word[kComponent][v] = even + start;
    word[1 - kComponent][v] = Vec<uint64_t>{} + fixed;
    word[2][v] = Vec<uint64_t>{} + c2;
    word[3][v] = Vec<uint64_t>{} + c3;
  }
  const Vec<uint64_t> m0 = Vec<uint64_t>{} + kPhiloxMultiplier0,
                      m1 = Vec<uint64_t>{} + kPhiloxMultiplier1;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Vec<uint64_t> k0 = Vec<uint64_t>{} + key0, k1 = Vec<uint64_t>{} + key1;
#pragma GCC unroll 4
    for (int v = 0; v < kPhiloxVectors; ++v) {
      const Vec<uint64_t> product0 = multiply_wide(word[0][v], m0);
      const Vec<uint64_t> product1 = multiply_wide(word[2][v], m1);
      word[0][v] = exclusive_or(product1 >> 32, word[1][v], k0);
      word[1][v] = product1;
      word[2][v] = exclusive_or(product0 >> 32, word[3][v], k1);
      word[3][v] = product0;
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  for (int w = 0; w < 4; ++w) {
    kept[w] = 0;
    for (int v = 0; v < kPhiloxVectors; v += 2) {
      const Vec32 both = (Vec32)((word[w][v] & 0xFFFFFFFFu) | word[w][v + 1] << 32);
      kept[w] |= to_bits((both >> 8) >= Vec32{} + threshold) << (v * kCount);
    }
  }
}

}  // namespace
}  // namespace fused_attn
