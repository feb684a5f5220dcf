"""Analysis of torch.einsum equations for the two matmuls of attention."""

from __future__ import annotations

from collections.abc import Sequence

from fused_attn.integrations.inductor.scores import Arrangement

ELLIPSIS = "..."


def scores_of(equation: str, ndims: Sequence[int]) -> tuple[Arrangement, Arrangement] | None:
    """Return the arrangements that convert query and key to (*batch, seqlen, head_dim).

    Return None if the equation is not query @ key^T.

    Args:
        equation: equation of two operands, such as "bhid,bhjd->bhij". The last two dimensions of
            the result must be queries and keys.
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
    """Return the arrangement of value and the output permutation for weights @ value.

    The arrangement converts value to (*batch, seqlen_k, head_dim). The permutation converts
    (*batch, seqlen_q, head_dim) to the dimension order of the einsum. Return None if the equation
    is not weights @ value.

    Args:
        equation: equation of two operands, weights first. The last two dimensions of the weights
            must be queries and keys.
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
    """Return the dimension labels of both operands and of the result; None if not supported.

    A label is a letter, or "...i" for dimension i of an ellipsis, counted from its last dimension.
    """
    sides = equation.replace(" ", "").split("->")
    operands = sides[0].split(",")
    if len(sides) != 2 or len(operands) != 2 or len(ndims) != 2:
        return None
    # If the ellipses of the operands cover different numbers of dimensions, the shorter broadcasts.
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
