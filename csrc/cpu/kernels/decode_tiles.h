// Decode kernel for AMX: few queries, many keys.
//
// Keys are the left operand of QK^T, so the score tiles are (keys, queries) and must be transposed.
// Softmax, masks and weights then use the row layout of query tiles (tile_softmax.h,
// tile_scores.h). Keys of types with one part are read in place. Keys of other types are split into
// parts one block at a time, so the block stays in L1. Values are packed in pairs of rows.
#pragma once

#include "cpu/kernels/decode_part.h"
#include "cpu/kernels/tile_softmax.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

template <class T>
class DecodeTiles {
  using F = TileFormat<T>;
  using Pack = TilePack<T>;
  using Products = TileProducts<F::kParts>;
  using Softmax = TileSoftmax<T, true>;
  static_assert(kDecodeKeys == kTileKeys, "KV blocks must have the size of tiles");
  static_assert(F::kRounds, "float32 takes six products and a split: DecodeRows is faster");
  static constexpr int64_t kScoreTiles = kTileKeys / 16;
  static constexpr int64_t kGathered = 4;  // maximum rows for which gathers beat a transpose
  // Cache lines of the next block to prefetch after each MMA.
  static constexpr int64_t kAhead = 8;
  static constexpr int32_t kTileIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

 public:
  // Minimum number of query rows for which this kernel is faster than DecodeRows.
  static constexpr int64_t kMinRows = F::kParts == 1 ? 1 : 6;

  DecodeTiles(const AttentionParams& p, const MaskView<float>& mask,
              const DecodeShape<float>& shape)
      : p_(p),
        mask_(mask),
        shape_(shape),
        scores_(p),
        dropout_(p),
        unit_(scores_.units.natural),
        steps_(tile_steps(p.head_dim)),
        steps_v_(tile_steps(p.head_dim_v)),
        heads_of_query_tile_(max64(min64(kTileQueries / p.seqlen_q, shape.group), 1)),
        num_query_tiles_(div_up(shape.group, heads_of_query_tile_)) {}

  bool allocate() {
    return arena_.layout([&] { place(); });
  }

  // Computes the partial result of keys [begin, end) of a key/value head.
  void run(int64_t b, int64_t h_kv, int64_t begin, int64_t end, const DecodePart<float>& part) {
    b_ = b;
    h_kv_ = h_kv;
    keys_ = HeadRows<T>(p_, p_.key, p_.key_strides, b, h_kv);
    values_ = HeadRows<T>(p_, p_.value, p_.value_strides, b, h_kv);
    for (int64_t i = 0; i < num_query_tiles_; ++i) begin_query_tile(i);
    for (int64_t j = begin; j < end; j += kTileKeys) block(j, min64(kTileKeys, end - j));
    for (int64_t i = 0; i < num_query_tiles_; ++i) end_query_tile(query_tiles_[i], part);
  }

 private:
  // A query tile: all queries of one or more heads, one head after another.
  struct QueryTile {
    int64_t head, heads;  // first head in the group; number of heads
    int64_t rows, tiles;  // query rows; tiles of 16 rows
    uint16_t* query;      // right tiles (tiles, steps)
    float* out;           // accumulator tiles (2 steps_v, 2), unnormalized
    bool begun;           // at least one block was processed
    QueryTileRows state;
  };

  // The keys of a block as left tiles, in place or packed. `pair`, `second` and `step` are the
  // distances, in elements, between groups of 32 keys, between the halves of a group, and between
  // steps. `row_bytes` is the distance between rows of a tile.
  struct KeyTiles {
    const uint16_t* tile(int64_t t, int64_t s, int64_t part) const {
      return at + t / 2 * pair + t % 2 * second + s * step + part * kPairNumbers;
    }

    const uint16_t* at;
    int64_t pair, second, step, row_bytes;
  };

