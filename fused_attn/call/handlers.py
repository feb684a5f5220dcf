"""Handlers of calls on tensors that are distributed over ranks.

`fused_attn.distributed` computes such calls. Only that package depends on ranks: attention and
norms look up a handler here, and `fused_attn.distributed` is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fused_attn.base.torch_state import PLAIN_TYPES
from fused_attn.masks import Mask

if TYPE_CHECKING:
    from fused_attn.call.attention import UncheckedAttention


class Handler(Protocol):
    """Interface of objects that compute attention calls on several ranks."""

    def attention(
        self, call: UncheckedAttention, want_lse: bool, named: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the results of `dispatch.attention` without sinks."""

    def attention_with_weights(
        self, call: UncheckedAttention, average: bool, named: str | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the results of `dispatch.attention_with_weights`."""


context: Handler | None = None  # computes all attention calls; set by context_parallel


def handler_of(tensor: object) -> Handler | None:
    """Return the handler for attention on a query, or None if this process computes it alone."""
    if context is not None or type(tensor) in PLAIN_TYPES:
        return context
    return dtensors() if is_dtensor(tensor) else None


def is_dtensor(tensor: object) -> bool:
    """Return True for a DTensor. torch.distributed.tensor is not imported."""
    if type(tensor) in PLAIN_TYPES:
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def dtensors() -> Any:
    """Return the module distributed/dtensors.py, which handles attention and norms of DTensors."""
    from fused_attn.distributed import dtensors

    return dtensors


def heads() -> Any:
    """Return distributed/heads.py, for attention modules whose heads are split over ranks."""
    from fused_attn.distributed import heads

    return heads


def tensors_of(mask: Any) -> list[Tensor]:
    """Return the tensors of an attn_mask of any kind."""
    if isinstance(mask, Mask):
        return mask.tensors()
    return [mask] if isinstance(mask, Tensor) else []


def check_no_dtensors(first: str, tensor: object, **others: object) -> None:
    """Raise ValueError if an argument is a DTensor, but `tensor` (the argument `first`) is not."""
    for name, other in others.items():
        if is_dtensor(other):
            got = type(tensor).__name__
            raise ValueError(f"{first} must be a DTensor (like {name}), got a {got}")


@contextlib.contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """Pass all attention calls of the process to `handler` within the block; None disables this."""
    global context
    before, context = context, handler
    try:
        yield
    finally:
        context = before
