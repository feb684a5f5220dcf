"""Error messages for keyword arguments that have another name in other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

_REPLACEMENTS = {
    "softmax_scale": "scale=",
    "causal": "is_causal=, or attn_mask=masks.causal(align=...)",
    "window_size": 'attn_mask=masks.sliding_window(left, right, align="bottom_right")',
    "alibi_slopes": 'attn_mask=masks.alibi(slopes, align="bottom_right")',
    "mask": "attn_mask=",
    "attn_bias": "attn_mask=",
    "key_padding_mask": "attn_mask=masks.padding(lengths)",
    "block_mask": "attn_mask= with a function of fused_attn.masks",
    "cache_seqlens": "decode_attention(..., cache_lengths=...)",
    "page_table": "decode_attention(..., block_table=...)",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    "s_aux": "sinks=",
    "return_attn_probs": "return_lse=",
    "return_softmax_lse": "return_lse=",
}


def refuse(function: str, names: Iterable[str]) -> NoReturn:
    """Raise TypeError for an unexpected keyword argument, and suggest its replacement if known."""
    name = next(iter(names))
    hint = f"; use {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