  // Prefetches the next block a few cache lines at a time. A burst would stall on the limited
  // number of outstanding requests of a core, and memory would be idle after it.
  //
  // Measured bandwidth: 8.7 GB/s with the hardware prefetcher alone, 10.4 GB/s in bursts of 4 lines
  // per pair of rows, 11.1 GB/s spread out. Summing the same bytes reaches 12.8 GB/s.
  class Ahead {
   public:
    void begin(const DecodeTiles& self, int64_t j) {
      const AttentionParams& p = self.p_;
      rows_ = 0;
      d_ = 0;
      lines = kTileKeys * (div_up(p.head_dim, kLine) + div_up(p.head_dim_v, kLine));
      left_ = 0;
      if (!self.keys_.is_run(j, kTileKeys) || !self.keys_.has_address(j)) return;
      key_ = {self.keys_.at(j), self.keys_.stride(), p.head_dim};
      value_ = {self.values_.at(j), self.values_.stride(), p.head_dim_v};
      left_ = lines;
    }

    FUSED_ATTN_INLINE void prefetch(int64_t count) {
      if (left_ <= 0) return;  // count may exceed left_, which is harmless
      left_ -= count;
      for (; count > 0; --count) {
        __builtin_prefetch(key_.row + d_, 0, 2);
        d_ += kLine;
        if (d_ < key_.dim) continue;
        d_ = 0;
        key_.row += key_.stride;
        if (++rows_ == kTileKeys) key_ = value_;
      }
    }

    int64_t lines = 0;  // cache lines per block

   private:
    static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    struct Rows {
      const T* row;
      int64_t stride, dim;
    };
    Rows key_, value_;
    int64_t rows_, d_, left_ = 0;
  };

  void place() {
    query_tiles_ = arena_.template take<QueryTile>(num_query_tiles_);
    kinds_ = arena_.template take<Tile>(shape_.group);
    queries_ = arena_.template take<uint16_t>(num_query_tiles_ * Pack::size(kTileQueries, steps_));
    outs_ = arena_.template take<float>(num_query_tiles_ * out_size());
    key_ = arena_.template take<uint16_t>(Pack::size(kTileKeys, steps_));
    block_.value = arena_.template take<uint16_t>(Pack::size(kTileKeys, steps_v_));
    turned_ = arena_.template take<float>(kScoreTiles * kTileSums);
    scores_at_ = arena_.template take<float>(2 * kScoreTiles * kTileSums);
    weights_ = arena_.template take<uint16_t>(4 * F::kParts * kTileNumbers);
  }

  int64_t out_size() const { return 2 * 2 * steps_v_ * kTileSums; }

  void begin_query_tile(int64_t index) {
    QueryTile& query_tile = query_tiles_[index];
    query_tile.head = index * heads_of_query_tile_;
    query_tile.heads = min64(heads_of_query_tile_, shape_.group - query_tile.head);
    query_tile.rows = query_tile.heads * p_.seqlen_q;
    query_tile.tiles = div_up(query_tile.rows, kTileRows);
    query_tile.query = queries_ + index * Pack::size(kTileQueries, steps_);
    query_tile.out = outs_ + index * out_size();
    query_tile.begun = false;
    clear(query_tile.out, out_size());
    Softmax::reset(&query_tile.state);
    const SequenceRows queries = query_rows(p_, b_);
    const T* rows[kTileQueries] = {};
    for (int64_t r = 0; r < query_tile.rows; ++r) {
      const int64_t h = h_kv_ * shape_.group + query_tile.head + r / p_.seqlen_q,
                    i = r % p_.seqlen_q;
      if (i >= queries.count) continue;
      rows[r] = at_head<T>(p_.query, p_.query_strides, queries, h) + i * p_.query_strides[2];
    }
    Pack::right(rows, query_tile.tiles * kTileRows, p_.head_dim, steps_, query_tile.query);
  }

