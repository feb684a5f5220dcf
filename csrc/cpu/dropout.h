// Dropout masks, a vector of counters at a time.
#pragma once

#include "cpu/simd.h"
#include "philox.h"

namespace fused_attn {
namespace {

// As philox4x32, a counter in each 64-bit lane, results in the lower halves; the upper halves of
// counters do not matter.
struct PhiloxLanes {
  Vec<uint64_t> word[4];
};

inline PhiloxLanes philox_lanes(Vec<uint64_t> c0, Vec<uint64_t> c1, Vec<uint64_t> c2,
                                Vec<uint64_t> c3, uint64_t seed) {
  const Vec<uint64_t> m0 = Vec<uint64_t>{} + 0xD2511F53u, m1 = Vec<uint64_t>{} + 0xCD9E8D57u;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Vec<uint64_t> product0 = multiply_wide(c0, m0), product1 = multiply_wide(c2, m1);
    c0 = product1 >> 32 ^ c1 ^ uint64_t{key0};
    c1 = product1;
    c2 = product0 >> 32 ^ c3 ^ uint64_t{key1};
    c3 = product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Which of 2 * kLanes<uint64_t> counters, `first` and its successors, dropout keeps: bit l of
// kept[w] is word w of counter first + l. The counter is component 0 or 1 of Philox's.
template <int kComponent>
inline void keep_bits(uint32_t first, uint32_t other, uint32_t c2, uint32_t c3, uint64_t seed,
                      uint32_t threshold, uint32_t kept[4]) {
  constexpr int kCount = kLanes<uint64_t>;
  Vec<uint64_t> even{};
  for (int l = 0; l < kCount; ++l) even[l] = 2 * static_cast<uint64_t>(l);
  even += uint64_t{first};
  const Vec<uint64_t> odd = even + uint64_t{1};
  const Vec<uint64_t> fixed = Vec<uint64_t>{} + other;
  const Vec<uint64_t> fixed2 = Vec<uint64_t>{} + c2, fixed3 = Vec<uint64_t>{} + c3;
  const PhiloxLanes a = kComponent == 0 ? philox_lanes(even, fixed, fixed2, fixed3, seed)
                                        : philox_lanes(fixed, even, fixed2, fixed3, seed);
  const PhiloxLanes b = kComponent == 0 ? philox_lanes(odd, fixed, fixed2, fixed3, seed)
                                        : philox_lanes(fixed, odd, fixed2, fixed3, seed);
  for (int w = 0; w < 4; ++w) {
    const Vec32 words = (Vec32)((a.word[w] & 0xFFFFFFFFu) | b.word[w] << 32);
    kept[w] = to_bits((words >> 8) >= Vec32{} + threshold);
  }
}

}  // namespace
}  // namespace fused_attn
