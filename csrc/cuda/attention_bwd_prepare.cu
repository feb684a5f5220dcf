// Prologue of the backward: computes the RowStatistics of each query row, and zeroes the workspace
// in which dQ is accumulated atomically.
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_passes.h"

namespace fused_attn {
namespace {

// Returns the sum of `own` over the kRowLanes lanes that share a row.
FUSED_ATTN_DEVICE float sum_of_lanes(float own) {
  FUSED_ATTN_UNROLL
  for (int lanes = 1; lanes < kRowLanes; lanes *= 2) own += shuffle_xor(own, lanes);
  return own;
}

// Returns `sum` plus the values of the lanes that share a row, added in lane order.
FUSED_ATTN_DEVICE float add_in_order(float sum, float own) {
  const int first = lane_id() / kRowLanes * kRowLanes;
  FUSED_ATTN_UNROLL
  for (int lane = first; lane < first + kRowLanes; ++lane) sum += shuffle(own, lane);
  return sum;
}

// Returns the dot product of a and b, which have `count` elements. residual: rounding residual of
// a, or null.
//
// In float32 the dot product rounds like an element of dO V^T. In a row with one visible key, out
// is a row of V, so both are the same number and dS is exactly 0. For every 32 elements, this
// ordered sum needs 8 shuffles in addition to two 16-byte loads per lane. An unordered sum would
// need 3 shuffles in total.
template <class T>
FUSED_ATTN_DEVICE float dot(const T* a, const int16_t* residual, const T* b, int64_t count) {
  constexpr int kPerChunk = 16 / sizeof(T);
  constexpr bool kInOrder = sizeof(T) == 4;
  static_assert(!kInOrder || kPerChunk == kPartOfSum,
                "each chunk is one partial sum, as in Product<float>");
  float sum = 0.0f;
  FUSED_ATTN_UNROLL_BY(2)  // unrolled further, the float32 loads exhaust the registers
  for (int64_t first = 0; first < count; first += kRowLanes * kPerChunk) {
    const int64_t c = first + lane_id() % kRowLanes * kPerChunk;
    float part = kInOrder ? 0.0f : sum;
    if (c < count) {
      const Chunk x = load_chunk(a + c), y = load_chunk(b + c);
      Chunk lost{};
      if constexpr (sizeof(T) == 2) {
        if (residual != nullptr) lost = load_chunk(residual + c);
      }
      FUSED_ATTN_UNROLL
      for (int e = 0; e < kPerChunk; ++e) {
        float unrounded = element<T>(x, e);
        if constexpr (sizeof(T) == 2) {
          const int bits = static_cast<int16_t>(lost.word[e / 2] >> (e % 2 * 16));
          unrounded = bits_float(float_bits(unrounded) + static_cast<uint32_t>(bits));
        }
        part = multiply_add(unrounded, element<T>(y, e), part);
      }
    }
    sum = kInOrder ? add_in_order(sum, part) : part;
  }
  return kInOrder ? sum : sum_of_lanes(sum);
}

template <class T, bool kGeneral>
FUSED_ATTN_KERNEL(kRowPassThreads, 8)
attention_bwd_prepare_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  const AttentionParams& p = args.params.fwd;
  const Units<T, kGeneral> units(p);
  const OwnedTile own = owned_queries(p, kStatisticsTile);
  if (own.count <= 0) return;
  const SequenceRows rows = query_rows(p, own.b);
  const RowStatistics stats = row_statistics(p, args.gpu, own.b, own.h);
  const int64_t lse_at = lse_begin(p, own.b, own.h) + own.begin;
  for (int row = thread_id() / kRowLanes; row < kStatisticsTile; row += kRowStep) {
    const bool inside = row < own.count;
    const int64_t at = own.begin + row, read = inside ? at : own.begin;
    const T* out =
        row_of(static_cast<const T*>(p.out), p.out_strides, rows.batch, own.h, rows.first + read);
    const T* grad_out = row_of(static_cast<const T*>(args.params.grad_out),
                               args.params.grad_out_strides, rows.batch, own.h, rows.first + read);
    // In a row with few visible keys, or with one dominant key, dS is smaller than the rounding
    // residual of out. delta is therefore computed from out plus its residual.
    const int16_t* residual = nullptr;
    if (p.out_residual != nullptr) {
      residual =
          row_of(p.out_residual, p.out_residual_strides, rows.batch, own.h, rows.first + read);
    }
    const float product = dot(out, residual, grad_out, p.head_dim_v);
    if (lane_id() % kRowLanes == 0) {
      const LogSum log_sum = inside ? load_lse(p, lse_at + row, units) : kFullyMasked;
      float delta = 0.0f;
      if (log_sum.exponent != kInfinity) {
        const float* grad_lse = static_cast<const float*>(args.params.grad_lse);
        delta = grad_lse == nullptr ? product : product - grad_lse[lse_at + row];
      }
      stats.lse[at] = log_sum.exponent;
      stats.factor[at] = log_sum.factor;
      stats.delta[at] = delta;
    }
    if (args.gpu.grad_query_sums == nullptr || !inside) continue;
    const int64_t stride = grad_query_sums_stride(p.head_dim);
    float* sums = args.gpu.grad_query_sums + (lse_at + row) * stride;
    for (int64_t c = lane_id() % kRowLanes; c < stride; c += kRowLanes) sums[c] = 0.0f;
  }
}

}  // namespace

void run_attention_bwd_prepare(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_type<0>(p.fwd, [&](auto element, auto general) {
    launch("attention_bwd_prepare_kernel",
           attention_bwd_prepare_kernel<decltype(element), decltype(general)::value>,
           statistics_blocks(p.fwd), kRowPassThreads, 0, AttentionBwdArgs{p, gpu}, stream_of(gpu));
  });
}

}  // namespace fused_attn
