"""FLOP formulas of the registered ops, for torch.utils.flop_counter.

That module imports triton (62 MB, 0.2 s), so it is not imported here: the formulas are registered
when something else has imported it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import math
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fused_attn.base.namespace import OPS
from fused_attn.call.calls import AttentionCall

_COUNTER = "torch.utils.flop_counter"


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
    if _COUNTER in sys.modules:
        _register(importlib.import_module(_COUNTER))  # waits where another thread imports it
    else:
        sys.meta_path.insert(0, _BehindImport())


def _register(counter: ModuleType) -> None:
    if not hasattr(counter, "register_flop_formula"):  # it is what imports this package
        return
    for formula in (_attention_fwd, _attention_bwd, _attention_weights, _attention_weights_bwd):
        op = getattr(OPS, formula.__name__.removeprefix("_"))
        counter.register_flop_formula(op)(formula)


class _BehindImport(importlib.abc.MetaPathFinder):
    """Finds the counter as Python does, and registers when it has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that registers behind another, and leaves that in its place."""

    def __init__(self, loader: Any, finder: _BehindImport) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register(module)
