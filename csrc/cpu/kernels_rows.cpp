// Norms, activations, rotary embeddings and the passes that read only masks.
#include "cpu/isa.h"

#if defined(FUSED_ATTN_OWN_ROWS)
#include "cpu/kernels/activation.h"
#include "cpu/kernels/norm.h"
#include "cpu/kernels/peak.h"
#include "cpu/kernels/rotary.h"
#include "cpu/kernels/tile_kinds.h"
#include "cpu/kernels/tile_summary.h"
#include "cpu/run_as.h"

namespace fused_attn {
namespace {

template <class B>
struct TileSummary {
  static void run(const SummaryParams& p) { tile_summary<B>(p); }
};

}  // namespace

bool own::norm_fwd(const NormParams& p) { return run_as<NormFwd>(p.dtype, base::norm_fwd, p); }

bool own::norm_bwd(const NormBwdParams& p) {
  return run_as<NormBwd>(p.fwd.dtype, base::norm_bwd, p);
}

bool own::activation(const ActivationParams& p) {
  return run_as<ActivationPass>(p.dtype, base::activation, p);
}

bool own::rotary(const RotaryParams& p) { return run_as<RotaryPass>(p.dtype, base::rotary, p); }

bool own::tile_kinds(const TileKindsParams& p) {
  return run_as<TileKinds>(p.problem.dtype, base::tile_kinds, p);
}

void own::tile_summary(const SummaryParams& p) {
  if (p.is_bool) return fused_attn::tile_summary<Flag>(p);
  run_as<TileSummary>(p.dtype, base::tile_summary, p);
}

double own::multiply_add_peak(int64_t threads) { return fused_attn::multiply_add_peak(threads); }

}  // namespace fused_attn

#endif  // FUSED_ATTN_OWN_ROWS
