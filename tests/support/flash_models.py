"""Stand-ins for flash-attn 2, 3, 4 and torch's varlen_attn: same signatures and semantics.

Each stand-in has the arguments, the mask alignment and the restrictions of its original, and these
pitfalls: the last tile of a sequence loads values after its end and multiplies them by 0; lse of
rows without keys is +inf (flash-attn 2 and torch); only flash-attn 4 differentiates lse.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.attention
from torch import Tensor

from fused_attn.backends import denylist, flash
from fused_attn.backends.flash import engines

Sides = tuple[int | None, int | None]
TILE = 16  # rows in each KV block that the stand-ins load
calls: list[dict[str, Any]] = []  # arguments of each call, in order


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, behind: Tensor, scale: float, sides: Any, softcap: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (queries, heads, dim) and lse (heads, queries) of one sequence.

    Args:
        behind: values of the following sequences that the last tile loads.
        sides: left and right limits of the window; None for no limit.
        slopes: (heads,).
    """
    queries, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v, behind = (t.repeat_interleave(group, 1) for t in (k, v, behind))
    assert scale > 0.0, "the kernels scale after masking, so that -inf would change its sign"
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    distance = j - i - (keys - queries)  # 0 for the last query and the last key
    if slopes is not None:
        # With a causal mask, flash-attn adds slope * key: out is the same, but lse is not.
        bias = j.expand(queries, keys) if sides == (None, 0) else -distance.abs()
        scores = scores + slopes.to(scores)[:, None, None] * bias
    left, right = (math.inf if side is None else side for side in sides)
    masked = (distance < -left) | (distance > right)
    empty = masked.all(1)
    scores = scores.masked_fill(masked & ~empty[:, None], float("-inf"))
    weights = scores.softmax(-1).masked_fill(empty[:, None], 0.0) if keys else scores
    out = torch.einsum("hqk,khd->qhd", weights, v) + 0.0 * behind.sum(0)
    lse = scores.logsumexp(-1) if keys else q.new_zeros(q.shape[1], queries)
    return out.masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty, float("-inf"))


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest: tuple[int, int],
    scale: float | None, sides: Any, softcap: float = 0.0, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for starts, rows, most in ((starts_q, q, longest[0]), (starts_k, k, longest[1])):
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        assert int(starts[0]) == 0 and int(starts[-1]) == rows.shape[0]
        lengths = starts.diff()
        assert bool((lengths >= 0).all()) and int(lengths.max()) <= most
    assert q.dim() == k.dim() == v.dim() == 3 and starts_q.shape == starts_k.shape
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[1] % k.shape[1] == 0
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    lengths_q, lengths_k = starts_q.diff().tolist(), starts_k.diff().tolist()
    rows = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    outs, sums = [], []
    for b, (queries, keys, values) in enumerate(rows):
        end = int(starts_k[b + 1])
        behind = v[end : end + -len(keys) % TILE].detach()
        own = _slopes_of(slopes, b)
        out, lse = _sequence(queries, keys, values, behind, scale, sides, softcap, own)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums, 1)


def _slopes_of(slopes: Tensor | None, sequence: int) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[sequence]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, sides: Any, softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    assert q.dim() == 4 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    starts = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k)]
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    out, lse = _varlen(*rows, *starts, (seqlen_q, seqlen_k), scale, sides, softcap, slopes)
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def _fa2_sides(causal: bool, window: Any, seqlen_k: int) -> Sides:
    """Return the window of flash-attn 2, where any negative number means no limit.

    A side >= seqlen_k also means no limit. If only the left side is limited, the limit on the right
    is seqlen_k, even if there are more queries than keys.
    """
    left, right = (None if side < 0 or side >= seqlen_k else side for side in window)
    right = 0 if causal else right
    return left, seqlen_k if left is not None and right is None else right


def _fa3_sides(causal: bool, window: Any, seqlen_q: int, seqlen_k: int) -> Sides:
    left, right = window
    left = None if left < 0 or left >= seqlen_k - 1 else left
    return left, 0 if causal else None if right < 0 or right >= seqlen_q - 1 else right


def _equal_dims(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> None:
    size = q.shape[-1]
    assert size == k.shape[-1] == v.shape[-1] and size <= 256 and size % multiple == 0


# ---- flash-attn 2 -------------------------------------------------------------------------------


def _fa2(out: Tensor, lse: Tensor, wanted: bool) -> Any:
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).detach()
    return (out, lse, None) if wanted else out


def fa2_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    calls.append(dict(locals()))
    _equal_dims(q, k, v, 1)
    sides = _fa2_sides(causal, window_size, k.shape[1])
    return _fa2(*_dense(q, k, v, softmax_scale, sides, softcap, alibi_slopes), return_attn_probs)


def fa2_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    calls.append(dict(locals()))
    _equal_dims(q, k, v, 1)
    if max_seqlen_q == 1 and q.shape[1] > k.shape[1] and alibi_slopes is None:
        assert q.shape[0] == len(cu_seqlens_q) - 1  # flash-attn treats heads as queries here
    results = _varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), softmax_scale,
        _fa2_sides(causal, window_size, max_seqlen_k), softcap, alibi_slopes,
    )  # fmt: skip
    return _fa2(*results, return_attn_probs)


