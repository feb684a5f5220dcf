"""The CPU kernels (csrc/cpu): tensors to the fields of csrc/params.h."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.fields import (
    DTYPES,
    add,
    attention_fields,
    contiguous_as,
    norm_fields,
    pointer,
    summary_fields,
)
from fused_attn.backends.problem import Problem, kernel_limits
from fused_attn.core.layout import gradient_layout, out_layout, readable_in_place
from fused_attn.core.torch_state import statistics_dtype
from fused_attn.masks.spec import MaskSpec

try:
    from fused_attn import _cpu
except ImportError as error:  # pragma: no cover - a broken installation
    _cpu, _import_error = None, str(error)  # type: ignore[assignment]

MAX_HEAD_DIM = 256


def unavailable() -> list[str]:
    """Why this backend cannot run on this machine."""
    return [] if _cpu is not None else [f"fused_attn._cpu cannot be imported: {_import_error}"]


def unsupported(problem: Problem) -> list[str]:
    """Why this backend does not take a problem; empty if it does."""
    reasons = unavailable()
    if problem.device.type != "cpu":
        reasons.append(f"runs on cpu, not on {problem.device.type}")
    return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)


def not_automatic() -> list[str]:
    """Why this backend is chosen only where it is asked for by name: it is chosen unasked."""
    return []


def isa() -> str:
    """The instruction set whose kernels run: an entry of csrc/cpu/isas.inc."""
    return _cpu.isa()


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Within the block the kernels of a lower instruction set run; for tests, process-wide."""
    _cpu.set_isa(name)
    try:
        yield
    finally:
        _cpu.set_isa("")


def attention_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    for_backward: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and what rounding took from it; shapes as in `reference.attention`.

    Not for_backward: the last one is empty, and a few queries may be computed in another order
    than the backward's.
    """
    out = _empty(*out_layout(query, value), query.dtype)
    lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    lse_low = torch.empty_like(lse) if for_backward else lse.new_empty(0)
    fields, _kept = _fields(query, key, value, out, spec, scale, softcap, dropout_p, seed)
    if for_backward:
        fields["lse_low"] = lse_low.data_ptr()
    _cpu.attention_fwd(**fields, lse=lse.data_ptr())
    return out, lse, lse_low


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    mask_field: str,
    scale: float,
    softcap: float,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """A function of tensors like these, for out alone.

    Args:
        mask_field: the field of spec that the function's last argument is, whose summary is then
            computed anew; "" if the mask is the same in every call.
    """
    shape, strides = out_layout(query, value)
    dtype = query.dtype
    out = torch.empty_strided(shape, strides, dtype=dtype)
    fields, kept = _fields(query, key, value, out, spec, scale, softcap, 0.0, None)
    sizes = tuple(getattr(spec, mask_field).shape) if mask_field else (0, 0, 0, 0)
    run = _cpu.AttentionCall(mask_field, sizes, **fields).run
    addressed = () if mask_field else (*kept[3:], *spec.flat())  # tensors of the same mask

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = _empty(shape, strides, dtype)
        run(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), pointer(mask),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    call.addressed = addressed  # type: ignore[attr-defined]

    return call


def attention_bwd(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and of the float mask (empty if not needed)."""
    grad_out = readable_in_place(grad_out)
    grad_query, grad_key, grad_value = (
        _empty(*gradient_layout(t), t.dtype) for t in (query, key, value)
    )
    fields, _kept = _fields(query, key, value, out, spec, scale, softcap, dropout_p, seed)
    fields["lse"], fields["lse_low"] = lse.data_ptr(), lse_low.data_ptr()
    add(fields, "grad_out", grad_out)
    add(fields, "grad_query", grad_query)
    add(fields, "grad_key", grad_key)
    add(fields, "grad_value", grad_value)
    if grad_lse is not None:
        grad_lse = grad_lse.to(lse.dtype).contiguous().resolve_neg()
        fields["grad_lse"] = grad_lse.data_ptr()
    grad_bias = _run_bwd(fields, query, lse, spec, needs_bias)
    return grad_query, grad_key, grad_value, grad_bias


