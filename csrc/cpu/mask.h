// A mask as the CPU kernels see it: classifies tiles, and applies itself to a tile of scores.
#pragma once

#include "block_ranges.h"
#include "cpu/convert.h"
#include "cpu/micro_gemm.h"
#include "cpu/workspace.h"

namespace fused_attn {
namespace {

constexpr int64_t kBlockN = 128;  // keys of a tile: scores of 32 queries fill 16 KiB, half of L1

template <class A>
class MaskView {
  static constexpr int kLane = kLanes<A>;
  static constexpr int64_t kRows = kPanel<A>;
  using VecI = Vec<Int<A>>;

 public:
  // Reads the documents once, to know the ids in each panel and each block. False: out of memory.
  bool init(const AttentionParams& p) {
    mask_ = &p.mask;
    seqlen_q_ = p.seqlen_q;
    seqlen_k_ = p.seqlen_k;
    if (p.mask.query_documents == nullptr) return true;
    num_panels_ = (seqlen_q_ + kRows - 1) / kRows;
    num_blocks_ = (seqlen_k_ + kBlockN - 1) / kBlockN;
    place(p.batch);
    if (!arena_.allocate()) return false;
    place(p.batch);
    for (int64_t b = 0; b < p.batch; ++b) {
      id_ranges(p.mask.query_documents + b * p.mask.query_documents_stride, seqlen_q_, kRows,
                query_ids_ + b * num_panels_);
      id_ranges(p.mask.key_documents + b * p.mask.key_documents_stride, seqlen_k_, kBlockN,
                key_ids_ + b * num_blocks_);
    }
    return true;
  }

  // The panel of queries from i_begin against the block of keys [j_begin, j_end).
  Tile classify(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t j_end) const {
    const int64_t i_end = min64(i_begin + kRows, seqlen_q_);
    Tile tile = classify_bounds(sequence_bounds(*mask_, b, seqlen_q_, seqlen_k_), i_begin, i_end,
                                j_begin, j_end);
    if (tile != Tile::kSkip && query_ids_ != nullptr) {
      tile = combine(tile, classify_documents(query_ids_[b * num_panels_ + i_begin / kRows],
                                              key_ids_[b * num_blocks_ + j_begin / kBlockN]));
    }
    if (tile != Tile::kSkip && mask_->key_mask.data != nullptr) {
      tile = combine(tile, classify_key_mask(b, h, j_begin, j_end));
    }
    if (tile != Tile::kSkip) {
      tile = combine(tile, classify_dense(mask_->dense, b, h, i_begin, i_end, j_begin, j_end));
    }
    if (tile != Tile::kSkip) {
      tile = combine(tile, classify_dense(mask_->bias, b, h, i_begin, i_end, j_begin, j_end));
    }
    return tile == Tile::kFull && mask_->slopes != nullptr ? Tile::kPartial : tile;
  }

  // Adds biases to the scores (n keys, panel) and sets the invisible ones to -inf.
  //
  // stage: (kBlockN, panel) of A.
  void apply(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n, A* scores,
             A* stage) const {
    add_bias(b, h, i_begin, j_begin, n, scores, stage);
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(stage);
    const bool has_bytes = stage_visible(b, h, i_begin, j_begin, n, bytes);
    const SequenceBounds s = sequence_bounds(*mask_, b, seqlen_q_, seqlen_k_);
    Int<A> lo[kRows], hi[kRows], position[kRows];
    for (int64_t l = 0; l < kRows; ++l) {
      const int64_t i = i_begin + l;
      const Interval keys = visible_keys(s, i);
      const bool sees = i >= s.query_begin && i < s.query_end;
      lo[l] = static_cast<Int<A>>(sees ? keys.lo : 0);
      hi[l] = static_cast<Int<A>>(sees ? keys.hi : 0);
      position[l] = static_cast<Int<A>>(i + s.alibi_offset);
    }
    const A slope =
        mask_->slopes == nullptr
            ? A(0)
            : A(mask_->slopes[b * mask_->slopes_strides[0] + h * mask_->slopes_strides[1]]);
    const DenseTensor& keys = mask_->key_mask;
    const uint8_t* key_mask = static_cast<const uint8_t*>(keys.data);
    if (key_mask != nullptr) key_mask += b * keys.strides[0] + h * keys.strides[1];
    for (int64_t t = 0; t < n; ++t) {
      const Int<A> j = static_cast<Int<A>>(j_begin + t);
      const bool seen = key_mask == nullptr || key_mask[(j_begin + t) * keys.strides[3]] != 0;
      for (int v = 0; v < 2; ++v) {
        A* const at = scores + t * kRows + v * kLane;
        Vec<A> score = load(at);
        if (slope != 0) {
          const VecI ahead = load(position + v * kLane) - j;
          score -= slope * __builtin_convertvector(ahead < 0 ? -ahead : ahead, Vec<A>);
        }
        VecI visible = (load(lo + v * kLane) <= j) & (load(hi + v * kLane) > j);
        if (has_bytes) visible &= load_bytes(bytes + t * kRows + v * kLane) != 0;
        store(at, seen ? (visible ? score : minus_infinity()) : minus_infinity());
      }
    }
  }

