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
    alignas(64) uint32_t words[kKeys];  // bit r: of query r
    for (int64_t t = 0; t < kKeys; t += 4) dropout_words(p_, at, t, words + t);
    for (int64_t r = 0; r < kTileQueries; ++r) {
      const __m512i bit = _mm512_set1_epi32(static_cast<int32_t>(uint32_t{1} << r));
      uint64_t row = 0;
      for (int64_t v = 0; v < kVectors; ++v) {
        const __m512i own = _mm512_load_si512(words + 16 * v);
        row |= static_cast<uint64_t>(_mm512_test_epi32_mask(own, bit)) << (16 * v);
      }
      keep_[r] = row;
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
