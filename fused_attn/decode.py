"""Decoding: attention of new tokens to a contiguous or paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from fused_attn.base.torch_state import needs_grad
from fused_attn.call import handlers
from fused_attn.call.attention import AttentionOptions
from fused_attn.call.keywords import refuse
from fused_attn.call.kv_cache import NO_GRAD, CacheUpdate, checked_update
from fused_attn.call.validation import check_floats
from fused_attn.masks import Mask
from fused_attn.ops import decode_step
from fused_attn.ops.rotary import checked_rotation, rotate
from fused_attn.ops.sinks import add_sinks, checked_sinks


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    cache_lengths: Tensor | Sequence[int],
    key: Tensor | None = None,
    value: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_mask: Tensor | Mask | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **kwargs: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a KV cache, and compute attention to the cached sequences.

    Kernels read only the valid positions of each sequence, regardless of the capacity of the
    cache.

    Backend "cuda" reads pages in place and appends new keys and values in the attention kernel, if
    seqlen_q * num_heads / num_heads_kv is at most 64 and the rows of the cache are multiples of 16
    bytes. Backend "cpp" reads pages in place for up to 4 queries and 64 new keys of a sequence.
    Otherwise, pages are copied into a contiguous tensor at each step: all pages in block_table if
    the lengths are on a GPU.

    Backend "flash" also appends and reads pages in place, with flash-attn 2, if the page size is a
    multiple of 256 and head_dim a multiple of 8.

    Backend "sdpa" reads the cache in place if there is no attn_mask, and all lengths are equal and
    readable on the host (integers, or a tensor on the CPU). Otherwise it copies the cache. If the
    lengths are readable on the host, the copy ends at the longest sequence.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16 or float64. The
            queries are at the last seqlen_q positions of each sequence, including the new keys.
        key_cache: (batch, num_heads_kv, max_len, head_dim), or (num_pages, num_heads_kv, page_size,
            head_dim) with block_table; num_heads may be a multiple of num_heads_kv. New keys are
            written to it in place.
        value_cache: shape of key_cache, with head_dim_v; new values are written to it in place.
        cache_lengths: (batch,) integers, the number of cached positions of each sequence before the
            call. It is not modified. Values derived from the tensor are cached on it. In-place
            changes by torch operations are detected. After other changes (another library's kernel,
            `.data`), pass a new tensor. Cache contents beyond these lengths may be non-finite.
        key: (batch, num_heads_kv, seqlen_new, head_dim), written to positions cache_lengths[b] to
            cache_lengths[b] + seqlen_new - 1 of sequence b, and visible to query. None appends
            nothing.
        value: (batch, num_heads_kv, seqlen_new, head_dim_v), as key.
        block_table: (batch, max_pages) int32 or int64. Positions [i * page_size, (i + 1) *
            page_size) of sequence b are in page block_table[b, i]. Entries beyond the end of a
            sequence are ignored. Sequences must not share pages that are written to. None means a
            contiguous cache.
        attn_mask: a `fused_attn.masks.Mask`, or a bool or float tensor as in
            scaled_dot_product_attention, broadcastable to (batch, num_heads, seqlen_q, capacity).
            The capacity is max_len, or max_pages * page_size; tensors in a Mask have it as
            seqlen_k. Align a Mask to the ends of the sequences with "bottom_right", for example
            masks.sliding_window(left, align="bottom_right"). Right padding in the same Mask moves
            such a window to the padded ends, but not is_causal. Pass the same Mask to every layer.
        is_causal: apply a bottom-right causal mask, in addition to attn_mask: the last query
            attends to all positions, and each earlier query to one position less than the next.
        scale: factor of query @ key^T; None means 1 / sqrt(head_dim).
        softcap: replace scores by softcap * tanh(scores / softcap) before the mask is added; None
            disables it.
        sinks: as in scaled_dot_product_attention, but not differentiable.
        rotary_cos, rotary_sin: (positions, width), tables of `rotary_embedding`, which is applied
            to query and to key at their positions in the sequence. None: no rotation.
        rotary_interleaved: as interleaved in `rotary_embedding`.
        return_lse: also return lse, the natural log of the softmax denominator.
        backend: "cpp", "cuda", "triton", "flash", "flex", "sdpa" or "eager"; None selects a backend
            automatically.

    Returns:
        out, (batch, num_heads, seqlen_q, head_dim_v). With return_lse, also lse, (batch, num_heads,
        seqlen_q), float32 (float64 for float64 inputs). lse includes the sinks. Without sinks, it
        is -inf for query rows with no visible key.

    Raises:
        ValueError, TypeError: an argument is invalid or requires grad; the message states the
            expected and the actual value. Values of tensors cache_lengths and block_table are
            checked only on the CPU, and not in graphs of torch.compile.
        NotImplementedError: the requested backend does not support the call, query is a DTensor, or
            the call is within `context_parallel`.

    Example:
        >>> key_cache, value_cache = (torch.zeros(2, 2, 4096, 64) for _ in range(2))
        >>> lengths = torch.tensor([0, 0])
        >>> for seqlen_new in (100, 1, 1):  # a prompt, then token by token
        ...     query = torch.randn(2, 8, seqlen_new, 64)
        ...     key, value = (torch.randn(2, 2, seqlen_new, 64) for _ in range(2))
        ...     out = fused_attn.decode_attention(
        ...         query, key_cache, value_cache, cache_lengths=lengths, key=key, value=value
        ...     )
        ...     lengths += seqlen_new
        >>> out.shape, lengths.tolist()
        (torch.Size([2, 8, 1, 64]), [102, 102])

    For sequences of equal length, `fused_attn.nn.KeyValueCache` manages a cache that grows.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
        PagedAttention" (paged cache); Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    if kwargs:
        refuse("decode_attention", kwargs)
    if handlers.context is not None or handlers.is_dtensor(query):
        raise NotImplementedError(
            "decode_attention must be called with local tensors (DTensor.to_local), outside of "
            "context_parallel: for caches that are distributed over ranks, use "
            "fused_attn.distributed.decode_attention"
        )
    update = checked_update(query, key_cache, value_cache, key, value, cache_lengths, block_table)
    if sinks is not None:
        checked_sinks(sinks, query[..., 0])  # raises before the cache is changed
        if needs_grad(sinks):
            raise ValueError(NO_GRAD.format(name="sinks"))
    if rotary_cos is not None or rotary_sin is not None:
        tables = _checked_tables(rotary_cos, rotary_sin, update)
        query = _rotated(query, update, *tables, rotary_interleaved)
        if key is not None:
            new_key = _rotated(key, update, *tables, rotary_interleaved)
            update = update._replace(key=new_key)
    options = AttentionOptions(scale, softcap, decoding=True)  # type: ignore[arg-type]
    # Under a bottom-right causal mask, a single query attends to all positions.
    is_causal = is_causal and query.shape[2] != 1
    want_lse = return_lse or sinks is not None
    out, lse = decode_step.run(query, update, attn_mask, is_causal, options, want_lse, backend)
    if sinks is not None and lse is not None:
        out, lse = add_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def _checked_tables(
    cos: Tensor | None, sin: Tensor | None, update: CacheUpdate
) -> tuple[Tensor, Tensor]:
    if cos is None or sin is None:
        got = "rotary_sin" if cos is None else "rotary_cos"
        raise ValueError(f"rotary_cos and rotary_sin must be given together, got only {got}")
    check_floats({"rotary_cos": cos, "rotary_sin": sin}, 2)
    if cos.shape != sin.shape:
        got = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(f"rotary_cos and rotary_sin must have the same shape, got {got}")
    if update.ends is not None and cos.shape[0] < update.ends[1]:
        raise ValueError(
            f"rotary_cos must have at least {update.ends[1]} rows (positions), got {cos.shape[0]}"
        )
    if needs_grad(cos, sin):
        raise ValueError(NO_GRAD.format(name="rotary_cos and rotary_sin"))
    return cos, sin


def _rotated(
    tokens: Tensor, update: CacheUpdate, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """Rotate the last tokens of the sequences, (batch, num_heads, count, head_dim).

    In sequences of fewer than count tokens, rows before the first token use position 0.
    """
    count, ends, positions = tokens.shape[2], update.ends, None
    if ends is not None and ends[0] == ends[1] and count <= ends[0]:
        cos, sin = (table.narrow(0, ends[0] - count, count) for table in (cos, sin))
    else:
        lengths = torch.as_tensor(update.lengths, device=tokens.device)
        firsts = lengths[:, None] + (update.seqlen_new - count)
        positions = (firsts + torch.arange(count, device=tokens.device)).clamp(min=0)
    return rotate(tokens, checked_rotation(tokens, cos, sin, positions, interleaved))
