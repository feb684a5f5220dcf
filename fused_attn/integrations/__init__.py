"""Integrations with libraries that define their own attention interface; imported on demand."""

from __future__ import annotations

import contextlib
from typing import Any

from fused_attn.base.behind_import import behind_import


def register_with_transformers() -> None:
    """Make "fused_attn" a valid attn_implementation as soon as transformers loads its models.

    This does not import transformers. An existing registration of the name is left alone, such as
    that of another copy of this package, from Hugging Face's Hub.
    """
    behind_import("transformers.modeling_utils", _register)


def _register(modeling_utils: Any) -> None:
    from fused_attn.integrations import transformers

    # An incompatible transformers release must still import; calling transformers.register()
    # directly raises the error.
    with contextlib.suppress(Exception):
        if transformers.NAME not in modeling_utils.ALL_ATTENTION_FUNCTIONS:
            transformers.register()
