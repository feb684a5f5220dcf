// Conversions of 16-bit floats and MMAs of tensor cores, computed on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fused_attn::emulator {

typedef uint32_t Words4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Floats4 __attribute__((vector_size(16)));

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

constexpr uint32_t kInfinity = 0x7f800000u;
inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > kInfinity; }

// Round a float32 to 16 bits, to nearest, ties to even. Any NaN becomes 0x7fff, the canonical NaN
// of the hardware.
inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan(bits)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 16 & 0x8000u;
  if (is_nan(bits)) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Expand four 16-bit floats, each in the upper half of a word, to the bit patterns of float32.
struct ExpandBFloat16 {
  static Words4 expand(Words4 upper) { return upper; }
};
struct ExpandHalf {
  static Words4 expand(Words4 upper) {
    const Words4 magnitude = (upper & 0x7fff0000u) >> 3;
    const Words4 scaled = (Words4)((Floats4)magnitude * 0x1p112f);  // exact, also for denormals
    const Words4 special = (Words4)(magnitude >= 0x0f800000u) & kInfinity;
    return scaled | special | (upper & 0x80000000u);
  }
};

template <class Expand>
float float_of_16_bits(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  return float_of(Expand::expand(Words4{word, word, word, word})[0]);
}

// Operands of a lane in an MMA, in the layout described in intrinsics.cuh.
struct MmaOperand {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// Adds a b to the accumulators d of all lanes of a warp.
template <int kDepth>
void multiply(void* const* operands, const float (&a)[16][kDepth], const float (&b)[kDepth][8]) {
  // Processes four rows in two halves each. The eight sums are independent, which hides the latency
  // of the additions.
  alignas(16) float sums[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const float* d = static_cast<const MmaOperand*>(operands[lane])->d;
    std::memcpy(&sums[lane / 4][lane % 4 * 2], d, 8);
    std::memcpy(&sums[lane / 4 + 8][lane % 4 * 2], d + 2, 8);
  }
  for (int row = 0; row < 16; row += 4) {
    Floats4 sum[8];
    std::memcpy(sum, sums[row], sizeof(sum));
    for (int k = 0; k < kDepth; ++k) {
      Floats4 right[2];
      std::memcpy(right, b[k], sizeof(right));
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) sum[i] += a[row + i / 2][k] * right[i % 2];
    }
    std::memcpy(sums[row], sum, sizeof(sum));
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* d = static_cast<const MmaOperand*>(operands[lane])->d;
    std::memcpy(d, &sums[lane / 4][lane % 4 * 2], 8);
    std::memcpy(d + 2, &sums[lane / 4 + 8][lane % 4 * 2], 8);
  }
}

template <class Expand>
void multiply_16_bits(void* const* operands) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaOperand& mine = *static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    const Words4 a_words = *reinterpret_cast<const Words4*>(mine.a);
    const Words4 b_words = {mine.b[0] << 16, mine.b[0], mine.b[1] << 16, mine.b[1]};
    const Floats4 low = (Floats4)Expand::expand(a_words << 16);
    const Floats4 high = (Floats4)Expand::expand(a_words & 0xffff0000u);
    const Floats4 b_values = (Floats4)Expand::expand(b_words & 0xffff0000u);
    for (int i = 0; i < 4; ++i) {
      a[g + i % 2 * 8][2 * t + i / 2 * 8] = low[i];
      a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = high[i];
      b[2 * t + i / 2 * 8 + i % 2][g] = b_values[i];
    }
  }
  multiply<16>(operands, a, b);
}

inline void multiply_tf32(void* const* operands) {
  constexpr uint32_t kRead = 0xffffe000u;  // tensor cores ignore the low 13 bits
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaOperand& mine = *static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = float_of(mine.a[i] & kRead);
    for (int i = 0; i < 2; ++i) b[t + i * 4][g] = float_of(mine.b[i] & kRead);
  }
  multiply<8>(operands, a, b);
}

}  // namespace fused_attn::emulator
