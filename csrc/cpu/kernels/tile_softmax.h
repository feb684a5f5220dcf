// Softmax of a tile: computes the weights exp(score - shift) one row at a time, interleaved with
// tile MMAs.
#pragma once

#include "cpu/kernels/tile_scores.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// Softmax state of a query tile, by row.
struct QueryTileRows {
  // The value subtracted from the scores, in score units; NaN before the row's first visible key.
  // It may lag behind the row maximum: weights may be up to 2^kMaximumSlack times larger than
  // 2^kWeightExponent. Accumulators are thus rescaled a few times per row, not at nearly every
  // block.
  alignas(64) float shift[kTileQueries];
  alignas(64) float start[kTileQueries];  // the shift in the form that Weights::begin() expects
  // Row sums of the weights before and after rounding, one partial sum per lane.
  alignas(64) float sum[kTileQueries][16];
  alignas(64) float rounded[kTileQueries][16];
};

// The Weights classes compute the weights of a row from its scores. A caller calls begin(), then
// add() for each half of the row, then end(), which adds the weights to the row sums, unless
// overflows() is true. start() converts a shift to the argument of begin().

// Computes weights with a polynomial approximation of exp.
template <class T, bool kSum>
class ExpWeights {
  using F = TileFormat<T>;
  static constexpr int kMaximumSlack = 8;
  // exp2_nearest() wraps around at 2^128, so exponents are clamped to this value, for which
  // overflows() is true.
  static constexpr float kMostExponent = 100;

 public:
  explicit ExpWeights(const ExpUnit<float>& unit)
      : unit_(unit), most_(broadcast(kMostExponent / unit.high)) {}

  static Vec<float> start(const ExpUnit<float>&, Vec<float>* shift) { return *shift; }

  // kLowered is the start value for scores from which the shift was already subtracted.
  // within_reach() clamps such scores to the valid range of add().
  static constexpr float kLowered = 0;
  static Vec<float> within_reach(const ExpUnit<float>&, Vec<float> lowered) { return lowered; }

  FUSED_ATTN_INLINE void begin(const float*, float start) {
    shift_ = broadcast(start);
    rounded_ = sum_ = Vec<float>{};
  }

  // keep: dropout bits of this half, used with kDrops. The row sums include dropped weights.
  template <int kHalf, bool kDrops>
  FUSED_ATTN_INLINE void add(Vec<float> a, Vec<float> b, uint32_t keep, uint16_t* to) {
    a = exp_nonpositive<float, kPrecision<T>>(lowered(a), unit_);
    b = exp_nonpositive<float, kPrecision<T>>(lowered(b), unit_);
    if (kSum) sum_ += a + b;
    F::template store_weights<kDrops>(to, a, b, keep, &rounded_);
  }

  // Returns true if a weight is NaN or too large for the storage format.
  FUSED_ATTN_INLINE bool overflows() const {
    constexpr float kMost = 1 << (kMaximumSlack + F::kWeightExponent);
    const Vec<float> checked = F::kRounds ? rounded_ : sum_;
    return _mm512_cmp_ps_mask((__m512)checked, _mm512_set1_ps(kMost), _CMP_NLE_UQ) != 0;
  }

  FUSED_ATTN_INLINE void end(float* rounded, float* sum) const {
    if (F::kRounds) store(rounded, load(rounded) + rounded_);
    if (kSum) store(sum, load(sum) + sum_);
  }

 private:
  FUSED_ATTN_INLINE Vec<float> lowered(Vec<float> scores) const {
    const Vec<float> by_shift = scores - shift_;
    if constexpr (kPrecision<T> != Precision::kFull) return by_shift;  // VSCALEFPS returns infinity
    return (Vec<float>)_mm512_min_ps((__m512)most_, (__m512)by_shift);  // NaN remains NaN
  }

  const ExpUnit<float> unit_;
  const Vec<float> most_;
  Vec<float> shift_{}, rounded_{}, sum_{};
};

// Computes bfloat16 weights with integer instructions, half as many as a polynomial needs. In steps
// of 1/128, the exponent of 2 is the bit pattern of a bfloat16 with mantissa 1 + f instead of 2^f
// (f: its fraction). A table of 128 bytes corrects the difference. The error is at most 2.7e-3
// (rounding alone: 3.9e-3), which is not accurate enough for the sums of an lse.
//
// Shifts are integer numbers of steps. The multiply-add that converts a score to steps also
// subtracts the shift. A score equal to its shift has a weight of 2^-7, so a bit test detects
// weights that are too large.
class TableWeights {
 public:
  explicit TableWeights(const ExpUnit<float>& unit)
      : unit_(in_register(_mm512_set1_ps(128 * unit.high))),
        round_(in_register(_mm512_castps_si512(_mm512_set1_ps(kRound)))),
        ones_(in_register(_mm512_set1_epi16(0x3F80))),
        large_(in_register(_mm512_set1_epi16(static_cast<int16_t>(0xC000)))),
        low_(in_register(_mm512_loadu_si512(kAbove))),
        high_(in_register(_mm512_loadu_si512(kAbove + 64))) {}