 private:
  typedef uint8_t Bytes __attribute__((vector_size(kLane)));

  static Vec<A> minus_infinity() { return broadcast<A>(-static_cast<A>(__builtin_inf())); }

  static VecI load_bytes(const uint8_t* p) {
    Bytes bytes;
    memcpy(&bytes, p, sizeof(bytes));
    return __builtin_convertvector(bytes, VecI);
  }

  void place(int64_t batch) {
    query_ids_ = arena_.template take<IdRange>(batch * num_panels_);
    key_ids_ = arena_.template take<IdRange>(batch * num_blocks_);
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
    int64_t seen = 0;
    for (int64_t j = j_begin; j < j_end; ++j) seen += row[j * t.strides[3]] != 0;
    return seen == 0 ? Tile::kSkip : seen == j_end - j_begin ? Tile::kFull : Tile::kPartial;
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
    const int64_t rows = min64(kRows, seqlen_q_ - i_begin);
    for (int64_t l = 0; l < kRows; ++l) {
      const B* row = base + min64(l, rows - 1) * t.strides[2];
      for (int64_t j = 0; j < n; ++j) {
        stage[j * kRows + l] = static_cast<A>(to_acc(row[j * t.strides[3]]));
      }
    }
    for (int64_t at = 0; at < n * kRows; at += kLane) {
      const Vec<A> bias = load(stage + at);
      // Not the sum alone: NaN + -inf would not mask.
      store(scores + at, bias == minus_infinity() ? bias : load(scores + at) + bias);
    }
  }

  // Documents and the dense mask, as bytes (n, panel) that are nonzero where visible; false where
  // there is neither.
  bool stage_visible(int64_t b, int64_t h, int64_t i_begin, int64_t j_begin, int64_t n,
                     uint8_t* bytes) const {
    const int64_t last = min64(kRows, seqlen_q_ - i_begin) - 1;
    if (query_ids_ != nullptr) {
      const int64_t* query = mask_->query_documents + b * mask_->query_documents_stride + i_begin;
      const int64_t* key = mask_->key_documents + b * mask_->key_documents_stride + j_begin;
      int64_t ids[kRows];
      for (int64_t l = 0; l < kRows; ++l) ids[l] = query[min64(l, last)];
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t l = 0; l < kRows; ++l) bytes[j * kRows + l] = ids[l] == key[j];
      }
    }
    const DenseTensor& t = mask_->dense;
    if (t.data == nullptr) return query_ids_ != nullptr;
    const uint8_t* base = static_cast<const uint8_t*>(t.data) + b * t.strides[0] +
                          h * t.strides[1] + i_begin * t.strides[2] + j_begin * t.strides[3];
    const uint8_t others = query_ids_ == nullptr ? 1 : 0;
    for (int64_t l = 0; l < kRows; ++l) {
      const uint8_t* row = base + min64(l, last) * t.strides[2];
      for (int64_t j = 0; j < n; ++j) {
        uint8_t* const at = bytes + j * kRows + l;
        *at = static_cast<uint8_t>((row[j * t.strides[3]] != 0) & (*at | others));
      }
    }
    return true;
  }

  const MaskParams* mask_ = nullptr;
  int64_t seqlen_q_ = 0, seqlen_k_ = 0, num_panels_ = 0, num_blocks_ = 0;
  IdRange* query_ids_ = nullptr;  // (batch, panels)
  IdRange* key_ids_ = nullptr;    // (batch, blocks)
  Arena arena_;
};

}  // namespace
}  // namespace fused_attn
