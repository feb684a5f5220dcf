"""Decoding: attention of new tokens to a contiguous or paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_attn import masks
from fused_attn.backends import AttentionProblem, CacheUpdate, problem_of, select
from fused_attn.backends.registry import choose, wanted_backend
from fused_attn.base.autocast import any_autocast
from fused_attn.base.torch_state import host_readable, plain_eager
from fused_attn.call.calls import AttentionCall
from fused_attn.call.keywords import refuse
from fused_attn.call.options import AttentionOptions
from fused_attn.call.unchecked import UncheckedAttention
from fused_attn.call.validation import (
    attention_call,
    check_float,
    check_length,
    check_same,
)
from fused_attn.masks import Mask
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import MaskSpec, normalize, spec_of_ends, with_summaries
from fused_attn.ops import autograd
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
    return_lse: bool = False,
    backend: str | None = None,
    **kwargs: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a KV cache, and compute attention to the cached sequences.

    Kernels read only the valid positions of each sequence, regardless of the capacity of the
    cache.

    Backend "cuda" reads pages in place and appends new keys and values in the attention kernel, if
    seqlen_q * num_heads / num_heads_kv is at most 64 and the rows of the cache are multiples of 16
    bytes. Otherwise new keys and values are appended first, and pages are copied into a contiguous
    tensor. If the lengths are on a GPU, all pages in block_table are copied.

    Backend "flash" does the same with flash-attn 2, for pages of a multiple of 256 positions. It
    requires a head_dim that is a multiple of 8.

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
            masks.sliding_window(left, align="bottom_right"). Pass the same Mask to every layer.
        is_causal: apply a bottom-right causal mask, in addition to attn_mask: the last query
            attends to all positions, and each earlier query to one position less than the next.
        scale: factor of query @ key^T; None means 1 / sqrt(head_dim).
        softcap: replace scores by softcap * tanh(scores / softcap) before the mask is added; None
            disables it.
        sinks: as in scaled_dot_product_attention, but not differentiable.
        return_lse: also return lse, the natural log of the softmax denominator.
        backend: "cpp", "cuda", "triton", "flash", "flex", "sdpa" or "eager"; None selects a backend
            automatically.

    Returns:
        out, (batch, num_heads, seqlen_q, head_dim_v). With return_lse, also lse, (batch, num_heads,
        seqlen_q), float32 (float64 for float64 inputs). lse includes the sinks. Without sinks, it
        is -inf for query rows with no visible key.

    Raises:
        ValueError, TypeError: an argument is invalid or requires grad; the message states the
            expected and the actual value. Values of cache_lengths and block_table are checked only
            on the CPU.
        NotImplementedError: the requested backend does not support the call.

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
    given = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    if (key is None) != (value is None):
        missing, there = ("key", "value") if key is None else ("value", "key")
        raise ValueError(f"{missing} must be given with {there}, got None")
    if key is not None and value is not None:
        given.update(key=key, value=value)
    check_decode_tensors(given)
    batch, num_heads, seqlen_q, _ = query.shape
    if sinks is not None and torch.is_grad_enabled() and sinks.requires_grad:
        raise ValueError(_NO_GRAD.format(name="sinks"))
    seqlen_new = 0 if key is None else key.shape[2]
    capacity = _checked_capacity(query, key_cache, block_table)
    cache_lengths, known = checked_cache_lengths(cache_lengths, query, seqlen_new, capacity)
    options = AttentionOptions(scale, softcap)  # type: ignore[arg-type]
    # Under a bottom-right causal mask, a single query attends to all positions.
    is_causal = is_causal and seqlen_q != 1
    if block_table is None and attn_mask is None and backend is None and known is not None:
        caches = (key_cache, value_cache)
        step = _of_cpu(query, caches, key, value, cache_lengths, known, is_causal, options)
        if step is not None:
            results = autograd.attention(step, return_lse, None, sinks)
            return results if return_lse else results[0]  # type: ignore[return-value]
    lengths = torch.as_tensor(cache_lengths, device=query.device)
    if block_table is not None:
        _check_pages(block_table, key_cache, lengths, seqlen_new)
    mask = with_cache_lengths(masks.as_mask(attn_mask), is_causal, lengths, seqlen_new)
    if torch.is_grad_enabled() and any(bias.requires_grad for bias in mask.biases):
        raise ValueError(_NO_GRAD.format(name="attn_mask"))
    spec = normalize(mask, batch, num_heads, seqlen_q, capacity, query)
    call = attention_call(query, key_cache, value_cache, spec, options)
    want_lse = return_lse or sinks is not None
    chosen = select(problem_of(call, "lse" if want_lse else "out"), backend)
    result: Any = None
    if plain_eager(*given.values(), lengths, block_table, *mask.tensors()):
        call = replace(call, mask=with_summaries(spec, chosen.tile_summary))
        result = chosen.attention_decode(call, CacheUpdate(key, value, lengths, block_table))
        if result is not None and seqlen_new > 0:
            for cache in (key_cache, value_cache):
                if not cache.is_inference():
                    increment_version(cache)
    if result is None:
        if key is not None and value is not None:
            _write((key_cache, value_cache), (key, value), lengths, block_table)
        if block_table is not None:
            longest = capacity if known is None else known[1] + seqlen_new
            caches = (key_cache, value_cache)
            keys, values = (_gather_pages(cache, block_table, longest) for cache in caches)
            call = replace(call, key=keys, value=values)
        if chosen.wraps_torch:
            if known is not None and attn_mask is None:
                call = _narrowed(call, mask, is_causal, known[0] == known[1], known[1] + seqlen_new)
            if known is None or known[0] + seqlen_new < call.key.shape[2]:
                call = _zero_beyond_ends(call, lengths + seqlen_new)
        result = autograd.attention_by(call, chosen, want_lse)
    out, lse = result
    if sinks is not None:
        out, lse = add_sinks(out, lse, checked_sinks(sinks, lse))
    return (out, lse) if return_lse else out


def _of_cpu(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    key: Tensor | None,
    value: Tensor | None,
    lengths: Tensor | Sequence[int],
    known: tuple[int, int],
    is_causal: bool,
    options: AttentionOptions,
) -> UncheckedAttention | None:
    """Append new keys and values, and return the unchecked call of a decoding step on the CPU.

    The result is None if the step requires the full path. In this case nothing was written.

    Args:
        caches: key_cache and value_cache, contiguous (without pages).
        lengths: lengths of the sequences before the call, readable on the host.
        known: minimum and maximum of lengths.
    """
    if query.device.type != "cpu" or any_autocast():
        return None
    if not plain_eager(query, *caches, key, value) or wanted_backend():
        return None
    options.checked(query.shape[3], query.device)
    if known[0] != known[1]:
        # torch's kernels multiply masked weights of 0 by the values beyond the end of a shorter
        # sequence, which may be NaN. The full path zeroes those rows.
        sizes = query.shape[3], caches[1].shape[3]
        backend = choose(AttentionProblem(query.device, query.dtype, *sizes))[0]
        if backend is None or backend.wraps_torch:
            return None
    seqlen_new = 0
    if key is not None and value is not None:
        seqlen_new = key.shape[2]
        if known[0] == known[1]:
            for cache, new in zip(caches, (key, value), strict=True):
                cache.narrow(2, known[0], seqlen_new).copy_(new)
        else:
            _write(caches, (key, value), torch.as_tensor(lengths), None)
    keys, values = (cache.narrow(2, 0, known[1] + seqlen_new) for cache in caches)
    mask: Mask | MaskSpec | None = _CAUSAL if is_causal else None
    if known[0] != known[1]:
        integers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        ends = [length + seqlen_new for length in integers]
        mask = spec_of_ends(ends, query.shape[2], is_causal)
    return UncheckedAttention(query, keys, values, mask, False, True, options)


# ---- validation of arguments --------------------------------------------------------------------

_NO_GRAD = (
    "{name} must not require grad: caches are overwritten, so no gradient can go through them; "
    "call decode_attention under torch.no_grad()"
)


def check_decode_tensors(given: dict[str, Tensor]) -> None:
    query, grad_enabled = given["query"], torch.is_grad_enabled()
    for name, tensor in given.items():
        check_float(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {tuple(tensor.shape)}")
        check_same(name, "dtype", tensor.dtype, query.dtype, "query")
        check_same(name, "device", tensor.device, query.device, "query")
        if grad_enabled and tensor.requires_grad:
            raise ValueError(_NO_GRAD.format(name=name))
    key_cache, value_cache = given["key_cache"], given["value_cache"]
    check_same("key_cache", "head_dim", key_cache.shape[3], query.shape[3], "query")
    check_same(
        "value_cache", "shape", tuple(value_cache.shape[:3]), tuple(key_cache.shape[:3]),
        "key_cache but for the last dimension",
    )  # fmt: skip
    num_heads, num_heads_kv = query.shape[1], key_cache.shape[1]
    if num_heads and (num_heads_kv == 0 or num_heads % num_heads_kv):
        raise ValueError(
            f"key_cache must have num_heads_kv that divides num_heads {num_heads} (of query), "
            f"got {num_heads_kv}"
        )
    if "key" not in given:
        return
    for name in ("key", "value"):
        tensor, cache = given[name], given[f"{name}_cache"]
        expected = (query.shape[0], num_heads_kv, given["key"].shape[2], cache.shape[3])
        if tensor.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
        strides = cache.stride()
        if 0 in strides and any(
            n > 1 and s == 0 for n, s in zip(cache.shape, strides, strict=True)
        ):
            raise ValueError(f"{name}_cache must be written to, got an expanded tensor")


def _checked_capacity(query: Tensor, key_cache: Tensor, block_table: Tensor | None) -> int:
    """Validate the shape of the cache, and return its capacity per sequence in positions."""
    batch = query.shape[0]
    if block_table is None:
        check_same("key_cache", "batch", key_cache.shape[0], batch, "query")
        capacity = key_cache.shape[2]
    else:
        if not isinstance(block_table, Tensor) or block_table.dtype not in _INTEGERS:
            got = getattr(block_table, "dtype", type(block_table).__name__)
            raise TypeError(f"block_table must be an int32 or int64 tensor, got {got}")
        check_same("block_table", "device", block_table.device, query.device, "query")
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(
                f"block_table must have shape ({batch}, max_pages), got {tuple(block_table.shape)}"
            )
        capacity = block_table.shape[1] * key_cache.shape[2]
    check_length(capacity, query.shape[2])
    return capacity


_INTEGERS = (torch.int32, torch.int64)


def checked_cache_lengths(
    lengths: Tensor | Sequence[int], query: Tensor, seqlen_new: int, capacity: int
) -> tuple[Tensor | Sequence[int], tuple[int, int] | None]:
    """Validate cache_lengths and convert them to a tensor, unless they are a list or tuple of ints.

    Returns:
        The lengths, and their (minimum, maximum), or None if they are not readable on the host.
    """
    batch, values = query.shape[0], None
    if type(lengths) in (list, tuple) and lengths and all(type(n) is int for n in lengths):
        values = lengths
        shape: tuple[int, ...] = (len(lengths),)
    else:
        if not isinstance(lengths, Tensor):
            try:
                lengths = torch.as_tensor(lengths)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"cache_lengths must be a tensor or integers, got {lengths}"
                ) from error
            lengths = lengths.long() if lengths.numel() == 0 else lengths
        if lengths.dtype not in _INTEGERS:
            raise TypeError(f"cache_lengths must be int32 or int64, got {lengths.dtype}")
        shape = tuple(lengths.shape)
        if len(shape) == 1 and host_readable(lengths):
            values = lengths.tolist()
    if shape != (batch,):
        raise ValueError(f"cache_lengths must have shape ({batch},), got {shape}")
    if not values:
        return lengths, None
    least, most = min(values), max(values)
    if least < 0 or most + seqlen_new > capacity:
        raise ValueError(
            f"cache_lengths must be in [0, {capacity - seqlen_new}] (room of the cache less "
            f"{seqlen_new} new positions), got [{least}, {most}]"
        )
    return lengths, (least, most)


def _check_pages(block_table: Tensor, cache: Tensor, lengths: Tensor, seqlen_new: int) -> None:
    """Raise ValueError if block_table has an invalid page index before the end of a sequence.

    Values are checked only if they are readable on the host.
    """
    if not (host_readable(block_table) and host_readable(lengths)) or block_table.numel() == 0:
        return
    num_pages, _, page_size, _ = cache.shape
    needed = torch.arange(block_table.shape[1]) * page_size < (lengths + seqlen_new)[:, None]
    wrong = needed & ((block_table < 0) | (block_table >= num_pages))
    if wrong.any():
        raise ValueError(
            f"block_table must have pages in [0, {num_pages}) up to the end of each sequence, got "
            f"{int(block_table[wrong][0])}"
        )


# ---- the mask -----------------------------------------------------------------------------------

_CAUSAL = masks.causal("bottom_right")


def with_cache_lengths(
    mask: Mask | None, is_causal: bool, lengths: Tensor, seqlen_new: int
) -> Mask:
    """Return the mask restricted to cached and new positions.

    The result is cached on the mask, or on lengths without a mask, so all layers share it.
    """

    def make() -> Mask:
        # The sum is always a new tensor. The cached mask must not reference `lengths`.
        whole = masks.padding(lengths + seqlen_new)
        whole = whole & _CAUSAL if is_causal else whole
        return whole if mask is None else mask & whole

    key = ("decode", is_causal, seqlen_new)
    if mask is None:
        return recall_on_tensor(lengths, key, [lengths], make)
    return recall(mask.memo, key, [lengths], lengths.device, make)


# ---- backends without pages ---------------------------------------------------------------------


def _narrowed(
    call: AttentionCall, mask: Mask, is_causal: bool, all_same: bool, seqlen_k: int
) -> AttentionCall:
    """Return the call restricted to the first seqlen_k keys and values, which are views.

    If all lengths are equal (all_same), the padding mask is not needed. The mask is then dropped
    if it is not causal, and replaced by a top-left causal mask, which torch's kernels support, if
    seqlen_q equals seqlen_k.
    """
    batch, num_heads, seqlen_q, _ = call.query.shape
    needed: Mask | None = mask
    if all_same and not is_causal:
        needed = None
    elif all_same and seqlen_q == seqlen_k:
        needed = masks.causal()
    spec = normalize(needed, batch, num_heads, seqlen_q, seqlen_k, call.query)
    keys, values = call.key[:, :, :seqlen_k], call.value[:, :, :seqlen_k]
    return replace(call, key=keys, value=values, mask=spec)


def _zero_beyond_ends(call: AttentionCall, ends: Tensor) -> AttentionCall:
    """Return the call with keys and values beyond the end of each sequence set to 0.

    torch's kernels multiply masked values by 0, so non-finite ones would become NaN.
    """
    beyond_end = torch.arange(call.key.shape[2], device=ends.device) >= ends[:, None, None]
    keys, values = (t.masked_fill(beyond_end[..., None], 0.0) for t in (call.key, call.value))
    return replace(call, key=keys, value=values)


def _write(
    caches: tuple[Tensor, Tensor],
    news: tuple[Tensor, Tensor],
    lengths: Tensor,
    block_table: Tensor | None,
) -> None:
    """Append new keys and values to the caches in place.

    Args:
        caches: key_cache and value_cache, contiguous or paged.
        news: key and value, (batch, num_heads_kv, seqlen_new, head_dim or head_dim_v).
        lengths: (batch,), positions at which the new rows begin.
        block_table: (batch, max_pages) for paged caches, else None.
    """
    (batch, _, page_size, _), device = caches[0].shape, lengths.device
    row = lengths.to(torch.int64)[:, None] + torch.arange(news[0].shape[2], device=device)
    if block_table is None:
        holder = torch.arange(batch, device=device)[:, None]
    else:
        holder = block_table.to(torch.int64).gather(1, row // page_size)
        row = row % page_size
    for cache, new in zip(caches, news, strict=True):
        cache[holder, :, row] = new.transpose(1, 2)


def _gather_pages(cache: Tensor, block_table: Tensor, longest: int) -> Tensor:
    """Copy the pages of each sequence into a contiguous tensor.

    Args:
        longest: number of positions to copy, rounded up to whole pages.

    Returns:
        (batch, num_heads_kv, max_pages * page_size, head_dim), uninitialised beyond the copied
        pages.
    """
    num_pages, num_heads, page_size, dim = cache.shape
    batch, max_pages = block_table.shape
    used = min(-(-longest // max(page_size, 1)), max_pages)
    whole = cache.new_empty(batch, num_heads, max_pages * page_size, dim)
    if whole.numel() == 0 or num_pages == 0:
        return whole
    # Entries beyond the end of a sequence may be invalid page indices.
    table = block_table[:, :used].to(torch.int64).clamp(0, num_pages - 1)
    pages = whole.view(batch, num_heads, max_pages, page_size, dim)
    pages[:, :, :used] = cache[table].transpose(1, 2)
    return whole
