// Computes dropout masks with Philox, one vector of counters at a time.
//
// A counter is (column / 8, row, c2, c3). Intermediate results of the first rounds that depend only
// on the column or only on the row are computed once. 9 of 14 vector multiplications remain.
#pragma once

#include "cpu/simd/simd.h"
#include "philox.h"

namespace fused_attn {
namespace {

constexpr int kPhiloxLanes = kLanes<uint64_t>;  // counters per vector

// The two key words of each Philox round.
struct PhiloxKeys {
  explicit PhiloxKeys(uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      key[round][0] = key0;
      key[round][1] = key1;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
  }
  uint64_t key[kPhiloxRounds][2];
};

// Runs rounds kFirst to kPhiloxRounds - 1. Counter words are in 64-bit lanes, whose upper halves
// are ignored.
template <int kFirst>
FUSED_ATTN_INLINE void philox_rounds(const PhiloxKeys& keys, Vec<uint64_t> word[4]) {
  const Vec<uint64_t> zero{};
#pragma GCC unroll 8
  for (int round = kFirst; round < kPhiloxRounds; ++round) {
    const Vec<uint64_t> product0 = multiply_wide(word[0], zero + kPhiloxMultiplier0);
    const Vec<uint64_t> product1 = multiply_wide(word[2], zero + kPhiloxMultiplier1);
    word[0] = exclusive_or(product1 >> 32, word[1], zero + keys.key[round][0]);
    word[1] = product1;
    word[2] = exclusive_or(product0 >> 32, word[3], zero + keys.key[round][1]);
    word[3] = product0;
  }
}

// Returns the position of the byte of lane l in the result of kept_bytes().
constexpr int byte_of_lane(int l) {
#if defined(__AVX512BW__)
  return l / 2 + l % 2 * (kPhiloxLanes / 2);
#else
  return l;
#endif
}

// Returns one byte per counter, whose bit e is set if decision e keeps its element.
FUSED_ATTN_INLINE uint64_t kept_bytes(const Vec<uint64_t> word[4], uint32_t threshold) {
#if defined(__AVX512BW__)
  // Each of the two vectors holds four neighbouring decisions of each counter.
  const auto both = [](Vec<uint64_t> even, Vec<uint64_t> odd) {
    return (__m512i)_mm512_mask_moveldup_ps((__m512)even, 0xAAAA, (__m512)odd);
  };
  const __m512i first = both(word[0], word[1]), second = both(word[2], word[3]);
  const __m512i most = _mm512_set1_epi16(static_cast<int16_t>(threshold - 1));
  const uint64_t even = _mm512_cmpgt_epu16_mask(_mm512_unpacklo_epi64(first, second), most);
  const uint64_t odd = _mm512_cmpgt_epu16_mask(_mm512_unpackhi_epi64(first, second), most);
  return threshold == 0 ? ~uint64_t{0} : even | odd << 32;
#elif defined(__AVX2__)
  const auto both = [](Vec<uint64_t> even, Vec<uint64_t> odd) {
    return _mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xAA);
  };
  const __m256i first = both(word[0], word[1]), second = both(word[2], word[3]);
  const __m256i least = _mm256_set1_epi16(static_cast<int16_t>(threshold));
  const auto keep = [&](__m256i x) { return _mm256_cmpeq_epi16(_mm256_max_epu16(x, least), x); };
  const __m256i bytes = _mm256_packs_epi16(keep(_mm256_unpacklo_epi64(first, second)),
                                           keep(_mm256_unpackhi_epi64(first, second)));
  const uint32_t bits = static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
  return threshold == kDropoutSteps ? 0 : bits;
#else
  uint64_t bytes = 0;
  for (int half = 0; half < 2; ++half) {
    for (int w = 0; w < 4; ++w) {
      const Vec<uint64_t> own = half == 0 ? word[w] & 0xFFFFu : word[w] >> 16 & 0xFFFFu;
      const uint32_t keep = to_bits(own >= Vec<uint64_t>{} + threshold);
      for (int l = 0; l < kPhiloxLanes; ++l) {
        bytes |= static_cast<uint64_t>(keep >> l & 1) << (8 * l + 2 * w + half);
      }
    }
  }
  return bytes;
#endif
}

// Dropout decisions for kColumns neighbouring columns, the first of which is a multiple of 8. With
// AVX-512, kRows may be 2. Each vector then holds half as many columns of a row, followed by those
// of the next row.
template <int kRows = 1>
class DropoutColumns {
  static constexpr int kOctets = kPhiloxLanes / kRows;

