"""Integrations with torch and other libraries; the submodules are imported on demand."""

from __future__ import annotations

import contextlib
from typing import Any

from fused_attn.base.behind_import import behind_import


def register_with_transformers() -> None:
    """Register "fused_attn" as an attn_implementation as soon as transformers loads its models.

    This function does not import transformers. It does not overwrite an existing registration, such
    as that of another copy of this package from Hugging Face's Hub.
    """
    behind_import("transformers.modeling_utils", _register)


def _register(modeling_utils: Any) -> None:
    from fused_attn.integrations import transformers

    # Errors are suppressed, because transformers must remain importable if its release is
    # incompatible. A direct call of `transformers.register()` of this package raises them.
    with contextlib.suppress(Exception):
        if transformers.NAME not in modeling_utils.ALL_ATTENTION_FUNCTIONS:
            transformers.register()
