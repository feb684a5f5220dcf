"""Options of attention and norm calls: all arguments except the input tensors and the mask.

To add an option, add a field and its validation here, an argument of the public functions, a line
in csrc/fields/*_options.inc, and support in the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from fused_attn.base.flat import Flat, flattens
from fused_attn.base.torch_state import statistics_dtype

_NUMBERS = frozenset({float, int})

OptionsT = TypeVar("OptionsT", "AttentionOptions", "NormOptions")


def default_scale(head_dim: int) -> float:
    """Return the default softmax scale, 1 / sqrt(head_dim); 1 if head_dim is 0."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def default_eps(dtype: torch.dtype) -> float:
    """Return the default eps of RMS norms, as in torch: the statistics dtype's machine epsilon."""
    return torch.finfo(statistics_dtype(dtype)).eps


@flattens
@dataclass(eq=False)
class AttentionOptions(Flat):
    """Options of an attention call.

    In an unchecked call, the values are those that the caller passed.

    Attributes:
        scale: factor of query @ key^T. Unchecked, None means the default.
        softcap: if not 0, scores become softcap * tanh(scores / softcap). Unchecked, None means no
            softcap.
        dropout_p: probability of dropping an attention weight.
        seed: int64 scalar tensor, required if dropout_p > 0. Unchecked, it may be an int or None.
        dropout_offsets: int64 (batch, 3), global offsets (row, key, head) of each sequence (see
            distributed/shards.py). None if the call is not a shard of a global call.
        partial: True for a partial result, over some of the keys, which the caller merges with
            others. out and all gradients then have the statistics dtype (float32 for 16-bit
            tensors), and the backward receives the merged out and lse.
        decoding: True if the queries are the last rows of sequences of any length. Kernels are then
            chosen by the number of queries alone, so the bits of a sequence do not depend on the
            lengths of others.
    """

    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: Tensor | None = None
    dropout_offsets: Tensor | None = None
    partial: bool = False
    decoding: bool = False

    def prepare(self, head_dim: int) -> bool:
        """Set the default scale of an unchecked call, and return True if all options are valid.

        False means that `checked` must convert or reject an option. A given seed also returns
        False.
        """
        scale: Any = self.scale
        softcap: Any = self.softcap
        if scale is None:
            self.scale = default_scale(head_dim)
        elif type(scale) not in _NUMBERS:
            return False
        if softcap is not None and not (type(softcap) in _NUMBERS and 0.0 < softcap < math.inf):
            return False
        dropout_p = self.dropout_p
        return type(dropout_p) in _NUMBERS and 0.0 <= dropout_p <= 1.0 and self.seed is None

    def checked(self, head_dim: int, device: torch.device) -> AttentionOptions:
        """Validate and convert the options of an unchecked call.

        Raises:
            ValueError, TypeError: an option is invalid; the message states what was expected.
        """
        scale: Any = self.scale
        softcap: Any = self.softcap
        if softcap is not None:
            softcap = checked_number("softcap", softcap)
            if not softcap > 0.0 or math.isinf(softcap):
                raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
        dropout_p = checked_probability(self.dropout_p)
        return AttentionOptions(
            default_scale(head_dim) if scale is None else checked_number("scale", scale),
            0.0 if softcap is None else softcap,
            dropout_p,
            checked_seed(self.seed, dropout_p, device),
            partial=self.partial,
            decoding=self.decoding,
        )

    def validated(self) -> AttentionOptions:
        """Return the validated options of an unchecked call that a backend has accepted."""
        return AttentionOptions(
            float(self.scale),
            self.softcap or 0.0,
            float(self.dropout_p),
            self.seed,
            decoding=self.decoding,
        )


