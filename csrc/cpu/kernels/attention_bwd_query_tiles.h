// Base class of the AMX backward: packs queries, keys and values, and writes the gradients.
#pragma once

#include "cpu/amx/tile_schedule.h"
#include "cpu/kernels/tile_gradients.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// A packed query tile.
struct BwdQueryTile {
  int64_t b, h, first, count;                  // queries [first, first + count) of head (b, h)
  uint32_t alive;                              // bit r: row r exists and has a visible key
  uint16_t *query, *grad_out;                  // left tiles (steps, parts, 2)
  uint16_t *query_columns, *grad_out_columns;  // transposed: left tiles (steps, parts, 2)
  float* grad_query;                           // tiles (2 steps, 2), not yet scaled
  GradientRows rows;
};

// A packed KV block and the accumulators of its gradients. The accumulators are tiles (2 steps, 2)
// of features x keys.
struct BwdBlock {
  KeyBlock keys;       // key: K as pairs of features, for S; value: K as pairs of keys, for dQ
  uint16_t* features;  // V as pairs of features, for dP
  float *grad_key, *grad_value;
  int64_t j, n;  // keys [j, j + n)
  int64_t at;    // index among the blocks of an epoch
};

template <class T>
class BwdQueryTiles {
 protected:
  using F = TileFormat<T>;
  using Pack = TilePack<T>;
  static constexpr int64_t kKeyTiles = kGradientKeys / 16;
  static constexpr int64_t kStep = F::kParts * kTileNumbers;

  explicit BwdQueryTiles(const AttentionBwdParams& p)
      : bwd_(p),
        p_(p.fwd),
        scores_(p_),
        unit_(scores_.units.natural),
        steps_(tile_steps(p_.head_dim)),
        // head_dim_v is 0 in the backward of the attention weights, which does not use the values.
        // dP is then computed from zeros.
        steps_v_(tile_steps(p_.head_dim_v)) {}

  static int64_t query_tile_bytes(int64_t steps, int64_t steps_v) {
    return 4 * Pack::size(kTileQueries, steps + steps_v);
  }

  void place(int64_t query_tiles) {
    const int64_t size = Pack::size(kTileQueries, steps_);
    const int64_t size_v = Pack::size(kTileQueries, steps_v_);
    query_tiles_ = arena_.template take<BwdQueryTile>(query_tiles);
    query_ = arena_.template take<uint16_t>(query_tiles * size);
    query_columns_ = arena_.template take<uint16_t>(query_tiles * size);
    grad_out_ = arena_.template take<uint16_t>(query_tiles * size_v);
    grad_out_columns_ = arena_.template take<uint16_t>(query_tiles * size_v);
    out_ = arena_.template take<uint16_t>(size_v);
    products_ = arena_.template take<float>(4 * kTileSums);
    rows_ = arena_.template take<float>(kGradientKeys * max64(steps_, steps_v_) * kTileSteps);
  }

  // Packs the query tile that starts at query `first` of head (b, h) into `slot`, and loads its lse
  // and delta. Skips the packing if all rows are fully masked.
  void pack_query_tile(int64_t b, int64_t h, int64_t first, int64_t slot) {
    const SequenceRows queries = query_rows(p_, b);
    BwdQueryTile& query_tile = query_tiles_[slot];
    query_tile.b = b;
    query_tile.h = h;
    query_tile.first = first;
    query_tile.count = min64(kTileQueries, queries.count - first);
    query_tile.query = query_ + slot * Pack::size(kTileQueries, steps_);
    query_tile.query_columns = query_columns_ + slot * Pack::size(kTileQueries, steps_);
    query_tile.grad_out = grad_out_ + slot * Pack::size(kTileQueries, steps_v_);
    query_tile.grad_out_columns = grad_out_columns_ + slot * Pack::size(kTileQueries, steps_v_);
    load_rows(lse_begin(p_, b, h) + first, &query_tile);
    if (query_tile.alive == 0) return;
    const T* rows[kTileQueries];
    list(p_.query, p_.query_strides, queries, query_tile, rows);
    Pack::left(rows, p_.head_dim, steps_, query_tile.query);
    Pack::left_columns(rows, p_.head_dim, steps_, query_tile.query_columns);
    list(bwd_.grad_out, bwd_.grad_out_strides, queries, query_tile, rows);
    Pack::left(rows, p_.head_dim_v, steps_v_, query_tile.grad_out);
    Pack::left_columns(rows, p_.head_dim_v, steps_v_, query_tile.grad_out_columns);
    list(p_.out, p_.out_strides, queries, query_tile, rows);
    Pack::right(rows, kTileQueries, p_.head_dim_v, steps_v_, out_);
    load_delta(queries, &query_tile);
  }

