"""FLOP formulas of the registered ops, for torch.utils.flop_counter.

The formulas are registered when other code imports that module. It is not imported here, because it
imports triton, which takes 0.2 s and 62 MB.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from fused_attn.base.behind_import import behind_import
from fused_attn.base.namespace import OPS
from fused_attn.call.attention import AttentionCall


def _products(shapes: tuple[Any, ...]) -> tuple[int, int]:
    """Return the FLOPs of query @ key^T and of weights @ value, from the shapes of a flat call.

    A multiply-add counts as two FLOPs. Masks are ignored, as in torch's formulas for attention.
    Each packed key sequence counts with max_seqlen_k keys.
    """
    query, key, value = shapes[:3]
    seqlen_k = shapes[AttentionCall.NAMES.index("max_seqlen_k")] or key[-2]
    rows = 2 * math.prod(query[:-1]) * seqlen_k
    return rows * query[-1], rows * value[-1]


def _attention_fwd(*shapes: Any, **kwargs: Any) -> int:
    return sum(_products(shapes))


def _attention_bwd(*shapes: Any, **kwargs: Any) -> int:
    scores, output = _products(shapes)
    return 3 * scores + 2 * output


def _attention_weights(*shapes: Any, **kwargs: Any) -> int:
    return _products(shapes)[0]


def _attention_weights_bwd(*shapes: Any, **kwargs: Any) -> int:
    return 3 * _products(shapes)[0]


def register() -> None:
    """Register the formulas, now or when torch.utils.flop_counter is imported."""
    behind_import("torch.utils.flop_counter", _register)


def _register(counter: ModuleType) -> None:
    if not hasattr(counter, "register_flop_formula"):  # partially initialized: circular import
        return
    for formula in (_attention_fwd, _attention_bwd, _attention_weights, _attention_weights_bwd):
        op = getattr(OPS, formula.__name__.removeprefix("_"))
        counter.register_flop_formula(op)(formula)
