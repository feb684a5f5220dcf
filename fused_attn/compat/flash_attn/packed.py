"""flash-attn's functions for packed sequences, optionally with paged keys."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from fused_attn.call.packed import cumulative
from fused_attn.compat.flash_attn.arguments import Window, check_probs, common_of, mask_of
from fused_attn.compat.flash_attn.dense import Results
from fused_attn.compat.rows import check_used, rows_of_pages, used_rows
from fused_attn.functional import varlen_attention


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **keywords: Any,
) -> Results:
    """Compute attention with the arguments of flash_attn.flash_attn_varlen_func.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_kv, head_dim), or (num_pages, page_size, num_heads_kv, head_dim) with
            block_table.
        v: as k, with head_dim_v.
        cu_seqlens_q: (batch + 1,), cumulative lengths of q, from 0 to total_q.
        cu_seqlens_k: as cu_seqlens_q, for k. None if seqused_k is given with block_table.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or an upper bound.
        block_table: (batch, max_pages) integers; the pages of each sequence. The rows in use are
            copied. flash-attn 4 calls it page_table.
        seqused_q, seqused_k: (batch,) integers; numbers of rows of each sequence that are used.
            Others are ignored, and are 0 in the result. The rows in use are copied.
        keywords: as in flash_attn_func; the same holds for all other arguments.

    Returns:
        out, (total_q, num_heads, head_dim_v). With return_attn_probs, also lse, (num_heads,
        total_q), and None in place of the weights.

    Raises:
        NotImplementedError: an argument is not supported.
        ValueError, TypeError: an argument is invalid.
    """
    check_probs(return_attn_probs, dropout_p)
    block_table = keywords.pop("page_table", None) if block_table is None else block_table
    options = common_of(
        "flash_attn_varlen_func", q, softmax_scale, softcap, deterministic, learnable_sink, keywords
    )
    if cu_seqlens_k is None and (block_table is None or seqused_k is None):
        raise TypeError("cu_seqlens_k must be given, except with both block_table and seqused_k")
    starts = cast(Tensor, cu_seqlens_k)
    if block_table is not None or seqused_k is not None:
        if v.shape[:-1] != k.shape[:-1]:
            got = f"{tuple(v.shape)} and {tuple(k.shape)}"
            raise ValueError(f"v must have the shape of k, except in the last dimension, got {got}")
        lengths = starts.diff() if seqused_k is None else seqused_k
        if block_table is None:
            check_used("seqused_k", lengths, starts.diff())
            check_used("seqused_k", lengths, len(k), starts[:-1])
            rows = used_rows(starts[:-1], lengths)
            k, v = k[rows], v[rows]
        else:
            rows = rows_of_pages(block_table, k.shape[1], k.shape[0], "seqused_k", lengths)
            k, v = k.flatten(0, 1)[rows], v.flatten(0, 1)[rows]
        starts = cumulative(lengths)
    total_q, used = q.shape[0], None
    if seqused_q is not None:
        check_used("seqused_q", seqused_q, cu_seqlens_q.diff())
        check_used("seqused_q", seqused_q, total_q, cu_seqlens_q[:-1])
        used = used_rows(cu_seqlens_q[:-1], seqused_q)
        q, cu_seqlens_q = q[used], cumulative(seqused_q)
    results = varlen_attention(
        q, k, v, cu_seqlens_q, starts, max_seqlen_q, max_seqlen_k,
        mask_of(causal, window_size, alibi_slopes), dropout_p, return_lse=return_attn_probs,
        **options,
    )  # fmt: skip
    out, lse = results if isinstance(results, tuple) else (results, None)
    if used is not None:
        out = out.new_zeros(total_q, *out.shape[1:]).index_copy(0, used, out)
        if lse is not None:
            empty = lse.new_full((lse.shape[0], total_q), float("-inf"))
            lse = empty.index_copy(1, used, lse)
    return out if lse is None else (out, lse, None)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **keywords: Any
) -> Results:
    """Compute `flash_attn_varlen_func` for qkv, (total, 3, num_heads, head_dim)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **keywords
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **keywords: Any,
) -> Results:
    """Compute `flash_attn_varlen_func` for kv, (total_k, 2, num_heads_kv, head_dim)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **keywords
    )
