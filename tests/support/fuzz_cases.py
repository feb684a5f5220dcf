"""Random cases of attention, and functions that draw and check them.

A case is a JSON object, whose "op" is a name in OPS (fuzz_ops.py). Kernels get views of larger
buffers, and non-finite values in fully masked positions and unused rows of caches. The reference is
eager attention on contiguous, finite tensors, with a mask evaluated position by position.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from fuzz_masks import Expression, is_fixed, lengths_of, trees
from helpers import (
    SLOW_BACKENDS,
    Reference,
    device_of,
    drawn,
    dropout_seed,
    random_qkv,
    round_inputs,
    run_with_gradients,
    use_threads,
)
from hypothesis import strategies as st
from torch import Tensor

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import cpp
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.tools import contract

Case = dict[str, Any]
QKV = "query", "key", "value"
ROUNDINGS = 8  # accumulator roundings allowed in the terms of a score gradient (slack_of)
PAGE = 16
HEAD_DIMS = [16, 1, 3, 8, 24, 32, 40, 64, 72, 96, 128, 256]
SEQLENS = [1, 2, 3, 5, 8, 16, 17, 33, 40, 66, 130]
LAYOUTS = ["plain", "transposed", "outer", "columns", "unaligned", "every second row", "expanded"]
# Magnitudes of query and key. Half of the pairs cause large rounding errors in gradients. Scores of
# ("1", "huge") are larger than 2^24, so that no backward can recompute a weight from lse.
SCORES = [
    ("1", "1"), ("3", "1"), ("8", "1"), ("20", "1"), ("1", "0"), ("1e-3", "1"), ("tiny", "huge"),
    ("huge", "tiny"), ("1", "huge"),
]  # fmt: skip
VALUES = ["1", "1", "1e-3", "0", "20", "tiny", "huge"]
worst: dict[str, float] = {}  # largest error of each op, as a fraction of its limit


# ---- tensors ------------------------------------------------------------------------------------


def scaled(tensor: Tensor, size: str, case: Case) -> Tensor:
    """Scale standard normal values by a number, or to the dtype's smallest or largest numbers."""
    dtype = getattr(torch, case["dtype"])
    tensor = tensor.to(torch.promote_types(dtype, torch.float32))
    # The expected error of eager attention is computed from squares, which must not overflow.
    power = 0.5 if dtype == torch.float64 else 1.0
    if size == "tiny":  # most values are subnormal, except in float64
        # Products of bfloat16 pairs read subnormal numbers as 0. With AMX, float32 values are split
        # into bfloat16 parts, which are subnormal for values below 2^-110.
        flushed = [torch.bfloat16, torch.float32][: _bfloat16_products()]
        return tensor * (2.0**-100 if dtype in flushed else torch.finfo(dtype).tiny ** power)
    if size == "huge":  # a sum of products with 1000 weights does not overflow
        return tensor.clamp(-4, 4) * (torch.finfo(dtype).max ** power / 4000)
    return tensor * float(size)


def _bfloat16_products() -> int:
    """Return for how many dtypes the CPU kernels multiply pairs of bfloat16: 0, 1, or 2 (AMX)."""
    isa = cpp.isa()
    return 2 if isa.startswith("amx") else int(isa == "avx512_bf16")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the tensor, differentiably, in a memory layout whose unused elements are NaN."""
    *leading, rows, columns = tensor.shape
    if layout in ("transposed", "outer"):
        dim = 0 if layout == "outer" else max(-3, -tensor.dim())
        return tensor.transpose(dim, -2).contiguous().transpose(dim, -2)
    if layout == "columns":
        return tensor.mT.contiguous().mT
    if layout == "unaligned":
        return tensor.new_full((*leading, rows, columns + 3), torch.nan)[..., 1:-2].copy_(tensor)
    if layout == "every second row":
        wide = tensor.new_full((*leading, 2 * rows, columns), torch.nan)
        return wide[..., 1::2, :].copy_(tensor)
    return tensor


def rotated(x: Tensor, tables: list[Tensor], positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate (batch, heads, seqlen, dim) by the rows `positions` (batch, seqlen) of the tables."""
    cos, sin = (t.to(x.dtype)[positions][:, None] for t in tables)
    width, dim = cos.shape[-1], -1 if interleaved else -2
    pairs = x[..., : 2 * width].unflatten(-1, (width, 2) if interleaved else (2, width))
    a, b = pairs.unbind(dim)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim)
    return torch.cat([turned.flatten(-2), x[..., 2 * width :]], -1)


