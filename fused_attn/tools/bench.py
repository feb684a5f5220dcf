"""The command `fused-attn bench`: attention against torch's F.scaled_dot_product_attention.

Both receive the same mask and the same (batch, seqlen, heads, head_dim) tensors, transposed as in
models, and their calls alternate. fused_attn is timed only if its results are within the numerics
contract. SDPA is timed only if its results show that it computes the same problem.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn import masks
from fused_attn.backends import AttentionProblem, select, use_backend
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.masks.spec import spec_of_mask
from fused_attn.tools import contract, timing
from fused_attn.tools.cases import (
    DTYPES,
    Shape,
    as_dense_mask,
    as_one_tensor,
    combined,
    make_mask,
    packed_rows,
    packed_sequences,
    sequence_lengths,
    tensors_of,
)
from fused_attn.tools.checks import attend

OURS, PEER = "fused_attn", "sdpa"


@dataclass
class Result:
    """Errors and times of one shape, mask, dtype and direction, as written to JSON.

    Attributes:
        shape, mask: as requested, in command-line syntax.
        direction: "forward" or "backward".
        backend: name of the fused_attn backend that was measured.
        visible: fraction of query-key pairs that are visible.
        ok: True if fused_attn is within the numerics contract.
        worst: name of the output or gradient that is closest to its limit.
        error, limit: maximum absolute error of `worst`, and the error that the contract allows.
        milliseconds: median time by name (OURS, PEER). Only implementations that were timed have
            an entry.
        speedup: SDPA's time divided by fused_attn's; None unless both were timed.
        share: lower bound on the time, as a fraction of fused_attn's time; None without `limits`.
            The bound is the time of the visible matmuls or of reading key and value, whichever is
            longer, at the rates of `ceilings`.
        note: the reason for a missing speedup; otherwise empty.
    """

    shape: str
    mask: str
    dtype: str
    direction: str
    backend: str
    visible: float
    ok: bool
    worst: str
    error: float
    limit: float
    milliseconds: dict[str, float]
    speedup: float | None = None
    share: float | None = None
    note: str = ""


def measure(
    shape: Shape,
    mask: str,
    dtype: str,
    *,
    backward: bool = False,
    dropout_p: float = 0.0,
    bias: bool = False,
    packed: bool = False,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    rounds: int = 20,
    limits: dict[str, float] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Check fused_attn on one shape and mask, then time it and SDPA in alternation.

    Args:
        shape: sizes of the call.
        mask: mask expression for `make_mask`. SDPA receives is_causal=True for "causal", and a
            tensor for all other masks.
        dtype: one of `DTYPES`.
        backward: time the backward pass alone. Otherwise, time the forward without gradients.
        dropout_p: dropout of the timed calls; results are checked without dropout.
        bias: add a (1, num_heads, seqlen_q, seqlen_k) tensor to the scores; it has a gradient. SDPA
            receives mask and bias as one tensor, which each call makes.
        packed: time `varlen_attention` on the sequences of mask "padding", without their padding.
            SDPA receives the padded tensors and a mask of the padding.
        device: "cpu" or a GPU.
        backend: fused_attn backend; None for the default choice.
        rounds: number of measurements of each implementation.
        limits: peak rates of this CPU, from `ceilings.cpu_ceilings`.
        advance: callback that is called after each round, outside the measurements.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: the backend does not support the problem.

    Example:
        >>> measure(Shape.parse("2,8,512,512,64"), "causal+padding", "float32").speedup
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    device, torch_dtype = torch.device(device), getattr(torch, dtype)
    # The gradient of the bias is a sum over all sequences, so none can be omitted.
    sample = shape.reduced(shape.batch if bias else None)
    padded = shape.operands(torch_dtype, device, layout="transposed")
    there = padded["query"].device
    own_mask = make_mask(mask, shape, device)
    if bias:
        scores = 1, shape.num_heads, shape.seqlen_q, shape.seqlen_k
        padded["bias"] = torch.randn(scores, dtype=torch_dtype, device=device)
    operands, peer_mask = padded, own_mask
    sequences = sample_sequences = None
    if packed:
        operands = {n: t if n == "bias" else packed_rows(t) for n, t in padded.items()}
        peer_mask = combined(own_mask, make_mask("padding", shape, device))
        sequences = packed_sequences(shape, device)
        sample_sequences = packed_sequences(shape, device, sample.batch)
    problem = AttentionProblem(
        device, torch_dtype, shape.head_dim, shape.head_dim, seqlen_q=shape.seqlen_q,
        mask=spec_of_mask(own_mask, *shape.scores, there).kind, seqlen_k=shape.seqlen_k,
        bias_dtype=torch_dtype if bias else None, learned_bias=bias and backward,
        dropout=dropout_p > 0, needs_grad=backward,
        packed=packed,
    )  # fmt: skip
    chosen = select(problem, backend).name
    # Naming a backend disables the fast path of small calls, so the default backend is not named.
    not_default = chosen != select(problem).name
    context = use_backend(chosen) if not_default else contextlib.nullcontext()
    visible, fixed_bias = tensors_of(peer_mask, shape, device)
    part = _part_of(shape, sample)
    sample_visible, sample_bias = (None if t is None else part(t) for t in (visible, fixed_bias))

    def own(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor, **dropout: Any) -> Tensor:
        whole = combined(own_mask, *map(masks.bias, biases))
        return attend(query, key, value, whole, sequences, **dropout)

    def eager(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Tensor:
        bias_of_dtype = (
            None if sample_bias is None else sample_bias.to(statistics_dtype(query.dtype))
        )
        with use_backend("eager"):
            whole = combined(as_dense_mask(sample_visible, bias_of_dtype), *map(masks.bias, biases))
            return attend(query, key, value, whole, sample_sequences)

    is_causal = mask == "causal" and not bias and not packed
    peer = _peer(shape, is_causal, visible, fixed_bias, torch_dtype)
    with context:
        verdict = contract.check(own, eager, operands, torch_dtype, backward, part)
        result = Result(
            str(shape), mask, dtype, "backward" if backward else "forward", chosen,
            _share(shape, visible, packed), verdict.ok, verdict.worst.name, verdict.worst.error,
            verdict.worst.limit, {},
        )  # fmt: skip
        if not verdict.ok:
            result.note = "fused_attn violates the numerics contract: not timed"
            return result
        leaves = [t.detach().requires_grad_(backward) for t in operands.values()]
        peer_leaves = [t.requires_grad_(backward) for t in padded.values()]
        with torch.set_grad_enabled(backward):
            dropping = [functools.partial(call, dropout_p=dropout_p) for call in (own, peer)]
            calls = {OURS: timing.timed(dropping[0], leaves, result.direction)}
            try:
                out = peer(*peer_leaves)
                if visible is not None:  # SDPA may return nonzero values in fully masked rows
                    out = out.masked_fill(~visible.any(-1, keepdim=True), 0.0)
                agrees = verdict.agrees(packed_rows(out) if packed else out)
                if agrees:
                    calls[PEER] = timing.timed(dropping[1], peer_leaves, result.direction)
                result.note = "" if agrees else "SDPA computes a different result: not timed"
            except RuntimeError as error:  # SDPA rejects the call
                result.note = f"SDPA: {error}"
            seconds = timing.medians(calls, device, rounds, advance)
    result.milliseconds = {name: 1e3 * s for name, s in seconds.items()}
    if limits is not None:
        products = 5 if backward else 2
        flops = products * shape.score_flops() * result.visible
        read = shape.key_bytes(torch_dtype) / limits["read"]
        result.share = max(flops / limits[dtype], read) / seconds[OURS]
    if PEER in seconds:
        result.speedup = seconds[PEER] / seconds[OURS]
    return result


def require_memory(
    shape: Shape, mask: str, dtype: str, device: torch.device, bias: bool = False
) -> None:
    """Raise ValueError if a measurement needs more memory than the device has.

    The estimate counts the operands, the output and float32 copies, and a mask tensor for SDPA.
    """
    queries = shape.batch * shape.num_heads * shape.seqlen_q
    keys = shape.batch * shape.num_heads_kv * shape.seqlen_k
    needed = 2 * (queries + keys) * shape.head_dim * (4 + getattr(torch, dtype).itemsize)
    if mask not in ("none", "causal"):
        needed += 5 * shape.seqlen_q * shape.seqlen_k
    needed += 8 * bias * shape.num_heads * shape.seqlen_q * shape.seqlen_k
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        sizes = (
            f"at least {needed / 2**30:,.0f} GiB of memory; {device} has {there / 2**30:,.0f} GiB"
        )
        raise ValueError(f"{shape} with mask {mask} needs {sizes}")


def _part_of(shape: Shape, sample: Shape) -> Callable[[Tensor], Tensor]:
    """Return `sample.part_of(shape)`, which also slices `packed_rows` of such tensors."""
    padded = sample.part_of(shape)
    both = [sequence_lengths(shape.batch, longest) for longest in (shape.seqlen_q, shape.seqlen_k)]
    rows = {int(lengths.sum()): int(lengths[: sample.batch].sum()) for lengths in both}

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4:
            return padded(tensor)
        return padded(tensor.transpose(0, 1)).transpose(0, 1)[: rows[len(tensor)]]

    return part


def _share(shape: Shape, visible: Tensor | None, packed: bool) -> float:
    """Return the fraction of query-key pairs that are visible; padding counts as not visible."""
    if packed and visible is not None:
        real = torch.arange(shape.seqlen_q) < sequence_lengths(shape.batch, shape.seqlen_q)[:, None]
        visible = visible & real.to(visible.device)[:, None, :, None]
    return 1.0 if visible is None else round(visible.float().mean().item(), 4)


def _peer(
    shape: Shape, causal: bool, visible: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """Return SDPA with the mask in its most compact form: is_causal, a bool or a float tensor."""
    mask = None if causal else as_one_tensor(visible, bias, dtype)

    def peer(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor, **dropout: Any) -> Tensor:
        gqa, attn_mask = shape.num_heads != shape.num_heads_kv, mask
        for learned in biases:
            total = learned if bias is None else learned + bias
            attn_mask = as_one_tensor(visible, total, dtype)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=causal, enable_gqa=gqa, **dropout
        )

    return peer
