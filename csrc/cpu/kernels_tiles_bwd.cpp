// Attention backward in AMX tile registers.
#include "cpu/isa.h"

#if defined(FUSED_ATTN_OWN_TILES)
#include "cpu/kernels/attention_bwd_tiles.h"
#include "cpu/run_as.h"

namespace fused_attn {
namespace {

template <class T>
struct Takes {
  static bool run(const AttentionBwdParams& p) { return !AttentionBwdTiles<T>::unsupported(p); }
};

template <class T>
struct TakesBias {
  static bool run(const AttentionBwdParams& p) { return AttentionBwdTiles<T>::supports_bias(p); }
};

}  // namespace

bool own::tiles_take_bwd(const AttentionBwdParams& p) {
  return run_as<Takes>(p.fwd.dtype, base::tiles_take_bwd, p);
}

bool own::tiles_take_bias(const AttentionBwdParams& p) {
  return run_as<TakesBias>(p.fwd.dtype, base::tiles_take_bias, p);
}

bool own::tiles_bwd(const AttentionBwdParams& p) {
  return run_as<AttentionBwdTiles>(p.fwd.dtype, base::tiles_bwd, p);
}

}  // namespace fused_attn

#endif  // FUSED_ATTN_OWN_TILES
