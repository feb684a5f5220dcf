"""Backend selection and execution of decoding steps: `run` is the only entry point."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_attn import masks
from fused_attn.backends import Backend, problem_of, select
from fused_attn.backends.registry import backend_for_unchecked
from fused_attn.base.autocast import any_autocast
from fused_attn.base.torch_state import needs_grad, plain_eager
from fused_attn.call.attention import AttentionCall, AttentionOptions, UncheckedAttention
from fused_attn.call.kv_cache import (
    NO_GRAD,
    CacheUpdate,
    append,
    check_pages,
    contiguous_rows,
    spec_of_ends,
    with_cache_lengths,
)
from fused_attn.call.validation import attention_call
from fused_attn.masks import Mask
from fused_attn.masks.spec import spec_of_mask
from fused_attn.ops import dispatch


def run(
    query: Tensor,
    update: CacheUpdate,
    attn_mask: Mask | Tensor | None,
    is_causal: bool,
    options: AttentionOptions,
    want_lse: bool,
    named: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Append new keys and values to the caches, and return out and lse.

    The arguments are those of `decode_attention`. lse may be None if it is not wanted.
    """
    step = None
    if attn_mask is None:
        step = _unchecked_step(query, update, is_causal, options, named)
    if step is None:
        mask = masks.as_mask(attn_mask)
        step = _checked_step(query, update, mask, is_causal, options, want_lse, named)
    return _attend(step, is_causal if attn_mask is None else None, want_lse)


class _Step(NamedTuple):
    """A decoding step, and the backend that computes it.

    Attributes:
        call: key and value are the caches; the mask has update.capacity keys.
        backend: backend that computes it.
        update: new keys and values.
        by_kernel: True if nothing intercepts the call, and all tensors and masks are plain.
    """

    call: AttentionCall
    backend: Backend
    update: CacheUpdate
    by_kernel: bool


def _unchecked_step(
    query: Tensor,
    update: CacheUpdate,
    is_causal: bool,
    options: AttentionOptions,
    named: str | None,
) -> _Step | None:
    """Return an unvalidated CPU step without attn_mask, for keys up to the longest sequence.

    Returns None if the step requires `_checked_step`, with which a small step takes 3 times as long
    (8 heads, 400 keys, head_dim 64).
    """
    if not update.plain or update.ends is None or query.device.type != "cpu" or any_autocast():
        return None
    if not options.prepare(query.shape[3]):
        return None
    spec = spec_of_ends(update, query, is_causal)
    call = UncheckedAttention(query, *update.caches, spec, False, True, options)
    backend = backend_for_unchecked(call, query.device, named)
    # Backends that wrap torch's kernels need finite values after the ends of sequences.
    if backend is None or backend.wraps_torch:
        return None
    update = update._replace(capacity=update.ends[1])
    return _Step(call.assume_checked(), backend, update, True)


def _checked_step(
    query: Tensor,
    update: CacheUpdate,
    attn_mask: Mask | None,
    is_causal: bool,
    options: AttentionOptions,
    want_lse: bool,
    named: str | None,
) -> _Step:
    """Validate a step for any device, mask and backend."""
    update = update._replace(lengths=torch.as_tensor(update.lengths, device=query.device))
    batch, num_heads, seqlen_q, _ = query.shape
    mask = with_cache_lengths(attn_mask, is_causal, update.lengths, update.seqlen_new, seqlen_q)
    if needs_grad(*mask.biases):
        raise ValueError(NO_GRAD.format(name="attn_mask"))
    spec = spec_of_mask(mask, batch, num_heads, seqlen_q, update.capacity, query.device)
    call = attention_call(query, *update.caches, spec, options)
    problem = problem_of(call, "lse" if want_lse else "out", update.capacity)
    plain = update.plain and plain_eager(update.lengths, *mask.tensors())
    return _Step(call, select(problem, named), update, plain)


def _attend(step: _Step, is_causal: bool | None, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Append new keys and values, and return out and lse.

    Args:
        is_causal: None if there is an attn_mask.
    """
    call, backend, update, by_kernel = step
    keys, values = update.caches
    empty = update.capacity == 0 or 0 in (*call.query.shape, *keys.shape, *values.shape)
    if by_kernel and not empty and not _is_refused(update):
        results = backend.attention_decode(call, update, want_lse)
        if results is not None:
            if update.seqlen_new > 0:
                increment_version([cache for cache in update.caches if not cache.is_inference()])
            return results
    check_pages(update)
    append(update)
    call.key, call.value = contiguous_rows(update, backend.empty)
    if backend.wraps_torch:
        call = _for_torch(call, update, is_causal)
    return dispatch.run_attention(call, backend, want_lse)


def _is_refused(update: CacheUpdate) -> bool:
    """Return True if new rows cannot be written, because a cache is an inference tensor."""
    if update.seqlen_new == 0 or torch.is_inference_mode_enabled():
        return False
    keys, values = update.caches
    return keys.is_inference() or values.is_inference()


def _for_torch(call: AttentionCall, update: CacheUpdate, is_causal: bool | None) -> AttentionCall:
    """Return the call in the form that torch's kernels require.

    Keys and values after the end of a sequence are set to 0, because torch multiplies them by
    weights of 0, and 0 * NaN is NaN. If the host knows the lengths and there is no attn_mask, keys
    and values end at the longest sequence.
    """
    if update.ends is not None and is_causal is not None:
        shortest, longest = update.ends
        if shortest == longest:
            spec = spec_of_ends(update, call.query, is_causal)
        else:
            batch, num_heads, seqlen_q, _ = call.query.shape
            mask = with_cache_lengths(None, is_causal, update.lengths, update.seqlen_new, seqlen_q)
            spec = spec_of_mask(mask, batch, num_heads, seqlen_q, longest, call.query.device)
        keys, values = (t[:, :, :longest] for t in (call.key, call.value))
        call = replace(call, key=keys, value=values, mask=spec)
    if update.ends is None or update.ends[0] < call.key.shape[2]:
        ends = update.lengths + update.seqlen_new
        beyond_end = torch.arange(call.key.shape[2], device=ends.device) >= ends[:, None, None]
        keys, values = (t.masked_fill(beyond_end[..., None], 0.0) for t in (call.key, call.value))
        call = replace(call, key=keys, value=values)
    return call
