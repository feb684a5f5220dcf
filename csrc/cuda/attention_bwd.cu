// Before and after the passes of the backward: a row of statistics for each query, and the gradient
// of queries from sums in float32.
#include "cuda/attention_bwd_tile.cuh"
#include "cuda/attention_passes.h"

namespace fused_attn {
namespace {

constexpr int kThreads = 128;
// Lanes that share a row: each reads 16 bytes of it at a time, 64 16-bit elements together.
constexpr int kLanes = 8;
constexpr int kRowsAtOnce = kThreads / kLanes;

// A block has kStatisticsTile rows of a head of a sequence, also those behind its end.
FUSED_ATTN_DEVICE OwnedTile owned_statistics(const AttentionParams& p) {
  const int64_t tiles = statistics_tiles(p.seqlen_q);
  const int64_t m = block_id() % tiles, bh = block_id() / tiles;
  OwnedTile own{static_cast<int>(bh / p.num_heads), static_cast<int>(bh % p.num_heads),
                static_cast<int>(m * kStatisticsTile), 0};
  own.count = static_cast<int>(min64(kStatisticsTile, query_rows(p, own.b).count - own.begin));
  return own;
}

template <class T>
FUSED_ATTN_DEVICE float dot(const T* a, const T* b, int64_t count) {
  constexpr int kPerChunk = 16 / sizeof(T);
  float sum = 0.0f;
  FUSED_ATTN_UNROLL_BY(2)  // by more, loads in float32 take all registers
  for (int64_t c = lane_id() % kLanes * kPerChunk; c < count; c += kLanes * kPerChunk) {
    const Chunk x = load_chunk(a + c), y = load_chunk(b + c);
    FUSED_ATTN_UNROLL
    for (int e = 0; e < kPerChunk; ++e) sum = multiply_add(element<T>(x, e), element<T>(y, e), sum);
  }
  FUSED_ATTN_UNROLL
  for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += shuffle_xor(sum, lanes);
  return sum;
}

template <class T, bool kGeneral>
FUSED_ATTN_KERNEL(kThreads, 8)
attention_bwd_prepare_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  const AttentionParams& p = args.params.fwd;
  const Units<T, kGeneral> units(p);
  const OwnedTile own = owned_statistics(p);
  if (own.count <= 0) return;
  const SequenceRows rows = query_rows(p, own.b);
  const RowStatistics stats = row_statistics(p, args.gpu, own.b, own.h);
  const int64_t lse_at = lse_begin(p, own.b, own.h) + own.begin;
  for (int row = thread_id() / kLanes; row < kStatisticsTile; row += kRowsAtOnce) {
    const bool inside = row < own.count;
    const int64_t at = own.begin + row, read = inside ? at : own.begin;
    const T* out =
        row_of(static_cast<const T*>(p.out), p.out_strides, rows.batch, own.h, rows.first + read);
    const T* grad_out = row_of(static_cast<const T*>(args.params.grad_out),
                               args.params.grad_out_strides, rows.batch, own.h, rows.first + read);
    const float product = dot(out, grad_out, p.head_dim_v);
    if (lane_id() % kLanes == 0) {
      const LogSum log_sum = inside ? load_lse(p, lse_at + row, units) : kSeesNothing;
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
    for (int64_t c = lane_id() % kLanes; c < stride; c += kLanes) sums[c] = 0.0f;
  }
}

template <class T>
FUSED_ATTN_KERNEL(kThreads, 8)
attention_bwd_finish_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  const AttentionParams& p = args.params.fwd;
  const OwnedTile own = owned_statistics(p);
  if (own.count <= 0) return;
  const SequenceRows rows = query_rows(p, own.b);
  const int64_t lse_at = lse_begin(p, own.b, own.h) + own.begin;
  const float scale = static_cast<float>(p.softmax_scale);
  for (int row = thread_id() / kLanes; row < own.count; row += kRowsAtOnce) {
    const float* sums =
        args.gpu.grad_query_sums + (lse_at + row) * grad_query_sums_stride(p.head_dim);
    T* grad_query = row_of(static_cast<T*>(args.params.grad_query), args.params.grad_query_strides,
                           rows.batch, own.h, rows.first + own.begin + row);
    for (int64_t c = lane_id() % kLanes; c < p.head_dim; c += kLanes) {
      grad_query[c] = from_float<T>(sums[c] * scale);
    }
  }
}

int64_t statistics_blocks(const AttentionParams& p) {
  return statistics_tiles(p.seqlen_q) * p.batch * p.num_heads;
}

}  // namespace

void run_attention_bwd_prepare(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_type<0>(p.fwd, [&](auto element, auto general) {
    launch("attention_bwd_prepare_kernel",
           attention_bwd_prepare_kernel<decltype(element), decltype(general)::value>,
           statistics_blocks(p.fwd), kThreads, 0, AttentionBwdArgs{p, gpu}, stream_of(gpu));
  });
}

void run_attention_bwd_finish(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_element(p.fwd, [&](auto element) {
    if constexpr (sizeof(element) == 2) {  // float32 is never added up atomically
      launch("attention_bwd_finish_kernel", attention_bwd_finish_kernel<decltype(element)>,
             statistics_blocks(p.fwd), kThreads, 0, AttentionBwdArgs{p, gpu}, stream_of(gpu));
    }
  });
}

}  // namespace fused_attn
