// Attention passes and the kernel table of one instruction set.
#include "cpu/isa.h"
#include "cpu/kernels/peak.h"
#include "cpu/run_as.h"

#if defined(FUSED_ATTN_OWN_ATTENTION)
#include "cpu/kernels/attention_bwd.h"
#include "cpu/kernels/attention_bwd_bias.h"
#include "cpu/kernels/attention_bwd_rows.h"
#include "cpu/kernels/attention_decode.h"
#include "cpu/kernels/attention_fwd.h"
#include "cpu/kernels/attention_weights.h"
#include "cpu/kernels/sequence_choice.h"
#endif

namespace fused_attn {

#if defined(FUSED_ATTN_OWN_ATTENTION)
namespace {

#if defined(FUSED_ATTN_OWN_TILES)
// Returns true if tile registers are faster than vectors. Forward and backward must agree, because
// the backward has to recompute the scores from which lse was computed. Tile registers are slower
// if a single query tile shares the packed keys (96 heads of 32 x 64 in bfloat16: 0.18 compared
// with 0.11 ms).
bool wants_tiles(const AttentionParams& p) {
  const int64_t group = p.num_heads / max64(p.num_heads_kv, 1);
  return group * p.seqlen_q > kTileQueries || p.seqlen_k > 2 * kTileKeys;
}
#else
bool wants_tiles(const AttentionParams&) { return false; }
#endif

template <class T>
struct Forward {
  static bool run(const TilePasses* tiles, const AttentionParams& p) {
    const auto is_few = [&](int64_t queries, int64_t keys) {
      return AttentionDecode<T>::pays_off(p, queries, keys);
    };
    const auto few = [&](const AttentionParams& part) {
      if (tiles != nullptr && tiles->supports_decode(part)) return tiles->decode(part);
      return own::attention_decode(part);
    };
    if (p.block_table != nullptr) return few(p);  // has at most kMaxPagedQueries queries
    return by_sequence(p, is_few, few, [&](const AttentionParams& part) {
      if (tiles != nullptr && wants_tiles(part)) return tiles->forward(part);
      return AttentionFwd<T>::run(part);
    });
  }
};

template <class T>
struct Backward {
  static bool run(const TilePasses* tiles, const AttentionBwdParams& p) {
    if (p.grad_weights != nullptr && !WeightRowSums<T>::run(p)) return false;
    if (tiles != nullptr && wants_tiles(p.fwd) && tiles->supports_backward(p)) {
      return tiles->backward(p) && (tiles->supports_bias(p) || run_bias(p));
    }
    const auto is_few = [&](int64_t queries, int64_t keys) {
      return AttentionBwdRows<T>::pays_off(p, queries, keys);
    };
    const bool packed = p.fwd.cu_seqlens_q != nullptr;
    if (!packed && !is_few(p.fwd.seqlen_q, p.fwd.seqlen_k) && AttentionBwd<T>::supports_bias(p)) {
      return AttentionBwd<T>::run(p, true);
    }
    const auto few = [&](const AttentionParams& part) {
      return own::attention_bwd_rows(of_part(p, part));
    };
    const auto query_tiles = [&](const AttentionParams& part) {
      return AttentionBwd<T>::run(of_part(p, part));
    };
    return by_sequence(p.fwd, is_few, few, query_tiles) && run_bias(p);
  }

 private:
  static AttentionBwdParams of_part(AttentionBwdParams p, const AttentionParams& part) {
    p.fwd = part;
    return p;
  }

  static bool run_bias(const AttentionBwdParams& p) {
    return p.grad_bias == nullptr || AttentionBwdBias<T>::run(p);
  }
};

}  // namespace

bool own::attention_fwd_with(const TilePasses* tiles, const AttentionParams& p) {
  const auto of_base = [](const TilePasses*, const AttentionParams& p) {
    return base::attention_fwd(p);
  };
  return run_as<Forward>(p.dtype, of_base, tiles, p);
}

bool own::attention_bwd_with(const TilePasses* tiles, const AttentionBwdParams& p) {
  const auto of_base = [](const TilePasses*, const AttentionBwdParams& p) {
    return base::attention_bwd(p);
  };
  return run_as<Backward>(p.fwd.dtype, of_base, tiles, p);
}

bool own::attention_weights(const AttentionWeightsParams& p) {
  return run_as<AttentionWeights>(p.fwd.dtype, base::attention_weights, p);
}
#else
bool own::attention_fwd_with(const TilePasses* tiles, const AttentionParams& p) {
  return base::attention_fwd_with(tiles, p);
}
bool own::attention_bwd_with(const TilePasses* tiles, const AttentionBwdParams& p) {
  return base::attention_bwd_with(tiles, p);
}
bool own::attention_weights(const AttentionWeightsParams& p) { return base::attention_weights(p); }
#endif

#if !defined(FUSED_ATTN_OWN_ROWS)
bool own::norm_fwd(const NormParams& p) { return base::norm_fwd(p); }
bool own::norm_bwd(const NormBwdParams& p) { return base::norm_bwd(p); }
bool own::activation(const ActivationParams& p) { return base::activation(p); }
bool own::rotary(const RotaryParams& p) { return base::rotary(p); }
bool own::tile_kinds(const TileKindsParams& p) { return base::tile_kinds(p); }
void own::tile_summary(const SummaryParams& p) { base::tile_summary(p); }
double own::multiply_add_peak(int64_t threads) { return base::multiply_add_peak(threads); }
#endif

#if defined(FUSED_ATTN_OWN_TILES)
static constexpr TilePasses kTilePasses = {own::tiles_fwd,       own::tiles_take_decode,
                                           own::tiles_decode,    own::tiles_take_bwd,
                                           own::tiles_take_bias, own::tiles_bwd};
static constexpr const TilePasses* kTiles = &kTilePasses;
#else
// Stubs for linking, because other instruction sets may have this one as their base. Never called.
bool own::tiles_fwd(const AttentionParams&) { return false; }
bool own::tiles_take_decode(const AttentionParams&) { return false; }
bool own::tiles_decode(const AttentionParams&) { return false; }
bool own::tiles_take_bwd(const AttentionBwdParams&) { return false; }
bool own::tiles_take_bias(const AttentionBwdParams&) { return false; }
bool own::tiles_bwd(const AttentionBwdParams&) { return false; }
static constexpr const TilePasses* kTiles = nullptr;
#endif

namespace {

int64_t query_tile_of(DType dtype) {
  return dtype == DType::kFloat64 ? kPanel<double> : kPanel<float>;
}

template <class T>
struct ProductPeak {
  static double run(DType, int64_t threads) { return product_peak<T>(threads); }
};

}  // namespace

double own::product_peak(DType dtype, int64_t threads) {
  return run_as<ProductPeak>(dtype, base::product_peak, dtype, threads);
}

bool own::attention_fwd(const AttentionParams& p) { return attention_fwd_with(kTiles, p); }
bool own::attention_bwd(const AttentionBwdParams& p) { return attention_bwd_with(kTiles, p); }

const KernelTable own::kKernels = {FUSED_ATTN_STRING(FUSED_ATTN_ISA),
                                   own::attention_fwd,
                                   own::attention_bwd,
                                   own::attention_weights,
                                   own::norm_fwd,
                                   own::norm_bwd,
                                   own::activation,
                                   own::rotary,
                                   own::tile_kinds,
                                   own::tile_summary,
                                   query_tile_of,
                                   kBlockN,
                                   own::multiply_add_peak,
                                   own::product_peak};

}  // namespace fused_attn