# ---- the check of one call ----------------------------------------------------------------------


def judge(
    case: Case, number: int, function: Any, tensors: dict[str, Tensor], backend: str, grads: bool
) -> None:
    """Assert that function(backend, **tensors), and its gradients, are within the contract.

    Elements that overflow in eager attention are exempt, and infinite elements of gradients, whose
    terms overflow.

    Args:
        number: number of the call in its case.
        function: a functools.partial.
    """
    dtype = getattr(torch, case["dtype"])
    exact = {name: round_inputs(t, dtype) for name, t in tensors.items()}

    def run(backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        call = functools.partial(function, backend)
        if grads:
            return run_with_gradients(call, exact, dtype, device=device)
        with dropout_seed(7):
            outputs = call(**{name: t.to(device, dtype) for name, t in exact.items()})
        return {f"out{i}": output.cpu() for i, output in enumerate(outputs)}

    function.key = json.dumps([case, number]).encode()  # instruction sets share the reference
    cpu = torch.device("cpu")
    known = Reference.of(lambda dtype: run("eager", dtype, cpu), dtype, exact, function)
    got = run(backend, dtype, device_of(backend))
    slack = slack_of(case, exact, backend, known.truth)
    assert got.keys() == known.truth.keys()
    for name, truth in known.truth.items():
        results = [truth, known.eager[name], got[name], known.residuals.get(name)]
        overflow = truth.isnan() | (results[1].isfinite() < (results[1] != truth))
        overflow |= truth.isinf() & name.startswith("grad")
        if name in ("grad_query", "grad_key") and "options" in case:  # scaled after the sum
            sum_of = truth.abs() / min(1.0, abs(case["options"]["scale"] or 0.05))
            overflow |= ~got[name].isfinite() & (sum_of > torch.finfo(dtype).max / 4)
        for i, t in enumerate(results):
            if t is not None and t.shape == truth.shape:
                results[i] = t.masked_fill(overflow, 0.0)
        truth, eager, own, residual = results
        finding = contract.judge(
            name, own, truth, eager, gradient=name.startswith("grad"), residual=residual,
            expected=functools.partial(known.expected.error, name),
        )  # fmt: skip
        finding = replace(finding, limit=finding.limit + slack.get(name, 0.0))
        overflows = finding.limit > torch.finfo(dtype).max or math.isinf(finding.limit)
        assert finding.ok or overflows, str(finding)
        share = finding.error / (finding.limit or 1.0)
        worst[case["op"]] = max(worst.get(case["op"], 0.0), share)


def slack_of(
    case: Case, tensors: dict[str, Tensor], backend: str, truth: dict[str, Tensor]
) -> dict[str, float]:
    """Return the amounts by which the limits for some results are raised, by name.

    A score gradient is P (dP - delta), which is about 0 where one key has all the weight. Eager
    attention subtracts equal values there, without any error. Fused kernels compute delta from the
    output, which causes accumulator rounding errors. The limit is raised by ROUNDINGS of these.

    Rotated queries and keys are rounded to their 16-bit type, by which scores change. In eager
    attention, the errors may happen to cancel.

    Where the CPU kernels multiply bfloat16 pairs, weights have a relative error of up to 1e-4,
    which is also that of lse and of the gradient of a float32 bias (docs/masks.md).

    For large negative numbers, torch's activations are 0, because their formulas cancel. The
    gradient of the bias is a sum of rounded numbers, whose errors may cancel in eager math.

    A norm with a residual stores the sum in its 16-bit type, but mean and rstd of the exact sum. In
    eager math, they belong to the stored sum, so errors may cancel in the gradient of the weight,
    mainly with few columns.
    """
    eps = torch.finfo(getattr(torch, case["dtype"])).eps
    if case["op"] == "norm" and "residual" in tensors and eps > 1e-4:
        rows, columns = case["shape"]
        return {"grad_weight": eps * (rows / columns) ** 0.5}
    if case["op"] == "activation":
        x = tensors["input"]
        small, rows = 2.0**-53 * float(x.abs().max()), x[..., 0].numel()
        return {"out0": small, "grad_input": small, "grad_shift": eps * rows**0.5}
    if "value" not in tensors or 0 in [t.numel() for t in tensors.values()]:
        return {}
    query, key, value = (tensors[n] for n in QKV)
    largest = value.double().abs().sum(-1).max()
    roundoff = 2.0**-53 if case["dtype"] == "float64" else 2.0**-24
    scale = abs(case["options"]["scale"] or query.shape[-1] ** -0.5)
    keep = 1.0 - case["options"].get("dropout_p", 0.0)
    terms = ROUNDINGS * roundoff / keep * largest
    if case["dtype"] == "float16":  # the residuals of outputs below 2^-14 saturate
        terms = terms + 2.0**-25 * value.shape[-1]
    factors = {"grad_query": scale * key.abs().max(), "grad_key": scale * query.abs().max()}
    if "bias" in tensors:  # its gradient is a sum over the dimensions that it is broadcast to
        rows = query[..., 0].numel() * key.shape[-2] / tensors["bias"].numel()
        factors["grad_bias"] = torch.tensor(rows).sqrt()
    slack = {n: terms * t for n, t in factors.items()}
    if "sinks" in tensors:  # eager attention, too, multiplies grad_out by the rounded output
        rows = query[..., 0].numel() / tensors["sinks"].numel()
        slack["grad_sinks"] = eps * rows**0.5 * largest
        if case["dtype"] in ("bfloat16", "float16"):
            # The gradient of out is scaled and rounded for each row, before the kernel reads it.
            if "grad_value" in truth:
                slack["grad_value"] = eps * truth["grad_value"].abs().max()
            if "bias" in tensors:
                slack["grad_bias"] += eps / 2 / keep * value.double().norm(dim=-1).max()
    if case.get("rotary") and case["dtype"] in ("bfloat16", "float16"):
        norms = [t.double().norm(dim=-1).max() for t in (query, key)]
        change = eps * scale * norms[0] * norms[1] / query.shape[-1] ** 0.5
        slack |= {"out0": change.clamp(max=2) * value.double().abs().max(), "out1": change}
    if backend == "cpp" and case["dtype"] == "bfloat16" and _bfloat16_products():
        slack["out1"] = slack.get("out1", torch.zeros(())) + 1e-4
        if "bias" in tensors:
            rows = query[..., 0].numel() / tensors["bias"][..., 0].numel()
            of_lse = 4.0 if case.get("lse") else 0.0  # its gradient
            slack["grad_bias"] += 1e-4 * rows**0.5 * (largest / keep + of_lse)
    return {n: min(t.item(), sys.float_info.max) for n, t in slack.items()}


# ---- attention, varlen, decode ------------------------------------------------------------------


class Masked(NamedTuple):
    """Mask of one call, as an argument for kernels and as tensors by position."""

    mask: Any
    visible: Tensor
    bias: Tensor

    @classmethod
    def of(cls, case: Case, expression: Expression | None, shape: Any, ends: Any) -> Masked:
        """Return the mask of a call; `ends` are the lengths of queries and keys."""
        mask, visible = None, torch.ones(shape, dtype=torch.bool)
        bias = torch.zeros(shape, dtype=torch.float64)
        rows, keys = torch.arange(shape[2]).view(-1, 1), torch.arange(shape[3])
        if expression is not None:
            visible, bias = expression.by_hand(shape, *ends)
            raw = case["raw"] and expression.kind == "dense"
            mask = expression.tensors[0] if raw else expression.mask
        if case["is_causal"]:
            last = ends[1] - ends[0] if case["op"] == "decode" else 0
            visible = visible & (keys <= rows + last)
        return cls(mask, visible & (rows < ends[0]) & (keys < ends[1]), bias)

    def on(self, device: torch.device, bias: Tensor | None = None) -> Any:
        """Return the mask and a bias as an attn_mask on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        if bias is None or mask is None:
            return mask if bias is None else bias
        return masks.as_mask(mask) & masks.bias(bias)

    def eager(self, case: Case, *qkv: Tensor, bias: Any = None, sinks: Any = None) -> Any:
        """Return out and lse of eager attention on a padded batch."""
        dtype = statistics_dtype(qkv[0].dtype)
        mask = masks.dense(self.visible) & masks.bias(self.bias.to(dtype))
        return F.scaled_dot_product_attention(
            *qkv, mask if bias is None else mask & masks.bias(bias), enable_gqa=True, sinks=sinks,
            return_lse=True, backend="eager", **case["options"],
        )  # fmt: skip


def tensors_and_mask(case: Case, shape: Any) -> tuple[dict[str, Any], Expression | None]:
    """Return query, key, value, bias and sinks of a case, and its mask."""
    tensors: dict[str, Any] = random_qkv(*case["shape"], seed=case["seed"])
    for name, size in zip(QKV, case["sizes"], strict=True):
        tensors[name] = scaled(tensors[name], size, case)
    generator = drawn(case["seed"] + 1)
    if case["bias"] is not None:
        sizes = [1 if d in case["bias"] else n for d, n in enumerate(shape)]
        tensors["bias"] = torch.randn(sizes, generator=generator)
    if case["sinks"]:
        tensors["sinks"] = torch.randn(shape[1], generator=generator)
    return tensors, Expression(case["mask"], shape) if case["mask"] else None


def check_attention(case: Case, backend: str, judge: Any = judge, call: Any = None) -> None:
    """Check calls of scaled_dot_product_attention or varlen_attention that share a Mask.

    Args:
        call: function that replaces `attend`, with the same arguments.
    """
    batch, heads, _, *longest, _, _ = case["shape"]
    lengths, starts = case["lengths"], []
    tensors, expression = tensors_and_mask(case, (batch, heads, *longest))
    if lengths:
        tensors |= {n: _packed(tensors[n], lengths[n != "query"]) for n in QKV}
        starts = [torch.tensor([0, *n]).cumsum(0).int().to(device_of(backend)) for n in lengths]
    elif "expanded" in case["layouts"]:
        layouts = zip(QKV, case["layouts"], strict=True)
        tensors |= {n: tensors[n][:1] for n, layout in layouts if layout == "expanded"}
    for number, step in enumerate(case["steps"]):
        if step["change"]:
            if expression is not None:
                expression.change()
            lengths = lengths and [n[::-1] for n in lengths]
            for t, n in zip(starts, lengths or [], strict=True):
                t.copy_(torch.tensor([0, *n]).cumsum(0))
        shape = batch, heads, min(step["rows"] or longest[0], longest[0]), longest[1]
        ends = [torch.tensor(n).view(-1, 1, 1, 1) for n in lengths or shape[2:]]
        at = Masked.of(case, expression, shape, ends)
        function = functools.partial(call or attend, case, at, lengths, starts)
        with use_threads(step["threads"]):
            judge(case, number, function, tensors, backend, step["grads"])


def attend(
    case: Case, at: Masked, lengths: Any, starts: Any, backend: str, query: Tensor, key: Tensor,
    value: Tensor, **extra: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out, and lse if the case requests it, from a backend or from the reference."""
    batch, _, heads_kv, *longest, _, _ = case["shape"]
    qkv = [query, key, value]
    if not lengths:
        qkv = [
            t.expand(batch, -1, -1, -1) for t in (query[:, :, : at.visible.shape[2]], key, value)
        ]
    if backend == "eager":
        if lengths:
            qkv = [_padded(t, lengths[i > 0], longest[i > 0]) for i, t in enumerate(qkv)]
        out, lse = at.eager(case, *qkv, **extra)
        if lengths:
            out, lse = (_packed(t, lengths[0]) for t in (out, lse[..., None]))
            lse = lse.squeeze(-1).mT
        return (out, lse) if case["lse"] else (out,)
    if case["poison"] is not None:
        hidden = ~at.visible.any(2).unflatten(1, (heads_kv, -1)).any(2)[..., None]
        hidden = _packed(hidden, lengths[1]) if lengths else hidden
        poison = query.new_full((), float(case["poison"]))
        qkv[1:] = [torch.where(hidden.to(key.device), poison, t) for t in qkv[1:]]
    qkv = [laid_out(t, layout) for t, layout in zip(qkv, case["layouts"], strict=True)]
    options = case["options"] | {"is_causal": case["is_causal"], "return_lse": case["lse"]}
    options |= {"sinks": extra.get("sinks"), "backend": backend}
    mask = at.on(query.device, extra.get("bias"))
    if lengths:
        results = fused_attn.varlen_attention(*qkv, *starts, *longest, mask, **options)
    else:
        results = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True, **options)
    return results if case["lse"] else (results,)  # type: ignore[return-value]


