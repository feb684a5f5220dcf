"""Merging of partial attention results, each over some of the keys.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.attention import AttentionOutputs

_INF = float("inf")
_MOST = 2**15 - 1  # as in store_residual_row (csrc/cpu/simd/convert.h)


class MergedOutputs:
    """Accumulator of partial results.

    The result depends only on the parts and their order. Fully masked rows remain 0, with lse -inf.

    Attributes:
        dtype: dtype of partial results, the statistics dtype.

    Args:
        query, value: tensors of a call whose out has the shape of the merged out.
    """

    def __init__(self, query: Tensor, value: Tensor) -> None:
        # out and total are sums scaled by exp(-maximum), as in online softmax. lse + lse_residual
        # has twice the precision of float32, so lse is processed in float64.
        self.dtype, rows = statistics_dtype(query.dtype), query.shape[:3]
        self._out = query.new_zeros(*rows, value.shape[3], dtype=self.dtype)
        self._total = query.new_zeros(rows, dtype=torch.float64)
        self._maximum = torch.full_like(self._total, -_INF)

    def add(self, part: AttentionOutputs, rows: slice) -> None:
        """Add the partial result of some query rows. lse_residual may be missing."""
        lse = part.lse.double()
        if part.lse_residual is not None and part.lse_residual.numel():
            lse += part.lse_residual
        before = self._maximum[:, :, rows]
        maximum = torch.maximum(before, lse)
        shift = maximum.masked_fill(maximum == -_INF, 0.0)  # -inf - -inf would be NaN
        old, new = (before - shift).exp(), (lse - shift).exp()
        out = self._out[:, :, rows].mul_(old.to(self.dtype)[..., None])
        out.addcmul_(part.out, new.to(self.dtype)[..., None])
        total = self._total[:, :, rows]
        total.mul_(old).add_(new)
        before.copy_(maximum)

    def finish(self, dtype: torch.dtype) -> AttentionOutputs:
        """Return the merged results, in the format that a backward requires.

        Args:
            dtype: dtype of out.
        """
        empty = self._total == 0.0
        total = self._total.masked_fill(empty, 1.0)
        exact = (self._maximum + total.log()).masked_fill(empty, -_INF)
        lse = exact.to(self.dtype)
        residual = (exact - lse.double()).masked_fill(empty, 0.0).to(self.dtype)
        wide = self._out.div_(total.to(self.dtype)[..., None])
        out = wide.to(dtype)
        return AttentionOutputs(out, lse, residual, _rounding_residual(wide, out))


def _rounding_residual(wide: Tensor, rounded: Tensor) -> Tensor | None:
    """Return the `out_residual` (csrc/fields/attention.inc) of a 16-bit out; None for wider types.

    Args:
        wide: float32, the unrounded out.
        rounded: wide in the dtype of out.
    """
    if rounded.dtype.itemsize > 2:
        return None
    bits = wide.view(torch.int32) - rounded.float().view(torch.int32)
    return bits.clamp(-_MOST, _MOST).to(torch.int16)
