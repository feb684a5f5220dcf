"""Arguments of varlen_attention for layers of transformers models that run on packed tokens.

- Encoders pack padded batches (encoders.py).
- In continuous batching, `model.generate_batch`, the new tokens of all requests are packed into one
  sequence. Before each attention, the paged cache of transformers stores their keys and values, and
  returns the packed keys and values of all tokens that the requests attend to. Nothing is padded,
  and no mask tensor is made.
"""

from __future__ import annotations

import functools
from typing import Any

from fused_attn import masks
from fused_attn.base.torch_state import is_compiling
from fused_attn.masks import Mask
from fused_attn.nn.packing import Packing

PACKING = "fused_attn_packing"  # keyword argument that passes a Packing to the attention
# All layers and steps share one Mask, because it caches data for the kernels.
_window, _everything = functools.cache(masks.sliding_window), functools.cache(Mask)


def encoder_arguments(
    packing: Packing, mask: Any, window: int | None, refused: dict[str, bool]
) -> dict[str, Any]:
    """Return the arguments of varlen_attention for a layer of a PackedModel.

    Args:
        packing: the packing of the batch.
        mask: the Mask that transformers made for the packed batch, or None. In a compiled graph, it
            is a dense tensor, which is not read.
        window: the sliding_window of the layer, as for flash-attn: the number of keys on each side
            of a query, plus one. None means no limit.
        refused: unsupported features by name; True for those that the layer uses.
    """
    names = [name for name, given in refused.items() if given]
    own = _everything() if window is None else _window(window - 1, window - 1)
    if mask is not None and not is_compiling():
        known = isinstance(mask, Mask) and not mask.tensors()
        if not known or mask.conditions() != own.conditions():
            names.append("masks other than windows")
    if names:
        raise NotImplementedError(
            f"fused_attn cannot pack padded batches of models with {', '.join(names)}: pass "
            "remove_padding=False to swap_modules"
        )
    return packing.varlen_arguments() | {"attn_mask": own}


def batching_arguments(
    kwargs: dict[str, Any], window: int | None, refused: dict[str, Any]
) -> dict[str, Any] | None:
    """Return arguments of varlen_attention for a layer; None outside of continuous batching.

    Args:
        kwargs: the keyword arguments that transformers passes to the attention of the layer.
        window: number of keys that a query attends to, including its token; None means all.
        refused: arguments of the layer by name, which must be None.
    """
    if kwargs.get("write_index") is None:
        return None
    refused = {**refused, "block_table": kwargs.get("block_table")}
    for name, argument in refused.items():
        if argument is not None:
            raise NotImplementedError(
                f"fused_attn does not support {name} in continuous batching of transformers"
            )
    return {
        "cu_seqlens_q": kwargs["cu_seq_lens_q"],
        "cu_seqlens_k": kwargs["cu_seq_lens_k"],
        "max_seqlen_q": kwargs["max_length_q"],
        "max_seqlen_k": kwargs["max_length_k"],
        # The queries are the newest tokens of their sequences.
        "attn_mask": _window(-1 if window is None else window - 1, 0, "bottom_right"),
    }
