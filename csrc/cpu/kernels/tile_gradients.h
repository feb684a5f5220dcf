// Computes P and dS of a tile from its scores and dP, interleaved with tile MMAs. attention_bwd.h
// defines the symbols.
#pragma once

#include "cpu/kernels/tile_scores.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// Row statistics of a query tile, by row.
struct GradientRows {
  // lse: in score units if kFull, otherwise in powers of 2; +inf for fully masked rows. lse_lost:
  // rounding residual of lse, in natural units.
  alignas(64) float lse[kTileQueries], lse_lost[kTileQueries];
  alignas(64) float delta[kTileQueries], grad_lse[kTileQueries];
};

// Number of keys in a block. With 64, the scores and dP of two tiles would fill L1. Each evicted
// cache line costs about as much as a vector multiply-add.
constexpr int64_t kGradientKeys = 32;

// Computes P and dS. Stores both as pairs of queries (for dV and dK), and dS also in rows (for dQ).
template <class T>
class TileGradients {
  using F = TileFormat<T>;

 public:
  static constexpr bool kFull = kPrecision<T> == Precision::kFull;

  // Inputs and outputs of one tile.
  struct Tile {
    const GradientRows* rows;
    // Scores and dP, as tiles (2 of keys, 2 of queries). With for_bias, both are overwritten: grads
    // with dS without the derivative of softcap, and scores, for 16-bit types, with P.
    float *scores, *grads;
    const float* cap_slope;                     // derivative of softcap, tiled like scores; or null
    const TileDropout<kGradientKeys>* dropout;  // null without dropout
    uint16_t *weight_pairs, *grad_pairs;        // right tiles (2, parts)
    uint16_t* grad_rows;                        // left tiles (parts, 2)
    ExpUnit<float> unit;                        // unit of the scores
    float dropout_scale;
    float grad_factor;  // scale of the stored dS if F::kShortRange
    bool for_bias;
  };

  // Vector work of one tile, for TileSchedule. A unit of work is two rows. kPlain: no dropout,
  // dlse, softcap or for_bias.
  template <bool kPlain>
  class Stream {
   public:
    explicit Stream(const Tile& tile, bool any) : tile_(tile), at_(any ? 0 : kUnits) {}

    static constexpr int kUnits = static_cast<int>(kTileQueries) / 2;

    FUSED_ATTN_INLINE bool done() const { return at_ >= kUnits; }

    // Computes a quarter of a unit, 16 keys of one row.
    template <int kQuarter>
    FUSED_ATTN_INLINE void next() {
      constexpr int kRow = kQuarter % 2, kVector = kQuarter / 2;
      const uint32_t r = 2 * at_ + kRow;
      static_assert(TileDropout<kGradientKeys>::kRows == 2,
                    "one unit is two rows, as in a draw of dropout");
      if (!kPlain && kQuarter == 0 && tile_.dropout != nullptr) {
        keep_ = tile_.dropout->keep(2 * at_);
      }
      gradient(r, kVector, weights_[kRow], grads_[kRow][kVector]);
      uint16_t* const row = tile_.grad_rows + r * kTileSteps;
      const int64_t pair = at_ * kTileSteps + kVector * F::kParts * kTileNumbers;
      for (int p = 0; p < F::kParts; ++p) {
        const int64_t part = p * kTileNumbers;
        if (kVector == 1) F::store_woven(grads_[kRow][0][p], grads_[kRow][1][p], row + 2 * part);
        if (kRow == 0) continue;
        F::store_woven(weights_[0][p], weights_[1][p], tile_.weight_pairs + pair + part);
        F::store_woven(grads_[0][kVector][p], grads_[1][kVector][p],
                       tile_.grad_pairs + pair + part);
      }
      if (kQuarter == 3) ++at_;
    }

   private:
    // Computes P and dS of row r for the 16 keys of vector v, split into parts.
    FUSED_ATTN_INLINE void gradient(uint32_t r, uint32_t v, Vec32* kept_parts,
                                    Vec32* grad_parts) const {
      const uint32_t e = r * 16 + v * static_cast<uint32_t>(kPairSums);
      const Vec<float> lse = broadcast(tile_.rows->lse[r]), score = load(tile_.scores + e);
      // Applies the rounding residuals of lse and of score - lse as a factor, exp(-residual) = 1 -
      // residual. If added to the exponent, they would be lost in rounding.
      Vec<float> rounded, lost = broadcast(tile_.rows->lse_lost[r]);
      if constexpr (kFull) {
        const Vec<float> below = score - lse;
        rounded = exp_nonpositive<float>(below, tile_.unit);
        lost += (score - (below + lse)) * tile_.unit.natural;
        lost = rounded == 0 ? Vec<float>{} : lost;  // it is NaN for a masked score
      } else {
        const Vec<float> high = broadcast(tile_.unit.high);
        rounded = exp2_rough<kPrecision<T>>(fused_multiply_add<float>(score, high, -lse));
      }
      const Vec<float> weight = rounded + rounded * lost;
      Vec<float> g = load(tile_.grads + e);
      Vec<float> kept = weight;
      if (kPlain) {
        g = weight * (g - tile_.rows->delta[r]);
      } else {
        if (tile_.dropout != nullptr) {
          const uint32_t own = static_cast<uint32_t>(keep_ >> (r % 2 * kGradientKeys + 16 * v));
          kept = where<float>(own, weight, Vec<float>{});
          g = where<float>(own, g, Vec<float>{});
        }
        g = weight * ((g - tile_.rows->delta[r]) * tile_.dropout_scale + tile_.rows->grad_lse[r]);
      }
      // A masked key may contain NaN, and 0 * NaN is NaN.
      g = weight == 0 ? Vec<float>{} : g;
      if (!kPlain) {
        if (tile_.for_bias) {
          store(tile_.grads + e, g);
          if (F::kRounds) store(tile_.scores + e, weight);
        }
        if (tile_.cap_slope != nullptr) {
          g = weight == 0 ? Vec<float>{} : g * load(tile_.cap_slope + e);
        }
      }
      if (F::kWeightExponent > 0) kept *= static_cast<float>(1 << F::kWeightExponent);
      if (F::kShortRange) g *= tile_.grad_factor;
      F::split(kept, kept_parts);
      F::split(g, grad_parts);
    }

    const Tile tile_;
    uint64_t keep_ = 0;  // dropout bits of the two rows of a unit
    uint32_t at_;
    Vec32 weights_[2][F::kParts], grads_[2][2][F::kParts];  // [row][vector] of the current unit
  };
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
