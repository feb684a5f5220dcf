"""Analysis of the two products of attention when written with torch.einsum."""

from __future__ import annotations

from collections.abc import Sequence

from fused_attn.integrations.inductor.scores import Arrangement

ELLIPSIS = "..."


def scores_of(equation: str, ndims: Sequence[int]) -> tuple[Arrangement, Arrangement] | None:
    """Return the arrangements of query and key as (*batch, seqlen, head_dim).

    None if the equation is not query @ key^T.

    Args:
        equation: with two operands, such as "bhid,bhjd->bhij". The last two dimensions of the
            result must be queries and keys.
        ndims: number of dimensions of each operand.
    """
    letters = _letters(equation, ndims)
    if letters is None:
        return None
    query, key, out = letters
    summed = set(query) & set(key) - set(out)
    if len(summed) != 1 or len(out) < 2:
        return None
    row, column = out[-2:]
    if row in key or row not in query or column in query or column not in key:
        return None
    batch = out[:-2]
    if set(query) | set(key) != {*out, *summed}:
        return None
    width = summed.pop()
    return _arranged(query, [*batch, row, width]), _arranged(key, [*batch, column, width])


def output_of(equation: str, ndims: Sequence[int]) -> tuple[Arrangement, tuple[int, ...]] | None:
    """Return the arrangement of the values in weights @ value, and the permutation of the result.

    The values become (*batch, seqlen_k, head_dim); the permutation maps (*batch, seqlen_q,
    head_dim) to the result's order. None if the equation is not weights @ value.

    Args:
        equation: with the weights first; their last two dimensions must be queries and keys.
        ndims: number of dimensions of each operand.
    """
    letters = _letters(equation, ndims)
    if letters is None:
        return None
    weights, value, out = letters
    if len(weights) < 2:
        return None
    batch, row, column = weights[:-2], weights[-2], weights[-1]
    width = [letter for letter in value if letter not in weights]
    if column not in value or row in value or len(width) != 1:
        return None
    own = [*batch, row, *width]
    if set(out) != set(own):
        return None
    return _arranged(value, [*batch, column, *width]), tuple(own.index(letter) for letter in out)


def _letters(equation: str, ndims: Sequence[int]) -> tuple[list[str], list[str], list[str]] | None:
    """Return the dimensions of both operands and the result, each as its letter or "...0"."""
    sides = equation.replace(" ", "").split("->")
    operands = sides[0].split(",")
    if len(sides) != 2 or len(operands) != 2 or len(ndims) != 2:
        return None
    # An ellipsis covers the same number of dimensions in both operands, or the shorter broadcasts.
    hidden = [n - len(o.replace(ELLIPSIS, "")) for o, n in zip(operands, ndims, strict=True)]
    first, second = (_split(o, n) for o, n in zip(operands, hidden, strict=True))
    out = _split(sides[1], max(hidden))
    if any(len(set(part)) != len(part) for part in (first, second, out)):
        return None
    return first, second, out


def _split(text: str, hidden: int) -> list[str]:
    before, ellipsis, after = text.partition(ELLIPSIS)
    middle = [f"{ELLIPSIS}{i}" for i in reversed(range(hidden))] if ellipsis else []
    return [*before, *middle, *after]


def _arranged(letters: list[str], wanted: list[str]) -> Arrangement:
    permutation = tuple(letters.index(letter) for letter in wanted if letter in letters)
    return permutation, tuple(i for i, w in enumerate(wanted) if w not in letters)
