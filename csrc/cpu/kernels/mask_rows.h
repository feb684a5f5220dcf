// Applies a mask to the scores of a KV block, one query at a time, for kernels whose score rows are
// queries.
#pragma once

#include "cpu/kernels/mask.h"

namespace fused_attn {
namespace {

// The mask of one head (b, h) for keys [j_begin, j_begin + n), where n <= kKeys.
template <class A, int64_t kKeys>
class BlockMask {
  static constexpr int kLane = kLanes<A>;

 public:
  void load(const AttentionParams& p, int64_t b, int64_t h, int64_t j_begin, int64_t n) {
    p_ = &p;
    mask_ = &p.mask;
    bounds_ = sequence_bounds(p.mask, b, query_rows(p, b).count, key_rows(p, b).count);
    b_ = b;
    h_ = h;
    j_begin_ = j_begin;
    n_ = n;
    const DenseTensor& keys = mask_->key_mask;
    if (keys.data == nullptr) return;
    key_bits_ = byte_bits(static_cast<const uint8_t*>(keys.data) + b * keys.strides[0] +
                              h * keys.strides[1] + j_begin * keys.strides[3],
                          keys.strides[3]);
  }

  // Adds biases to the scores of query i, in natural units, and sets masked scores to -inf.
  //
  // scores: kKeys elements; consecutive vectors are `stride` elements apart.
  void apply(int64_t i, A* scores, int64_t stride) const {
    if (mask_->bias.data != nullptr) add_bias(i, scores, stride);
    if (mask_->slopes != nullptr) add_alibi(i, scores, stride);
    const uint64_t bits = visible(i);
    if (bits == first_bits(kKeys)) return;
    const Vec<A> nothing = broadcast<A>(-static_cast<A>(__builtin_inf()));
    for (int64_t t = 0; t < kKeys; t += kLane) {
      A* const at = scores + t / kLane * stride;
      store(at, where<A>(static_cast<uint32_t>(bits >> t), fused_attn::load(at), nothing));
    }
  }

 private:
  static_assert(kKeys <= 64, "a bit each");
  static_assert(kLane <= 16, "as many as there are indices");
  static constexpr Int<A> kLaneIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  uint64_t visible(int64_t i) const {
    if (i < bounds_.query_begin || i >= bounds_.query_end) return 0;
    const Interval keys = intersection(visible_keys(bounds_, i), interval_of(*mask_, b_, h_, i));
    uint64_t bits = first_bits(min64(keys.hi - j_begin_, n_));
    bits &= ~first_bits(keys.lo - j_begin_);
    if (bits == 0) return 0;
    if (mask_->key_mask.data != nullptr) bits &= key_bits_;
    if (mask_->query_documents != nullptr) bits &= same_document(i);
    if (mask_->bits != nullptr) bits &= bits_of(*p_, b_, h_, i, j_begin_);
    const DenseTensor& dense = mask_->dense;
    if (dense.data != nullptr) bits &= byte_bits(row_of<uint8_t>(dense, i), dense.strides[3]);
    return bits;
  }

  template <class E>
  const E* row_of(const DenseTensor& t, int64_t i) const {
    return static_cast<const E*>(t.data) + b_ * t.strides[0] + h_ * t.strides[1] +
           i * t.strides[2] + j_begin_ * t.strides[3];
  }

  // Returns a word in which bit t is set if byte t is nonzero.
  uint64_t byte_bits(const uint8_t* bytes, int64_t stride) const {
#if defined(__AVX512BW__)
    if (stride == 1) {
      const __m512i x = _mm512_maskz_loadu_epi8(first_bits(n_), bytes);
      return _mm512_test_epi8_mask(x, x);
    }
#endif
    uint64_t bits = 0;
    for (int64_t t = 0; t < n_; ++t) bits |= static_cast<uint64_t>(bytes[t * stride] != 0) << t;
    return bits;
  }

  uint64_t same_document(int64_t i) const {
    const int64_t own = mask_->query_documents[b_ * mask_->query_documents_stride + i];
    const int64_t* const key = mask_->key_documents + b_ * mask_->key_documents_stride + j_begin_;
    uint64_t bits = 0;
    for (int64_t t = 0; t < n_; ++t) bits |= static_cast<uint64_t>(key[t] == own) << t;
    return bits;
  }

  void add_bias(int64_t i, A* scores, int64_t stride) const {
    alignas(64) A row[kKeys];
    switch (mask_->bias_dtype) {
      case DType::kFloat32:
        bias_row(row_of<float>(mask_->bias, i), row);
        break;
      case DType::kFloat64:
        bias_row(row_of<double>(mask_->bias, i), row);
        break;
      case DType::kFloat16:
        bias_row(row_of<Half>(mask_->bias, i), row);
        break;
      case DType::kBFloat16:
        bias_row(row_of<BFloat16>(mask_->bias, i), row);
        break;
    }
    for (int64_t t = 0; t < kKeys; t += kLane) {
      A* const at = scores + t / kLane * stride;
      store(at, biased<A>(fused_attn::load(at), fused_attn::load(row + t)));
    }
  }

  template <class B>
  void bias_row(const B* src, A* row) const {
    const int64_t stride = mask_->bias.strides[3];
    if constexpr (sizeof(Acc<B>) == sizeof(A)) {
      if (stride == 1) {
        load_row(src, n_, row);
        for (int64_t t = n_; t < kKeys; ++t) row[t] = 0;
        return;
      }
    }
    for (int64_t t = 0; t < kKeys; ++t) {
      row[t] = t < n_ ? static_cast<A>(to_acc(src[t * stride])) : A(0);
    }
  }

  void add_alibi(int64_t i, A* scores, int64_t stride) const {
    const A slope = with_plain_nan(static_cast<A>(
        mask_->slopes[b_ * mask_->slopes_strides[0] + h_ * mask_->slopes_strides[1]]));
    // Uses a table, because a vector built lane by lane would be rebuilt for each row.
    Vec<Int<A>> ahead =
        static_cast<Int<A>>(i + bounds_.alibi_offset - j_begin_) - fused_attn::load(kLaneIndex);
    for (int64_t t = 0; t < kKeys; t += kLane) {
      A* const at = scores + t / kLane * stride;
      store(at, fused_attn::load(at) -
                    slope * __builtin_convertvector(ahead < 0 ? -ahead : ahead, Vec<A>));
      ahead -= kLane;
    }
  }

  const AttentionParams* p_ = nullptr;
  const MaskParams* mask_ = nullptr;
  SequenceBounds bounds_{};
  int64_t b_ = 0, h_ = 0, j_begin_ = 0, n_ = 0;
  uint64_t key_bits_ = 0;
};

}  // namespace
}  // namespace fused_attn
