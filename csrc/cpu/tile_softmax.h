// Scores of a tile to weights exp(score - shift), a row at a time, beside the products.
#pragma once

#include "cpu/tile_scores.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// What a panel of queries knows of its rows.
struct PanelRows {
  // What scores are lowered by, in their own units; NaN: the row has seen nothing yet. The largest
  // weight is 2^kWeightExponent, or up to 2^kMaximumSlack more: so results are rescaled a few times
  // a row, not for nearly every block.
  alignas(64) float shift[kTileQueries];
  alignas(64) float sum[kTileQueries][16];  // of the weights, and of what rounding left of them;
  alignas(64) float rounded[kTileQueries][16];  // each lane for itself
};

// bfloat16 weights of 32 scores by integer instructions, half of what a polynomial takes: a score
// in steps of 1/128 of a power of 2 is a bfloat16 but for its last 7 bits, of which a table of 128
// bytes says how far the line 1 + f is above the curve 2^f. Within 2.7e-3, where rounding alone is
// within 3.9e-3; not for sums that are wanted more exactly.
class WeightTable {
 public:
  WeightTable() = default;
  explicit WeightTable(float unit) : unit_(128 * unit) {
    low_ = _mm512_loadu_si512(kAbove);
    high_ = _mm512_loadu_si512(kAbove + 64);
  }

  // Key t of the 32 is number position(t) of the row: packing goes by 128-bit lanes.
  static constexpr int position(int t) { return t % 16 / 4 * 8 + t / 16 * 4 + t % 4; }

  // below: scores less their shift. Too large ones, and NaN, become NaN.
  FUSED_ATTN_INLINE void store_weights(uint16_t* row, Vec<float> a, Vec<float> b,
                                       Vec<float>* rounded) const {
    const __m512i steps = _mm512_max_epi16(_mm512_packs_epi32(whole_steps(a), whole_steps(b)),
                                           _mm512_setzero_si512());
    const __m512i over = _mm512_maskz_permutex2var_epi8(0x5555555555555555, low_, steps, high_);
    const __m512i weights = _mm512_sub_epi16(steps, over);
    _mm512_store_si512(row, weights);
    *rounded = (Vec<float>)_mm512_dpbf16_ps((__m512)*rounded, (__m512bh)weights,
                                            (__m512bh)_mm512_set1_epi16(0x3F80));
  }

 private:
  // 1.5 * 2^23: a float that it is added to has its whole part in its last bits. 127 * 128: the
  // bits of a bfloat16 1.
  static constexpr float kRound = 12582912.f;

  FUSED_ATTN_INLINE __m512i whole_steps(Vec<float> below) const {
    const Vec<float> steps =
        fused_multiply_add<float>(below, broadcast(unit_), broadcast(kRound + 127 * 128));
    return _mm512_sub_epi32((__m512i)steps, _mm512_castps_si512(_mm512_set1_ps(kRound)));
  }

  // round(128 (1 + f / 128 - 2^(f / 128)))
  static constexpr uint8_t kAbove[128] = {
      0,  0,  1,  1,  1,  1,  2,  2,  2,  3,  3,  3,  3,  4,  4,  4,  4,  5,  5,  5,  5,  6,
      6,  6,  6,  6,  7,  7,  7,  7,  7,  8,  8,  8,  8,  8,  8,  9,  9,  9,  9,  9,  9,  9,
      10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
      11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10,
      10, 10, 10, 9,  9,  9,  9,  9,  9,  9,  8,  8,  8,  8,  8,  7,  7,  7,  7,  7,  6,  6,
      6,  6,  5,  5,  5,  4,  4,  4,  3,  3,  3,  3,  2,  2,  1,  1,  1,  0};

  float unit_;
  __m512i low_, high_;
};

// Multiplies row r of tiles (2, columns).
inline void scale_tile_row(int64_t r, float factor, int64_t columns, float* tiles) {
  float* const row = tiles + r / 16 * columns * kTileSums + r % 16 * 16;
  for (int64_t c = 0; c < columns; ++c) {
    store(row + c * kTileSums, load(row + c * kTileSums) * factor);
  }
}

