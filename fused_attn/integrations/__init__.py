"""Glue to libraries that have their own way of calling attention; imported only on demand."""

from __future__ import annotations

import contextlib
from types import ModuleType

from fused_attn.base.behind_import import behind_import


def register_with_transformers() -> None:
    """Make "fused_attn" a name for attn_implementation, as soon as transformers loads its models.

    transformers itself is not imported by this.
    """
    behind_import("transformers.modeling_utils", _register)


def _register(module: ModuleType) -> None:
    from fused_attn.integrations import transformers

    # A release that this package cannot work with must not fail to be imported: a call of
    # transformers.register() says what is wrong.
    with contextlib.suppress(Exception):
        transformers.register()
