"""Host code of the Triton attention kernels: arguments, workspaces and launches."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fused_attn.backends.fields import empty_summary
from fused_attn.backends.triton import tiles
from fused_attn.backends.triton.attention_tile import KernelConstants, Rows, Settings
from fused_attn.backends.triton.backward import (
    RowStatistics,
    attention_bwd_dkdv_kernel,
    attention_bwd_dq_kernel,
    row_statistics_kernel,
)
from fused_attn.backends.triton.bias_grad import attention_bwd_bias_kernel
from fused_attn.backends.triton.decode import Parts, attention_decode_kernel, merge_parts_kernel
from fused_attn.backends.triton.forward import attention_fwd_kernel
from fused_attn.backends.triton.launch import arch_of, launch
from fused_attn.backends.triton.masks import Sizes
from fused_attn.backends.triton.spec_args import mask_args, summaries
from fused_attn.backends.triton.tiles import TileLists
from fused_attn.backends.triton.tuning import (
    DECODE_KEYS_PER_PART,
    DECODE_MAX_PARTS,
    MAX_DECODE_QUERIES,
    PROGRAMS_PER_CORE,
    Config,
    config,
    padded,
)
from fused_attn.backends.triton.weights import attention_weights_kernel
from fused_attn.base.layout import kernel_strides
from fused_attn.base.philox import dropout_scale, dropout_threshold
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
)
from fused_attn.masks.spec import MaskSpec

_NO_LISTS = TileLists(None, None, 1)


def attention_fwd(call: AttentionCall, outputs: AttentionOutputs) -> None:
    """Compute attention, and write the results to `outputs`.

    An empty lse_residual means that no backward follows.
    """
    out, lse, lse_residual, out_residual = outputs
    for_backward = lse_residual.numel() > 0
    args = LaunchArguments(call)
    sizes = args.sizes
    if sizes.seqlen_q <= MAX_DECODE_QUERIES and not for_backward:
        _decode(args, out, lse)
        return
    # Partial results have no out_residual, but also divide by the sums of the rounded weights.
    rounded = for_backward and args.dtype.itemsize == 2
    config = args.config("fwd", rounded)
    num_m = -(-sizes.seqlen_q // config.block_m)
    launch(
        attention_fwd_kernel, args.device, (num_m * sizes.batch * sizes.num_heads,),
        *args.qkv, _rows(out), lse, lse_residual if for_backward else None,
        _rows(out_residual) if out_residual.numel() else None, *args.common, args.lists(config),
        *sizes, args.settings, ROUNDED=rounded, **args.compiled_for(config),
    )  # fmt: skip


def _decode(args: LaunchArguments, out: Tensor, lse: Tensor) -> None:
    """Compute out and lse for a few queries with split-KV, for calls without a backward."""
    sizes = args.sizes
    rows = sizes.num_heads // sizes.num_heads_kv * sizes.seqlen_q
    config = args.config("decode")
    num_m = -(-rows // config.block_m)
    programs = sizes.batch * sizes.num_heads_kv * num_m
    # At most as many programs as run concurrently: a second, shorter wave would double the time.
    wanted = PROGRAMS_PER_CORE * arch_of(args.device).num_cores // programs
    longest = -(-sizes.seqlen_k // DECODE_KEYS_PER_PART)
    num_parts = max(1, min(wanted, longest, DECODE_MAX_PARTS))
    maximum, total = (lse.new_empty(lse.numel(), num_parts) for _ in range(2))
    weighted = lse.new_empty(lse.numel(), num_parts, args.head_dim_v)
    parts = Parts(maximum, total, weighted)
    compiled_for = args.compiled_for(config, packed_heads=True)
    launch(
        attention_decode_kernel, args.device, (programs * num_parts,), *args.qkv, parts,
        *args.common, _NO_LISTS, *args.sizes, args.settings, num_parts, **compiled_for,
    )  # fmt: skip
    launch(
        merge_parts_kernel, args.device, (lse.numel(),), parts, _rows(out), lse,
        sizes.num_heads, sizes.total_q, args.settings, num_parts, const=compiled_for["const"],
        num_warps=1,
    )  # fmt: skip


def attention_bwd(work: AttentionBackward, grads: AttentionGradients) -> None:
    """Compute the gradients, and write them to `grads`. An empty grads.bias is skipped."""
    call, outputs, grad_out, grad_lse, _ = work
    query, (out, lse, lse_residual, out_residual) = call.query, outputs
    needs_bias = grads.bias.numel() > 0
    args = LaunchArguments(call)
    sizes = args.sizes
    # These variables keep contiguous copies alive until the kernels are launched.
    out_rows, grad_out_rows = (_rows(_kernel_layout(t)) for t in (out, grad_out))
    residual_rows = _rows(_kernel_layout(out_residual)) if out_residual.numel() else None
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float32).contiguous().resolve_neg()
    exact = args.natural or query.dtype == torch.float32
    factor = torch.empty_like(lse) if exact else None
    stats = RowStatistics(torch.empty_like(lse), factor, torch.empty_like(lse), grad_lse)
    heads = sizes.batch * sizes.num_heads
    config = args.config("statistics")
    num_m = -(-sizes.seqlen_q // config.block_m)
    launch(
        row_statistics_kernel, args.device, (num_m * heads,), out_rows, residual_rows,
        grad_out_rows, lse, lse_residual, stats, args.cu_seqlens_q, *args.sizes,
        **args.compiled_for(config),
    )  # fmt: skip
    config = args.config("dq")
    num_m = -(-sizes.seqlen_q // config.block_m)
    consistent = needs_bias and not call.options.partial
    launch(
        attention_bwd_dq_kernel, args.device, (num_m * heads,), *args.qkv, grad_out_rows,
        _rows(grads.query), *args.common, args.lists(config), *args.sizes,
        args.settings, stats, CONSISTENT=consistent, **args.compiled_for(config),
    )  # fmt: skip
    if needs_bias:
        _grad_bias(args, grad_out_rows, stats, grads.bias)
    config = args.config("dkdv")
    num_n = -(-sizes.seqlen_k // config.block_n)
    launch(
        attention_bwd_dkdv_kernel, args.device, (num_n * sizes.batch * sizes.num_heads_kv,),
        *args.qkv, grad_out_rows, _rows(grads.key), _rows(grads.value), *args.common,
        args.lists(config, of_keys=True), *args.sizes, args.settings, stats,
        GROUP=sizes.num_heads // sizes.num_heads_kv, **args.compiled_for(config),
    )  # fmt: skip


def _grad_bias(
    args: LaunchArguments, grad_out: Rows, stats: RowStatistics, grad_bias: Tensor
) -> None:
    """Compute the gradient of the float mask, and write it to `grad_bias`."""
    sizes = args.sizes
    bias_batch, bias_heads, bias_rows, bias_columns = grad_bias.shape
    config = args.config("bias")
    kinds = tile_kinds(args.spec, sizes, config.block_m, config.block_n, args.device)
    _, kinds_heads, num_m, num_n = kinds.shape
    tiles_of_mask = num_m * num_n * bias_batch * bias_heads
    shared = sizes.batch * sizes.num_heads // (bias_batch * bias_heads)
    wanted = -(-PROGRAMS_PER_CORE * arch_of(args.device).num_cores // tiles_of_mask)
    num_parts = max(1, min(shared, wanted))
    rows, columns = bias_rows > 1, bias_columns > 1
    parts = torch.empty(
        num_parts, bias_batch, bias_heads,
        sizes.seqlen_q if rows else num_m, sizes.seqlen_k if columns else num_n,
        dtype=torch.float32, device=args.device,
    )  # fmt: skip
    launch(
        attention_bwd_bias_kernel, args.device, (tiles_of_mask * num_parts,), *args.qkv,
        grad_out, *args.common, kinds, kinds_heads, *args.sizes, args.settings, stats,
        parts, bias_batch, bias_heads, num_parts, PER_ROW=rows, PER_COLUMN=columns,
        **args.compiled_for(config),
    )  # fmt: skip
    broadcast = [0] * (num_parts > 1) + [3] * (not rows) + [4] * (not columns)
    total = parts.sum(broadcast) if broadcast else parts
    grad_bias.copy_(total.reshape(grad_bias.shape))


def attention_weights(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool, weights: Tensor
) -> None:
    """Compute the attention weights after dropout, averaged over heads if `average`."""
    args = LaunchArguments(replace(call, value=call.key))
    sizes = args.sizes
    config = args.config("bias")
    kinds = tile_kinds(call.mask, sizes, config.block_m, config.block_n, args.device)
    owners = math.prod(weights.shape[:-2])
    seed, _, _, mask = args.common
    launch(
        attention_weights_kernel, args.device, (owners * math.prod(kinds.shape[2:]),),
        *args.qkv[:2], lse.contiguous(), lse_residual.contiguous(), weights, seed, mask, kinds,
        kinds.shape[1], *sizes, args.settings, AVERAGE=average, **args.compiled_for(config),
    )  # fmt: skip


def tile_kinds(
    spec: MaskSpec, sizes: Sizes, block_m: int, block_n: int, device: torch.device
) -> Tensor:
    """Classify each tile of a mask as SKIP, PARTIAL or FULL.

    Returns:
        uint8 (batch, num_heads or 1, query tiles, KV blocks).
    """
    heads = max([1, *(t.shape[1] for t in (spec.key_mask, spec.dense, spec.bias) if t is not None)])
    num_m, num_n = -(-sizes.seqlen_q // block_m), -(-sizes.seqlen_k // block_n)
    kinds = torch.empty(sizes.batch, heads, num_m, num_n, dtype=torch.uint8, device=device)
    chunk = tiles.KINDS_CHUNK
    launch(
        tiles.tile_kinds_kernel, device, (sizes.batch * heads * num_m, -(-num_n // chunk)),
        kinds, mask_args(spec), summaries(spec, tile_summary), *sizes, heads,
        BLOCK_M=block_m, BLOCK_N=block_n, CHUNK=chunk,
    )  # fmt: skip
    return kinds


def tile_summary(tensor: Tensor) -> Tensor:
    """Implement `Backend.tile_summary`."""
    batch, num_heads, seqlen_q, seqlen_k = tensor.shape
    tile = tiles.SUMMARY_TILE_M.value, tiles.SUMMARY_TILE_N.value
    summary = empty_summary(tensor, tile)
    num_m, num_n = summary.shape[2:]
    is_bool = tensor.dtype == torch.bool
    cells = tiles.SUMMARY_CELLS
    if summary.numel():
        launch(
            tiles.tile_summary_kernel, tensor.device,
            (batch * num_heads * num_m, -(-num_n // cells)),
            tensor.view(torch.uint8) if is_bool else tensor, *tensor.stride(), summary, num_heads,
            seqlen_q, seqlen_k, num_m, num_n, IS_BOOL=is_bool, CELLS=cells,
        )  # fmt: skip
    return summary


def packed_words(dense: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the bits of a dense mask: int64 (batch or 1, num_heads or 1, words, seqlen_q)."""
    batch, num_heads = dense.shape[:2]
    strides = [0 if n == 1 else s for n, s in zip(dense.shape, dense.stride(), strict=True)]
    num_m, num_words = -(-seqlen_q // tiles.WORD_ROWS), -(-seqlen_k // 64)
    words = torch.empty(
        batch, num_heads, num_words, seqlen_q, dtype=torch.int64, device=dense.device
    )
    if words.numel():
        launch(
            tiles.pack_words_kernel, dense.device, (batch * num_heads * num_m, num_words),
            dense.view(torch.uint8), *strides, words, num_heads, seqlen_q, seqlen_k, num_m,
            num_words, ROWS=tiles.WORD_ROWS,
        )  # fmt: skip
    return words


class LaunchArguments:
    """Arguments shared by all kernels that an attention call launches."""

    def __init__(self, call: AttentionCall) -> None:
        query, key, value, spec = call.query, call.key, call.value, call.mask
        options, dropout_p = call.options, call.options.dropout_p
        self.spec = spec
        self.device, self.dtype = query.device, query.dtype
        self.head_dim, self.head_dim_v = query.shape[3], value.shape[3]
        self.qkv = [_rows(_kernel_layout(t)) for t in (query, key, value)]
        batch, seqlen_q, seqlen_k = call.sizes()
        self.sizes = Sizes(
            batch, query.shape[1], key.shape[1], seqlen_q, seqlen_k, query.shape[2],
            spec.band_lo, spec.band_hi, spec.alibi_offset,
        )  # fmt: skip
        offsets = options.dropout_offsets if dropout_p > 0.0 else None
        self.settings = Settings(
            float(options.scale), float(options.softcap), dropout_threshold(dropout_p),
            dropout_scale(dropout_p), None if offsets is None else offsets.contiguous(),
        )  # fmt: skip
        self.softcapped = options.softcap > 0.0
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.accurate = query.dtype == torch.float32 and not tf32
        adds = spec.slopes is not None or spec.bias is not None
        self.natural = self.softcapped or adds or self.accurate
        listed = (spec.query_documents, spec.key_mask, spec.dense, spec.bias)
        self.has_lists = any(t is not None for t in listed)
        cu_seqlens = (spec.cu_seqlens_q, spec.cu_seqlens_k)
        self.cu_seqlens_q, cu_seqlens_k = (
            None if t is None else t.contiguous() for t in cu_seqlens
        )
        seed = options.seed if dropout_p > 0.0 else None
        words = None if spec.dense is None else packed_words(spec.dense, seqlen_q, seqlen_k)
        self.common = (seed, self.cu_seqlens_q, cu_seqlens_k, mask_args(spec, words))

    def config(self, kind: str, rounded: bool = False) -> Config:
        """Return the tile sizes, warps and stages for the kernel of a pass.

        Args:
            kind: the pass, without "_masked".
            rounded: True if a forward divides by the row sums of the rounded weights.
        """
        head_dim = max(self.head_dim, self.head_dim_v)
        heavy = self.has_lists or self.common[0] is not None
        # With the largest tiles, the row sums of the rounded weights do not fit in registers when
        # head_dim > 128.
        heavy |= rounded and head_dim > 128
        # The loop over the heads of a group needs additional registers.
        heavy |= kind == "dkdv" and self.sizes.num_heads > self.sizes.num_heads_kv
        if heavy and kind in ("fwd", "dq", "dkdv"):
            kind += "_masked"
        return config(kind, arch_of(self.device).name, self.dtype.itemsize, head_dim)

    def compiled_for(self, config: Config, packed_heads: bool = False) -> dict[str, Any]:
        """Return the compile-time arguments of a kernel launch."""
        tf32 = self.dtype == torch.float32 and not self.accurate
        bias, packed = self.spec.bias, self.cu_seqlens_q is not None
        whole_blocks = not packed and bias is not None and bias.shape[3] % config.block_n == 0
        constants = _constants(
            self.head_dim, self.head_dim_v, padded(self.head_dim), padded(self.head_dim_v),
            config.block_m, config.block_n, self.softcapped, self.natural, self.accurate,
            "tf32" if tf32 else "ieee", packed_heads, whole_blocks,
        )  # fmt: skip
        return {"const": constants, "num_warps": config.num_warps, "num_stages": config.num_stages}

    def lists(self, config: Config, of_keys: bool = False) -> TileLists:
        """List the visible tiles of each query tile, or of each KV block if of_keys.

        Returns _NO_LISTS if ranges of tiles suffice.
        """
        if not self.has_lists:
            return _NO_LISTS
        kinds = tile_kinds(self.spec, self.sizes, config.block_m, config.block_n, self.device)
        batch, heads, num_m, num_n = kinds.shape
        owners, others = (num_n, num_m) if of_keys else (num_m, num_n)
        strides = (1, num_n) if of_keys else (num_n, 1)
        counts = kinds.new_empty(batch, heads, owners, 2, dtype=torch.int32)
        indices = kinds.new_empty(batch, heads, owners, others, dtype=torch.int32)
        launch(
            tiles.list_tiles_kernel, self.device, (batch * heads * owners,), kinds, counts, indices,
            owners, others, *strides, CHUNK=tiles.LIST_CHUNK, num_warps=1,
        )  # fmt: skip
        return TileLists(counts, indices, heads)


@functools.lru_cache(maxsize=1024)
def _constants(*values: Any) -> KernelConstants:
    """Return one object for equal values, because Triton compares other objects by field."""
    return KernelConstants(*map(tl.constexpr, values))


def _kernel_layout(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if kernels do not support its strides.

    Row strides are limited because kernels compute offsets within a tile in 32 bits.
    """
    tensor = kernel_strides(tensor)
    return tensor if tensor.stride(2) < 1 << 22 else tensor.contiguous()


def _rows(tensor: Tensor) -> Rows:
    return Rows(tensor, *tensor.stride()[:3])