// Leaves row r of a tile of woven weights those whose bit is set.
template <class T>
inline void drop_weights(uint64_t keep, uint32_t r, uint16_t* weights) {
  using F = TileFormat<T>;
  for (int64_t half = 0; half < 2; ++half) {
    const __m512i own = F::woven_mask(static_cast<uint32_t>(keep >> (32 * half)));
    for (int part = 0; part < F::kParts; ++part) {
      uint16_t* const row =
          weights + weights_row<kTileKeys>(r, F::kParts) + (half * F::kParts + part) * kTileNumbers;
      _mm512_store_si512(row, _mm512_and_si512(_mm512_load_si512(row), own));
    }
  }
}

// The softmax of a tile. kSum: the sum of unrounded weights is wanted.
template <class T, bool kSum>
class TileSoftmax {
  using F = TileFormat<T>;
  static constexpr int kVectors = static_cast<int>(kTileKeys / 16);
  static constexpr int kMaximumSlack = 8;

 public:
  static constexpr bool kByTable = kIsBFloat16<T> && !kSum;

  // A tile of scores, and where its weights go.
  struct Tile {
    PanelRows* rows;
    const float* scores;
    uint16_t* weights;
    ExpUnit<float> unit;  // of a score
  };

  // The rows of a tile, in registers: nothing in here is called, and memory that tile instructions
  // may write would be read anew after each of them.
  class Stream {
   public:
    explicit Stream(const Tile& tile, bool any = true)
        : rows(tile.rows),
          scores(tile.scores),
          weights(tile.weights),
          unit(tile.unit),
          table(tile.unit.high),
          row(any ? 0 : kTileQueries) {}

    FUSED_ATTN_INLINE bool done() const { return row >= kTileQueries; }

    uint32_t left() const { return unfinished; }

    // One more row: its weights, and its sums unless one of the weights leaves the format, or the
    // row has not seen anything yet: then it is left to finish(). A quarter has a vector of scores.
    template <int kQuarter>
    FUSED_ATTN_INLINE void next() {
      if (kQuarter % 2 == 1) return;  // two vectors make a row of weights
      if (kQuarter == 0) rounded_ = sum_ = Vec<float>{};
      weigh<kQuarter>(row, rows->shift[row], &rounded_, &sum_);
      if (kQuarter == 0) return;
      constexpr float kMost = 1 << (kMaximumSlack + F::kWeightExponent);
      const Vec<float> checked = F::kRounds ? rounded_ : sum_;
      const __mmask16 wrong =
          _mm512_cmp_ps_mask((__m512)checked, _mm512_set1_ps(kMost), _CMP_NLE_UQ);
      if (__builtin_expect(wrong != 0, 0)) {
        unfinished |= uint32_t{1} << row;
        rounded_ = sum_ = Vec<float>{};
      }
      add_sums(row, rounded_, sum_);
      ++row;
    }

    // Vectors kVector and the next one.
    template <int kVector>
    FUSED_ATTN_INLINE void weigh(uint32_t r, float shift, Vec<float>* rounded,
                                 Vec<float>* sum) const {
      const float* const from = scores + scores_row<kTileKeys>(r);
      uint16_t* const to =
          weights + weights_row<kTileKeys>(r, F::kParts) + kVector / 2 * F::kParts * kTileNumbers;
      Vec<float> x[2];
      for (int i = 0; i < 2; ++i) x[i] = lower(from, kVector + i, shift);
      if constexpr (kByTable) {
        table.store_weights(to, x[0], x[1], rounded);
      } else {
        for (Vec<float>& e : x) e = exp_nonpositive<float, kPrecision<T>>(e, unit);
        if (kSum) *sum += x[0] + x[1];
        F::store_weights(to, x[0], x[1], rounded);
      }
    }