def _packed(batch: Tensor, lengths: list[int]) -> Tensor:
    """Pack the first rows of sequences (batch, heads, seqlen, dim) to (total, heads, dim)."""
    return torch.cat([batch[b, :, :n] for b, n in enumerate(lengths)], 1).transpose(0, 1)


def _padded(rows: Tensor, lengths: list[int], longest: int) -> Tensor:
    """Return packed rows as (batch, heads, longest, dim), padded with 0."""
    blank = rows.new_zeros((longest, *rows.shape[1:]))
    parts = [torch.cat([part, blank[len(part) :]]) for part in rows.split(lengths)]
    return torch.stack(parts).transpose(1, 2)


class Cache(NamedTuple):
    """Keys and values of the sequences of a decode case, filled at its first call.

    Attributes:
        caches: tensors for decode_attention.
        order: page of each PAGE positions, (batch, pages); None if the cache is contiguous.
        tables: cos and sin of the rotary embedding.
    """

    caches: list[Tensor]
    order: Tensor | None
    tables: list[Tensor]

    def fill(self, case: Case, whole: list[Tensor], unused: Tensor) -> None:
        """Store keys and values, with NaN in unused rows."""
        filled = [t.masked_fill(unused.to(t.device), torch.nan) for t in whole]
        if self.order is not None:
            places = self.order.flatten().argsort()
            filled = [
                t.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)[places] for t in filled
            ]
        self.caches[:] = [laid_out(t, case["layout"]) for t in filled]

    def contents(self) -> list[Tensor]:
        """Return keys and values, (batch, heads, capacity, dim)."""
        if self.order is None:
            return self.caches
        return [t[self.order].transpose(1, 2).flatten(2, 3) for t in self.caches]


