"""Compiled FlexAttention: one function for each variant, and a limit on their number.

Without compilation, FlexAttention materializes the scores and ignores the blocks. torch.compile
falls back to this silently if a function reaches the recompilation limit, unless fullgraph=True.
So each variant is a separate function, compiled with fullgraph=True. Only its batch size and
sequence lengths vary, so torch.compile makes at most a few versions of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.fx.experimental import _config

from fused_attn.backends import verdicts
from fused_attn.backends.flex.functions import Variant, attend
from fused_attn.backends.flex.operands import Operands, dimensions

# Users report 30 to 120 s for a compilation on a GPU (model cards of huggingface.co/Synthyra). A
# model needs one variant for each kind of mask, in training and in evaluation.
MAX_VARIANTS = 64

_functions: dict[Variant, Any] = {}  # None for a variant that cannot be compiled


def at_limit(variant: Variant) -> bool:
    """Return True if a variant is new, but the limit on compiled variants is reached."""
    is_full = len(_functions) >= MAX_VARIANTS and not verdicts.in_verification
    return is_full and variant not in _functions


def run(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor, operands: Operands
) -> tuple[Tensor, Tensor | None] | None:
    """Run the compiled `attend` of a variant; compile it for any sizes if the variant is new.

    Returns:
        out and lse; None, with one warning, if the variant cannot be compiled or is beyond the
        limit.

    Raises:
        NotImplementedError: the variant cannot be compiled, during verification.
    """
    if at_limit(variant):
        _fall_back(f"has reached the limit of {MAX_VARIANTS} compiled kinds of calls")
        return None
    function = _functions.get(variant)
    if function is None and variant in _functions:
        if verdicts.in_verification:
            _fall_back("cannot compile this kind of call")
        return None
    try:
        if function is not None:
            return function(query, key, value, operands)
        return _first_run(variant, query, key, value, operands)
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        _functions[variant] = None
        _fall_back(f"cannot compile this kind of call ({error})")
        return None


def _fall_back(reason: str) -> None:
    """Warn that a call runs on eager attention; during verification, refuse the call instead."""
    if verdicts.in_verification:
        raise NotImplementedError(reason)
    text = f'backend "flex" {reason}, so calls of this kind run on eager attention'
    warnings.warn(text, stacklevel=3)


def _first_run(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor, operands: Operands
) -> tuple[Tensor, Tensor | None]:
    function = _functions[variant] = _compiled(variant)
    if variant.device_type == "cpu":
        return function(query, key, value, operands)
    # Duck shapes would assume that sizes that are equal in this call are equal in all calls.
    marked = [(tensor, "bhq") for tensor in (query, key, value)]
    marked += [(tensor, "bhqk") for tensor in operands.lists or ()]
    marked += dimensions(variant.pattern, operands)
    config: Any = _config
    with config.patch(use_duck_shape=False), _any_size(marked):
        return function(query, key, value, operands)


def _compiled(variant: Variant) -> Any:
    def attention(query: Tensor, key: Tensor, value: Tensor, operands: Operands) -> Any:
        return attend(variant, query, key, value, operands)

    # torch.compile limits recompilations per code object, so each variant has a separate one.
    code = attention.__code__.replace(co_name=f"flex_attention_{len(_functions)}")
    own = FunctionType(code, attention.__globals__, code.co_name, None, attention.__closure__)
    # Inductor's C++ code for FlexAttention supports only constant sizes (torch 2.13), so on the CPU
    # each size is compiled separately.
    dynamic = False if variant.device_type == "cpu" else None
    return torch.compile(own, fullgraph=True, dynamic=dynamic)


@contextlib.contextmanager
def _any_size(tensors: list[tuple[Tensor, str]]) -> Iterator[None]:
    """Mark the sizes of batch and sequences as dynamic within the block.

    Otherwise torch.compile would first compile for constants, and again for each size that changes
    in a later call. Heads, head dimensions and sizes of 1 stay constant, see `Variant`.

    Args:
        tensors: each with the letters of its dimensions; those of "h" stay constant.
    """
    for tensor, letters in tensors:
        sizes = zip(letters, tensor.shape, strict=False)
        maybe_mark_dynamic(tensor, [d for d, (x, n) in enumerate(sizes) if x != "h" and n > 1])
    try:
        yield
    finally:
        for tensor, _ in tensors:
            for name in ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"):
                vars(tensor).pop(name, None)
