"""What the choice of a backend may depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionProblem:
    """A call of scaled_dot_product_attention."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    bias_dtype: torch.dtype | None = None
    transformed: bool = False  # under a torch.func transform, or with forward-mode tangents


@dataclass(frozen=True)
class NormProblem:
    """A call of layer_norm or rms_norm."""

    device: torch.device
    dtype: torch.dtype
    num_columns: int
    transformed: bool = False


Problem = AttentionProblem | NormProblem
