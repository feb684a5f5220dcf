"""Host code of the Triton norm kernels: arguments, workspaces and launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fused_attn.backends.triton.launch import Arch, arch_of, launch
from fused_attn.backends.triton.norm import Dropout, Matrix, Runs, norm_bwd_kernel, norm_fwd_kernel
from fused_attn.base.layout import rows_in_place
from fused_attn.base.philox import dropout_scale, dropout_threshold
from fused_attn.call.norm import NormBackward, NormCall, NormGradients, NormOutputs


def norm_fwd(call: NormCall, outputs: NormOutputs) -> None:
    """Compute a norm, and write the results to `outputs`."""
    input, rows, columns = call.input, call.rows, call.input.shape[-1]
    config = _config(columns, FWD_LIMITS, arch_of(input.device))
    launch(
        norm_fwd_kernel,
        input.device,
        (triton.cdiv(rows, config.block_rows),),
        _matrix(input),
        _matrix(call.residual),
        _contiguous(call.weight),
        _contiguous(call.bias),
        _dropout(call),
        _runs(call),
        outputs.out,
        outputs.total if call.has_total else None,
        None if call.options.rms else outputs.mean,
        outputs.rstd,
        rows,
        call.options.eps,
        COLUMNS=columns,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLS=config.block_cols,
        num_warps=config.num_warps,
    )


def norm_bwd(work: NormBackward, grads: NormGradients) -> None:
    """Compute the gradients, and write them to `grads`. Empty weight and bias are skipped."""
    call, mean, rstd, grad_out, grad_total, *_ = work
    total, rows, columns = call.input, call.rows, call.input.shape[-1]
    arch = arch_of(total.device)
    config = _config(columns, BWD_LIMITS, arch)
    programs = min(triton.cdiv(rows, config.block_rows), config.programs_per_core * arch.num_cores)
    weight_sums = rstd.new_empty(programs, columns) if grads.weight.numel() else None
    bias_sums = rstd.new_empty(programs, columns) if grads.bias.numel() else None
    launch(
        norm_bwd_kernel,
        total.device,
        (programs,),
        _matrix(grad_out),
        _matrix(grad_total),
        _matrix(total),
        _contiguous(call.weight),
        None if call.options.rms else mean,
        rstd,
        _dropout(call),
        _runs(call),
        grads.input if call.options.dropout_p > 0.0 else None,
        grads.total,
        weight_sums,
        bias_sums,
        rows,
        COLUMNS=columns,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLS=config.block_cols,
        num_warps=config.num_warps,
    )
    if weight_sums is not None:
        torch.sum(weight_sums, 0, out=grads.weight)
    if bias_sums is not None:
        torch.sum(bias_sums, 0, out=grads.bias)


class Config(NamedTuple):
    """Tile size and warps of a program, and the number of programs per core in the backward."""

    block_rows: int
    block_cols: int
    num_warps: int
    programs_per_core: int


class Limits(NamedTuple):
    """Largest tile sizes that fit in registers in a pass.

    Attributes:
        tile: number of elements of a tile of full rows. A tile of a single row may have more.
        columns: padded row length up to which a row is a single chunk.
        chunk: columns of a tile for longer rows, which has one row.
        chunk_per_thread: elements of a thread in such a tile.
        chunk_programs: programs per core in the backward of longer rows.
    """

    tile: int
    columns: int
    chunk: int
    chunk_per_thread: int
    chunk_programs: int = 1


# Tiles of whole rows are chosen from the register counts that the compiler reports for sm_80,
# sm_90, sm_100 and gfx942.
#
# With 16 elements per thread, dropout and residual, a thread has up to 64 registers in the forward
# and 128 in the backward. (In the backward, tiles of 4096 elements need 142 for rows of 768.) A
# core with 65536 registers then runs at least 4 programs. With 16-bit types, these have 32 KB of
# loads in flight, from two matrices in the backward. An H100 SM needs about 15 KB to hide memory
# latency.
#
# Longer rows were measured on an H200 with 8192 x 16384 bfloat16. The forward took 0.145 ms with
# chunks of 8192 columns, 0.217 with whole rows. The backward, which reads and writes partial sums
# in each chunk, took 0.557 ms with 4 programs of 512 threads per core, 0.684 with one, 1.12 with
# one program of chunks of 4 x 1024, and 0.94 with whole rows, which spill.
FWD_LIMITS = Limits(tile=4096, columns=8192, chunk=8192, chunk_per_thread=32)
BWD_LIMITS = Limits(tile=2048, columns=8192, chunk=4096, chunk_per_thread=8, chunk_programs=4)
_PER_THREAD = 16
_THREADS_PER_CORE = 512  # in the backward, with 128 registers per thread


def _config(columns: int, limits: Limits, arch: Arch) -> Config:
    block_cols = max(16, triton.next_power_of_2(columns))
    warp_size = 64 if arch.name.startswith("gfx") else 32
    if block_cols > limits.columns:
        warps = limits.chunk // limits.chunk_per_thread // warp_size
        return Config(1, limits.chunk, warps, limits.chunk_programs)
    block_rows = max(1, limits.tile // block_cols)
    threads = block_rows * block_cols // _PER_THREAD
    programs_per_core = max(1, _THREADS_PER_CORE // threads)
    return Config(block_rows, block_cols, threads // warp_size, programs_per_core)


def _matrix(tensor: Tensor | None) -> Tensor | Matrix | None:
    tensor = None if tensor is None else rows_in_place(tensor)
    if tensor is None or tensor.is_contiguous():
        return tensor
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    return Matrix(tensor, sizes[-1], strides[0] if len(sizes) > 1 else 0, strides[-1])


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _dropout(call: NormCall) -> Dropout | None:
    p = call.options.dropout_p
    if p == 0.0:
        return None
    return Dropout(call.options.seed, dropout_threshold(p), dropout_scale(p))


def _runs(call: NormCall) -> Runs | None:
    offsets = call.options.dropout_offsets
    if call.options.dropout_p == 0.0 or offsets is None:
        return None
    offsets = offsets.contiguous()
    return Runs(offsets, call.rows // offsets.shape[0])
