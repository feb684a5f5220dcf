// Philox4x32-7 counter-based random numbers for dropout masks, on host and device.
//
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Seven rounds pass all
// of TestU01's BigCrush. fused_attn/base/philox.py implements the same generator with torch
// operations.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "params.h"

namespace fused_attn {
namespace {  // internal linkage: each instruction set compiles a copy

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 7;

struct Philox4 {
  uint32_t word[4];
};

FUSED_ATTN_HOST_DEVICE Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                          uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
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

// Each counter decides kDecisions neighboring elements with 16 bits each. Decision e uses word e /
// 2: its lower half if e is even, its upper half if e is odd. dropout_p is therefore rounded to a
// multiple of 1 / kDropoutSteps.
constexpr int kDecisions = 8;
constexpr uint32_t kDropoutSteps = 1u << 16;

FUSED_ATTN_HOST_DEVICE uint32_t half_word(uint32_t word, int half) {
  return half == 0 ? word & 0xFFFFu : word >> 16;
}

// Returns dropout_p * kDropoutSteps, rounded to the nearest integer, ties to even. An element is
// kept if its 16 random bits are at least this value.
FUSED_ATTN_HOST_DEVICE uint32_t dropout_threshold(double dropout_p) {
  const double scaled = dropout_p * kDropoutSteps;
  const uint32_t below = static_cast<uint32_t>(scaled);
  const double rest = scaled - below;
  return below + (rest > 0.5 || (rest == 0.5 && below % 2 == 1) ? 1 : 0);
}

// Returns the scale of kept elements, or 0 if no element is kept.
FUSED_ATTN_HOST_DEVICE double dropout_scale(double dropout_p) {
  const uint32_t kept_steps = kDropoutSteps - dropout_threshold(dropout_p);
  return kept_steps == 0 ? 0.0 : static_cast<double>(kDropoutSteps) / kept_steps;
}

// Returns the global offsets of sequence b. Each offset must fit in 32 bits, because a counter word
// holds it.
FUSED_ATTN_HOST_DEVICE DropoutOffsets dropout_offsets(const AttentionParams& p, int64_t b) {
  if (p.dropout_offsets != nullptr) return p.dropout_offsets[b];
  return {0, 0, b * p.num_heads};
}

// Returns a bit mask in which bit e is set if decision e keeps its element.
FUSED_ATTN_HOST_DEVICE uint32_t kept_decisions(const Philox4& random, uint32_t threshold) {
  uint32_t keep_mask = 0;
  FUSED_ATTN_UNROLL
  for (int e = 0; e < kDecisions; ++e) {
    keep_mask |= half_word(random.word[e / 2], e % 2) >= threshold ? 1u << e : 0u;
  }
  return keep_mask;
}

}  // namespace
}  // namespace fused_attn
