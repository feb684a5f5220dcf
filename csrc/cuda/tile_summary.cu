// Host side of the pre-passes in tile_summary.cuh.
#include "cuda/api.h"
#include "cuda/launch.cuh"
#include "cuda/tile_summary.cuh"

namespace fused_attn {
namespace {

// Returns the number of blocks that contain `warps` warps.
int64_t blocks_of(int64_t warps) { return (warps + kSummaryWarps - 1) / kSummaryWarps; }

template <class T>
void summarize(const TileSummaryArgs& args, const GpuParams& gpu) {
  launch("tile_summary_kernel", tile_summary_kernel<T>, blocks_of(args.tiles), kSummaryThreads, 0,
         args, static_cast<Stream>(gpu.stream));
}

void find_ranges(const int64_t* ids, int64_t batch, int64_t stride, int64_t seqlen, int32_t* ranges,
                 const GpuParams& gpu) {
  const int64_t sequences = stride == 0 ? min64(batch, 1) : batch;
  const int64_t runs = sequences * ((seqlen + kIdRangeTile - 1) / kIdRangeTile);
  const IdRangesArgs args{ids, stride, seqlen, runs, ranges};
  launch("id_ranges_kernel", id_ranges_kernel, blocks_of(runs), kSummaryThreads, 0, args,
         static_cast<Stream>(gpu.stream));
}

}  // namespace

const char* launch_obstacle() { return obstacle(id_ranges_kernel); }

void run_tile_summary(const SummaryParams& params, const GpuParams& gpu) {
  const int64_t rows = (params.sizes[2] + kSummaryTileM - 1) / kSummaryTileM;
  const int64_t columns = (params.sizes[3] + kSummaryTileN - 1) / kSummaryTileN;
  const TileSummaryArgs args{params, params.sizes[0] * params.sizes[1] * rows * columns};
  if (params.is_bool) return summarize<Flag>(args, gpu);
  for_element(params.dtype, [&](auto element) { summarize<decltype(element)>(args, gpu); });
}

void run_id_ranges(const AttentionParams& params, const GpuParams& gpu) {
  const MaskParams& mask = params.mask;
  if (mask.query_documents == nullptr) return;
  find_ranges(mask.query_documents, params.batch, mask.query_documents_stride, params.seqlen_q,
              gpu.query_id_ranges, gpu);
  find_ranges(mask.key_documents, params.batch, mask.key_documents_stride, params.seqlen_k,
              gpu.key_id_ranges, gpu);
}

}  // namespace fused_attn