def fa2_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    calls.append(dict(locals()))
    _equal_dims(q, k_cache, v_cache, 8)
    assert cache_seqlens.dtype == torch.int32 and k_cache.stride(-1) == v_cache.stride(-1) == 1
    page_size, outs, sums = k_cache.shape[1], [], []
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    for b, begin in enumerate(cache_seqlens.tolist()):
        end = begin + (0 if k is None else k.shape[1])
        position = torch.arange(end)
        holder = torch.full_like(position, b)
        if block_table is not None:
            assert page_size % 256 == 0 and block_table.dtype == torch.int32
            holder, position = block_table[b][position // page_size].long(), position % page_size
        for cache, new in ((k_cache, k), (v_cache, v)):
            if new is not None:
                cache[holder[begin:], position[begin:]] = new[b]
        keys, values = (cache[holder, position] for cache in (k_cache, v_cache))
        out, lse = _sequence(
            q[b], keys, values, values[:0], softmax_scale,
            _fa2_sides(causal, window_size, capacity), softcap, _slopes_of(alibi_slopes, b),
        )  # fmt: skip
        outs.append(out)
        sums.append(lse.masked_fill(lse == float("-inf"), float("inf")))
    return (torch.stack(outs), torch.stack(sums)) if return_softmax_lse else torch.stack(outs)


# ---- flash-attn 3 -------------------------------------------------------------------------------


def fa3_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    calls.append(dict(locals()))
    _equal_dims(q, k, v, 8)
    sides = _fa3_sides(causal, window_size, q.shape[1], k.shape[1])
    out, lse = _dense(q, k, v, softmax_scale, sides, softcap)
    return (out, lse.detach()) if return_attn_probs else out


def fa3_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    calls.append(dict(locals()))
    _equal_dims(q, k, v, 8)
    out, lse = _varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), softmax_scale,
        _fa3_sides(causal, window_size, max_seqlen_q, max_seqlen_k), softcap,
    )  # fmt: skip
    return (out, lse.detach()) if return_attn_probs else out


# ---- flash-attn 4 -------------------------------------------------------------------------------


def _fa4_sides(causal: bool, window: Any, q: Tensor, v: Tensor) -> Sides:
    for size in (q.shape[-1], v.shape[-1]):
        assert 8 <= size <= 256 and size % 8 == 0
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return left, 0 if causal else right  # a single negative side is an offset, not "no limit"


def fa4_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    calls.append(dict(locals()))
    sides = _fa4_sides(causal, window_size, q, v)
    out, lse = _dense(q, k, v, softmax_scale, sides, softcap)
    return out, lse if return_lse else None


def fa4_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
    mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    calls.append(dict(locals()))
    sides = _fa4_sides(causal, window_size, q, v)
    lengths = cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k)
    out, lse = _varlen(q, k, v, *lengths, softmax_scale, sides, softcap)
    return out, lse if return_lse else None


# ---- torch's varlen_attn ------------------------------------------------------------------------


class AuxRequest(NamedTuple):
    lse: bool = False


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    calls.append(dict(locals()))
    _equal_dims(query, key, value, 8)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert max_q > 1 or query.shape[0] == len(cu_seq_q) - 1
    sides = _fa2_sides(window_size == (-1, 0), window_size, max_k)
    lengths = cu_seq_q, cu_seq_k, (max_q, max_k)
    out, lse = _varlen(query, key, value, *lengths, scale, sides)
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).detach()
    return (out, lse) if return_aux is not None and return_aux.lse else out


def _module(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


# Stand-in modules, by engine.
MODULES = {
    "flash-attn": _module(
        "flash_attn",
        flash_attn_func=fa2_func,
        flash_attn_varlen_func=fa2_varlen_func,
        flash_attn_with_kvcache=fa2_with_kvcache,
    ),
    "flash-attn-3": _module(
        "flash_attn_interface", flash_attn_func=fa3_func, flash_attn_varlen_func=fa3_varlen_func
    ),
    "flash-attn-4": _module(
        "flash_attn.cute", flash_attn_func=fa4_func, flash_attn_varlen_func=fa4_varlen_func
    ),
    "torch.nn.attention.varlen": _module(
        "torch.nn.attention.varlen", varlen_attn=varlen_attn, AuxRequest=AuxRequest
    ),
}
# Source files of the originals, by engine.
FILES = {
    "flash-attn": "flash_attn/flash_attn_interface.py",
    "flash-attn-3": "flash_attn_interface.py",
    "flash-attn-4": "flash_attn/cute/interface.py",
}
ENGINES = {engine.name: engine for engine in engines.ENGINES}
VERSIONS = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0b1", "flash-attn-4": "4.0.0b36"}


def installer(monkeypatch):
    """Yield a function that replaces all engines by stand-ins for the named ones, on the CPU."""
    monkeypatch.setattr(engines, "no_gpu", list)
    monkeypatch.setattr(engines, "version_of", VERSIONS.get)
    monkeypatch.setattr(denylist, "DEFECTS", {})
    monkeypatch.setattr(flash, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(flash, "DTYPES", (*flash.DTYPES, torch.float64))
    calls.clear()

    def install(*names):
        flash._cached_choice.cache_clear()
        monkeypatch.setattr(flash, "ENGINES", tuple(ENGINES[name] for name in names))
        for module in (MODULES[name] for name in names):
            monkeypatch.setitem(sys.modules, module.__name__, module)
            parent, _, own = module.__name__.rpartition(".")
            if parent == "flash_attn":  # flash-attn and flash-attn-4 share this package
                monkeypatch.setitem(sys.modules, parent, MODULES["flash-attn"])
            if parent:
                monkeypatch.setattr(sys.modules[parent], own, module, raising=False)

    yield install
    flash._cached_choice.cache_clear()