    FUSED_ATTN_INLINE void add_sums(uint32_t r, Vec<float> rounded, Vec<float> sum) const {
      if (F::kRounds) store(rows->rounded[r], load(rows->rounded[r]) + rounded);
      if (kSum) store(rows->sum[r], load(rows->sum[r]) + sum);
    }

    Vec<float> maximum(uint32_t r) const {
      const float* const from = scores + scores_row<kTileKeys>(r);
      Vec<float> highest = lower(from, 0, 0);
      for (int v = 1; v < kVectors; ++v) highest = max<float>(lower(from, v, 0), highest);
      return highest;
    }

    FUSED_ATTN_INLINE static Vec<float> lower(const float* from, int v, float shift) {
      return load(from + v * kTileSums) - shift;
    }

   private:
    PanelRows* const rows;
    const float* const scores;
    uint16_t* const weights;
    const ExpUnit<float> unit;
    const WeightTable table;
    uint32_t row, unfinished = 0;   // the next one; bit r: row r was left
    Vec<float> rounded_{}, sum_{};  // of the first half of a row
  };

  // The shifts of a panel that has seen nothing yet: by the maximum of each row; NaN stays where
  // nothing is seen.
  __attribute__((noinline)) static void begin(const Tile& tile, int64_t rows = kTileQueries) {
    const Stream stream(tile);
    for (uint32_t half = 0; half < rows; half += 16) {
      alignas(64) float highest[16][16], turned[16][16], tops[16];
      for (uint32_t r = 0; r < 16; ++r) store(highest[r], stream.maximum(half + r));
      transpose_tile(highest, 16, turned, 16);
      Vec<float> top = load(turned[0]);
      for (int l = 1; l < 16; ++l) top = max<float>(load(turned[l]), top);
      store(tops, top);
      for (uint32_t r = 0; r < 16; ++r) {
        if (tops[r] == -infinity()) continue;
        tile.rows->shift[half + r] = wanted_shift(tops[r], tile.unit.high);
      }
    }
  }

  // Rows that a stream has left.
  void finish(const Tile& tile, uint32_t left) {
    rescaled = 0;
    for (; left != 0; left &= left - 1) raise(tile, static_cast<uint32_t>(__builtin_ctz(left)));
  }

  uint32_t rescaled = 0;  // bit r: what was summed of row r has to be multiplied by rescale[r]
  float rescale[kTileQueries];

 private:
  static constexpr float infinity() { return __builtin_inff(); }

  // Of a tiny unit the weights may be smaller: the shift is finite.
  static float wanted_shift(float top, float unit) {
    const float bias = static_cast<float>(F::kWeightExponent) / unit;
    return top - (bias < 0x1p125f ? bias : 0x1p125f);
  }

  // A new shift, and what next() has left.
  __attribute__((noinline, cold)) void raise(const Tile& tile, uint32_t r) {
    const Stream stream(tile);
    PanelRows& rows = *tile.rows;
    const Vec<float> highest = stream.maximum(r);
    float top = -infinity();
    for (int l = 0; l < 16; ++l) top = highest[l] > top ? highest[l] : top;
    const float old = rows.shift[r];
    const bool seen = old == old;
    float shift = 0;  // still nothing: -inf less -inf would be NaN
    if (seen || top > -infinity()) {
      const float wanted = wanted_shift(top, tile.unit.high);
      rows.shift[r] = shift = old >= wanted ? old : wanted;
      if (seen && shift != old) {
        const Vec<float> alpha = exp_nonpositive<float>(broadcast(old - shift), tile.unit);
        store(rows.sum[r], load(rows.sum[r]) * alpha);
        store(rows.rounded[r], load(rows.rounded[r]) * alpha);
        rescale[r] = alpha[0];
        rescaled |= uint32_t{1} << r;
      }
    }
    Vec<float> rounded{}, sum{};
    stream.template weigh<0>(r, shift, &rounded, &sum);
    stream.template weigh<2>(r, shift, &rounded, &sum);
    stream.add_sums(r, rounded, sum);
  }
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