  // Returns the position of key t of 32 in the row. vpackusdw packs within 128-bit lanes, which
  // permutes the keys.
  static constexpr int position(int t) { return t % 16 / 4 * 8 + t / 16 * 4 + t % 4; }
  // Returns the key at position i, the inverse of position().
  static constexpr int key_at(int i) { return i / 8 * 4 + i % 8 / 4 * 16 + i % 4; }

  // Rounds *shift to an integer number of steps and returns the addend of the multiply-add that
  // converts scores to steps. Returns NaN, for which overflows() is true, if a float cannot
  // represent the number of steps exactly.
  static Vec<float> start(const ExpUnit<float>& unit, Vec<float>* shift) {
    const float step = 128 * unit.high;
    const Vec<float> steps = *shift * step + kRound - kRound, nearest = steps / step;
    const auto exact = steps < kMostSteps && steps > -kMostSteps;
    *shift = exact && nearest - nearest == 0.f ? nearest : *shift;  // infinite if unit is tiny
    return exact ? kLowered - steps : broadcast(__builtin_nanf(""));
  }

  // 1.5 * 2^23. Adding it rounds a float to an integer, which the low bits then hold.
  static constexpr float kRound = 12582912.f;
  static constexpr float kLowered = kRound + 120 * 128;  // 120 * 128 gives a weight of 2^-7
  static constexpr float kMostSteps = kRound / 4;

  // Clamps very low scores, because their steps would wrap around and appear large. Replaces NaN
  // with +inf, because half of all NaN patterns would appear as small scores.
  static Vec<float> within_reach(const ExpUnit<float>& unit, Vec<float> lowered) {
    const Vec<float> reached = max<float>(broadcast(-kMostSteps / (128 * unit.high)), lowered);
    return lowered != lowered ? broadcast(__builtin_inff()) : reached;
  }

  FUSED_ATTN_INLINE void begin(const float* rounded, float start) {
    start_ = _mm512_set1_ps(start);
    rounded_ = _mm512_load_ps(rounded);
  }

  template <int kHalf, bool kDrops>
  FUSED_ATTN_INLINE void add(Vec<float> a, Vec<float> b, uint32_t, uint16_t* to) {
    static_assert(!kDrops, "TableWeights does not support dropout");
    const __m512 steps_a = _mm512_fmadd_ps((__m512)a, unit_, start_);
    const __m512 steps_b = _mm512_fmadd_ps((__m512)b, unit_, start_);
    const __m512i steps = _mm512_packus_epi32(to_int(steps_a), to_int(steps_b));  // negative: 0
    const __m512i over = _mm512_maskz_permutex2var_epi8(0x5555555555555555, low_, steps, high_);
    const __m512i weights = _mm512_sub_epi16(steps, over);
    _mm512_store_si512(to, weights);
    rounded_ = _mm512_dpbf16_ps(rounded_, (__m512bh)weights, (__m512bh)ones_);
    // NaN is not detectable in the integer steps, so it is detected in their float sum.
    const __m512 known = _mm512_add_ps(steps_a, steps_b);
    nan_ = _mm512_cmp_ps_mask(kHalf == 0 ? known : known_, known, _CMP_UNORD_Q);
    bits_ = kHalf == 0 ? steps : _mm512_or_si512(bits_, steps);
    known_ = known;
  }

  // Returns true if a weight is NaN or at least 2.
  FUSED_ATTN_INLINE bool overflows() const {
    return !_kortestz_mask16_u8(_mm512_test_epi32_mask(bits_, large_), nan_);
  }

  FUSED_ATTN_INLINE void end(float* rounded, float*) const { _mm512_store_ps(rounded, rounded_); }

 private:
  FUSED_ATTN_INLINE __m512i to_int(__m512 steps) const {
    return _mm512_sub_epi32(_mm512_castps_si512(steps), round_);
  }

  // Entry f is round(128 (1 + f / 128 - 2^(f / 128))).
  static constexpr uint8_t kAbove[128] = {
      0,  0,  1,  1,  1,  1,  2,  2,  2,  3,  3,  3,  3,  4,  4,  4,  4,  5,  5,  5,  5,  6,
      6,  6,  6,  6,  7,  7,  7,  7,  7,  8,  8,  8,  8,  8,  8,  9,  9,  9,  9,  9,  9,  9,
      10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
      11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10,
      10, 10, 10, 9,  9,  9,  9,  9,  9,  9,  8,  8,  8,  8,  8,  7,  7,  7,  7,  7,  6,  6,
      6,  6,  5,  5,  5,  4,  4,  4,  3,  3,  3,  3,  2,  2,  1,  1,  1,  0};

