"""Norms as the tests of backends call them."""

from __future__ import annotations

import torch

from fused_attn import functional as F


def norm(kind: str, **options):
    """function(backend)(input, residual, weight, norm_bias) for `assert_like_eager`."""

    def of(backend):
        def call(input, residual=None, weight=None, norm_bias=None):
            columns = input.shape[-1]
            common = {"residual": residual, "return_residual": True, "backend": backend, **options}
            if kind == "layer_norm":
                return F.layer_norm(input, columns, weight, norm_bias, 1e-5, **common)
            return F.rms_norm(input, columns, weight, 1e-6, **common)

        return call

    return of


def tensors_of(kind, shape, residual, affine):
    generator = torch.Generator().manual_seed(0)
    tensors = {"input": torch.randn(shape, generator=generator) * 2 + 1}
    if residual:
        tensors["residual"] = torch.randn(shape, generator=generator)
    if affine:
        tensors["weight"] = torch.rand(shape[1], generator=generator) + 0.5
        if kind == "layer_norm":
            tensors["norm_bias"] = torch.randn(shape[1], generator=generator)
    return tensors
