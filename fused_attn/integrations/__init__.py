"""Glue to libraries that have their own way of calling attention; imported only on demand."""

from __future__ import annotations

import contextlib
from typing import Any

from fused_attn.base.behind_import import behind_import


def register_with_transformers() -> None:
    """Make "fused_attn" a name for attn_implementation, as soon as transformers loads its models.

    transformers itself is not imported by this. A name that is taken stays with whoever took it,
    such as another copy of this package, from Hugging Face's Hub.
    """
    behind_import("transformers.modeling_utils", _register)


def _register(modeling_utils: Any) -> None:
    from fused_attn.integrations import transformers

    # A release that this package cannot work with must not fail to be imported: a call of
    # transformers.register() says what is wrong.
    with contextlib.suppress(Exception):
        if transformers.NAME not in modeling_utils.ALL_ATTENTION_FUNCTIONS:
            transformers.register()
