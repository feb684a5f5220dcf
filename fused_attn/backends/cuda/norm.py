"""CUDA norms: conversion of calls to the fields of csrc/params.h."""

from __future__ import annotations

from typing import Any

from fused_attn.backends.cuda.module import compiled, num_multiprocessors, run
from fused_attn.base.layout import rows_in_place
from fused_attn.call.norm import NormBackward, NormCall, NormGradients, NormOutputs


def norm_fwd(call: NormCall, outputs: NormOutputs) -> None:
    """Compute a norm, and write the results to `outputs`."""
    call = call.kernel_layout()
    run("norm_fwd", call.input.device, call, {**_seed(call), **outputs._asdict()})


def norm_bwd(work: NormBackward, grads: NormGradients) -> None:
    """Compute the gradients, and write them to `grads`. Empty weight and bias are skipped."""
    call, mean, rstd, grad_out, grad_total, *_ = work
    total, columns = call.input, call.input.shape[-1]
    num_parts = compiled().norm_bwd_parts(call.rows, columns, num_multiprocessors(total.device))
    wanted = grads.weight.numel() + grads.bias.numel() > 0
    fields = {
        **_seed(call),
        "mean": mean,
        "rstd": rstd,
        "grad_out": rows_in_place(grad_out),
        "grad_total": None if grad_total is None else rows_in_place(grad_total),
        "grad_input": grads.input,
        "grad_residual": grads.total,
        "grad_weight": grads.weight,
        "grad_bias": grads.bias,
        "partial_sums": rstd.new_empty(2, num_parts, columns) if wanted else None,
        "num_parts": num_parts,
    }
    run("norm_bwd", total.device, call.kernel_layout(), fields)


def _seed(call: NormCall) -> dict[str, Any]:
    options = call.options
    return {"seed_address": options.seed} if options.dropout_p > 0.0 else {}