  const __m512 unit_;
  const __m512i round_, ones_, large_, low_, high_;
  __m512 start_{}, rounded_{}, known_{};  // known_ is NaN if a score is NaN
  __m512i bits_{};                        // bitwise OR of the row's steps
  __mmask16 nan_ = 0;
};

// Multiplies row r of output tiles (columns, 2) by a factor.
inline void scale_tile_row(int64_t r, float factor, int64_t columns, float* tiles) {
  for (int64_t c = 0; c < columns; ++c) {
    float* const at = tiles + c * kPairSums + r * 16;
    store(at, load(at) * factor);
  }
}

// Zeroes the weights in row r of a woven tile whose keep bit is 0.
template <class T>
inline void drop_weights(uint64_t keep, uint32_t r, uint16_t* weights) {
  using F = TileFormat<T>;
  for (int64_t half = 0; half < 2; ++half) {
    const __m512i own = F::woven_mask(static_cast<uint32_t>(keep >> (32 * half)));
    for (int part = 0; part < F::kParts; ++part) {
      uint16_t* const row = weights + (half * F::kParts + part) * kPairNumbers + r * kTileSteps;
      _mm512_store_si512(row, _mm512_and_si512(_mm512_load_si512(row), own));
    }
  }
}

// Softmax of a tile. kSum: also accumulate the row sums of the unrounded weights.
template <class T, bool kSum>
class TileSoftmax {
  using F = TileFormat<T>;
  static constexpr int kVectors = static_cast<int>(kTileKeys / 16);

 public:
  static constexpr bool kByTable = kIsBFloat16<T> && !kSum;
  using Weights = std::conditional_t<kByTable, TableWeights, ExpWeights<T, kSum>>;

  // Inputs and outputs of one tile.
  struct Tile {
    QueryTileRows* rows;
    float* scores;
    uint16_t* weights;
    ExpUnit<float> unit;  // unit of the scores
    const TileDropout<kTileKeys>* dropout;
  };

  // Vector work of one tile, for TileSchedule: computes the rows one by one, with the state in
  // registers. Every method is inlined. Tile instructions may write memory, so the compiler would
  // otherwise reload the state after each of them.
  template <bool kDrops>
  class Stream {
   public:
    explicit Stream(const Tile& tile, bool any = true)
        : made_(tile.unit),
          dropout_(tile.dropout),
          rows_(tile.rows),
          scores_(tile.scores),
          weights_(tile.weights),
          row_(any ? 0 : kTileQueries) {}

    FUSED_ATTN_INLINE bool done() const { return row_ >= kTileQueries; }

    uint32_t left() const { return left_; }

    // Computes a quarter of the work of the next row; a quarter is one vector of scores. After the
    // last quarter, adds the weights to the row sums. Leaves the row to finish() if a weight
    // overflows or if the row had no visible key before.
    template <int kQuarter>
    FUSED_ATTN_INLINE void next() {
      if (kQuarter % 2 == 1) return;  // two vectors of scores make one vector of weights
      weigh<kQuarter / 2>(row_, rows_->start[row_]);
      if (kQuarter == 0) return;
      if (__builtin_expect(made_.overflows(), 0)) {
        left_ |= uint32_t{1} << row_;
      } else {
        made_.end(rows_->rounded[row_], rows_->sum[row_]);
      }
      ++row_;
    }

    // Computes the weights and row sums of a row from which the shift was already subtracted.
    void weigh_lowered(int64_t row) {
      weigh<0>(row, Weights::kLowered);
      weigh<1>(row, Weights::kLowered);
      made_.end(rows_->rounded[row], rows_->sum[row]);
    }

   private:
    template <int kHalf>
    FUSED_ATTN_INLINE void weigh(int64_t row, float start) {
      if (kHalf == 0) made_.begin(rows_->rounded[row], start);
      if (kHalf == 0 && kDrops) keep_ = dropout_->keep(row);
      const float* const from = scores_ + row * 16 + kHalf * 2 * kPairSums;
      made_.template add<kHalf, kDrops>(
          load(from), load(from + kPairSums), static_cast<uint32_t>(keep_ >> (32 * kHalf)),
          weights_ + row * kTileSteps + kHalf * F::kParts * kPairNumbers);
    }

