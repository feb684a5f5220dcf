"""Tensor layouts: the strides that kernels read without a copy, and the strides of outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import SymInt, Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
EMPTY_LAYOUT: Layout = ((0,), (1,))
_SHORT_ROW, _PAGE = 128, 4096  # bytes; see `rows_in_place`
_MAX_ROWS = 1 << 31  # maximum number of rows that norm kernels address by two strides


def kernel_strides(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last stride is not 1 or its negative bit is set."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return (tensor if dense else tensor.contiguous()).resolve_neg()


def rows_in_place(tensor: Tensor) -> Tensor:
    """Return a (*, columns) tensor as a view that norm kernels can read, or as a copy.

    The result is (columns,), (rows, columns) or (runs, rows, columns), with last stride 1 and
    arbitrary other strides. If the tensor has four or more dimensions, leading dimensions are
    merged where their strides allow it. The tensor is copied in four cases:

    - more than two leading dimensions remain;
    - the last stride is not 1;
    - two leading dimensions have more rows than kernels can address;
    - rows are shorter than 128 bytes and at least 4096 bytes (a page) apart. Reading such rows in
      place takes up to 1.5 times as long (bfloat16, 512 x 512 rows of 32 elements).

    csrc/bind_norm.h implements the same rule.
    """
    strides = tensor.stride()
    *leading, columns = tensor.shape
    if leading and (
        (columns * tensor.itemsize < _SHORT_ROW and strides[-2] * tensor.itemsize >= _PAGE)
        or (len(leading) > 1 and math.prod(leading) > _MAX_ROWS)
    ):
        return tensor.contiguous().reshape(math.prod(leading), columns)
    if strides[-1] == 1 and len(strides) <= 3:
        return tensor
    dense = strides[-1] == 1 or columns == 1
    steps: list[tuple[int, int]] = []  # sizes and strides, innermost first
    for size, stride in zip(reversed(leading), strides[-2::-1], strict=True) if dense else ():
        if steps and stride == math.prod(steps[-1]):
            steps[-1] = (steps[-1][0] * size, steps[-1][1])
        elif size != 1:
            steps.append((size, stride))
    if 1 <= len(steps) <= 2:
        sizes, strides = zip(*reversed(steps), strict=True)
        return tensor.as_strided((*sizes, columns), (*strides, 1))
    return tensor.contiguous().reshape(math.prod(leading), columns)


def contiguous(shape: Sequence[int]) -> Layout:
    """Return the contiguous (row-major) layout of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(shape), tuple(reversed(strides))


def laid_out_like(like: Tensor, shape: tuple[int, ...]) -> Layout:
    """Return a dense layout of `shape` whose dimensions are ordered in memory as those of `like`.

    The last dimension is always innermost. This is torch's rule for the output of SDPA. The output
    for a contiguous query is contiguous. For a query that is a transposed (batch, seqlen,
    num_heads, head_dim) tensor, the output has the same order, so the output projection reads it
    without a copy. csrc/bind_attention.h implements the same rule.

    Allocate the output with these strides instead of transposing a contiguous tensor: autograd
    restricts in-place operations on views.
    """
    batch, heads, rows, last = strides = like.stride()
    if type(last) is not int or last != 1:
        return contiguous(shape)  # kernels read a contiguous copy of `like` (see `kernel_strides`)
    if type(batch) is type(heads) is type(rows) is int:
        _, num_heads, seqlen, dim = shape
        if batch >= heads >= rows:
            return shape, (num_heads * seqlen * dim, seqlen * dim, dim, 1)
        if batch >= rows >= heads > 0:
            return shape, (seqlen * num_heads * dim, dim, num_heads * dim, 1)
    order = [0, 1, 2, 3]
    for i in (0, 1, 0):  # bubble sort of the three leading dimensions
        if _is_inner(strides[order[i]], strides[order[i + 1]]):
            order[i], order[i + 1] = order[i + 1], order[i]
    _, steps = contiguous([shape[dim] for dim in order])
    return shape, tuple(steps[order.index(dim)] for dim in range(4))


def _is_inner(stride: int | SymInt, other: int | SymInt) -> bool:
    """Return True if the first stride is nonzero and smaller than the second.

    The result is False for a stride of 0 (expanded dimension), and for symbolic strides whose order
    is not statically known, because comparing them would add a guard.
    """
    if isinstance(stride, int) and isinstance(other, int):
        return 0 < stride < other
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(stride > 0) and statically_known_true(stride < other)
