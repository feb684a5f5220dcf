// Mask support for the CPU kernels: classifies tiles, and applies the mask to tiles of scores.
#pragma once

#include "block_ranges.h"
#include "cpu/kernels/product.h"
#include "cpu/simd/convert.h"
#include "cpu/workspace.h"

namespace fused_attn {
namespace {

// Replaces any NaN by the default quiet NaN. Rounding weights and gradients to bfloat16 adds to
// their bits, which would turn a NaN of a float32 bias, slope or dlse into a number if its low bits
// are ones.
template <class A>
inline A with_plain_nan(A x) {
  return x == x ? x : static_cast<A>(__builtin_nan(""));
}

// Returns score + bias, and -inf where the bias is -inf, even if the score is NaN.
template <class A>
inline Vec<A> biased(Vec<A> score, Vec<A> bias) {
  const Vec<A> nan = broadcast<A>(static_cast<A>(__builtin_nan("")));
  const Vec<A> sum = bias == bias ? score + bias : nan;
  return bias == -static_cast<A>(__builtin_inf()) ? bias : sum;
}

// Number of keys in a KV block. Its float32 scores for 32 queries take 16 KiB, half of a 32 KiB L1
// cache.
constexpr int64_t kBlockN = 128;

// Returns the interval of query i, which is unlimited without a table of intervals.
inline Interval interval_of(const MaskParams& mask, int64_t b, int64_t h, int64_t i) {
  if (mask.intervals == nullptr) return {0, kUnlimited};
  return mask.intervals[b * mask.intervals_strides[0] + h * mask.intervals_strides[1] + i];
}

inline Interval intersection(const Interval& a, const Interval& b) {
  return {max64(a.lo, b.lo), min64(a.hi, b.hi)};
}

// Returns a word in which bits [0, n) are set.
inline uint64_t first_bits(int64_t n) {
  return n >= 64 ? ~uint64_t{0} : n <= 0 ? 0 : (uint64_t{1} << n) - 1;
}

// Returns bits j to j + 63 of query i in the table of bits. Bits past seqlen_k are undefined.
inline uint64_t bits_of(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t* const strides = p.mask.bits_strides;
  const int64_t word = j / 64, shift = j % 64;
  const uint64_t* const row = p.mask.bits + b * strides[0] + h * strides[1] + i * strides[2] + word;
  const bool last = 64 * (word + 1) >= p.seqlen_k;
  return shift == 0 || last ? row[0] >> shift : row[0] >> shift | row[1] << (64 - shift);
}

template <class A>
class MaskView {
  static constexpr int kLane = kLanes<A>;
  static constexpr int64_t kRows = kPanel<A>;
  static constexpr int64_t kSpan = 32;      // K of one tile MMA
  static constexpr int64_t kBiasKeys = 16;  // keys that are transposed together
  using VecI = Vec<Int<A>>;

 public:
  // Initializes the view. Scans the document ids once for the range of ids in each query tile and
  // in each KV block of `block` keys, and the intervals for their range in each query tile. `p`
  // must outlive the view. Returns false if out of memory.
  bool init(const AttentionParams& p, int64_t block = kBlockN) {
    p_ = &p;
    block_ = block;
    mask_ = &p.mask;
    const bool documents = mask_->query_documents != nullptr;
    if (!documents && mask_->intervals == nullptr) return true;
    num_query_tiles_ = (p.seqlen_q + kRows - 1) / kRows;
    num_blocks_ = (p.seqlen_k + block_ - 1) / block_;
    if (!arena_.layout([&] { place(p.batch); })) return false;
    if (mask_->intervals != nullptr) summarize_intervals();
    for (int64_t b = 0; documents && b < p.batch; ++b) {
      id_ranges(p.mask.query_documents + b * p.mask.query_documents_stride, p.seqlen_q, kRows,
                query_ids_ + b * num_query_tiles_);
      id_ranges(p.mask.key_documents + b * p.mask.key_documents_stride, p.seqlen_k, block_,
                key_ids_ + b * num_blocks_);
    }
    return true;
  }

