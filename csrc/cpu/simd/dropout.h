// Computes dropout masks with Philox, one vector of counters at a time.
//
// A counter is (column / 8, row, c2, c3). Intermediate results of the first rounds that depend only
// on the column or only on the row are computed once. 9 of 14 vector multiplications remain.
// DropoutColumns decides many columns of one row, DropoutRows eight columns of many rows.
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

// Words of one vector of counters, in 64-bit lanes whose upper halves are ignored.
struct PhiloxWords {
  Vec<uint64_t> word[4];
};

// Runs rounds kFirst to kPhiloxRounds - 1 for kCount vectors. Each round is computed for all
// vectors before the next, because the steps of a vector depend on each other.
template <int kFirst, int kCount>
FUSED_ATTN_INLINE void philox_rounds(const PhiloxKeys& keys, PhiloxWords (&counters)[kCount]) {
  const Vec<uint64_t> zero{};
#pragma GCC unroll 8
  for (int round = kFirst; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 4
    for (PhiloxWords& counter : counters) {
      Vec<uint64_t>* const word = counter.word;
      const Vec<uint64_t> product0 = multiply_wide(word[0], zero + kPhiloxMultiplier0);
      const Vec<uint64_t> product1 = multiply_wide(word[2], zero + kPhiloxMultiplier1);
      word[0] = exclusive_or(product1 >> 32, word[1], zero + keys.key[round][0]);
      word[1] = product1;
      word[2] = exclusive_or(product0 >> 32, word[3], zero + keys.key[round][1]);
      word[3] = product0;
    }
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
  // Each of the two vectors holds four neighboring decisions of each counter.
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

// Dropout decisions for kColumns neighboring columns, the first of which is a multiple of 8. With
// AVX-512, kRows may be 2: each vector then holds half as many columns, for a row and the next row.
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
    PhiloxWords counter[1] = {{{(own >> 32) ^ column_1_, own, product ^ column_3_, third_}}};
    philox_rounds<3>(*keys_, counter);
    return kept_bytes(counter[0].word, threshold_);
  }

 private:
  FUSED_ATTN_INLINE Vec<uint64_t> of_row(uint32_t row) const {
    return Vec<uint64_t>{} + uint64_t{kPhiloxMultiplier0} * (row_0_ ^ row);
  }

  const PhiloxKeys* keys_;
  uint32_t threshold_, row_0_;
  Vec<uint64_t> column_1_, column_2_, column_3_, third_;
};

// Dropout decisions for kRows neighboring rows, eight columns at a time.
template <int kRows>
class DropoutRows {
  static constexpr int kVectors = kRows / kPhiloxLanes;
  static_assert(kRows <= 32 && kRows % kPhiloxLanes == 0, "rows must fit 32 bits and fill vectors");
#if defined(__AVX2__)
  static constexpr bool kShorts = kVectors == 4;
#else
  static constexpr bool kShorts = false;
#endif

 public:
  DropoutRows(const PhiloxKeys* keys, uint32_t threshold, uint32_t row, uint32_t c2, uint32_t c3)
      : keys_(keys), threshold_(threshold), c3_(c3), uniform_(uint64_t{kPhiloxMultiplier1} * c2) {
    const Vec<uint64_t> zero{};
    for (int x = 0; x < kVectors; ++x) {
      Vec<uint64_t> rows = zero + row;
      for (int l = 0; l < kPhiloxLanes; ++l) rows[l] += static_cast<uint64_t>(row_of_lane(x, l));
      rows_[x] = multiply_wide(rows ^ (zero + (uniform_ >> 32 ^ keys->key[0][0])),
                               zero + kPhiloxMultiplier0);
    }
  }

