// Epilogue of the nondeterministic backward: scales the float32 accumulators of dQ and stores them
// to grad_query.
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_passes.h"

namespace fused_attn {
namespace {

template <class T>
FUSED_ATTN_KERNEL(kRowPassThreads, 8)
attention_bwd_finish_kernel(FUSED_ATTN_ARGUMENT AttentionBwdArgs args) {
  const AttentionParams& p = args.params.fwd;
  const OwnedTile own = owned_queries(p, kStatisticsTile);
  if (own.count <= 0) return;
  const SequenceRows rows = query_rows(p, own.b);
  const int64_t lse_at = lse_begin(p, own.b, own.h) + own.begin;
  const float scale = static_cast<float>(p.scale);
  for (int row = thread_id() / kRowLanes; row < own.count; row += kRowStep) {
    const float* sums =
        args.gpu.grad_query_sums + (lse_at + row) * grad_query_sums_stride(p.head_dim);
    const int64_t at =
        row_start(args.params.grad_query_strides, rows.batch, own.h, rows.first + own.begin + row);
    for (int64_t c = lane_id() % kRowLanes; c < p.head_dim; c += kRowLanes) {
      store_result<T>(p, args.params.grad_query, at + c, sums[c] * scale);
    }
  }
}

}  // namespace

void run_attention_bwd_finish(const AttentionBwdParams& p, const GpuParams& gpu) {
  for_element(p.fwd.dtype, [&](auto element) {
    if constexpr (sizeof(element) == 2) {  // dQ is accumulated atomically for 16-bit types only
      launch("attention_bwd_finish_kernel", attention_bwd_finish_kernel<decltype(element)>,
             statistics_blocks(p.fwd), kRowPassThreads, 0, AttentionBwdArgs{p, gpu},
             stream_of(gpu));
    }
  });
}

}  // namespace fused_attn