  // Classifies the query tile that begins at row i_begin against the KV block [j_begin, j_end).
  Tile classify(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t j_end) const {
    const int64_t i_end = min64(i_begin + kRows, num_queries(b));
    Tile tile = classify_bounds(bounds(b), i_begin, i_end, j_begin, j_end);
    if (tile != Tile::kSkip && intervals_ != nullptr) {
      tile = combine(tile, classify_intervals(intervals_of(b, h, i_begin), j_begin, j_end));
    }
    if (tile != Tile::kSkip && query_ids_ != nullptr) {
      tile = combine(tile, classify_documents(query_ids_[b * num_query_tiles_ + i_begin / kRows],
                                              key_ids_[b * num_blocks_ + j_begin / block_]));
    }
    if (tile != Tile::kSkip && mask_->key_mask.data != nullptr) {
      tile = combine(tile, classify_key_mask(b, h, j_begin, j_end));
    }
    if (tile != Tile::kSkip && mask_->bits != nullptr) {
      tile = combine(tile, classify_bits(b, h, i_begin, i_end, j_begin, j_end));
    }
    if (tile != Tile::kSkip) {
      tile = combine(tile, classify_dense(mask_->dense, b, h, i_begin, i_end, j_begin, j_end));
    }
    if (tile != Tile::kSkip) {
      tile = combine(tile, classify_dense(mask_->bias, b, h, i_begin, i_end, j_begin, j_end));
    }
    return tile == Tile::kFull && mask_->slopes != nullptr ? Tile::kPartial : tile;
  }

  // Computes the key range [*lo, *hi) of block [j_begin, j_end) outside which the structural mask
  // masks all keys for the entire query tile. *lo - j_begin is a multiple of kSpan. *hi - j_begin
  // is too, unless *hi is j_end. *lo >= *hi if all keys are masked.
  void visible_span(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t j_end,
                    int64_t* lo, int64_t* hi) const {
    const SequenceBounds s = bounds(b);
    const int64_t first = max64(i_begin, s.query_begin);
    const int64_t last = min64(min64(i_begin + kRows, num_queries(b)), s.query_end) - 1;
    Interval keys =
        intersection({visible_keys(s, first).lo, visible_keys(s, last).hi}, {j_begin, j_end});
    if (intervals_ != nullptr) keys = intersection(keys, intervals_of(b, h, i_begin).any);
    *lo = j_begin + (keys.lo - j_begin) / kSpan * kSpan;
    *hi = keys.lo < keys.hi ? min64(j_begin + round_up(keys.hi - j_begin, kSpan), j_end) : *lo;
  }

  // Adds biases to the scores (n keys, kRows), in natural units, and sets masked scores to -inf.
  //
  // stage: workspace (kBlockN, kRows).
  void apply(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n, A* scores,
             A* stage) const {
    add_bias(b, h, i_begin, j_begin, n, scores, stage);
    if (mask_->slopes != nullptr) add_alibi(b, h, i_begin, j_begin, n, scores);
    uint32_t words[kBlockN];
    if (!visible_words(b, h, i_begin, j_begin, n, words)) return;
    for (int64_t t = 0; t < n; ++t) {
      for (int v = 0; v < 2; ++v) {
        A* const at = scores + t * kRows + v * kLane;
        store(at, where<A>(words[t] >> (v * kLane), load(at), minus_infinity()));
      }
    }
  }

 private:
  int64_t num_queries(int64_t b) const { return query_rows(*p_, b).count; }
  SequenceBounds bounds(int64_t b) const {
    return sequence_bounds(*mask_, b, num_queries(b), key_rows(*p_, b).count);
  }

  static Vec<A> minus_infinity() { return broadcast<A>(-static_cast<A>(__builtin_inf())); }

  void place(int64_t batch) {
    if (mask_->query_documents != nullptr) {
      query_ids_ = arena_.template take<IdRange>(batch * num_query_tiles_);
      key_ids_ = arena_.template take<IdRange>(batch * num_blocks_);
    }
    if (mask_->intervals != nullptr) {
      intervals_ = arena_.template take<IntervalRange>(interval_heads() * num_query_tiles_);
    }
  }

  // Returns the number of (batch, head) pairs in the table of intervals, where a broadcast
  // dimension counts as 1.
  int64_t interval_heads() const {
    const int64_t* const strides = mask_->intervals_strides;
    return (strides[0] == 0 ? 1 : p_->batch) * (strides[1] == 0 ? 1 : p_->num_heads);
  }

