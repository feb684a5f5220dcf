"""Attention for variable-length sequences that are packed along one dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from fused_attn import masks
from fused_attn.call import packed
from fused_attn.call.keywords import refuse
from fused_attn.call.options import AttentionOptions
from fused_attn.call.unchecked import UncheckedAttention
from fused_attn.call.validation import (
    check_floats,
    check_max_seqlen,
    check_same,
    checked_cu_seqlens,
)
from fused_attn.masks import Mask
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import MaskSpec, normalize
from fused_attn.ops import dispatch


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **kwargs: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within each sequence of a packed batch, without padding.

    Results, gradients and dropped positions equal those of `scaled_dot_product_attention` on the
    padded batch.

    Args:
        query: (total_q, num_heads, head_dim); float32, float16, bfloat16 or float64.
        key: (total_k, num_heads_kv, head_dim); num_heads may be a multiple of num_heads_kv.
        value: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,) int32 or int64, cumulative lengths from 0 to total_q. Rows
            [cu_seqlens_q[b], cu_seqlens_q[b + 1]) are sequence b. Pass the same tensor to every
            layer, because values derived from it are cached on it. In-place changes by torch
            operations are detected. Changes by another library's kernel or through `.data` are not.
        cu_seqlens_k: cumulative lengths of key and value, from 0 to total_k, as cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or an upper bound.
        attn_mask: a `fused_attn.masks.Mask`, or a bool or float tensor as in
            scaled_dot_product_attention, broadcastable to (batch, num_heads, max_seqlen_q,
            max_seqlen_k). Positions are relative to the start of each sequence.
        is_causal: apply a top-left causal mask: query i of a sequence attends to its keys j <= i.
            For a bottom-right causal mask, as in decoding with a cache, pass
            masks.causal(align="bottom_right") as attn_mask.
        dropout_p, scale, softcap, sinks, seed, backend: as in scaled_dot_product_attention.
        return_lse: also return lse, the natural log of the softmax denominator.

    Returns:
        out, (total_q, num_heads, head_dim_v). With return_lse, also lse, (num_heads, total_q),
        float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value. Values of cu_seqlens_q and cu_seqlens_k are checked only on the CPU.
        NotImplementedError: the requested backend does not support the call.

    Example:
        >>> lengths = torch.tensor([100, 28, 64])
        >>> cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        >>> query, key, value = (torch.randn(192, 8, 64) for _ in range(3))
        >>> out = fused_attn.varlen_attention(
        ...     query, key, value, cu_seqlens, cu_seqlens, 100, 100, is_causal=True
        ... )
        >>> out.shape
        torch.Size([192, 8, 64])

    Source: Dao 2023, "FlashAttention-2", section 3.2 (packed layout).
    """
    if kwargs:
        refuse("varlen_attention", kwargs)
    if type(query) is not Tensor or not query.dim() == key.dim() == value.dim() == 3:
        check_floats({"query": query, "key": key, "value": value}, 3)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    spec = packed_spec(query, key, *lengths, masks.as_mask(attn_mask), is_causal)
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, spec, False, True, options)
    results = dispatch.attention(call, return_lse, backend, sinks)
    return results if return_lse else results[0]  # type: ignore[return-value]


def packed_spec(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Mask | None,
    is_causal: bool,
) -> MaskSpec:
    """Validate cu_seqlens and maximum lengths, and return the MaskSpec of the packed call.

    The result is cached on the mask, or on cu_seqlens_q without a mask, so all layers share it.
    """
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    num_heads = query.shape[1]

    def make() -> MaskSpec:
        starts_q = checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, query)
        starts_k = checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, key)
        check_same("cu_seqlens_k", "shape", starts_k.shape, starts_q.shape, "cu_seqlens_q")
        within = packed.with_lengths(mask, is_causal, cu_seqlens_q, cu_seqlens_k)
        batch = starts_q.shape[0] - 1
        spec = normalize(within, batch, num_heads, max_seqlen_q, max_seqlen_k, query)
        band = spec.band
        if band is not None:  # lengths other than those of the sequences need `bounds`
            same = 0 if cu_seqlens_q is cu_seqlens_k else None
            band = band._replace(offset=same) if band.lengths == 1 else None
        # A cached value must not hold a reference to the tensor that owns the cache.
        return replace(
            spec,
            band=band,
            cu_seqlens_q=starts_q.clone() if starts_q is cu_seqlens_q else starts_q,
            cu_seqlens_k=starts_k.clone() if starts_k is cu_seqlens_q else starts_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    memo_key = ("spec", is_causal, max_seqlen_q, max_seqlen_k, num_heads, len(query), len(key))
    ends = cu_seqlens_q, cu_seqlens_k
    if mask is None:
        return recall_on_tensor(cu_seqlens_q, memo_key, ends, make)
    return recall(mask.memo, memo_key, (*ends, *mask.tensors()), query.device, make)
