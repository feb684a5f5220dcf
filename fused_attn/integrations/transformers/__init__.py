"""fused_attn as an attention implementation of Hugging Face transformers.

`import fused_attn` makes "fused_attn" a name for ``attn_implementation`` in ``from_config``,
``from_pretrained`` and ``set_attn_implementation``, by `register()`.

    models.py        which models take it, and how they are switched to it
    attention.py     the attention of each layer
    masks.py         the mask that the library asks for once a forward pass
    model_mask.py    what stands for it in the model: a tensor, to all but the attention
    encoders.py      encoders that drop padding, of BERT and its like
    by_code.py       modules that `swap_modules` swaps, known by their code:
    norms.py         RMS norms, and
    blocks.py        what is beside attention in BERT's layers

Example:
    >>> import fused_attn
    >>> model = AutoModel.from_pretrained(name, attn_implementation="fused_attn")
"""

from __future__ import annotations

import importlib
from typing import Any

# Where each public name is defined. They are imported when they are asked for: that imports
# transformers, which encoders.py, that the rest of the package asks, does without.
_HOMES = {
    "NAME": "encoders",
    "attention_forward": "attention",
    "attention_mask": "masks",
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
