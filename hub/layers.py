"""Layers for `kernels.kernelize`, which replaces the forward methods of a model's layers."""

from __future__ import annotations

from torch import Tensor, nn

from fused_attn.functional import layer_norm, rms_norm


class LayerNorm(nn.Module):
    """Layer norm whose forward reads the attributes of torch.nn.LayerNorm."""

    can_torch_compile = True
    has_backward = True

    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Normalize input, (*, *normalized_shape)."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """RMS norm whose forward reads the attributes of transformers' LlamaRMSNorm."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize hidden_states, (*, hidden_size)."""
        weight = self.weight
        return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
