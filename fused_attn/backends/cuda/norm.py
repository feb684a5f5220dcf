"""The CUDA kernels of norms: tensors to the fields of csrc/params.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.cuda.module import compiled, num_multiprocessors, run
from fused_attn.backends.fields import contiguous_as, norm_fields, pointer
from fused_attn.core.call import NormCall, NormGradients, NormOutputs


def norm_fwd(call: NormCall, outputs: NormOutputs) -> None:
    """Computes the outputs."""
    input, residual = call.input.contiguous(), call.residual
    if input.numel() == 0:
        return
    residual = None if residual is None else residual.contiguous()
    weight = contiguous_as(call.weight, torch.float32)
    bias = contiguous_as(call.bias, torch.float32)
    fields = {
        **_norm_fields(call),
        "eps": call.eps,
        "input": input.data_ptr(),
        "residual": pointer(residual),
        "weight": pointer(weight),
        "bias": pointer(bias),
        **{name: t.data_ptr() for name, t in outputs._asdict().items()},
    }
    run("norm_fwd", input.device, fields)


def norm_bwd(
    call: NormCall,
    mean: Tensor,
    rstd: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
    grads: NormGradients,
) -> None:
    """Computes the gradients; those of weight and bias where they are not empty."""
    total, grad_out = call.input.contiguous(), grad_out.contiguous()
    rows, columns = total.shape
    grad_total = None if grad_total is None else grad_total.contiguous()
    weight = contiguous_as(call.weight, torch.float32)
    if total.numel() == 0:
        grads.weight.zero_(), grads.bias.zero_()
        return
    num_parts = compiled().norm_bwd_parts(rows, columns, num_multiprocessors(total.device))
    wanted = grads.weight.numel() + grads.bias.numel() > 0
    partial_sums = rstd.new_empty(2, num_parts, columns) if wanted else None
    fields = {
        **_norm_fields(call),
        "total": total.data_ptr(),
        "weight": pointer(weight),
        "mean": mean.data_ptr(),
        "rstd": rstd.data_ptr(),
        "grad_out": grad_out.data_ptr(),
        "grad_total": pointer(grad_total),
        "grad_input": grads.input.data_ptr(),
        "grad_residual": grads.total.data_ptr(),
        "grad_weight": grads.weight.data_ptr(),
        "grad_bias": grads.bias.data_ptr(),
        "partial_sums": pointer(partial_sums),
        "num_parts": num_parts,
    }
    run("norm_bwd", total.device, fields)


def _norm_fields(call: NormCall) -> dict[str, Any]:
    fields = norm_fields(call)
    if call.dropout_p > 0.0:
        assert call.seed is not None
        fields["seed_address"] = call.seed.data_ptr()
    return fields
