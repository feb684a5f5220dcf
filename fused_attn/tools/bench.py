"""The command `fused-attn bench`: attention against torch's F.scaled_dot_product_attention.

Both receive the same mask and the same (batch, seqlen, heads, head_dim) tensors, transposed as in
models, and their calls alternate. fused_attn is timed only if its results are within the numerics
contract. SDPA is timed only if its results show that it computes the same problem.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn import functional, masks
from fused_attn.backends import AttentionProblem, select, use_backend
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.packed import cumulative
from fused_attn.masks import Mask
from fused_attn.masks.spec import normalize
from fused_attn.tools import ceilings, contract, timing
from fused_attn.tools.cases import (
    DTYPES,
    Shape,
    as_dense_mask,
    as_one_tensor,
    make_mask,
    sequence_lengths,
    tensors_of,
)
from fused_attn.varlen import varlen_attention

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
        packed: `varlen_attention` of the sequences of mask "padding", without their padding. SDPA
            receives the padded tensors and a mask that hides the padding.
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
    # The gradient of the bias is a sum over all sequences.
    sample = shape.reduced(shape.batch if bias else None)
    layout = (_Packed if packed else _Padded)(shape, sample, device)
    padded = shape.operands(torch_dtype, device, layout="transposed")
    own_mask = make_mask(mask, shape)
    own_mask = None if own_mask is None else own_mask.to(device)
    if bias:
        scores = 1, shape.num_heads, shape.seqlen_q, shape.seqlen_k
        padded["bias"] = torch.randn(scores, dtype=torch_dtype, device=device)
    operands = {name: layout.pack(name, tensor) for name, tensor in padded.items()}
    sizes = shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k
    problem = AttentionProblem(
        device, torch_dtype, shape.head_dim, shape.head_dim, seqlen_q=shape.seqlen_q,
        mask=normalize(own_mask, *sizes, padded["query"]).kind, seqlen_k=shape.seqlen_k,
        bias_dtype=torch_dtype if bias else None, learned_bias=bias and backward,
        dropout=dropout_p > 0, needs_grad=backward,
        packed=packed,
    )  # fmt: skip
    chosen = select(problem, backend).name
    # Naming a backend disables the fast path of small calls, so the default backend is not named.
    not_default = chosen != select(problem).name
    context = use_backend(chosen) if not_default else contextlib.nullcontext()
    visible, fixed_bias = tensors_of(own_mask, shape, device)
    part = sample.part_of(shape)
    sample_visible, sample_bias = (None if t is None else part(t) for t in (visible, fixed_bias))
    visible = layout.without_padding(visible)

    def own(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor, **dropout: Any) -> Tensor:
        return layout.attend(query, key, value, _with_biases(own_mask, biases), **dropout)

    def eager(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Tensor:
        bias_of_dtype = (
            None if sample_bias is None else sample_bias.to(statistics_dtype(query.dtype))
        )
        with use_backend("eager"):
            mask = as_dense_mask(sample_visible, bias_of_dtype)
            return layout.attend(query, key, value, _with_biases(mask, biases))

    is_causal = mask == "causal" and not bias and not packed
    peer = _peer(shape, is_causal, visible, fixed_bias, torch_dtype)
    with context:
        verdict = contract.check(own, eager, operands, torch_dtype, backward, layout.part)
        result = Result(
            str(shape), mask, dtype, "backward" if backward else "forward", chosen,
            layout.share(visible), verdict.ok, verdict.worst.name, verdict.worst.error,
            verdict.worst.limit, {},
        )  # fmt: skip
        if not verdict.ok:
            result.note = "fused_attn violates the numerics contract: not timed"
            return result
        leaves = [t.detach().requires_grad_(backward) for t in operands.values()]
        peer_leaves = [t.requires_grad_(backward) for t in padded.values()]
        with torch.set_grad_enabled(backward):
            dropping = [functools.partial(call, dropout_p=dropout_p) for call in (own, peer)]
            calls = {OURS: _timed(dropping[0], leaves)}
            try:
                agrees = verdict.agrees(
                    layout.pack("query", _zero_masked_rows(peer(*peer_leaves), visible))
                )
                calls |= {PEER: _timed(dropping[1], peer_leaves)} if agrees else {}
                result.note = "" if agrees else "SDPA computes a different result: not timed"
            except RuntimeError as error:  # SDPA rejects the call
                result.note = f"SDPA: {error}"
            seconds = timing.medians(calls, device, rounds, advance)
    result.milliseconds = {name: 1e3 * s for name, s in seconds.items()}
    if limits is not None:
        products = 5 if backward else 2
        flops = products * shape.score_flops() * result.visible
        least = ceilings.shortest(flops, shape.key_bytes(torch_dtype), dtype, limits)
        result.share = least / seconds[OURS]
    if PEER in seconds:
        result.speedup = seconds[PEER] / seconds[OURS]
    return result


def require_memory(
    shape: Shape, mask: str, dtype: str, device: torch.device, bias: bool = False
) -> None:
    """Raise ValueError if a measurement needs more memory than the device has.

    Counted are the operands, the output and float32 copies, and a mask tensor for SDPA.
    """
    queries = shape.batch * shape.num_heads * shape.seqlen_q
    keys = shape.batch * shape.num_heads_kv * shape.seqlen_k
    needed = 2 * (queries + keys) * shape.head_dim * (4 + getattr(torch, dtype).itemsize)
    if mask not in ("none", "causal"):
        needed += 5 * shape.seqlen_q * shape.seqlen_k
    needed += 8 * bias * shape.num_heads * shape.seqlen_q * shape.seqlen_k
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > there:
        sizes = (
            f"at least {needed / 2**30:,.0f} GiB of memory; {device} has {there / 2**30:,.0f} GiB"
        )
        raise ValueError(f"{shape} with mask {mask} needs {sizes}")


class _Padded:
    """Operands of `bench` as (batch, heads, seqlen, head_dim) tensors.

    Args:
        shape: sizes of the call.
        sample: sizes of the part that is checked.
    """

    def __init__(self, shape: Shape, sample: Shape, device: torch.device) -> None:
        self.shape, self.sample = shape, sample

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        """Return a padded operand in this layout."""
        return tensor

    def part(self, tensor: Tensor) -> Tensor:
        """Return the part of an operand, a result or a gradient that is checked."""
        return self.sample.part_of(self.shape)(tensor)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, **dropout: Any
    ) -> Tensor:
        """Return the attention of operands in this layout, of all or of the part."""
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=True, **dropout
        )
        return cast(Tensor, out)

    def without_padding(self, visible: Tensor | None) -> Tensor | None:
        """Return the mask that padded operands need to compute the same."""
        return visible

    def share(self, visible: Tensor | None) -> float:
        """Return the fraction of visible pairs of a query and a key."""
        return 1.0 if visible is None else round(visible.float().mean().item(), 4)


class _Packed(_Padded):
    """Operands as (total, heads, head_dim) tensors of sequences with `sequence_lengths` tokens."""

    def __init__(self, shape: Shape, sample: Shape, device: torch.device) -> None:
        super().__init__(shape, sample, device)
        self.real, self.starts = {}, {}
        for name, seqlen in (("query", shape.seqlen_q), ("key", shape.seqlen_k)):
            lengths = sequence_lengths(shape.batch, seqlen).to(device)
            self.real[name] = torch.arange(seqlen, device=device) < lengths[:, None]
            cu_seqlens = cumulative(lengths)
            for starts in (cu_seqlens, cu_seqlens[: sample.batch + 1]):
                self.starts[int(starts[-1])] = starts  # the same tensor in every call

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        if name == "bias":
            return tensor
        return tensor.transpose(1, 2)[self.real["query" if name == "query" else "key"]]

    def part(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 4:  # the bias
            return super().part(tensor)
        heads = self.sample.num_heads_kv * tensor.shape[1] // self.shape.num_heads_kv
        seqlen = self.starts[len(tensor)][: self.sample.batch + 1][-1]
        return tensor[:seqlen, :heads]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, **dropout: Any
    ) -> Tensor:
        starts = self.starts[len(query)], self.starts[len(key)]
        longest = self.shape.seqlen_q, self.shape.seqlen_k
        return cast(Tensor, varlen_attention(query, key, value, *starts, *longest, mask, **dropout))

    def without_padding(self, visible: Tensor | None) -> Tensor | None:
        keys = self.real["key"][:, None, None]
        return keys if visible is None else visible & keys

    def share(self, visible: Tensor | None) -> float:
        assert visible is not None
        return super().share(visible & self.real["query"][:, None, :, None])


def _with_biases(mask: Mask | None, biases: Sequence[Tensor]) -> Mask | None:
    for bias in biases:
        mask = masks.bias(bias) if mask is None else mask & masks.bias(bias)
    return mask


def _timed(call: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Callable[[], Any]:
    """Return a callable that runs the backward alone, or the forward if gradients are disabled."""
    if not torch.is_grad_enabled():
        return lambda: call(*leaves)
    out = call(*leaves)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


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


def _zero_masked_rows(out: Tensor, visible: Tensor | None) -> Tensor:
    """Zero the fully masked rows, for which SDPA may return values other than fused_attn's 0."""
    return out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)
