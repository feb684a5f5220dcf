"""Fields of a MaskSpec: the dimensions of its tensors, and refusal of unknown fields.

Code outside of the kernels that reads a MaskSpec field by field calls `unknown_fields` or
`refuse_unknown_fields`: masks/spec.py (`kind`), materialize.py, restrict.py, intervals.py, band.py,
torch_arguments.py, and Triton's spec_args.py. A new field is refused there, instead of ignored,
until all of them handle it and KNOWN lists it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

Shape = tuple[int, int, int, int]  # batch, num_heads, seqlen_q, seqlen_k
# Dimensions of each tensor: b batch, h heads, q queries, k keys, w words of 64 keys, or a constant
# size. Those named by a lower-case letter may have size 1 and are then broadcast.
DIMENSIONS = {
    "bias": "bhqk",
    "dense": "bhqk",
    "key_mask": "bh1k",
    "bounds": "B8",
    "query_documents": "bQ",
    "key_documents": "bK",
    "slopes": "bH",
    "intervals": "bhQ2",
    "bits": "bhqW",
}
# Not derived from DIMENSIONS, because new tensors are listed there before all readers support them.
KNOWN = frozenset(
    (
        "bias", "bias_summary", "dense", "dense_summary", "key_mask", "bounds", "query_documents",
        "key_documents", "slopes", "intervals", "bits", "cu_seqlens_q", "cu_seqlens_k",
        "max_seqlen_q", "max_seqlen_k", "band_lo", "band_hi", "alibi_offset", "by_query", "band",
        "memo",
    )
)  # fmt: skip


def unknown_fields(spec: Any) -> list[str]:
    """Return the names of the fields that are set in a MaskSpec and are not in KNOWN."""
    defined = type(spec).__dataclass_fields__
    if len(defined) == len(KNOWN):
        return []
    others = [field for name, field in defined.items() if name not in KNOWN]
    return [field.name for field in others if _is_set(getattr(spec, field.name), field.default)]


def refuse_unknown_fields(spec: Any, what: str) -> None:
    """Raise NotImplementedError if a MaskSpec has a field that is not in KNOWN.

    Args:
        what: name of the operation that does not support the field, for the message.
    """
    names = unknown_fields(spec)
    if names:
        raise NotImplementedError(f"{what} does not support masks with {', '.join(names)}")


def _is_set(value: Any, default: Any) -> bool:
    return value is not default and (isinstance(value, Tensor) or value != default)
