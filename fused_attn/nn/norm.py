"""LayerNorm and RMSNorm with fused dropout and residual addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Module

from fused_attn import functional
from fused_attn.nn._nested import on_padded
from fused_attn.nn.replacement import FromTorch, fx_leaf, is_plain, replaces, unhooked


class Norm(FromTorch):
    """Base class of the fused norms, to which the `norm` argument of `swap_modules` applies."""

    def _forward_nested(self, input: Tensor) -> Tensor:
        """Normalize a nested tensor; encoder layers pass such tensors to norms in inference."""
        if input.layout == torch.jagged:
            # torch's op preserves the symbolic ragged size, which must equal that of the residual.
            return super().forward(input)
        return on_padded(lambda padded, _: self.forward(padded), input)


@replaces(torch.nn.LayerNorm)
class LayerNorm(Norm, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, optionally fused with ``residual + dropout(input)``.

    Arguments, parameters and state_dict keys are those of torch.nn.LayerNorm.

    Args:
        normalized_shape: trailing dimensions to normalize over; an int means the last dimension.
        eps: added to the variance.
        elementwise_affine: learn a weight of shape normalized_shape.
        bias: also learn a bias of this shape, if elementwise_affine is True.
        device, dtype: device and dtype of the parameters.

    Example:
        >>> norm = fused_attn.nn.LayerNorm(64)
        >>> x, sublayer = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> out, total = norm(sublayer, residual=x, dropout_p=0.1, return_residual=True)
        >>> out.shape, total.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 64]))

    Source: Ba et al. 2016, "Layer Normalization", equation 4.
    """

    @fx_leaf
    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        residual: Tensor | None = None,
        dropout_p: float = 0.0,
        return_residual: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize residual + dropout(input); residual and dropout are optional.

        Args:
            input: (*, *normalized_shape); float32, float16, bfloat16 or float64.
            residual: same shape and dtype as input; added before the norm.
            dropout_p: probability of dropping an element of input before the addition. It does not
                depend on the training flag, so pass 0.0 in evaluation.
            return_residual: also return residual + dropout(input).

        Returns:
            The normalized tensor, with the shape and dtype of input. With return_residual, a tuple
            of this tensor and residual + dropout(input).
        """
        if input.is_nested and residual is None and not (dropout_p or return_residual):
            return self._forward_nested(input)
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            dropout_p=dropout_p,
            return_residual=return_residual,
        )


@replaces(torch.nn.RMSNorm)
class RMSNorm(Norm, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, optionally fused with ``residual + dropout(x)``.

    Arguments, parameters and state_dict keys are those of torch.nn.RMSNorm.

    Args:
        normalized_shape: trailing dimensions to normalize over; an int means the last dimension.
        eps: added to the mean square. None means the machine epsilon of float64 for float64 inputs,
            and of float32 for all other dtypes.
        elementwise_affine: learn a weight of shape normalized_shape.
        device, dtype: device and dtype of the weight.

    Example:
        >>> fused_attn.nn.RMSNorm(64)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    @fx_leaf
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        dropout_p: float = 0.0,
        return_residual: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize residual + dropout(x); residual and dropout are optional.

        Args:
            x: (*, *normalized_shape); float32, float16, bfloat16 or float64.
            residual, dropout_p, return_residual: as in `LayerNorm.forward`.

        Returns:
            The normalized tensor, with the shape and dtype of x. With return_residual, a tuple of
            this tensor and residual + dropout(x).
        """
        if x.is_nested and residual is None and not (dropout_p or return_residual):
            return self._forward_nested(x)
        return functional.rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            residual=residual,
            dropout_p=dropout_p,
            return_residual=return_residual,
        )


def residual_norm(
    norm: Module, dropout: Module, sublayer: Tensor, residual: Tensor, return_residual: bool = False
) -> Any:
    """Compute norm(residual + dropout(sublayer)), in one fused kernel if possible.

    The operations run separately if `norm` or `dropout` is user-defined or has hooks, which observe
    intermediate tensors. They also run separately if the sum promotes dtypes, as under autocast.

    Args:
        return_residual: also return the sum, which is the next residual in pre-norm layers.
    """
    if _fusable(norm, dropout) and sublayer.dtype == residual.dtype:
        p = dropout.p if dropout.training else 0.0
        return norm(sublayer, residual=residual, dropout_p=p, return_residual=return_residual)
    total = residual + dropout(sublayer)
    return (norm(total), total) if return_residual else norm(total)


def _fusable(norm: Module, dropout: Module) -> bool:
    if type(norm) not in (LayerNorm, RMSNorm) or type(dropout) is not Dropout:
        return False
    # compare() replaces the forward of norms with one that accepts a residual.
    replaced = norm.__dict__.get("forward")
    if replaced is not None and not getattr(replaced, "takes_residual", False):
        return False
    return unhooked(norm) and is_plain(dropout)
