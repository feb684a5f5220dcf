"""Fields of a MaskSpec: the dimensions of its tensors, and refusal of fields that are not known.

Code outside the kernels that reads a MaskSpec field by field lists the fields that it knows. A new
field is refused there until it is handled, instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

# Dimensions of each tensor: b batch, h heads, q queries, k keys, and "." for any other. Those of
# size 1 broadcast, except in bounds.
TENSORS = {
    "bias": "bhqk",
    "dense": "bhqk",
    "key_mask": "bhqk",
    "bounds": "b.",
    "query_documents": "bq",
    "key_documents": "bk",
    "slopes": "bh",
}


def unknown_fields(spec: Any, known: Collection[str]) -> list[str]:
    """Return the fields that are set in a MaskSpec and are not among the known ones.

    Args:
        known: names of fields of MaskSpec.
    """
    defined = type(spec).__dataclass_fields__
    if len(defined) == len(known):
        return []
    others = [field for name, field in defined.items() if name not in known]
    return [field.name for field in others if _is_set(getattr(spec, field.name), field.default)]


def refuse_unknown_fields(spec: Any, known: Collection[str], what: str) -> None:
    """Raise NotImplementedError if a MaskSpec has a field that is not among the known ones.

    Args:
        what: what cannot be computed without the field, for the message.
    """
    names = unknown_fields(spec, known)
    if names:
        raise NotImplementedError(f"{what} does not support {', '.join(names)} of a mask")


def _is_set(value: Any, default: Any) -> bool:
    return value is not default and (isinstance(value, Tensor) or value != default)