  void summarize_intervals() {
    const int64_t batches = mask_->intervals_strides[0] == 0 ? 1 : p_->batch;
    const int64_t heads = interval_heads() / max64(batches, 1);
    IntervalRange* out = intervals_;
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < p_->seqlen_q; i += kRows) *out++ = interval_range(b, h, i);
      }
    }
  }

  IntervalRange interval_range(int64_t b, int64_t h, int64_t i_begin) const {
    IntervalRange range{{kUnlimited, 0}, {0, kUnlimited}};
    for (int64_t i = i_begin; i < min64(i_begin + kRows, p_->seqlen_q); ++i) {
      const Interval keys = interval_of(*mask_, b, h, i);
      range.every = intersection(range.every, keys);
      if (keys.lo >= keys.hi) continue;
      range.any = {min64(range.any.lo, keys.lo), max64(range.any.hi, keys.hi)};
    }
    return range;
  }

  const IntervalRange& intervals_of(int64_t b, int64_t h, int64_t i_begin) const {
    const int64_t* const strides = mask_->intervals_strides;
    const int64_t heads = strides[1] == 0 ? 1 : p_->num_heads;
    const int64_t run = (strides[0] == 0 ? 0 : b * heads) + (strides[1] == 0 ? 0 : h);
    return intervals_[run * num_query_tiles_ + i_begin / kRows];
  }

  static void id_ranges(const int64_t* ids, int64_t count, int64_t step, IdRange* out) {
    for (int64_t begin = 0; begin < count; begin += step, ++out) {
      *out = {ids[begin], ids[begin]};
      for (int64_t i = begin + 1; i < min64(begin + step, count); ++i) {
        *out = {min64(out->min, ids[i]), max64(out->max, ids[i])};
      }
    }
  }

  Tile classify_key_mask(int64_t b, int64_t h, int64_t j_begin, int64_t j_end) const {
    const DenseTensor& t = mask_->key_mask;
    const uint8_t* row = static_cast<const uint8_t*>(t.data) + b * t.strides[0] + h * t.strides[1];
    int64_t num_visible = 0;
    if (t.strides[3] == 1) {  // this loop vectorizes
      for (int64_t j = j_begin; j < j_end; ++j) num_visible += row[j] != 0;
    } else {
      for (int64_t j = j_begin; j < j_end; ++j) num_visible += row[j * t.strides[3]] != 0;
    }
    return num_visible == 0                 ? Tile::kSkip
           : num_visible == j_end - j_begin ? Tile::kFull
                                            : Tile::kPartial;
  }

  Tile classify_bits(int64_t b, int64_t h, int64_t i_begin, int64_t i_end, int64_t j_begin,
                     int64_t j_end) const {
    uint64_t visible = 0, masked = 0;
    for (int64_t i = i_begin; i < i_end; ++i) {
      for (int64_t j = j_begin; j < j_end; j += 64) {
        const uint64_t bits = bits_of(*p_, b, h, i, j), within = first_bits(j_end - j);
        visible |= bits & within;
        masked |= ~bits & within;
      }
      if (visible != 0 && masked != 0) return Tile::kPartial;
    }
    return visible == 0 ? Tile::kSkip : Tile::kFull;
  }

  void add_bias(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n, A* scores,
                A* stage) const {
    if (mask_->bias.data == nullptr) return;
    switch (mask_->bias_dtype) {
      case DType::kFloat32:
        return add_bias_as<float>(b, h, i_begin, j_begin, n, scores, stage);
      case DType::kFloat64:
        return add_bias_as<double>(b, h, i_begin, j_begin, n, scores, stage);
      case DType::kFloat16:
        return add_bias_as<Half>(b, h, i_begin, j_begin, n, scores, stage);
      case DType::kBFloat16:
        return add_bias_as<BFloat16>(b, h, i_begin, j_begin, n, scores, stage);
    }
  }

  template <class B>
  void add_bias_as(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n, A* scores,
                   A* stage) const {
    const DenseTensor& t = mask_->bias;
    const B* base = static_cast<const B*>(t.data) + b * t.strides[0] + h * t.strides[1] +
                    i_begin * t.strides[2] + j_begin * t.strides[3];
    if (t.strides[2] == 0) {  // the bias is the same for every query
      for (int64_t j = 0; j < n; ++j) {
        const Vec<A> bias = broadcast<A>(static_cast<A>(to_acc(base[j * t.strides[3]])));
        for (int v = 0; v < 2; ++v) add_to(bias, scores + j * kRows + v * kLane);
      }
      return;
    }
    transpose_bias(base, t.strides, min64(kRows, num_queries(b) - i_begin), n, stage);
    for (int64_t at = 0; at < n * kRows; at += kLane) add_to(load(stage + at), scores + at);
  }

  // Stores the bias of `rows` queries and n keys in stage, (n, kRows). The lanes after the last
  // query repeat it.
  template <class B>
  static void transpose_bias(const B* bias, const int64_t strides[4], int64_t rows, int64_t n,
                             A* stage) {
    constexpr bool kConverts = sizeof(B) != sizeof(A);
    if constexpr (!kConverts) {
      if (strides[3] == 1 && rows == kRows) {
        return transpose(bias, strides[2], kRows, n, stage, kRows);
      }
    }
    alignas(64) A row[kRows * kBiasKeys];
    for (int64_t j = 0; j < n; j += kBiasKeys) {
      const int64_t keys = min64(kBiasKeys, n - j);
      for (int64_t l = 0; l < kRows; ++l) {
        const B* const src = bias + min64(l, rows - 1) * strides[2] + j * strides[3];
        A* const dst = row + l * kBiasKeys;
        if constexpr (sizeof(Acc<B>) == sizeof(A)) {
          if (strides[3] == 1) {
            load_row(src, keys, dst);
            continue;
          }
        }
        for (int64_t e = 0; e < keys; ++e) dst[e] = static_cast<A>(to_acc(src[e * strides[3]]));
      }
      transpose(row, kBiasKeys, kRows, keys, stage + j * kRows, kRows);
    }
  }

  static void add_to(Vec<A> bias, A* scores) { store(scores, biased<A>(load(scores), bias)); }

  void add_alibi(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n,
                 A* scores) const {
    const A slope = with_plain_nan(
        static_cast<A>(mask_->slopes[b * mask_->slopes_strides[0] + h * mask_->slopes_strides[1]]));
    const int64_t offset = bounds(b).alibi_offset;
    VecI first[2];
    for (int l = 0; l < kRows; ++l) {
      first[l / kLane][l % kLane] = static_cast<Int<A>>(i_begin + l + offset - j_begin);
    }
    for (int64_t t = 0; t < n; ++t) {
      for (int v = 0; v < 2; ++v) {
        A* const at = scores + t * kRows + v * kLane;
        const VecI ahead = first[v] - static_cast<Int<A>>(t);
        store(at, load(at) - slope * __builtin_convertvector(ahead < 0 ? -ahead : ahead, Vec<A>));
      }
    }
  }

  // Sets bit l of words[t] if key j_begin + t is visible to query i_begin + l. Does not apply
  // biases. Returns false if all keys are visible; `words` is then undefined.
  bool visible_words(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n,
                     uint32_t* words) const {
    const SequenceBounds s = bounds(b);
    const int64_t i_end = min64(i_begin + kRows, num_queries(b));
    bool bounded = classify_bounds(s, i_begin, i_end, j_begin, j_begin + n) != Tile::kFull;
    bounded = bounded || mask_->intervals != nullptr;
    if (!bounded && query_ids_ == nullptr && mask_->key_mask.data == nullptr &&
        mask_->dense.data == nullptr && mask_->bits == nullptr) {
      return false;
    }
    if (bounded) {
      bound_words(s, b, h, i_begin, i_end, j_begin, n, words);
    } else {
      for (int64_t t = 0; t < n; ++t) words[t] = ~uint32_t{0};
    }
    if (query_ids_ != nullptr) and_documents(b, i_begin, j_begin, n, words);
    const DenseTensor& keys = mask_->key_mask;
    if (keys.data != nullptr) {
      const uint8_t* const visible = static_cast<const uint8_t*>(keys.data) + b * keys.strides[0] +
                                     h * keys.strides[1] + j_begin * keys.strides[3];
      for (int64_t t = 0; t < n; ++t) words[t] = visible[t * keys.strides[3]] != 0 ? words[t] : 0;
    }
    const int64_t rows = i_end - i_begin;
    if (mask_->dense.data != nullptr) {
      and_bytes(rows, n, words,
                [&](int64_t l, uint8_t* row) { read_dense(b, h, i_begin + l, j_begin, n, row); });
    }
    if (mask_->bits != nullptr) {
      and_bytes(rows, n, words,
                [&](int64_t l, uint8_t* row) { read_bits(b, h, i_begin + l, j_begin, n, row); });
    }
    return true;
  }

  // Computes visible_words() for the structural mask and the intervals. The visible keys of a row
  // form one interval, so its bit changes only at both ends.
  void bound_words(const SequenceBounds& s, int64_t b, int64_t h, int64_t i_begin, int64_t i_end,
                   int64_t j_begin, int64_t n, uint32_t* words) const {
    uint32_t changes[kBlockN + 1] = {};
    for (int64_t l = 0; l < i_end - i_begin; ++l) {
      const int64_t i = i_begin + l;
      if (i < s.query_begin || i >= s.query_end) continue;
      const Interval keys = intersection(visible_keys(s, i), interval_of(*mask_, b, h, i));
      const int64_t lo = max64(keys.lo - j_begin, 0), hi = min64(keys.hi - j_begin, n);
      if (lo >= hi) continue;
      changes[lo] ^= uint32_t{1} << l;
      changes[hi] ^= uint32_t{1} << l;
    }
    uint32_t word = 0;
    for (int64_t t = 0; t < n; ++t) words[t] = word ^= changes[t];
  }

  void and_documents(int64_t b, int64_t i_begin, int64_t j_begin, int64_t n,
                     uint32_t* words) const {
    const int64_t* const query = mask_->query_documents + b * mask_->query_documents_stride;
    const int64_t* const key = mask_->key_documents + b * mask_->key_documents_stride + j_begin;
    uint32_t same = 0;
    for (int64_t t = 0; t < n; ++t) {
      if (t == 0 || key[t] != key[t - 1]) {
        same = 0;
        for (int64_t l = 0; l < min64(kRows, num_queries(b) - i_begin); ++l) {
          same |= static_cast<uint32_t>(query[i_begin + l] == key[t]) << l;
        }
      }
      words[t] &= same;
    }
  }

  // Writes the dense mask of query i as a byte for each of n <= kBlockN keys.
  void read_dense(int64_t b, int64_t h, int64_t i, int64_t j_begin, int64_t n, uint8_t* row) const {
    const DenseTensor& t = mask_->dense;
    const uint8_t* const src = static_cast<const uint8_t*>(t.data) + b * t.strides[0] +
                               h * t.strides[1] + i * t.strides[2] + j_begin * t.strides[3];
    if (t.strides[3] == 1) {
      memcpy(row, src, n);
    } else {
      for (int64_t j = 0; j < n; ++j) row[j] = src[j * t.strides[3]];
    }
  }

  // Writes bits of query i as one byte per key, for n keys rounded up to a multiple of 64.
  void read_bits(int64_t b, int64_t h, int64_t i, int64_t j_begin, int64_t n, uint8_t* row) const {
    for (int64_t j = 0; j < n; j += 64) {
      const uint64_t bits = bits_of(*p_, b, h, i, j_begin + j);
      for (int64_t byte = 0; byte < 8; ++byte) {  // byte k of `bytes` is nonzero if bit k is set
        const uint64_t copies = (bits >> (8 * byte) & 0xFF) * 0x0101010101010101u;
        const uint64_t bytes = copies & 0x8040201008040201u;
        memcpy(row + j + 8 * byte, &bytes, 8);
      }
    }
  }

  // Clears the bits of `words` whose byte is 0. The bytes of four keys of a query form one 32-bit
  // word, so a transposed vector holds four keys of kLanes queries.
  //
  // read(l, row): writes a byte for each key of query l, nonzero if visible.
  template <class Read>
  static void and_bytes(int64_t count, int64_t n, uint32_t* words, const Read& read) {
    constexpr int64_t kQuads = kBlockN / 4, kQueries = kPanel<float>;
    alignas(64) uint32_t rows[kQueries][kQuads] = {}, quads[kQuads][kQueries];
    for (int64_t l = 0; l < count; ++l) read(l, reinterpret_cast<uint8_t*>(rows[l]));
    transpose(rows[0], kQuads, kQueries, kQuads, quads[0], kQueries);
    for (int64_t j = 0; j < n; ++j) {
      const uint32_t byte = 0xFFu << (8 * (j % 4));
      uint32_t visible = 0;
      for (int64_t l = 0; l < kQueries; l += kLanes<float>) {
        visible |= to_bits((load(quads[j / 4] + l) & byte) != 0) << l;
      }
      words[j] &= visible;
    }
  }

  const AttentionParams* p_ = nullptr;
  const MaskParams* mask_ = nullptr;
  int64_t block_ = kBlockN, num_query_tiles_ = 0, num_blocks_ = 0;
  IdRange* query_ids_ = nullptr;  // (batch, query tiles); id range of each query tile
  IdRange* key_ids_ = nullptr;    // (batch, KV blocks); id range of each KV block
  // (batch or 1, heads or 1, query tiles); keys of each query tile in the table of intervals
  IntervalRange* intervals_ = nullptr;
  Arena arena_;
};

}  // namespace
}  // namespace fused_attn
