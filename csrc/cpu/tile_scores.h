// What becomes of a tile of scores between its product and its weights, a row at a time.
#pragma once

#include "cpu/attention_tile.h"
#include "cpu/mask_rows.h"
#include "cpu/tile_pack.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

template <int64_t kKeys>
class TileScores {
  static constexpr int64_t kVectors = kKeys / 16;

 public:
  explicit TileScores(const AttentionParams& p) : units(p), p_(p) {}

  // Whether finish() has anything to do.
  bool wanted(bool partial, int64_t n) const { return partial || n < kKeys || units.scaled; }

  // Masks the scores of `rows` queries, in rows from `first` on, and brings them to natural units
  // where the softmax wants those.
  //
  // cap_slope: with softcap, the derivative of the capped score by the uncapped one; null: not
  // wanted.
  void finish(const TileAt& at, bool partial, int64_t rows, float* scores, float* cap_slope,
              uint32_t first = 0) {
    const bool masked = partial || at.n < kKeys;
    const bool capped = p_.softcap > 0;
    const float inner =
        static_cast<float>(capped ? p_.softmax_scale / p_.softcap : p_.softmax_scale);
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

  // Makes all keys invisible to query r.
  static void clear_row(uint32_t r, float* scores) {
    const Vec<float> nothing = broadcast(-__builtin_inff());
    for (int64_t v = 0; v < kVectors; ++v) {
      store(scores + r * 16 + v * kPairSums, nothing);
    }
  }

  // Bit t of row r: dropout keeps key t of query r.
  const uint64_t* dropout(const TileAt& at) {
    constexpr int kRows = 64 / kKeys;  // of a vector of counters
    const PhiloxKeys keys(p_.seed);
    const DropoutColumns<kRows> columns(&keys, dropout_threshold(p_.dropout_p), at.j,
                                        dropout_head(p_, at), 0);
    for (uint32_t r = 0; r < kTileQueries; r += kRows) {
      const uint64_t rows = columns.keep(static_cast<uint32_t>(at.i) + r);
      for (int e = 0; e < kRows; ++e) keep_[r + e] = rows >> (e * kKeys % 64);
    }
    return keep_;
  }

  const ScoreUnits units;

 private:
  const AttentionParams& p_;
  BlockMask<float, kKeys> mask_;
  uint64_t keep_[kTileQueries];
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