  // Packs keys and values [j, j + n) of head (b, h_kv).
  void pack_block(int64_t b, int64_t h_kv, int64_t j, int64_t n, BwdBlock* block) {
    const SequenceRows keys = key_rows(p_, b);
    const T* rows[kGradientKeys];
    block->j = j;
    block->n = n;
    list_rows(at_head<T>(p_.value, p_.value_strides, keys, h_kv), p_.value_strides[2], j, n,
              kGradientKeys, rows);
    Pack::right(rows, kGradientKeys, p_.head_dim_v, steps_v_, block->features);
    list_rows(at_head<T>(p_.key, p_.key_strides, keys, h_kv), p_.key_strides[2], j, n,
              kGradientKeys, rows);
    Pack::right(rows, kGradientKeys, p_.head_dim, steps_, block->keys.key);
    Pack::values(
        rows, kGradientKeys, p_.head_dim, steps_, [](int i) { return F::unwoven(i); },
        &block->keys);
  }

  // Returns the largest power of 2 by which dS of the query heads of h_kv can be scaled without
  // overflow, in formats with a short exponent range, or 1 for other formats. The bound is
  //   |dS| <= c (|dP| + |delta|) + |dlse| <= 2 c max |dO| max |V| + max |dlse|.
  float grad_factor(int64_t b, int64_t h_kv) {
    if (!F::kShortRange) return 1;
    const SequenceRows queries = query_rows(p_, b), keys = key_rows(p_, b);
    const int64_t group = p_.num_heads / p_.num_heads_kv;
    float grad_out = 0, grad_lse = 0;
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
      const T* const head = at_head<T>(bwd_.grad_out, bwd_.grad_out_strides, queries, h);
      const float own = longest(head, bwd_.grad_out_strides[2], queries.count);
      grad_out = own > grad_out ? own : grad_out;
      for (int64_t i = 0; bwd_.grad_lse != nullptr && i < queries.count; ++i) {
        const float x = static_cast<const float*>(bwd_.grad_lse)[lse_begin(p_, b, h) + i];
        const float size = __builtin_fabsf(x);
        grad_lse = size > grad_lse ? size : grad_lse;  // false for NaN
      }
    }
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv);
    const float length = longest(value, p_.value_strides[2], keys.count);
    const double scale = dropout_scale(p_.dropout_p);
    const double bound = 2 * scale * static_cast<double>(grad_out) * length + grad_lse;
    constexpr int kLargest = 15;  // 2^15 is finite in float16
    int exponent = 0;
    (void)__builtin_frexp(bound, &exponent);  // bound <= 2^exponent
    if (!(bound > 0) || exponent > 1000) return 1;
    const int64_t shift = min64(max64(kLargest - exponent, -100), 100);
    return __builtin_ldexpf(1.f, static_cast<int>(shift));
  }

  // Scales dQ of a head and writes it from tiles to the rows of grad_query.
  void write_grad_query(int64_t b, int64_t h, const float* query_tiles) {
    const SequenceRows queries = query_rows(p_, b);
    const ResultRows<T> out(p_, bwd_.grad_query, bwd_.grad_query_strides, queries, h);
    const float scale = static_cast<float>(p_.scale);
    for (int64_t i = 0; i < queries.count; i += kTileQueries) {
      const float* const query_tile = query_tiles + i * steps_ * kTileSteps;
      for (int64_t r = 0; r < min64(kTileQueries, queries.count - i); ++r) {
        for (int64_t c = 0; c < 2 * steps_; ++c) {
          store(rows_ + c * 16, load(query_tile + c * kPairSums + r * 16) * scale);
        }
        out.store(i + r, rows_, p_.head_dim);
      }
    }
  }

  // Transposes the gradients of keys [begin, end), multiplies them by `factor`, and writes them to
  // the rows of `result`.
  void write_key_rows(const float* tiles, int64_t steps, int64_t dim, double factor, int64_t begin,
                      int64_t end, void* result, const int64_t strides[3], int64_t b, int64_t h) {
    const ResultRows<T> out(p_, result, strides, key_rows(p_, b), h);
    const int64_t wide = steps * kTileSteps;
    const float scale = static_cast<float>(factor);
    for (int64_t j = begin; j < end; j += kGradientKeys, tiles += kGradientKeys * wide) {
      for (int64_t f = 0; f < 2 * steps; ++f) {
        for (int64_t k = 0; k < kKeyTiles; ++k) {
          alignas(64) float turned[16][16];
          const int64_t at = (f / 2 * kKeyTiles + k) * 2 + f % 2;
          transpose_tile(tiles + at * kTileSums, 16, turned, 16);
          for (int c = 0; c < 16; ++c) {
            store(rows_ + (k * 16 + c) * wide + f * 16, load(turned[c]) * scale);
          }
        }
      }
      for (int64_t t = 0; t < min64(kGradientKeys, end - j); ++t) {
        out.store(j + t, rows_ + t * wide, dim);
      }
    }
  }

  const AttentionBwdParams& bwd_;
  const AttentionParams& p_;
  TileScores<kGradientKeys> scores_;
  const ExpUnit<float> unit_;  // unit of the scores
  const int64_t steps_, steps_v_;
  Arena arena_;
  TileRegisters registers_;
  BwdQueryTile* query_tiles_;  // (slots)
  float* rows_;                // (32, max(head_dim, head_dim_v)), padded

 private:
  // Returns the largest Euclidean norm of a row, excluding rows whose norm is not finite.
  float longest(const T* rows, int64_t stride, int64_t count) {
    float most = 0;
    for (int64_t r = 0; r < count; ++r) {
      load_row(rows + r * stride, p_.head_dim_v, rows_);
      for (int64_t d = p_.head_dim_v; d < steps_v_ * kTileSteps; ++d) rows_[d] = 0;
      Vec<float> sum{};
      for (int64_t d = 0; d < steps_v_ * kTileSteps; d += 16) {
        sum += load(rows_ + d) * load(rows_ + d);
      }
      const float square = horizontal_sum<float>(sum);
      most = square > most && square < __builtin_inff() ? square : most;
    }
    return __builtin_sqrtf(most);
  }

  // Loads lse, its rounding residual and dlse of the query tile, and sets `alive`.
  //
  // at: index of the first row in lse.
  void load_rows(int64_t at, BwdQueryTile* query_tile) const {
    query_tile->alive = 0;
    GradientRows& rows = query_tile->rows;
    // Unless kFull, exponents have base 2: lse is stored in units of score * unit_.high.
    const double step = TileGradients<T>::kFull ? 1 : 1 / static_cast<double>(unit_.high);
    const double natural = scores_.units.natural * step;
    for (int64_t r = 0; r < kTileQueries; ++r) {
      const bool alive = load_lse(bwd_, r < query_tile->count, at + r, natural, &rows.lse[r],
                                  &rows.lse_lost[r], &rows.grad_lse[r]);
      query_tile->alive |= uint32_t{alive} << r;
    }
  }

  // Fills `rows` with the addresses of the rows of a query tile. Fully masked rows are null,
  // because their contents, even NaN, must have no effect.
  static void list(const void* data, const int64_t strides[3], const SequenceRows& queries,
                   const BwdQueryTile& query_tile, const T** rows) {
    const T* const head = at_head<T>(data, strides, queries, query_tile.h);
    for (int64_t r = 0; r < kTileQueries; ++r) {
      rows[r] = query_tile.alive >> r & 1 ? head + (query_tile.first + r) * strides[2] : nullptr;
    }
  }

  // Computes delta as the diagonal of dO O^T, with the same MMAs as dP: in rows where one key has
  // all the weight, delta and dP are large and must cancel. For the same reason, dlse is not folded
  // into delta.
  void load_delta(const SequenceRows& queries, BwdQueryTile* query_tile) {
    TileQuad quad;
    product_quads<F>(query_tile->grad_out, out_, steps_v_, 2, products_, &quad);
    PendingSums pending;
    TileSchedule<F, NoWork>(&pending, {}).template multiply<false, 0>(quad);
    pending.flush();
    const float scale = static_cast<float>(dropout_scale(p_.dropout_p));
    const int64_t head = lse_begin(p_, query_tile->b, query_tile->h) + query_tile->first;
    for (int64_t r = 0; r < kTileQueries; ++r) {
      query_tile->rows.delta[r] = 0;
      if ((query_tile->alive >> r & 1) == 0 || scale == 0) continue;
      float delta = products_[r / 16 * kPairSums + r * 16 + r % 16];
      if constexpr (sizeof(T) == 2) {
        if (p_.out_residual != nullptr)
          delta += delta_residual<T>(bwd_, queries, query_tile->h, query_tile->first + r);
      }
      if (bwd_.row_sums != nullptr) delta += static_cast<const float*>(bwd_.row_sums)[head + r];
      query_tile->rows.delta[r] = delta / scale;
    }
  }

  uint16_t *query_, *query_columns_, *grad_out_, *grad_out_columns_;
  uint16_t* out_;    // right tiles (2, steps_v, parts)
  float* products_;  // (4 tiles): dO O^T
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
