"""FLOP formulas of the registered ops, for torch.utils.flop_counter.

That module imports triton (62 MB, 0.2 s), so it is not imported here: the formulas are registered
when something else has imported it.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from fused_attn.base.behind_import import behind_import
from fused_attn.base.namespace import OPS
from fused_attn.call.calls import AttentionCall


def _products(shapes: tuple[Any, ...]) -> tuple[int, int]:
    """Multiply-adds times two of one query @ key^T and one weights @ value, of a flat call.

    The count of the unmasked problem, as torch's formulas for attention have it; of packed
    sequences as if all keys' sequences were as long as the longest.
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
    """Gives the formulas to torch: now, or as soon as its counter is imported."""
    behind_import("torch.utils.flop_counter", _register)


def _register(counter: ModuleType) -> None:
    if not hasattr(counter, "register_flop_formula"):  # it is what imports this package
        return
    for formula in (_attention_fwd, _attention_bwd, _attention_weights, _attention_weights_bwd):
        op = getattr(OPS, formula.__name__.removeprefix("_"))
        counter.register_flop_formula(op)(formula)
