// Philox4x32-10, the generator of dropout masks, for host and device.
//
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
// fused_attn/core/philox.py is the same in torch operations.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fused_attn {
namespace {  // each instruction set has its own copy (design: no shared inline functions)

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

struct Philox4 {
  uint32_t word[4];
};

FUSED_ATTN_HOST_DEVICE Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                          uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c0;
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// A word is kept where its upper 24 bits, as a float in [0, 1), are >= dropout_p as a float;
// compared as integers: where (word >> 8) >= dropout_threshold(p).
FUSED_ATTN_HOST_DEVICE uint32_t dropout_threshold(double dropout_p) {
  const double scaled = static_cast<double>(static_cast<float>(dropout_p)) * 16777216.0;
  const uint32_t below = static_cast<uint32_t>(scaled);
  return static_cast<double>(below) == scaled ? below : below + 1;
}

FUSED_ATTN_HOST_DEVICE double dropout_scale(double dropout_p) {
  return dropout_p < 1.0 ? 1.0 / (1.0 - dropout_p) : 0.0;
}

}  // namespace
}  // namespace fused_attn