@flattens
@dataclass(eq=False)
class NormOptions(Flat):
    """Options of a norm call.

    In an unchecked call, the values are those that the caller passed.

    Attributes:
        eps: added to the variance, or to the mean square of an RMS norm. Unchecked, None means the
            default.
        rms: True for RMS norm, False for layer norm.
        dropout_p: probability of dropping an element of input.
        seed: int64 scalar tensor, required if dropout_p > 0. Unchecked, it may be an int or None.
        dropout_offsets: int64 (runs,), global index of the first row of each run (see
            distributed/dtensors.py). A run has rows / runs rows. None if the call is not a shard of
            a global call.
    """

    eps: float
    rms: bool
    dropout_p: float = 0.0
    seed: Tensor | None = None
    dropout_offsets: Tensor | None = None

    def prepare(self, dtype: torch.dtype) -> bool:
        """Set the default eps of an unchecked call, and return True if all options are valid.

        False means that `checked` must convert or reject an option. A given seed also returns
        False.
        """
        if self.eps is None:
            self.eps = default_eps(dtype)
        dropout_p = self.dropout_p
        if type(self.eps) is not float or type(dropout_p) not in _NUMBERS:
            return False
        return 0.0 <= dropout_p <= 1.0 and self.seed is None

    def checked(self, dtype: torch.dtype, device: torch.device) -> NormOptions:
        """Validate and convert the options of an unchecked call.

        Raises:
            ValueError, TypeError: an option is invalid; the message states what was expected.
        """
        eps: Any = self.eps
        dropout_p = checked_probability(self.dropout_p)
        return NormOptions(
            default_eps(dtype) if eps is None else checked_number("eps", eps),
            self.rms,
            dropout_p,
            checked_seed(self.seed, dropout_p, device),
        )

    def validated(self) -> NormOptions:
        """Return the validated options of an unchecked call that a backend has accepted."""
        return NormOptions(self.eps, self.rms, float(self.dropout_p), self.seed)


def with_dense_offsets(options: OptionsT) -> OptionsT:
    """Return the options with contiguous dropout_offsets, as kernels require."""
    offsets = options.dropout_offsets
    dense = offsets if offsets is None else offsets.contiguous()
    return options if dense is offsets else replace(options, dropout_offsets=dense)


def checked_number(name: str, value: object) -> float:
    """Convert a Python or NumPy number, or a scalar tensor, to a float.

    Symbolic numbers are returned unchanged.

    Raises:
        TypeError: the value is of another type, or requires grad.
    """
    if type(value) is float:
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise TypeError(f"{name} must not require grad: its gradient is not computed")
        if value.dim() or value.is_complex() or value.dtype == torch.bool:
            got = f"{value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{name} must be a float, got a {got}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    return float(value)


def checked_probability(dropout_p: float) -> float:
    """Convert dropout_p to a float; raise ValueError if it is not in [0, 1]."""
    dropout_p = checked_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    return dropout_p


def checked_seed(
    seed: int | Tensor | None, dropout_p: float, device: torch.device
) -> Tensor | None:
    """Validate a seed and convert it to an int64 scalar tensor on `device`.

    The result is None if there is no dropout, or if the seed is None and must be drawn.

    Raises:
        ValueError, TypeError: the seed is invalid; the message states what was expected.
    """
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim():
            got = f"{seed.dtype} tensor of shape {tuple(seed.shape)}"
            raise TypeError(f"seed must be an int or an int64 scalar tensor, got a {got}")
        if seed.device != device:
            raise ValueError(
                f"seed must have device {device} (like the other tensors), got {seed.device}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (Integral, torch.SymInt)):
            raise TypeError(
                f"seed must be an int or an int64 scalar tensor, got {type(seed).__name__}"
            )
        seed = seed if isinstance(seed, torch.SymInt) else int(seed)  # NumPy ints may overflow
        if not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
    if seed is None or dropout_p == 0.0:
        return None
    if isinstance(seed, Tensor):
        return seed
    # Reinterpret the bits as int64: seeds from 2^63 on become negative.
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    # torch.tensor would copy from the host, which synchronizes and fails in a CUDA graph.
    return torch.full((), signed, dtype=torch.int64, device=device)
