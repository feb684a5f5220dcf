"""FLOP formulas of the registered ops, for torch.utils.flop_counter.

They are registered after another module imports torch.utils.flop_counter. Importing it here would
import triton, which takes 0.2 s and 62 MB.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

from fused_attn.base.behind_import import behind_import
from fused_attn.base.namespace import OPS
from fused_attn.call.attention import AttentionCall

# Number of matmuls of the size of query @ key^T, and of weights @ value, in each op.
_PRODUCTS = {
    "attention_fwd": (1, 1),
    "attention_bwd": (3, 2),
    "attention_weights": (1, 0),
    "attention_weights_bwd": (3, 0),
}


def _flops(scores: int, output: int, *shapes: Any, **kwargs: Any) -> int:
    """Return the FLOPs of an op from the shapes of a flat call and its `_PRODUCTS`.

    A multiply-add counts as two FLOPs. Masks are ignored, as in torch's formulas for attention.
    Each packed key sequence counts with max_seqlen_k keys.
    """
    query, key, value = shapes[:3]
    seqlen_k = shapes[AttentionCall.NAMES.index("max_seqlen_k")] or key[-2]
    return 2 * math.prod(query[:-1]) * seqlen_k * (scores * query[-1] + output * value[-1])


def register() -> None:
    """Register the formulas, now or when torch.utils.flop_counter is imported."""
    behind_import("torch.utils.flop_counter", _register)


def _register(counter: ModuleType) -> None:
    if not hasattr(counter, "register_flop_formula"):  # partially initialized: circular import
        return
    for name, products in _PRODUCTS.items():
        counter.register_flop_formula(getattr(OPS, name))(functools.partial(_flops, *products))