def check_decode(case: Case, backend: str) -> None:
    """Check decode_attention over several steps, which append rows to one cache."""
    batch, heads, _, seqlen_q, capacity, *_ = case["shape"]
    first, generator = torch.tensor(case["lengths"]), drawn(case["seed"])
    tensors, expression = tensors_and_mask(case, (batch, heads, seqlen_q, capacity))
    order, tables = None, []
    if case["layout"] == "pages":
        order = torch.randperm(batch * capacity // PAGE).view(batch, -1).to(device_of(backend))
    if case["rotary"]:  # the tables' values are exact in 16 bits
        sizes = capacity, case["rotary"][0]
        tables = [torch.randint(-64, 65, sizes, generator=generator) / 64 for _ in range(2)]
    cache = Cache([], order, tables)
    for number, step in enumerate(case["steps"]):
        if step["change"] and expression is not None:
            expression.change()
        lengths = (first + number * case["new"]).view(-1, 1, 1, 1)
        ends = torch.tensor(seqlen_q), lengths + case["new"]
        at = Masked.of(case, expression, (batch, heads, seqlen_q, capacity), ends)
        with use_threads(step["threads"]):
            function = functools.partial(decode, case, at, cache, lengths)
            judge(case, number, function, tensors, backend, grads=False)


def decode(
    case: Case, at: Masked, cache: Cache, lengths: Tensor, backend: str, query: Tensor,
    key: Tensor, value: Tensor, sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out, lse and the used rows of the cache, from a backend or from the reference."""
    batch, _, heads_kv, seqlen_q, capacity, *_ = case["shape"]
    new, rotary, there = case["new"], case["rotary"], query.device
    first, position = torch.tensor(case["lengths"])[:, None], torch.arange(capacity)
    spare = (position >= lengths.view(-1, 1) + new).view(batch, 1, -1, 1).to(there)
    if backend == "eager":
        if rotary:
            turned = rotated(key, cache.tables, position.expand(batch, -1), rotary[1])
            key = torch.where((position >= first).view(batch, 1, -1, 1), turned, key)
            rows = lengths.view(-1, 1) + new - seqlen_q + torch.arange(seqlen_q)
            query = rotated(query, cache.tables, rows.clamp(min=0), rotary[1])
        used = [t.masked_fill(spare, 0.0) for t in (key, value)]
        return (*at.eager(case, query, key, value, sinks=sinks), *used)
    if not cache.caches:
        cache.fill(case, [key, value], (position >= first).view(batch, 1, -1, 1))
    more: dict[str, Any] = {"rotary_interleaved": bool(rotary and rotary[1])}
    rows = (lengths + torch.arange(new).view(-1, 1)).to(there)
    for name, t in (("key", key), ("value", value)):
        if new:
            more[name] = t.gather(2, rows.expand(-1, heads_kv, -1, t.shape[3]))
    for name, t in zip(("rotary_cos", "rotary_sin"), cache.tables, strict=False):
        more[name] = t.to(query)
    results = fused_attn.decode_attention(
        laid_out(query, case["layouts"][0]), *cache.caches, block_table=cache.order,
        cache_lengths=lengths.flatten().to(there), attn_mask=at.on(there),
        is_causal=case["is_causal"], return_lse=True, backend=backend, sinks=sinks,
        **case["options"], **more,
    )  # fmt: skip
    used = cache.contents()
    assert all((t.isnan() | ~spare).all() for t in used), "unused rows changed"
    return (*results, *(t.masked_fill(spare, 0.0) for t in used))


@st.composite
def attention_cases(draw: st.DrawFn, op: str, backend: str, dtype: str) -> Case:
    """Draw a case of "attention", "varlen" or "decode"."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    slow = backend in SLOW_BACKENDS
    seqlens = SEQLENS[:9] if slow else SEQLENS
    heads_kv, batch, head_dim = pick(1, 1, 2), pick(1, 2, 3), pick(*HEAD_DIMS)
    shape = [batch, heads_kv * pick(1, 2, 1, 3), heads_kv, pick(*seqlens), pick(*seqlens)]
    shape += [head_dim, pick(head_dim, *HEAD_DIMS)]
    step = {"grads": st.booleans(), "threads": st.sampled_from([1, 2]), "change": st.booleans()}
    steps = draw(st.lists(st.fixed_dictionaries(step), min_size=1, max_size=3))
    scores = pick(*SCORES)
    case: Case = {
        "op": op, "seed": draw(st.integers(0, 1 << 40)), "dtype": dtype, "shape": shape,
        "sizes": [*scores, pick(*VALUES)], "layouts": [pick("plain", *LAYOUTS) for _ in range(3)],
        "is_causal": pick(False, False, True), "raw": pick(True, False), "bias": None,
        "sinks": pick(False, False, True), "steps": steps, "lengths": None,
        "options": {"scale": pick(None, 0.3, -0.3), "softcap": pick(None, None, 2.0, 30.0)},
    }  # fmt: skip
    if op == "decode":
        case["new"], case["layout"] = pick(0, 1, 2, 17), pick("plain", "transposed", "pages")
        filled = pick(0, 3, 16, 40) if slow else pick(0, 3, 16, 40, 300)
        shape[3] = case["new"] or pick(1, 2, 5)
        shape[4] = -(-(filled + len(steps) * case["new"] + pick(1, 20)) // PAGE) * PAGE
        case["lengths"] = draw(lengths_of(batch, filled))
        case["rotary"] = None if head_dim == 1 else pick(None, [head_dim // 2, True], [1, False])
        case["mask"] = draw(trees((*shape[:2], *shape[3:5])))  # type: ignore[arg-type]
        return case
    if op == "varlen":
        slack = pick(0, 1, 7)
        case["lengths"] = [[1, *draw(lengths_of(batch - 1, n))] for n in shape[3:5]]
        shape[3:5] = [max(n) + slack for n in case["lengths"]]
    case["poison"] = pick(None, "nan", "inf", "-inf")
    case["bias"] = pick(None, None, None, [], [0], [0, 1], [0, 2], [1, 2], [3], [0, 1, 2, 3])
    case["mask"] = draw(trees((*shape[:2], *shape[3:5])))  # type: ignore[arg-type]
    case["lse"] = pick(False, True)
    case["options"] |= {"dropout_p": pick(0.0, 0.0, 0.3, 0.9), "seed": case["seed"]}
    fixed = op == "varlen" or is_fixed(case["mask"]) or case["bias"] is not None
    for step in steps:
        step["rows"] = None if fixed else pick(None, 1, 4)
        step["grads"] &= scores != ("1", "huge")
    return case
