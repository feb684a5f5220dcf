// Scales and masks a tile of scores one row at a time, and draws its dropout decisions.
#pragma once

#include "cpu/amx/tile_pack.h"
#include "cpu/kernels/attention_common.h"
#include "cpu/kernels/mask_rows.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// Dropout decisions of a tile, computed for kRows query rows at a time.
template <int64_t kKeys>
class TileDropout {
 public:
  static constexpr int kRows = 64 / kKeys;

  explicit TileDropout(const AttentionParams& p)
      : keys_(p.seed), threshold_(dropout_threshold(p.dropout_p)) {}

  void begin(const AttentionParams& p, const TileAt& at) {
    const DropoutAt first = dropout_at(p, at);
    columns_ = {&keys_, threshold_, first.key, first.head, 0};
    first_ = first.query;
  }

  // Returns keep bits for kRows query rows, beginning at row r of the tile. Bit t is for key t of
  // row r, and the bits of each following row are kKeys positions higher.
  FUSED_ATTN_INLINE uint64_t keep(int64_t r) const {
    return columns_.keep(first_ + static_cast<uint32_t>(r));
  }

 private:
  const PhiloxKeys keys_;
  const uint32_t threshold_;
  uint32_t first_ = 0;
  DropoutColumns<kRows> columns_;
};

template <int64_t kKeys>
class TileScores {
  static constexpr int64_t kVectors = kKeys / 16;

 public:
  explicit TileScores(const AttentionParams& p) : units(p), p_(p) {}

  // Returns true if finish() must be called for a tile of n keys.
  bool wanted(bool partial, int64_t n) const { return partial || n < kKeys || units.scaled; }

  // Applies the mask to `rows` rows of scores, beginning at row `first`. Converts the scores to
  // natural units if units.scaled.
  //
  // cap_slope: with softcap, receives its derivative; may be null.
  void finish(const TileAt& at, bool partial, int64_t rows, float* scores, float* cap_slope,
              uint32_t first = 0) {
    const bool masked = partial || at.n < kKeys;
    const bool capped = p_.softcap > 0;
    const float inner = static_cast<float>(capped ? p_.scale / p_.softcap : p_.scale);
    const float cap = static_cast<float>(p_.softcap);
    if (masked) mask_.load(p_, at.b, at.h, at.j, at.n);
    for (uint32_t r = first; r < first + rows; ++r) {
      float* const row = scores + r * 16;
      for (int64_t v = 0; units.scaled && v < kVectors; ++v) {
        const Vec<float> score = load(row + v * kPairSums) * inner;
        if (!capped) {
          store(row + v * kPairSums, score);
          continue;
        }
        const Vec<float> t = tanh<float>(score);
        store(row + v * kPairSums, t * cap);
        if (cap_slope != nullptr) {
          store(cap_slope + r * 16 + v * kPairSums, 1.f - t * t);
        }
      }
      if (masked) mask_.apply(at.i + r - first, row, kPairSums);
    }
  }

  // Sets all scores of row r to -inf.
  static void clear_row(uint32_t r, float* scores) {
    const Vec<float> nothing = broadcast(-__builtin_inff());
    for (int64_t v = 0; v < kVectors; ++v) {
      store(scores + r * 16 + v * kPairSums, nothing);
    }
  }

  const ScoreUnits units;

 private:
  const AttentionParams& p_;
  BlockMask<float, kKeys> mask_;
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
