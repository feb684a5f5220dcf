"""Attention of sequences of several lengths that lie one after the other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fused_attn import masks
from fused_attn.call import packed
from fused_attn.call.options import AttentionOptions
from fused_attn.call.unchecked import UncheckedAttention
from fused_attn.call.validation import (
    check_max_seqlen,
    check_packed,
    check_same,
    checked_cu_seqlens,
)
from fused_attn.masks import Mask
from fused_attn.masks.memo import recall, recall_of
from fused_attn.masks.spec import MaskSpec, normalize
from fused_attn.ops import autograd


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that lie one after the other, without padding.

    The results are those of `scaled_dot_product_attention` on the padded batch, dropout included,
    and so is what is differentiable.

    Args:
        query: (total_q, num_heads, head_dim); float32, float16, bfloat16, float64.
        key: (total_k, num_heads_kv, head_dim); num_heads may be a multiple of num_heads_kv.
        value: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,) int32 or int64; sequence b is the rows [cu_seqlens_q[b],
            cu_seqlens_q[b + 1]), so it starts with 0 and ends with total_q. Layers should share
            it, for what calls derive of it, which is kept until torch changes it (another library's
            kernel or `.data` would not be noticed).
        cu_seqlens_k: the same for key and value, and total_k.
        max_seqlen_q, max_seqlen_k: rows of the longest sequence, or more.
        attn_mask: as in scaled_dot_product_attention, of each sequence by itself: broadcastable to
            (batch, num_heads, max_seqlen_q, max_seqlen_k), or a `fused_attn.masks.Mask`.
        is_causal: query i of a sequence sees its keys j <= i (top-left; for bottom-right, as in
            decoding with a cache, pass masks.causal(align="bottom_right")).
        dropout_p, scale, softcap, sinks, seed, backend: as in scaled_dot_product_attention.
        return_lse: also return the natural log of the softmax denominator.

    Returns:
        out (total_q, num_heads, head_dim_v); with return_lse also lse, (num_heads, total_q),
        float32 (float64 for float64).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got. Values of
            cu_seqlens are looked at on the CPU only.
        NotImplementedError: the backend that was asked for does not take the problem.

    Example:
        >>> lengths = torch.tensor([100, 28, 64])
        >>> cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        >>> query, key, value = (torch.randn(192, 8, 64) for _ in range(3))
        >>> out = fused_attn.varlen_attention(
        ...     query, key, value, cu_seqlens, cu_seqlens, 100, 100, is_causal=True
        ... )
        >>> out.shape
        torch.Size([192, 8, 64])

    Source: Dao 2023, "FlashAttention-2", section 3.2, for the layout.
    """
    if type(query) is not Tensor or not query.dim() == key.dim() == value.dim() == 3:
        check_packed(query, key, value)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    spec = _spec(query, key, *lengths, masks.as_mask(attn_mask), is_causal)
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, spec, False, True, options)
    results = autograd.attention(call, return_lse, backend, sinks)
    return results if return_lse else results[0]  # type: ignore[return-value]


def _spec(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Mask | None,
    is_causal: bool,
) -> MaskSpec:
    """The mask of packed sequences, which are checked; kept, so that layers share it."""
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    num_heads = query.shape[1]

    def make() -> MaskSpec:
        starts_q = checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, query)
        starts_k = checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, key)
        check_same("cu_seqlens_k", "shape", starts_k.shape, starts_q.shape, "cu_seqlens_q")
        within = packed.with_lengths(mask, is_causal, cu_seqlens_q, cu_seqlens_k)
        batch = starts_q.shape[0] - 1
        # What is kept must not hold its owner.
        return replace(
            normalize(within, batch, num_heads, max_seqlen_q, max_seqlen_k, query),
            cu_seqlens_q=starts_q.clone() if starts_q is cu_seqlens_q else starts_q,
            cu_seqlens_k=starts_k.clone() if starts_k is cu_seqlens_q else starts_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    what = ("spec", is_causal, max_seqlen_q, max_seqlen_k, num_heads, len(query), len(key))
    ends = cu_seqlens_q, cu_seqlens_k
    if mask is None:
        return recall_of(cu_seqlens_q, what, ends, make)
    return recall(mask.memo, what, (*ends, *mask.tensors()), query.device, make)
