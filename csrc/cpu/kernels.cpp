// The kernels of one instruction set; compiled once for each line of isas.inc.
#include "cpu/activation.h"
#include "cpu/attention_bwd.h"
#include "cpu/attention_bwd_bias.h"
#include "cpu/attention_bwd_tiles.h"
#include "cpu/attention_decode.h"
#include "cpu/attention_fwd.h"
#include "cpu/attention_fwd_tiles.h"
#include "cpu/attention_weights.h"
#include "cpu/dispatch.h"
#include "cpu/norm.h"
#include "cpu/peak.h"
#include "cpu/tile_kinds.h"
#include "cpu/tile_summary.h"

#define FUSED_ATTN_PASTE_(a, b) a##b
#define FUSED_ATTN_PASTE(a, b) FUSED_ATTN_PASTE_(a, b)
#define FUSED_ATTN_ISA_NAMESPACE FUSED_ATTN_PASTE(isa_, FUSED_ATTN_ISA)
#define FUSED_ATTN_STRING_(a) #a
#define FUSED_ATTN_STRING(a) FUSED_ATTN_STRING_(a)

namespace fused_attn {
namespace {

// Runs Op<T> for the type that a tensor is stored in.
template <template <class> class Op, class Params>
bool run_as(DType dtype, const Params& params) {
  switch (dtype) {
    case DType::kFloat32:
      return Op<float>::run(params);
    case DType::kFloat64:
      return Op<double>::run(params);
    case DType::kFloat16:
      return Op<Half>::run(params);
    case DType::kBFloat16:
      return Op<BFloat16>::run(params);
  }
  return false;
}

#if defined(__AMX_BF16__)
// Where tiles of rows pay off, forward and backward alike: the backward's scores have to be those
// that lse was made of. Not where a panel is all that shares packed keys (96 heads of 32 x 64 in
// bfloat16: 0.18 against 0.11 ms).
inline bool wants_tiles(const AttentionParams& p) {
  const int64_t group = p.num_heads / max64(p.num_heads_kv, 1);
  return group * p.seqlen_q > kTileQueries || p.seqlen_k > 2 * kTileKeys;
}
#endif

template <class T>
struct Forward {
#if defined(__AMX_BF16__)
  static bool run_tiles(const AttentionParams& p) {
    // Without rounding, the sum of weights is what out is divided by, and wanted anyway.
    if constexpr (TileFormat<T>::kRounds) {
      if (p.lse == nullptr && p.dropout_p == 0) return AttentionFwdTiles<T, false>::run(p);
    }
    if (p.dropout_p > 0) return AttentionFwdTiles<T, true, true>::run(p);
    return AttentionFwdTiles<T, true>::run(p);
  }
#endif

  static bool run(const AttentionParams& p) {
    if (AttentionDecode<T>::pays_off(p)) return AttentionDecode<T>::run(p);
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) < 8) {
      if (wants_tiles(p)) return run_tiles(p);
    }
#endif
    return AttentionFwd<T>::run(p);
  }
};

bool run_attention_fwd(const AttentionParams& p) { return run_as<Forward>(p.dtype, p); }

template <class T>
struct Backward {
  static bool run(const AttentionBwdParams& p) {
    if (p.grad_weights != nullptr && !WeightRowSums<T>::run(p)) return false;
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) < 8) {
      using Tiles = AttentionBwdTiles<T>;
      if (wants_tiles(p.fwd) && !Tiles::unsupported(p)) {
        return Tiles::run(p) && (Tiles::takes_bias(p) || run_bias(p));
      }
    }
#endif
    return AttentionBwd<T>::run(p) && run_bias(p);
  }

 private:
  static bool run_bias(const AttentionBwdParams& p) {
    return p.grad_bias == nullptr || AttentionBwdBias<T>::run(p);
  }
};

bool run_attention_bwd(const AttentionBwdParams& p) { return run_as<Backward>(p.fwd.dtype, p); }

bool run_attention_weights(const AttentionWeightsParams& p) {
  return run_as<AttentionWeights>(p.fwd.dtype, p);
}

bool run_norm_fwd(const NormParams& p) { return run_as<NormFwd>(p.dtype, p); }

bool run_norm_bwd(const NormBwdParams& p) { return run_as<NormBwd>(p.fwd.dtype, p); }

bool run_activation(const ActivationParams& p) { return run_as<ActivationPass>(p.dtype, p); }

bool run_tile_kinds(const TileKindsParams& p) { return run_as<TileKinds>(p.problem.dtype, p); }

int64_t panel_of(DType dtype) { return dtype == DType::kFloat64 ? kPanel<double> : kPanel<float>; }

double run_product_peak(DType dtype, int64_t threads) {
  switch (dtype) {
    case DType::kFloat32:
      return product_peak<float>(threads);
    case DType::kFloat64:
      return product_peak<double>(threads);
    case DType::kFloat16:
      return product_peak<Half>(threads);
    case DType::kBFloat16:
      return product_peak<BFloat16>(threads);
  }
  return 0;
}

template <class B>
struct TileSummary {
  static bool run(const SummaryParams& p) {
    tile_summary<B>(p);
    return true;
  }
};

void run_tile_summary(const SummaryParams& p) {
  if (p.is_bool) {
    tile_summary<Flag>(p);
  } else {
    run_as<TileSummary>(p.dtype, p);
  }
}

}  // namespace

namespace FUSED_ATTN_ISA_NAMESPACE {
extern const KernelTable kKernels;
const KernelTable kKernels = {FUSED_ATTN_STRING(FUSED_ATTN_ISA),
                              run_attention_fwd,
                              run_attention_bwd,
                              run_attention_weights,
                              run_norm_fwd,
                              run_norm_bwd,
                              run_activation,
                              run_tile_kinds,
                              run_tile_summary,
                              panel_of,
                              kBlockN,
                              multiply_add_peak,
                              run_product_peak};
}  // namespace FUSED_ATTN_ISA_NAMESPACE

}  // namespace fused_attn