    Weights made_;
    const TileDropout<kTileKeys>* const dropout_;
    uint64_t keep_ = 0;  // dropout bits of the row
    QueryTileRows* const rows_;
    const float* const scores_;
    uint16_t* const weights_;
    int64_t row_;        // the next row
    uint32_t left_ = 0;  // bit r is set if row r is left to finish()
  };

  static void reset(QueryTileRows* rows) {
    if (kSum) clear(rows->sum[0], kTileQueries * 16);
    if (F::kRounds) clear(rows->rounded[0], kTileQueries * 16);
    for (int64_t r = 0; r < kTileQueries; r += 16) {
      store(rows->shift + r, broadcast(__builtin_nanf("")));
      store(rows->start + r, broadcast(__builtin_nanf("")));
    }
  }

  // Initializes the shifts of a query tile from the row maxima of its first KV block. Rows without
  // a visible key in this block get NaN.
  __attribute__((noinline)) static void begin(const Tile& tile, int64_t rows = kTileQueries) {
    for (uint32_t half = 0; half < rows; half += 16) {
      alignas(64) float highest[16][16], turned[16][16];
      for (uint32_t r = 0; r < 16; ++r) store(highest[r], maximum(tile, half + r));
      transpose_tile(highest, 16, turned, 16);
      Vec<float> top = load(turned[0]);
      for (int l = 1; l < 16; ++l) top = max<float>(load(turned[l]), top);
      Vec<float> shift = wanted_shift(top, tile.unit.high);
      const Vec<float> start = Weights::start(tile.unit, &shift), unseen = broadcast(-infinity());
      const Vec<float> nan = broadcast(__builtin_nanf(""));
      store(tile.rows->shift + half, top == unseen ? nan : shift);
      store(tile.rows->start + half, top == unseen ? nan : start);
    }
  }

  // Computes the rows of bit mask `left`, which a Stream did not complete, with new shifts.
  template <bool kDrops>
  void finish(const Tile& tile, uint32_t left) {
    rescaled = 0;
    for (; left != 0; left &= left - 1) {
      raise<kDrops>(tile, static_cast<uint32_t>(__builtin_ctz(left)));
    }
  }

  uint32_t rescaled = 0;  // bit r: the accumulated PV of row r must be multiplied by rescale[r]
  float rescale[kTileQueries];

 private:
  static constexpr float infinity() { return __builtin_inff(); }

  static Vec<float> maximum(const Tile& tile, uint32_t r) {
    const float* const from = tile.scores + r * 16;
    Vec<float> highest = load(from);
    for (int v = 1; v < kVectors; ++v) highest = max<float>(load(from + v * kPairSums), highest);
    return highest;
  }

  // Returns the shift for the row maximum `top`. If the unit is tiny, the exponent bias is capped
  // so that the shift stays finite. The weights are then smaller.
  static Vec<float> wanted_shift(Vec<float> top, float unit) {
    const float bias = static_cast<float>(F::kWeightExponent) / unit;
    return top - (bias < 0x1p125f ? bias : 0x1p125f);
  }

  // Computes a new shift for row r, rescales the row sums, and computes the weights.
  template <bool kDrops>
  __attribute__((noinline, cold)) void raise(const Tile& tile, uint32_t r) {
    QueryTileRows& rows = *tile.rows;
    const Vec<float> highest = maximum(tile, r);
    float top = -infinity();
    for (int l = 0; l < 16; ++l) top = highest[l] > top ? highest[l] : top;
    const float old = rows.shift[r];
    const bool has_shift = old == old;
    const bool any = has_shift || top > -infinity();
    if (any) {
      const float wanted = wanted_shift(broadcast(top), tile.unit.high)[0];
      Vec<float> shift = broadcast(old >= wanted ? old : wanted);
      rows.start[r] = Weights::start(tile.unit, &shift)[0];
      rows.shift[r] = shift[0];
      if (has_shift && rows.shift[r] != old) {
        const Vec<float> alpha = exp_nonpositive<float>(broadcast(old - rows.shift[r]), tile.unit);
        store(rows.sum[r], load(rows.sum[r]) * alpha);
        store(rows.rounded[r], load(rows.rounded[r]) * alpha);
        rescale[r] = alpha[0];
        rescaled |= uint32_t{1} << r;
      }
    }
    float* const row = tile.scores + r * 16;
    for (int v = 0; v < kVectors; ++v) {
      // If no key is visible, subtract 0, because -inf - -inf would be NaN.
      const Vec<float> lowered = load(row + v * kPairSums) - (any ? rows.shift[r] : 0.f);
      store(row + v * kPairSums, Weights::within_reach(tile.unit, lowered));
    }
    Stream<kDrops>(tile).weigh_lowered(r);
  }
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
