"""fused_attn as an attention implementation of Hugging Face transformers.

`import fused_attn` makes "fused_attn" a valid ``attn_implementation`` in ``from_config``,
``from_pretrained`` and ``set_attn_implementation``. `register()` is called when transformers loads
``modeling_utils``.

    models.py          which models are supported, and how to switch a model
    attention.py       the attention function that each layer calls
    packed.py          arguments of the attention for packed tokens
    mask_functions.py  the mask function that the library calls once for each kind of layer
    model_mask.py      the tensor stand-in for a Mask that is passed through the model
    encoders.py        BERT-like encoders that remove padding
    by_code.py         modules that `swap_modules` recognizes by their bytecode
    norms.py           replacements for RMS norms
    rotary.py          fused rotary embeddings in attention modules
    blocks.py          replacements for the feed-forward and residual blocks of BERT layers

Example:
    >>> import fused_attn
    >>> model = AutoModel.from_pretrained(name, attn_implementation="fused_attn")
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "fused_attn"  # name of the attention implementation

# Maps each public name to the file that defines it. Names are imported on first access, because
# these files import transformers.
_HOMES = {
    "attention_forward": "attention",
    "attention_mask": "mask_functions",
    "padded_stacks": "models",
    "register": "models",
    "set_implementation": "models",
    "unsupported": "models",
    "use_fused_attention": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
