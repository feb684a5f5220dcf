"""The CUDA kernels of norms: tensors to the fields of csrc/params.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.cuda.module import compiled, num_multiprocessors, run
from fused_attn.backends.fields import contiguous_as, norm_fields, pointer


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
    """As `cpp.norm_fwd`."""
    input = input.contiguous()
    has_total = residual is not None or dropout_p > 0.0
    out = torch.empty_like(input)
    total = torch.empty_like(input) if has_total else input.new_empty(0)
    mean = input.new_empty(0 if rms else input.shape[0], dtype=torch.float32)
    rstd = input.new_empty(input.shape[0], dtype=torch.float32)
    if input.numel() == 0:
        return out, total, mean, rstd
    residual = None if residual is None else residual.contiguous()
    weight, bias = contiguous_as(weight, torch.float32), contiguous_as(bias, torch.float32)
    fields = {
        **_norm_fields(input, rms, dropout_p, seed),
        "eps": eps,
        "input": input.data_ptr(),
        "residual": pointer(residual),
        "weight": pointer(weight),
        "bias": pointer(bias),
        "out": out.data_ptr(),
        "total": total.data_ptr(),
        "mean": mean.data_ptr(),
        "rstd": rstd.data_ptr(),
    }
    run("norm_fwd", input.device, fields)
    return out, total, mean, rstd


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
    """As `cpp.norm_bwd`."""
    total, grad_out = total.contiguous(), grad_out.contiguous()
    rows, columns = total.shape
    grad_total = None if grad_total is None else grad_total.contiguous()
    weight = contiguous_as(weight, torch.float32)
    grad_residual = torch.empty_like(total)
    grad_input = torch.empty_like(total) if dropout_p > 0.0 else total.new_empty(0)
    grad_weight = rstd.new_empty(columns if needs_weight else 0)
    grad_bias = rstd.new_empty(columns if needs_bias else 0)
    if total.numel() == 0:
        return grad_input, grad_residual, grad_weight.zero_(), grad_bias.zero_()
    num_parts = compiled().norm_bwd_parts(rows, columns, num_multiprocessors(total.device))
    wanted = needs_weight or needs_bias
    partial_sums = rstd.new_empty(2, num_parts, columns) if wanted else None
    fields = {
        **_norm_fields(total, rms, dropout_p, seed),
        "total": total.data_ptr(),
        "weight": pointer(weight),
        "mean": mean.data_ptr(),
        "rstd": rstd.data_ptr(),
        "grad_out": grad_out.data_ptr(),
        "grad_total": pointer(grad_total),
        "grad_input": grad_input.data_ptr(),
        "grad_residual": grad_residual.data_ptr(),
        "grad_weight": grad_weight.data_ptr(),
        "grad_bias": grad_bias.data_ptr(),
        "partial_sums": pointer(partial_sums),
        "num_parts": num_parts,
    }
    run("norm_bwd", total.device, fields)
    return grad_input, grad_residual, grad_weight, grad_bias


def _norm_fields(
    matrix: Tensor, rms: bool, dropout_p: float, seed: Tensor | None
) -> dict[str, Any]:
    fields = norm_fields(matrix, rms, dropout_p)
    if dropout_p > 0.0:
        assert seed is not None
        fields["seed_address"] = seed.data_ptr()
    return fields