  // Processes one KV block for all query tiles.
  void block(int64_t j, int64_t n) {
    bool any = false;
    for (int64_t g = 0; g < shape_.group; ++g) {
      kinds_[g] = mask_.classify(b_, h_kv_ * shape_.group + g, 0, j, j + n);
      any = any || kinds_[g] != Tile::kSkip;
    }
    if (!any) return;
    ahead_.begin(*this, j + kTileKeys);
    const T* rows[kTileKeys] = {};
    values_.list(j, n, rows);
    Pack::values(
        rows, kTileKeys, p_.head_dim_v, steps_v_, [](int i) { return F::unwoven(i); }, &block_,
        [this] { ahead_.prefetch(F::kParts); });
    const KeyTiles keys = key_tiles(j, n);
    for (int64_t i = 0; i < num_query_tiles_; ++i) {
      QueryTile& query_tile = query_tiles_[i];
      for (int64_t tile = 0; tile < query_tile.tiles; ++tile) multiply_keys(query_tile, tile, keys);
      weigh(&query_tile, j, n);
      for (int64_t tile = 0; tile < query_tile.tiles; ++tile) add_values(query_tile, tile);
      for (int s = 0; s < block_.num_nonfinite; ++s)
        add_nonfinite(query_tile, j, block_.nonfinite[s]);
    }
  }

  // Returns the keys of a block: in place if possible, otherwise copied or packed into key_.
  KeyTiles key_tiles(int64_t j, int64_t n) {
    if constexpr (F::kParts == 1) {
      int64_t stride = steps_ * kTileSteps;
      const T* key = reinterpret_cast<T*>(key_);
      if (n == kTileKeys && p_.head_dim == stride && keys_.is_run(j, n)) {
        key = keys_.at(j);
        stride = keys_.stride();
      } else {
        keys_.copy(j, n, p_.head_dim, reinterpret_cast<T*>(key_), kTileKeys, stride);
      }
      return {reinterpret_cast<const uint16_t*>(key), 32 * stride, 16 * stride, kTileSteps,
              2 * stride};
    }
    const T* rows[kTileKeys] = {};
    keys_.list(j, n, rows);
    const int64_t pair = Pack::size(2 * kTileRows, steps_);
    for (int64_t half = 0; half < 2; ++half) {
      Pack::left(rows + half * 2 * kTileRows, p_.head_dim, steps_, key_ + half * pair,
                 [this] { ahead_.prefetch(1); });
    }
    return {key_, pair, kTileNumbers, F::kParts * kPairNumbers, 64};
  }

