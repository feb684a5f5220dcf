// Attention forward and decoding in AMX tile registers.
#include "cpu/isa.h"

#if defined(FUSED_ATTN_OWN_TILES)
#include "cpu/kernels/attention_decode.h"
#include "cpu/kernels/attention_fwd_tiles.h"
#include "cpu/run_as.h"

namespace fused_attn {
namespace {

template <class T>
struct Forward {
  static bool run(const AttentionParams& p) {
    // kSum, the first bool argument, accumulates the unrounded weights. Types that round weights
    // need this sum for lse only. The other types also divide out by it.
    if constexpr (TileFormat<T>::kRounds) {
      if (p.lse == nullptr && p.dropout_p == 0) return AttentionFwdTiles<T, false>::run(p);
    }
    if (p.dropout_p > 0) return AttentionFwdTiles<T, true, true>::run(p);
    return AttentionFwdTiles<T, true>::run(p);
  }
};

template <class T>
struct TakesDecode {
  static bool run(const AttentionParams& p) { return AttentionDecode<T>::supports_tiles(p); }
};

template <class T>
struct Decode {
  static bool run(const AttentionParams& p) { return AttentionDecode<T>::run_tiles(p); }
};

}  // namespace

bool own::tiles_fwd(const AttentionParams& p) {
  return run_as<Forward>(p.dtype, base::tiles_fwd, p);
}

bool own::tiles_take_decode(const AttentionParams& p) {
  return run_as<TakesDecode>(p.dtype, base::tiles_take_decode, p);
}

bool own::tiles_decode(const AttentionParams& p) {
  return run_as<Decode>(p.dtype, base::tiles_decode, p);
}

}  // namespace fused_attn

#endif  // FUSED_ATTN_OWN_TILES