  // Sets bit r of keep_mask[c] if column + c is kept in row r. `column` must be a multiple of 8.
  FUSED_ATTN_INLINE void keep(int64_t column, uint32_t keep_mask[kDecisions]) const {
    const Vec<uint64_t> zero{};
    const auto& key = keys_->key;
    // The first three rounds. Terms that do not depend on the row are computed once. Terms that do
    // not depend on the column are in rows_.
    const uint64_t first =
        uint64_t{kPhiloxMultiplier0} * static_cast<uint32_t>(column / kDecisions);
    const uint64_t second =
        uint64_t{kPhiloxMultiplier1} * static_cast<uint32_t>(first >> 32 ^ c3_ ^ key[0][1]);
    const uint64_t third =
        uint64_t{kPhiloxMultiplier0} * static_cast<uint32_t>(second >> 32 ^ uniform_ ^ key[1][0]);
    PhiloxWords counters[kVectors];
#pragma GCC unroll 4
    for (int x = 0; x < kVectors; ++x) {
      const Vec<uint64_t> own =
          multiply_wide((rows_[x] >> 32) ^ (zero + (first ^ key[1][1])), zero + kPhiloxMultiplier1);
      counters[x] = {{(own >> 32) ^ (zero + (second ^ key[2][0])), own,
                      rows_[x] ^ (zero + (third >> 32 ^ key[2][1])), zero + third}};
    }
    philox_rounds<3>(*keys_, counters);
#if defined(__AVX2__)
    if constexpr (kShorts) return compare_shorts(counters, keep_mask);
#endif
    for (int c = 0; c < kDecisions; ++c) keep_mask[c] = 0;
    for (int x = 0; x < kVectors; ++x) {
      for (int w = 0; w < 4; ++w) {
        const Vec<uint64_t> own = counters[x].word[w], low = own & 0xFFFFu;
        const Vec<uint64_t> high = own >> 16 & 0xFFFFu;
        keep_mask[2 * w] |= to_bits(low >= zero + threshold_) << (x * kPhiloxLanes);
        keep_mask[2 * w + 1] |= to_bits(high >= zero + threshold_) << (x * kPhiloxLanes);
      }
    }
  }

 private:
  // Returns the row of lane l of vector x. With kShorts, the 16-bit parts of four vectors are
  // interleaved into one vector, whose lanes must be in row order.
  static constexpr int row_of_lane(int x, int l) {
    return kShorts ? 4 * l + x % 2 * 2 + x / 2 : x * kPhiloxLanes + l;
  }

#if defined(__AVX2__)
  // Computes keep() with comparisons of 16-bit lanes.
  FUSED_ATTN_INLINE void compare_shorts(const PhiloxWords (&counters)[kVectors],
                                        uint32_t keep_mask[kDecisions]) const {
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      const auto word = [&](int x) { return counters[x].word[w]; };
#if defined(__AVX512BW__)
      const __m512i least = _mm512_set1_epi16(static_cast<int16_t>(threshold_));
      const auto both = [](Vec<uint64_t> even, Vec<uint64_t> odd) {
        return (__m512i)_mm512_mask_moveldup_ps((__m512)even, 0xAAAA, (__m512)odd);
      };
      const __m512i even = both(word(0), word(1)), odd = both(word(2), word(3));
      const __m512i low = _mm512_mask_blend_epi16(0xAAAAAAAA, even, _mm512_slli_epi32(odd, 16));
      const __m512i high = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(even, 16), odd);
      const bool none = threshold_ == kDropoutSteps;
      keep_mask[2 * w] = none ? 0 : _mm512_cmpge_epu16_mask(low, least);
      keep_mask[2 * w + 1] = none ? 0 : _mm512_cmpge_epu16_mask(high, least);
#else
      const __m256i least = _mm256_set1_epi16(static_cast<int16_t>(threshold_));
      const auto both = [](Vec<uint64_t> even, Vec<uint64_t> odd) {
        return _mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xAA);
      };
      const auto keep = [&](__m256i x) {
        return _mm256_cmpeq_epi16(_mm256_max_epu16(x, least), x);
      };
      const __m256i even = both(word(0), word(1)), odd = both(word(2), word(3));
      const __m256i low = keep(_mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA));
      const __m256i high = keep(_mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA));
      // The bytes of each half are eight of `low`, then eight of `high`.
      const uint32_t bits =
          threshold_ == kDropoutSteps
              ? 0
              : static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(low, high)));
      keep_mask[2 * w] = (bits & 0xFFu) | (bits >> 8 & 0xFF00u);
      keep_mask[2 * w + 1] = (bits >> 8 & 0xFFu) | (bits >> 16 & 0xFF00u);
#endif
    }
  }
#endif

  const PhiloxKeys* const keys_;
  const uint32_t threshold_, c3_;
  const uint64_t uniform_;        // product of the first round that depends on c2 only
  Vec<uint64_t> rows_[kVectors];  // products of the second round, which depend on the row
};

}  // namespace
}  // namespace fused_attn