  // Computes QK^T of 16 query rows and transposes the score tiles from (keys, queries) to (queries,
  // keys).
  void multiply_keys(const QueryTile& query_tile, int64_t tile, const KeyTiles& keys) {
    const uint16_t* query = query_tile.query + tile * steps_ * F::kParts * kTileNumbers;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t s = 0; s < steps_; ++s, query += F::kParts * kTileNumbers) {
#pragma GCC unroll 6
      for (int product = 0; product < Products::kCount; ++product) {
        const int of_key = Products::kOfLeft[product];
        tile_load<6>(query + Products::kOfRight[product] * kTileNumbers);
        tile_load<4>(keys.tile(0, s, of_key), keys.row_bytes);
        F::Number::template multiply<0, 4, 6>();
        ahead_.prefetch(kAhead);
        tile_load<5>(keys.tile(1, s, of_key), keys.row_bytes);
        F::Number::template multiply<1, 5, 6>();
        ahead_.prefetch(kAhead);
        tile_load<4>(keys.tile(2, s, of_key), keys.row_bytes);
        F::Number::template multiply<2, 4, 6>();
        ahead_.prefetch(kAhead);
        tile_load<5>(keys.tile(3, s, of_key), keys.row_bytes);
        F::Number::template multiply<3, 5, 6>();
        ahead_.prefetch(kAhead);
      }
    }
    tile_store<0>(turned_);
    tile_store<1>(turned_ + kTileSums);
    tile_store<2>(turned_ + 2 * kTileSums);
    tile_store<3>(turned_ + 3 * kTileSums);
    float* const scores = scores_at_ + tile * kTileSums;
    const int64_t rows = min64(query_tile.rows - tile * kTileRows, kTileRows);
    for (int64_t c = 0; c < kScoreTiles; ++c) {
      const float* const turned = turned_ + c * kTileSums;
      ahead_.prefetch(ahead_.lines / 16);
      if (rows > kGathered) {
        transpose_tile(turned, 16, scores + c * kPairSums, 16);
        continue;
      }
      const __m512i keys = _mm512_slli_epi32((__m512i)load(kTileIndex), 4);
      for (int64_t r = 0; r < rows; ++r) {
        store(scores + c * kPairSums + r * 16,
              (Vec<float>)_mm512_i32gather_ps(keys, turned + r, 4));
      }
    }
  }

  // Converts the scores of a query tile and keys [j, j + n) to weights: applies mask, softmax and
  // dropout. Multiplies the rows of `out` whose softmax shift changed by their rescale factors.
  void weigh(QueryTile* query_tile, int64_t j, int64_t n) {
    for (int64_t g = 0; g < query_tile->heads; ++g) {
      const Tile kind = kinds_[query_tile->head + g];
      const int64_t first = g * p_.seqlen_q;
      if (kind == Tile::kSkip) {
        for (int64_t i = 0; i < p_.seqlen_q; ++i) {
          scores_.clear_row(static_cast<uint32_t>(first + i), scores_at_);
        }
      } else if (scores_.wanted(kind == Tile::kPartial, n)) {
        scores_.finish(tile_at(*query_tile, g, j, n), kind == Tile::kPartial, p_.seqlen_q,
                       scores_at_, nullptr, static_cast<uint32_t>(first));
      }
    }
    const typename Softmax::Tile tile{&query_tile->state, scores_at_, weights_, unit_, nullptr};
    if (!query_tile->begun) Softmax::begin(tile, query_tile->rows);
    query_tile->begun = true;
    typename Softmax::template Stream<false> stream(tile);
    for (int64_t r = 0; r < query_tile->rows; ++r) {
      stream.template next<0>();
      stream.template next<2>();
    }
    softmax_.template finish<false>(tile, stream.left());
    for (uint32_t left = softmax_.rescaled; left != 0; left &= left - 1) {
      const int r = __builtin_ctz(left);
      scale_tile_row(r, softmax_.rescale[r], 2 * steps_v_, query_tile->out);
    }
    for (int64_t g = 0; p_.dropout_p > 0 && g < query_tile->heads; ++g) {
      dropout_.begin(p_, tile_at(*query_tile, g, j, n));
      for (int64_t i = 0; i < p_.seqlen_q; ++i) {
        drop_weights<T>(dropout_.keep(i), static_cast<uint32_t>(g * p_.seqlen_q + i), weights_);
      }
    }
  }

  TileAt tile_at(const QueryTile& query_tile, int64_t g, int64_t j, int64_t n) const {
    return {b_, h_kv_ * shape_.group + query_tile.head + g, 0, j, n};
  }

  // Accumulates PV of 16 query rows into out.
  void add_values(const QueryTile& query_tile, int64_t tile) {
    const uint16_t* const weights = weights_ + tile * kTileNumbers;
    float* const out = query_tile.out + tile * kTileSums;
    int64_t c = 0;
    for (; c + 4 <= 2 * steps_v_; c += 4) add_columns<4>(weights, c, out + c * kPairSums);
    if (c < 2 * steps_v_) add_columns<2>(weights, c, out + c * kPairSums);
  }

  template <int kColumns>
  void add_columns(const uint16_t* weights, int64_t c, float* out) {
    tile_load<0>(out);
    tile_load<1>(out + kPairSums);
    if (kColumns == 4) tile_load<2>(out + 2 * kPairSums);
    if (kColumns == 4) tile_load<3>(out + 3 * kPairSums);
    constexpr int64_t kStep = F::kParts * kTileNumbers;
    for (int64_t s = 0; s < 2; ++s) {
#pragma GCC unroll 6
      for (int product = 0; product < Products::kCount; ++product) {
        const uint16_t* const value = block_.value + (s * 2 * steps_v_ + c) * kStep +
                                      Products::kOfRight[product] * kTileNumbers;
        tile_load<4>(weights + (s * F::kParts + Products::kOfLeft[product]) * kPairNumbers);
        ahead_.prefetch(4 * kAhead);
        tile_load<6>(value);
        F::Number::template multiply<0, 4, 6>();
        tile_load<7>(value + kStep);
        F::Number::template multiply<1, 4, 7>();
        if (kColumns == 4) {
          tile_load<6>(value + 2 * kStep);
          F::Number::template multiply<2, 4, 6>();
          tile_load<7>(value + 3 * kStep);
          F::Number::template multiply<3, 4, 7>();
        }
      }
    }
    tile_store<0>(out);
    tile_store<1>(out + kPairSums);
    if (kColumns == 4) tile_store<2>(out + 2 * kPairSums);
    if (kColumns == 4) tile_store<3>(out + 3 * kPairSums);
  }

  // Accumulates a non-finite value, which is packed as 0, for the query rows that attend to it.
  void add_nonfinite(const QueryTile& query_tile, int64_t j, int64_t t) {
    const T* const value = values_.at(j + t);
    for (uint32_t r = 0; r < query_tile.rows; ++r) {
      const float weight = F::weight(weights_ + t / 32 * F::kParts * kPairNumbers + r * kTileSteps +
                                     F::woven(static_cast<int>(t % 32)));
      if (weight == 0) continue;
      float* const out = query_tile.out + r * 16;
      for (int64_t d = 0; d < p_.head_dim_v; ++d) {
        out[d / 16 * kPairSums + d % 16] += weight * to_acc(value[d]);
      }
    }
  }

  // Writes a query tile to `part`. Multiplies out by sum / rounded sum, because the product with
  // value used rounded weights.
  void end_query_tile(const QueryTile& query_tile, const DecodePart<float>& part) const {
    for (int64_t r = 0; r < query_tile.rows; ++r) {
      const int64_t at = query_tile.head * p_.seqlen_q + r;
      const float sum = horizontal_sum<float>(load(query_tile.state.sum[r]));
      const float rounded = horizontal_sum<float>(load(query_tile.state.rounded[r]));
      const float shift = query_tile.state.shift[r], factor = rounded == 0 ? 1 : sum / rounded;
      part.sum[at] = sum;
      part.maximum[at] = shift == shift ? shift : -__builtin_inff();
      const float* const out = query_tile.out + r * 16;
      for (int64_t c = 0; c < 2 * steps_v_; ++c) {
        store(part.out + at * shape_.wide + c * 16, load(out + c * kPairSums) * factor);
      }
    }
  }

  const AttentionParams& p_;
  const MaskView<float>& mask_;
  const DecodeShape<float>& shape_;
  TileScores<kTileKeys> scores_;
  TileDropout<kTileKeys> dropout_;
  const ExpUnit<float> unit_;  // unit of the scores
  const int64_t steps_, steps_v_, heads_of_query_tile_, num_query_tiles_;
  Softmax softmax_;
  TileRegisters registers_;
  Arena arena_;
  int64_t b_ = 0, h_kv_ = 0;
  HeadRows<T> keys_, values_;  // of the current key/value head
  Ahead ahead_;
  QueryTile* query_tiles_;
  Tile* kinds_;  // (group), of the current block
  uint16_t* queries_;
  float* outs_;
  uint16_t* key_;   // left tiles (2, steps, parts, 2), or copied rows
  KeyBlock block_;  // value: right tiles (2, 2 steps_v, parts) of pairs of keys
  float* turned_;   // score tiles (keys, queries)
  float* scores_at_;
  uint16_t* weights_;
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