 public:
  static constexpr int kColumns = kOctets * kDecisions;

  DropoutColumns() = default;
  DropoutColumns(const PhiloxKeys* keys, uint32_t threshold, int64_t column, uint32_t c2,
                 uint32_t c3)
      : keys_(keys), threshold_(threshold) {
    const Vec<uint64_t> zero{};
    Vec<uint64_t> octet = zero + static_cast<uint64_t>(column / kDecisions);
    for (int l = 0; l < kPhiloxLanes; ++l) {
      octet[l] += static_cast<uint64_t>(byte_of_lane(l) % kOctets);
    }
    const auto& key = keys->key;
    // column_n_ is the column-dependent part of word n after the first three rounds, or of its
    // input.
    const uint64_t uniform = uint64_t{kPhiloxMultiplier1} * c2;
    row_0_ = static_cast<uint32_t>(uniform >> 32 ^ key[0][0]);
    const Vec<uint64_t> first = multiply_wide(octet, zero + kPhiloxMultiplier0);
    const Vec<uint64_t> second =
        multiply_wide((first >> 32) ^ (zero + (c3 ^ key[0][1])), zero + kPhiloxMultiplier1);
    column_2_ = first ^ (zero + key[1][1]);
    column_1_ = second ^ (zero + key[2][0]);
    third_ =
        multiply_wide((second >> 32) ^ (zero + (uniform ^ key[1][0])), zero + kPhiloxMultiplier0);
    column_3_ = (third_ >> 32) ^ (zero + key[2][1]);
  }

  // Returns a bit mask in which bit c is set if column c of `row` is kept.
  FUSED_ATTN_INLINE uint64_t keep(uint32_t row) const {
    Vec<uint64_t> product = of_row(row);
#if defined(__AVX512F__)
    if constexpr (kRows == 2) {
      const Vec<uint64_t> other = of_row(row + 1);
      product = (Vec<uint64_t>)_mm512_mask_mov_epi64((__m512i)product, 0xAA, (__m512i)other);
    }
#endif
    const Vec<uint64_t> own =
        multiply_wide((product >> 32) ^ column_2_, Vec<uint64_t>{} + kPhiloxMultiplier1);
    Vec<uint64_t> word[4] = {(own >> 32) ^ column_1_, own, product ^ column_3_, third_};
    philox_rounds<3>(*keys_, word);
    return kept_bytes(word, threshold_);
  }

 private:
  FUSED_ATTN_INLINE Vec<uint64_t> of_row(uint32_t row) const {
    return Vec<uint64_t>{} + uint64_t{kPhiloxMultiplier0} * (row_0_ ^ row);
  }

  const PhiloxKeys* keys_;
  uint32_t threshold_, row_0_;
  Vec<uint64_t> column_1_, column_2_, column_3_, third_;
};

// Computes which of eight columns are kept in kRows rows. Bit r of keep_mask[c] is set if column +
// c is kept in row + r. `column` must be a multiple of 8.
template <int kRows>
inline void keep_rows(const PhiloxKeys& keys, uint32_t threshold, int64_t column, uint32_t row,
                      uint32_t c2, uint32_t c3, uint32_t keep_mask[kDecisions]) {
  const Vec<uint64_t> zero{};
  for (int c = 0; c < kDecisions; ++c) keep_mask[c] = 0;
  static_assert(kRows <= 32 && kRows % kPhiloxLanes == 0, "a bit each, and whole vectors");
  for (int first = 0; first < kRows; first += kPhiloxLanes) {
    Vec<uint64_t> word[4] = {zero + static_cast<uint64_t>(column / kDecisions), zero + row,
                             zero + c2, zero + c3};
    for (int l = 0; l < kPhiloxLanes; ++l) word[1][l] += static_cast<uint64_t>(first + l);
    philox_rounds<0>(keys, word);
    for (int w = 0; w < 4; ++w) {
      const Vec<uint64_t> low = word[w] & 0xFFFFu, high = word[w] >> 16 & 0xFFFFu;
      keep_mask[2 * w] |= to_bits(low >= zero + threshold) << first;
      keep_mask[2 * w + 1] |= to_bits(high >= zero + threshold) << first;
    }
  }
}

}  // namespace
}  // namespace fused_attn
