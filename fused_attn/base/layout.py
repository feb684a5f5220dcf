"""The layouts of tensors: what kernels read in place, and how their results lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import SymInt, Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
NOTHING: Layout = ((0,), (1,))
_SHORT_ROW, _PAGE = 128, 4096  # bytes
_MAX_ROWS = 1 << 31  # of rows that two strides lead to


def kernel_strides(tensor: Tensor) -> Tensor:
    """Kernels read any strides whose last one is 1, and no lazy negation; others are copied."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return (tensor if dense else tensor.contiguous()).resolve_neg()


def rows_in_place(tensor: Tensor) -> Tensor:
    """(*, columns) as kernels of norms read it: as (columns,), (rows, columns) or (runs, rows,
    columns), each with any strides but for the last one, which is 1.

    Of four and more dimensions the leading ones become one where they lie as one. All is copied
    where more than two are left, where columns are apart, where two strides lead to more rows than
    kernels count, and where rows are short and each is in a page of its own, which takes up to 1.5
    times as long in place (bfloat16, 512 x 512 rows of 32). csrc/bind_norm.h has the rule too.
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
    steps: list[tuple[int, int]] = []  # sizes and strides, the innermost first
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
    """The layout of rows one behind the other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(shape), tuple(reversed(strides))


def laid_out_like(like: Tensor, shape: tuple[int, ...]) -> Layout:
    """A dense layout whose dimensions lie in the order of those of `like`, the last one innermost.

    That is torch's rule for attention: a contiguous query gives a contiguous output, and one that
    is a transpose of (batch, seqlen, num_heads, dim) gives the same, which the projection that
    follows reads without a copy. csrc/bind_attention.h has the rule too.

    These are strides for a fresh tensor, not a transpose of one: that would be a view to autograd,
    which restricts in-place operations on it.
    """
    batch, heads, rows, last = strides = like.stride()
    if type(last) is not int or last != 1:
        return contiguous(shape)  # as the copy is that kernels read
    if type(batch) is type(heads) is type(rows) is int:
        _, num_heads, seqlen, dim = shape
        if batch >= heads >= rows:
            return shape, (num_heads * seqlen * dim, seqlen * dim, dim, 1)
        if batch >= rows >= heads > 0:
            return shape, (seqlen * num_heads * dim, dim, num_heads * dim, 1)
    order = [0, 1, 2, 3]
    for i in (0, 1, 0):  # three comparisons sort three
        if _lies_inside(strides[order[i]], strides[order[i + 1]]):
            order[i], order[i + 1] = order[i + 1], order[i]
    _, steps = contiguous([shape[dim] for dim in order])
    return shape, tuple(steps[order.index(dim)] for dim in range(4))


def _lies_inside(stride: int | SymInt, other: int | SymInt) -> bool:
    """True if a dimension's stride puts it within another one that stands behind it in the shape.

    An expanded dimension stays where it is, and so does one of which sizes as symbols say nothing:
    no guard may come of the question.
    """
    if isinstance(stride, int) and isinstance(other, int):
        return 0 < stride < other
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

    return statically_known_true(stride > 0) and statically_known_true(stride < other)
