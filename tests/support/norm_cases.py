"""Norm calls and input layouts for the tests of backends."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import NamedTuple

import torch
from helpers import drawn
from torch import Tensor

from fused_attn import functional as F


def norm(kind: str, **options):
    """Return function(backend)(input, residual, weight, norm_bias) for `assert_like_eager`."""

    def of(backend):
        def call(input, residual=None, weight=None, norm_bias=None):
            columns = input.shape[-1]
            common = {"residual": residual, "return_residual": True, "backend": backend, **options}
            if kind == "layer_norm":
                return F.layer_norm(input, columns, weight, norm_bias, 1e-5, **common)
            return F.rms_norm(input, columns, weight, 1e-6, **common)

        return call

    of.key = pickle.dumps((kind, options))  # type: ignore[attr-defined]
    return of


def tensors_of(kind, shape, residual, affine):
    generator = drawn(0)
    tensors = {"input": torch.randn(shape, generator=generator) * 2 + 1}
    if residual:
        tensors["residual"] = torch.randn(shape, generator=generator)
    if affine:
        tensors["weight"] = torch.rand(shape[1], generator=generator) + 0.5
        if kind == "layer_norm":
            tensors["norm_bias"] = torch.randn(shape[1], generator=generator)
    return tensors


class Layout(NamedTuple):
    """Layout of a matrix (*, columns) that is a view of a larger tensor.

    Attributes:
        whole: shape of the larger tensor.
        view: function that returns the view of the larger tensor.
        in_place: True if kernels read the view without copying it.
    """

    whole: tuple[int, ...]
    view: Callable[[Tensor], Tensor]
    in_place: bool = True


# 40 columns, because a GPU uses 16-byte loads only if rows begin at a multiple of 16 bytes.
LAYOUTS = {
    "rows_but_the_first": Layout((3, 8, 40), lambda t: t[:, 1:]),
    "every_second_row": Layout((3, 8, 40), lambda t: t[:, ::2]),
    "one_row_of_each": Layout((9, 4, 40), lambda t: t[:, 1:2]),
    "one_run": Layout((1, 8, 40), lambda t: t[:, 1:]),
    "sequence_first": Layout((5, 3, 40), lambda t: t.transpose(0, 1)),
    "packed": Layout((2, 5, 120), lambda t: t[..., 40:80]),
    "packed_rows": Layout((11, 120), lambda t: t[:, :40]),
    "unaligned": Layout((2, 5, 120), lambda t: t[:, 1:, 1:41]),
    "odd_columns": Layout((2, 6, 37), lambda t: t[:, 1:]),
    "one_column": Layout((4, 6, 3), lambda t: t[:, 1:, 1:2]),
    "same_rows": Layout((5, 40), lambda t: t.expand(3, 5, 40)),
    "same_row": Layout((3, 1, 40), lambda t: t.expand(3, 5, 40)),
    "four_dims": Layout((3, 4, 2, 40), lambda t: t[:, 1:]),
    "packed_heads": Layout((2, 5, 3, 4, 40), lambda t: t[:, :, 1]),
    "three_strides": Layout((2, 5, 3, 4, 40), lambda t: t[:, 1:, 1], in_place=False),
    "heads_first": Layout((2, 5, 3, 40), lambda t: t.transpose(1, 2), in_place=False),
    "columns_apart": Layout((2, 5, 80), lambda t: t[..., ::2], in_place=False),
    "pages_apart": Layout((6, 520, 8), lambda t: t[:, :2].transpose(0, 1), in_place=False),
    "same_column": Layout((2, 5, 1), lambda t: t.expand(2, 5, 40), in_place=False),
    "no_rows": Layout((2, 1, 40), lambda t: t[:, 1:]),
}
