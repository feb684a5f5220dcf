"""FLOP formulas of the registered ops, for torch.utils.flop_counter.

That module imports triton (62 MB, 0.2 s), so it is not imported here. The formulas are registered
when something else imports it.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from fused_attn.base.behind_import import behind_import
from fused_attn.base.namespace import OPS
from fused_attn.call.calls import AttentionCall


def _products(shapes: tuple[Any, ...]) -> tuple[int, int]:
    """Return the FLOPs of one query @ key^T and of one weights @ value, for a flat call.

    Masks are ignored, as in torch's formulas for attention. Packed key sequences all count as long
    as the longest. A multiply-add is two FLOPs.
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
    """Register the formulas with torch: now, or as soon as its counter is imported."""
    behind_import("torch.utils.flop_counter", _register)


def _register(counter: ModuleType) -> None:
    if not hasattr(counter, "register_flop_formula"):  # circular import from the counter
        return
    for formula in (_attention_fwd, _attention_bwd, _attention_weights, _attention_weights_bwd):
        op = getattr(OPS, formula.__name__.removeprefix("_"))
        counter.register_flop_formula(op)(formula)
