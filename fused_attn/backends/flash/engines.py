"""Engines of backend "flash": FlashAttention 4, 3 and 2, and torch's varlen_attn.

Each engine states its limits for a problem, and runs a call with the arguments of its own function.
All arguments are passed by keyword, because their order differs between versions. The packages are
imported by statements, which torch.compile can trace.

Sources: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3"; the Python interfaces
of flash-attn 2.8, flash-attn-3 (hopper/flash_attn_interface.py), flash-attn-4 4.0.0b36, torch 2.13.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.flash.engine_base import (
    TORCH,
    Arguments,
    Engine,
    Results,
    equal_head_dims,
    lengths_of,
    window_of,
)
from fused_attn.backends.problem import AttentionProblem


class FlashAttention4(Engine):
    """FlashAttention 4, in CuTe DSL for Hopper and Blackwell; it compiles at the first call."""

    name = "flash-attn-4"
    min_version = "4.0.0b36"
    min_capability, max_capability = (9, 0), (11, 9)
    has_lse_gradient = True
    traceable = False

    def head_dim_refusals(
        self, problem: AttentionProblem, capability: tuple[int, int] | None
    ) -> list[str]:
        sizes = problem.head_dim, problem.head_dim_v
        most = 256 if capability is None or capability[0] == 9 else 128
        fits = all(8 <= size <= most for size in sizes) or sizes in ((192, 128), (256, 256))
        if fits and not any(size % 8 for size in sizes):
            return []
        return [f"does not take head_dim {sizes[0]} with head_dim_v {sizes[1]}"]

    def function(self, name: str) -> Any:
        from flash_attn import cute

        return getattr(cute, name)

    def run(self, call: Arguments) -> Results:
        options = {**_options(call, None), "return_lse": call.want_lse}
        name = "flash_attn_func" if call.sequences is None else "flash_attn_varlen_func"
        out, lse = self.function(name)(**options, **lengths_of(call))
        return out, lse if call.want_lse else None


class FlashAttention3(Engine):
    """FlashAttention 3, for Hopper."""

    name = "flash-attn-3"
    min_version = "3.0.0b1"
    min_capability = max_capability = (9, 0)

    def function(self, name: str) -> Any:
        import flash_attn_interface

        return getattr(flash_attn_interface, name)

    def run(self, call: Arguments) -> Results:
        return _run_with_probs_flag(self, call, {})


class FlashAttention2(Engine):
    """FlashAttention 2."""

    name = "flash-attn"
    min_version = "2.6"
    has_alibi = True
    limits_right_side = True

    def head_dim_refusals(
        self, problem: AttentionProblem, capability: tuple[int, int] | None
    ) -> list[str]:
        return equal_head_dims(problem, multiple=1)

    def function(self, name: str) -> Any:
        import flash_attn

        return getattr(flash_attn, name)

    def run(self, call: Arguments) -> Results:
        out, lse = _run_with_probs_flag(self, call, {"alibi_slopes": call.slopes})
        if lse is not None:  # +inf in rows without keys
            lse = lse.masked_fill(lse == float("inf"), float("-inf"))
        return out, lse


class TorchVarlen(Engine):
    """torch's varlen_attn, with torch's build of FlashAttention 2."""

    name = TORCH
    min_version = "2.13"
    dense = False
    has_softcap = False
    limits_right_side = True

    def function(self, name: str) -> Any:
        from torch.nn.attention import varlen

        return getattr(varlen, name)

    def run(self, call: Arguments) -> Results:
        assert call.sequences is not None
        causal, window = window_of(call.left, call.right, -1)
        arguments = {
            "query": call.query,
            "key": call.key,
            "value": call.value,
            "cu_seq_q": call.sequences.cu_seqlens_q,
            "cu_seq_k": call.sequences.cu_seqlens_k,
            "max_q": call.max_seqlen_q,
            "max_k": call.max_seqlen_k,
            "scale": call.scale,
            "window_size": (-1, 0) if causal else window,  # its way to ask for a causal mask
            "enable_gqa": call.query.shape[1] != call.key.shape[1],
        }
        attend = self.function("varlen_attn")
        if not call.want_lse:
            return attend(**arguments), None
        out, lse = attend(**arguments, return_aux=self.function("AuxRequest")(lse=True))
        return out, lse.masked_fill(lse == float("inf"), float("-inf"))


# In order of preference.
_CLASSES = (FlashAttention4, FlashAttention3, FlashAttention2, TorchVarlen)
ENGINES: tuple[Engine, ...] = tuple(engine() for engine in _CLASSES)


def _options(call: Arguments, unlimited: int | None) -> dict[str, Any]:
    """Return the arguments that all versions of FlashAttention have; see `window_of`."""
    causal, window = window_of(call.left, call.right, unlimited)
    return {
        "q": call.query,
        "k": call.key,
        "v": call.value,
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size": window,
        "softcap": call.softcap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _run_with_probs_flag(engine: Engine, call: Arguments, extra: dict[str, Any]) -> Results:
    """Run FlashAttention 2 or 3, which return lse only with `return_attn_probs`."""
    options = _options(call, -1)
    name = "flash_attn_func" if call.sequences is None else "flash_attn_varlen_func"
    function = engine.function(name)
    # Early builds of flash-attn-3 have no flag, and return lse always.
    if call.want_lse and "return_attn_probs" in inspect.signature(function).parameters:
        options["return_attn_probs"] = True
    results = function(**options, **lengths_of(call), **extra)
    out, lse = (results, None) if isinstance(results, Tensor) else results[:2]
    return out, lse if call.want_lse else None
