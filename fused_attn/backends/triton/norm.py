"""Forward and backward kernels of layer_norm and rms_norm of residual + dropout(input).

A program processes (BLOCK_ROWS, BLOCK_COLS) tiles, which contain full rows if these fit in
registers, and chunks of rows otherwise. The first chunk of a row stays in registers. With a single
chunk, the loops over the remaining chunks compile to no code. COLUMNS is a compile-time constant,
so that any row whose size is a multiple of 16 bytes is read with 16-byte loads.

Sources: Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4. Welford 1962 and Chan et
al. 1983, equation 2.1, for the variance of chunked rows.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_attn.backends.triton.philox import keep_tile


class Dropout(NamedTuple):
    """Dropout seed, threshold and scale."""

    seed: Any  # () int64
    threshold: int  # from `dropout_threshold`
    scale: float  # factor of the elements that dropout keeps


class Runs(NamedTuple):
    """Equally long runs of rows. The Philox row counter of each run starts at its offset."""

    offsets: Any  # (runs,) int64: global index of the first row of each run
    length: int  # rows per run


class Matrix(NamedTuple):
    """Non-contiguous input matrix with equally long runs of rows. Strides are in elements."""

    data: Any
    run_length: int  # rows per run
    run_stride: int  # between the first rows of two runs
    row_stride: int  # between rows of a run


class Tile(NamedTuple):
    """Indices of the elements of an (M, N) tile in a matrix."""

    row: Any  # (M, 1) row indices
    exists: Any  # (M, 1) bool: the row is inside the matrix
    start: Any  # index of the first column, a multiple of eight
    column: Any  # (1, N) column indices
    offset: Any  # (M, N) int64: offsets of the elements in a contiguous matrix
    inside: Any  # (M, N) bool: row and column are inside the matrix
    in_row: Any  # (1, N) bool: the column is inside the matrix


@triton.jit(do_not_specialize=["rows"])
def norm_fwd_kernel(
    input,
    residual,
    weight,
    bias,
    dropout,
    runs,
    out,
    total,
    mean,
    rstd,
    rows,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Compute norm(residual + dropout(input)), the sum itself, and its row statistics.

    Args:
        input, residual, out, total: (rows, COLUMNS). input and residual may be a Matrix. residual
            may be None. total is None if it equals input.
        weight, bias: (COLUMNS,) or None.
        dropout: Dropout or None.
        runs: Runs, or None if Philox counters use the row index itself.
        mean, rstd: (rows,) float32. mean is None for rms_norm.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    tile = _tile(row, 0, rows, COLUMNS, BLOCK_COLS)
    x = _sum_tile(input, residual, dropout, runs, total, tile)

    # For each position of the tile: the mean over the chunks, and the sum of squared deviations
    # from it. rms_norm has no mean, so its deviations are from 0.
    center = x
    squares = x * x if mean is None else tl.zeros_like(x)
    for start in range(BLOCK_COLS, COLUMNS, BLOCK_COLS):
        chunk = _tile(row, start, rows, COLUMNS, BLOCK_COLS)
        y = _sum_tile(input, residual, dropout, runs, total, chunk)
        if mean is None:
            squares += y * y
        else:
            step = tl.where(chunk.in_row, y - center, 0.0)
            center += step * (BLOCK_COLS / (start + BLOCK_COLS))
            squares += step * (y - center)
    if mean is None:
        row_mean = 0.0
    else:
        count = tl.cdiv(COLUMNS - tile.column, BLOCK_COLS).to(tl.float32)
        row_mean = tl.sum(center * count, 1, keep_dims=True) / COLUMNS
        off = center - row_mean
        squares += count * off * off
        tl.store(mean + row, row_mean, mask=row < rows)
    # Correctly rounded, because it is computed once per row and multiplies every element.
    variance = tl.sum(squares, 1, keep_dims=True) / COLUMNS
    row_rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(rstd + row, row_rstd, mask=row < rows)

    _store_normalized(x, row_mean, row_rstd, weight, bias, out, tile)
    if COLUMNS > BLOCK_COLS:
        tl.debug_barrier()  # elements of total that other threads wrote are read next
    for start in range(BLOCK_COLS, COLUMNS, BLOCK_COLS):
        chunk = _tile(row, start, rows, COLUMNS, BLOCK_COLS)
        y = _load_tile(input if total is None else total, chunk)
        _store_normalized(y, row_mean, row_rstd, weight, bias, out, chunk)


@triton.jit(do_not_specialize=["rows"])
def norm_bwd_kernel(
    grad_out,
    grad_total,
    total,
    weight,
    mean,
    rstd,
    dropout,
    runs,
    grad_input,
    grad_residual,
    weight_sums,
    bias_sums,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Compute the gradients of input and residual, and partial sums for those of weight and bias.

    With x the normalized row and g = weight * grad_out:
        grad_residual = rstd (g - mean(g) - x mean(g x)) + grad_total, without mean(g) for rms_norm.

    Args:
        grad_out, grad_total, total, grad_input, grad_residual: (rows, COLUMNS). The first three may
            be a Matrix. grad_total may be None. grad_input is None without dropout, because it then
            equals grad_residual.
        weight_sums, bias_sums: (programs, COLUMNS) float32, or None if not requested. The rows of a
            program depend only on shapes and the grid, and each program has at least one row.
        others: as in `norm_fwd_kernel`.
    """
    first = tl.program_id(0) * BLOCK_ROWS
    columns = _tile(first, 0, rows, COLUMNS, BLOCK_COLS)
    w = _load_parameter(weight, columns)
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for begin in range(first, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = begin + tl.arange(0, BLOCK_ROWS)
        # Load vectors: a thread would load an (M, 1) tensor once per column that it holds.
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        row_mean = 0.0
        if mean is not None:
            row_mean = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        row = row[:, None]
        tile = _tile(row, 0, rows, COLUMNS, BLOCK_COLS)
        x = (_load_tile(total, tile) - row_mean) * row_rstd
        grad = _load_tile(grad_out, tile)
        weight_sum += grad * x
        bias_sum += grad
        g = grad * w

        along, across = g * x, g
        for start in range(BLOCK_COLS, COLUMNS, BLOCK_COLS):
            chunk = _tile(row, start, rows, COLUMNS, BLOCK_COLS)
            h = _load_tile(grad_out, chunk) * _load_parameter(weight, chunk)
            along += h * (_load_tile(total, chunk) - row_mean) * row_rstd
            across += h
        along = tl.sum(along, 1, keep_dims=True) / COLUMNS
        across = 0.0 if mean is None else tl.sum(across, 1, keep_dims=True) / COLUMNS

        g = row_rstd * (g - across - x * along)
        _store_gradients(g, grad_total, dropout, runs, grad_input, grad_residual, tile)
        for start in range(BLOCK_COLS, COLUMNS, BLOCK_COLS):
            chunk = _tile(row, start, rows, COLUMNS, BLOCK_COLS)
            y = (_load_tile(total, chunk) - row_mean) * row_rstd
            h = _load_tile(grad_out, chunk)
            _add_up(weight_sums, h * y, chunk, begin > first, COLUMNS)
            _add_up(bias_sums, h, chunk, begin > first, COLUMNS)
            h *= _load_parameter(weight, chunk)
            h = row_rstd * (h - across - y * along)
            _store_gradients(h, grad_total, dropout, runs, grad_input, grad_residual, chunk)
        if COLUMNS > BLOCK_COLS:
            tl.debug_barrier()  # sums that other threads wrote are read next
    _add_up(weight_sums, weight_sum, columns, False, COLUMNS)
    _add_up(bias_sums, bias_sum, columns, False, COLUMNS)


@triton.jit
def _tile(row, start, rows, COLUMNS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    column = start + tl.arange(0, BLOCK_COLS)[None, :]
    in_row = column < COLUMNS
    offset = tl.cast(row, tl.int64) * COLUMNS + column
    exists = row < rows
    return Tile(row, exists, start, column, offset, exists & in_row, in_row)


@triton.jit
def _sum_tile(input, residual, dropout, runs, total, tile):
    """Return residual + dropout(input) in float32, and store it in `total` unless that is None.

    Elements outside the matrix are 0. If the sum is stored, the stored, rounded values are
    returned, because the backward reads those.
    """
    x = _load_tile(input, tile)
    if dropout is not None:
        x = _dropped(x, dropout, runs, tile)
    if residual is not None:
        x += _load_tile(residual, tile)
    if total is not None:
        x = x.to(total.dtype.element_ty)
        tl.store(total + tile.offset, x, mask=tile.inside)
    return x.to(tl.float32)


@triton.jit
def _store_normalized(x, mean, rstd, weight, bias, out, tile):
    y = (x - mean) * rstd * _load_parameter(weight, tile)
    if bias is not None:
        y += _load_parameter(bias, tile)
    tl.store(out + tile.offset, y, mask=tile.inside)


@triton.jit
def _store_gradients(grad, grad_total, dropout, runs, grad_input, grad_residual, tile):
    if grad_total is not None:
        grad += _load_tile(grad_total, tile)
    tl.store(grad_residual + tile.offset, grad, mask=tile.inside)
    if dropout is not None:
        grad = _dropped(grad, dropout, runs, tile)
        tl.store(grad_input + tile.offset, grad, mask=tile.inside)


@triton.jit
def _dropped(x, dropout, runs, tile):
    octet = tile.start // 8 + tl.arange(0, x.shape[1] // 8)[None, :]
    row = tile.row
    if runs is not None:
        first = tl.load(runs.offsets + row // runs.length, mask=tile.exists, other=0)
        row = first.to(tl.int32) + row % runs.length
    keep = keep_tile(tl.load(dropout.seed), row, octet, 0, 1, dropout.threshold)
    return tl.where(keep, x * dropout.scale, 0.0)


@triton.jit
def _load_tile(matrix, tile):
    """Load an (M, N) tile as float32. Elements outside the matrix are 0."""
    if isinstance(matrix, tl.tensor):
        at = matrix + tile.offset
    else:
        run, row = tile.row // matrix.run_length, tile.row % matrix.run_length
        first = run.to(tl.int64) * matrix.run_stride + row.to(tl.int64) * matrix.row_stride
        at = matrix.data + (first + tile.column)
    return tl.load(at, mask=tile.inside, other=0.0).to(tl.float32)


@triton.jit
def _load_parameter(parameter, tile):
    """Load weight or bias as float32 (1, N), or return 1 if it is None."""
    values = 1.0
    if parameter is not None:
        values = tl.load(parameter + tile.column, mask=tile.in_row, other=0.0).to(tl.float32)
    return values


@triton.jit
def _add_up(sums, terms, tile, begun, COLUMNS: tl.constexpr):
    """Add the sum of the rows of terms (M, N) to the partial sums of this program.

    The partial sums are overwritten unless `begun`.
    """
    if sums is not None:
        at = sums + tl.program_id(0).to(tl.int64) * COLUMNS + tile.column
        before = tl.load(at, mask=tile.in_row & begun, other=0.0)
        tl.store(at, before + tl.sum(terms, 0, keep_dims=True), mask=tile.in_row)