def attention_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    average: bool,
) -> Tensor:
    """As `reference.attention_weights`, from the lse of `attention_fwd` and what rounding took."""
    batch, num_heads, seqlen_q, _ = query.shape
    shape = (batch, *(() if average else (num_heads,)), seqlen_q, key.shape[2])
    weights = query.new_empty(shape)
    fields, _kept = _weights_fields(query, key, lse, lse_low, spec, scale, softcap, dropout_p, seed)
    _cpu.attention_weights(**fields, weights=weights.data_ptr(), average=average)
    return weights


def attention_weights_bwd(
    grad_weights: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    average: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and the float mask (empty if not needed) by `attention_weights`."""
    grad_weights = readable_in_place(grad_weights)
    grad_query, grad_key = (_empty(*gradient_layout(t), t.dtype) for t in (query, key))
    fields, _kept = _weights_fields(query, key, lse, lse_low, spec, scale, softcap, dropout_p, seed)
    add(fields, "grad_query", grad_query)
    add(fields, "grad_key", grad_key)
    heads = grad_weights[:, None].expand(-1, query.shape[1], -1, -1) if average else grad_weights
    add(fields, "grad_weights", heads)
    fields["grad_weights_factor"] = 1.0 / max(query.shape[1], 1) if average else 1.0
    row_sums = torch.empty_like(lse)
    fields["row_sums"] = row_sums.data_ptr()
    return grad_query, grad_key, _run_bwd(fields, query, lse, spec, needs_bias)


def norm_fwd(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, residual + dropout(input) (empty if it is input), mean (empty for rms), rstd."""
    statistics = statistics_dtype(input.dtype)
    input = input.contiguous()
    has_total = residual is not None or dropout_p > 0.0
    out = _empty_like(input)
    total = _empty_like(input) if has_total else input.new_empty(0)
    mean = input.new_empty(0 if rms else input.shape[0], dtype=statistics)
    rstd = input.new_empty(input.shape[0], dtype=statistics)
    residual = None if residual is None else residual.contiguous()
    weight, bias = contiguous_as(weight, statistics), contiguous_as(bias, statistics)
    _cpu.norm_fwd(
        **_norm_fields(input, rms, dropout_p, seed),
        eps=eps,
        input=input.data_ptr(),
        residual=pointer(residual),
        weight=pointer(weight),
        bias=pointer(bias),
        out=out.data_ptr(),
        total=total.data_ptr(),
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
    )
    return out, total, mean, rstd


def norm_call(
    rows: Tensor, eps: float, rms: bool
) -> Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]:
    """A function of contiguous tensors with such rows, of weight, bias and no residual, for out
    alone."""
    run = _cpu.NormCall(**_norm_fields(rows, rms, 0.0, None), eps=eps).run

    def call(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out = _empty_like(input)
        run(
            input.data_ptr(), pointer(weight), pointer(bias), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    return call


def norm_bwd(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rms: bool,
    dropout_p: float,
    seed: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of input (empty where it is residual's), residual, weight and bias."""
    total, grad_out = total.contiguous(), grad_out.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    weight = contiguous_as(weight, mean.dtype)
    grad_residual = _empty_like(total)
    grad_input = _empty_like(total) if dropout_p > 0.0 else total.new_empty(0)
    grad_weight = mean.new_empty(total.shape[1] if needs_weight else 0)
    grad_bias = mean.new_empty(total.shape[1] if needs_bias else 0)
    _cpu.norm_bwd(
        **_norm_fields(total, rms, dropout_p, seed),
        total=total.data_ptr(),
        weight=pointer(weight),
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
        grad_out=grad_out.data_ptr(),
        grad_total=pointer(grad_total),
        grad_input=grad_input.data_ptr(),
        grad_residual=grad_residual.data_ptr(),
        grad_weight=grad_weight.data_ptr(),
        grad_bias=grad_bias.data_ptr(),
    )
    return grad_input, grad_residual, grad_weight, grad_bias


def tile_summary(tensor: Tensor) -> Tensor:
    """What each 32 x 64 tile of a dense mask or bias shows: uint8, enum SummaryValue."""
    summary, fields = summary_fields(tensor, _cpu.SUMMARY_TILE)
    _cpu.tile_summary(**fields, num_threads=torch.get_num_threads())
    return summary


def tile_kinds(
    spec: MaskSpec, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, int]]:
    """How the kernels classify the tiles of a problem; for tests and tools.

    Returns:
        (batch, num_heads, panels, blocks) uint8, 0 for tiles that are skipped, 1 for partial and
        2 for full ones; and the tile's size, in queries and keys.
    """
    panel, block = _cpu.tile_size(DTYPES[dtype])
    shape = (batch, num_heads, -(-seqlen_q // panel), -(-seqlen_k // block))
    kinds = torch.empty(shape, dtype=torch.uint8)
    empty = torch.empty(batch, num_heads, seqlen_q, 0, dtype=dtype)
    keys = torch.empty(batch, num_heads, seqlen_k, 0, dtype=dtype)
    fields, _kept = _fields(empty, keys, keys, empty, spec, 1.0, 0.0, 0.0, None)
    _cpu.tile_kinds(**fields, kinds=kinds.data_ptr())
    return kinds, (panel, block)


# ---- memory -------------------------------------------------------------------------------------

# Smaller blocks stay with malloc, which reuses them; taking one from the pool costs 4 microseconds.
_POOLED_FROM = 1 << 20


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor; a large one in memory that earlier ones have left."""
    numel = math.prod(shape)
    if numel * dtype.itemsize < _POOLED_FROM or len(shape) > 4:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.from_dlpack(_cpu.pooled_tensor(shape, strides, DTYPES[dtype]))


def _empty_like(tensor: Tensor) -> Tensor:
    return _empty(tensor.shape, tensor.stride(), tensor.dtype)


# ---- fields -------------------------------------------------------------------------------------


def _fields(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[dict[str, Any], list[Tensor]]:
    """The fields of AttentionParams, and tensors that must outlive the call."""
    query, key, value = (readable_in_place(t) for t in (query, key, value))
    summaries = (
        ("dense", spec.dense, spec.dense_summary),
        ("bias", spec.bias, spec.bias_summary),
    )
    fields, kept = attention_fields(
        query, key, value, out, spec, scale, softcap, dropout_p, summaries, tile_summary
    )
    fields["num_threads"] = torch.get_num_threads()
    if dropout_p > 0.0:
        assert seed is not None
        fields["seed"] = int(seed.item())
    return fields, kept


def _weights_fields(
    query: Tensor, key: Tensor, lse: Tensor, lse_low: Tensor, *options: Any
) -> tuple[dict[str, Any], list[Tensor]]:
    """`_fields` of a problem without values, whose lse is known."""
    value, out = key.new_empty(*key.shape[:3], 0), query.new_empty(*query.shape[:3], 0)
    fields, kept = _fields(query, key, value, out, *options)
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    fields["lse"], fields["lse_low"] = lse.data_ptr(), lse_low.data_ptr()
    return fields, [*kept, value, out, lse, lse_low]


def _run_bwd(
    fields: dict[str, Any], query: Tensor, lse: Tensor, spec: MaskSpec, needs_bias: bool
) -> Tensor:
    """Runs the backward; the gradient of the float mask, empty if it is not needed."""
    if not needs_bias:
        _cpu.attention_bwd(**fields)
        return query.new_empty(0)
    assert spec.bias is not None
    grad_bias = lse.new_zeros(spec.bias.shape)
    _cpu.attention_bwd(**fields, grad_bias=grad_bias.data_ptr())
    return grad_bias.to(spec.bias.dtype)


def _norm_fields(
    matrix: Tensor, rms: bool, dropout_p: float, seed: Tensor | None
) -> dict[str, Any]:
    return {
        **norm_fields(matrix, rms, dropout_p),
        "seed": int(seed.item()) if seed is not None else 0,
        "num_threads": torch.get_num_threads(),
    }
