"""CUDA attention: conversion of calls to the fields of csrc/params.h and gpu_params.h."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.cuda.module import (
    BLOCKS_PER_MULTIPROCESSOR,
    compiled,
    num_multiprocessors,
    run,
)
from fused_attn.backends.fields import empty_summary
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
)
from fused_attn.call.kv_cache import CacheUpdate

# Kernels load rows in chunks of CHUNK_BYTES. They compute offsets within a tile in 32 bits, which
# limits the row stride to fewer than MAX_ROW_STRIDE elements.
CHUNK_BYTES = 16
MAX_ROW_STRIDE = 1 << 22
# The rows of the decode kernel are the queries of all heads that share a KV head. Each thread block
# has 16 rows, and reads the keys once. Calls with more than MAX_DECODE_ROWS rows use the forward
# kernel. Blocks of the forward kernel have at least that many rows, except in float32 with head_dim
# above 128, where they have 32.
DECODE_BLOCK_ROWS = 16
MAX_DECODE_ROWS = 64
MIN_KEYS_PER_SPLIT = 128  # two KV blocks


def attention_fwd(call: AttentionCall, outputs: AttentionOutputs) -> None:
    """Compute attention, and write the results to `outputs`.

    An empty lse_residual means that no backward follows.
    """
    query, (out, lse, lse_residual, out_residual) = call.query, outputs
    for_backward = lse_residual.numel() > 0
    call, fields = call_fields(call, out)
    fields["lse"] = lse
    if for_backward:
        fields |= {"lse_residual": lse_residual, "out_residual": out_residual}
    elif decode_rows(query, call.key, call.sizes()[1]) <= MAX_DECODE_ROWS:
        _run_decode(call, lse, fields)
        return
    run("attention_fwd", query.device, call, fields)


def attention_decode(call: AttentionCall, update: CacheUpdate) -> tuple[Tensor, Tensor] | None:
    """Implement `Backend.attention_decode`."""
    query, key_cache, value_cache = call.query, call.key, call.value
    if decode_rows(query, key_cache, query.shape[2]) > MAX_DECODE_ROWS:
        return None
    if any(in_chunks(cache) is not cache for cache in (key_cache, value_cache)):
        return None  # the kernel would append to a copy
    out, lse, *_ = call.outputs(False)
    call, fields = call_fields(call, out)
    fields["seqlen_k"], fields["lse"] = update.capacity, lse
    if update.block_table is not None:
        fields["block_table"] = update.block_table.to(torch.int32).contiguous()
        fields["block_table_stride"] = update.block_table.shape[1]
        fields["page_size"] = key_cache.shape[2]
    if update.key is not None and update.value is not None:
        fields["new_key"], fields["new_value"] = in_chunks(update.key), in_chunks(update.value)
        fields["cache_lengths"] = update.lengths.to(query.device, torch.int32).clamp(min=0)
        fields["seqlen_new"] = update.key.shape[2]
    _run_decode(call, lse, fields)
    return out, lse


def decode_rows(query: Tensor, key: Tensor, seqlen_q: int) -> int:
    """Return the number of query rows that share a KV head: heads per group times seqlen_q."""
    return query.shape[1] // key.shape[1] * seqlen_q


def _run_decode(call: AttentionCall, lse: Tensor, fields: dict[str, Any]) -> None:
    """Run the decode kernel, with as many KV splits as fill all multiprocessors in one wave."""
    query, key, (batch, seqlen_q, seqlen_k) = call.query, call.key, call.sizes()
    blocks = batch * key.shape[1] * -(-decode_rows(query, key, seqlen_q) // DECODE_BLOCK_ROWS)
    resident_blocks = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(query.device)
    longest = -(-fields.get("seqlen_k", seqlen_k) // MIN_KEYS_PER_SPLIT)
    num_splits = fields["num_splits"] = max(1, min(longest, resident_blocks // blocks))
    shape = (*lse.shape, num_splits, 2 + call.value.shape[3])
    fields["splits"] = lse.new_empty(shape if num_splits > 1 else 0)
    run("attention_decode", query.device, call, fields)


def attention_bwd(work: AttentionBackward, grads: AttentionGradients) -> None:
    """Compute the gradients, and write them to `grads`. An empty grads.bias is skipped."""
    call, outputs, grad_out, grad_lse, _ = work
    query, spec, lse = call.query, call.mask, outputs.lse
    out, grad_out = in_chunks(outputs.out), in_chunks(grad_out)
    out_residual = outputs.out_residual
    if out_residual.numel() > 0:
        out_residual = in_chunks(out_residual)
    call, fields = call_fields(call, out)
    fields |= {
        "lse": lse,
        "lse_residual": outputs.lse_residual,
        "out_residual": out_residual,
        "grad_out": grad_out,
        "grad_query": grads.query,
        "grad_key": grads.key,
        "grad_value": grads.value,
        "row_statistics": lse.new_empty(3, query.shape[1], _statistics_rows(call)),
    }
    if grad_lse is not None:
        fields["grad_lse"] = grad_lse.to(torch.float32).contiguous().resolve_neg()
    bias_parts = None
    if grads.bias.numel() > 0 and spec.bias is not None:
        bias_parts = _bias_parts(spec.bias, call)
        fields["grad_bias_parts"] = bias_parts
        fields["num_bias_parts"] = bias_parts.shape[0]
        fields["bias_sizes"] = tuple(spec.bias.shape)
    elif _accumulates_dq_atomically(query, call.value):
        fields["grad_query_sums"] = lse.new_empty(*lse.shape, -(-query.shape[3] // 8) * 8)
    fields["deterministic"] = "grad_query_sums" not in fields
    run("attention_bwd", query.device, call, fields)
    if bias_parts is not None:
        # Reduce over the parts, and over the tiles along broadcast queries or keys.
        dims = [0] + [d + 1 for d in (2, 3) if grads.bias.shape[d] == 1]
        grads.bias.copy_(bias_parts.sum(dims).reshape(grads.bias.shape))


def attention_weights(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool, weights: Tensor
) -> None:
    """Compute the attention weights after dropout from lse, and write them to `weights`."""
    call = call.without_value()
    call, fields = call_fields(call, call.query.new_empty(*call.query.shape[:3], 0))
    fields |= {"lse": lse.contiguous(), "lse_residual": lse_residual.contiguous()}
    fields |= {"weights": weights, "average": average}
    run("attention_weights", call.query.device, call, fields)


def tile_summary(tensor: Tensor) -> Tensor:
    """Implement `Backend.tile_summary`."""
    summary = empty_summary(tensor, compiled().SUMMARY_TILE)
    run("tile_summary", tensor.device, None, {"tensor": tensor, "summary": summary})
    return summary


def call_fields(call: AttentionCall, out: Tensor) -> tuple[AttentionCall, dict[str, Any]]:
    """Return the call in the layout that kernels read, and the fields common to all passes.

    The returned tensors must stay alive until the kernel is launched. Memory that is freed after
    the launch is reused only once the kernel has run, except on another stream.
    """
    query, key, value = (in_chunks(t) for t in (call.query, call.key, call.value))
    call, spec = replace(call, query=query, key=key, value=value), call.mask
    fields: dict[str, Any] = {"out": out}
    if spec.key_mask is not None:
        fields["key_mask_summary"] = tile_summary(spec.key_mask)
    fields["tf32"] = torch.backends.cuda.matmul.fp32_precision == "tf32"
    if call.options.dropout_p > 0.0:
        assert call.options.seed is not None
        fields["seed_address"] = call.options.seed.to(query.device)
    for name, ids in (("query", spec.query_documents), ("key", spec.key_documents)):
        if ids is not None:
            shape = (ids.shape[0], -(-ids.shape[1] // compiled().ID_RANGE_TILE), 2)
            fields[f"{name}_id_ranges"] = ids.new_empty(shape, dtype=torch.int32)
    return call, fields


def in_chunks(tensor: Tensor) -> Tensor:
    """Return the tensor if kernels can load its rows in chunks of CHUNK_BYTES, otherwise a copy.

    The rows of the copy are padded with zeros to a multiple of CHUNK_BYTES.
    """
    tensor = tensor.resolve_neg()
    *sizes, row = tensor.shape
    step = CHUNK_BYTES // tensor.element_size()
    strides = [stride for size, stride in zip(sizes, tensor.stride(), strict=False) if size > 1]
    if row == 0 or (
        row % step == 0
        and tensor.stride(3) == 1
        and tensor.data_ptr() % CHUNK_BYTES == 0
        and all(stride % step == 0 for stride in strides)
        and (sizes[2] <= 1 or tensor.stride(2) < MAX_ROW_STRIDE)
    ):
        return tensor
    copy = tensor.new_zeros(*sizes, -(-row // step) * step)
    return copy.narrow(3, 0, row).copy_(tensor)


def _accumulates_dq_atomically(query: Tensor, value: Tensor) -> bool:
    """Return True if the dK/dV kernel also accumulates dQ, by atomic additions in any order."""
    if torch.are_deterministic_algorithms_enabled() or query.dtype == torch.float32:
        return False
    return max(query.shape[3], value.shape[3]) <= compiled().MAX_ADDED_HEAD_DIM


def _statistics_rows(call: AttentionCall) -> int:
    """Return the number of rows of row_statistics. Each sequence starts at a tile boundary."""
    tile = compiled().STATISTICS_TILE
    batch, seqlen_q, _ = call.sizes()
    if call.mask.cu_seqlens_q is not None:
        return (call.query.shape[2] // tile + batch + 1) * tile
    return batch * -(-seqlen_q // tile) * tile


def _bias_parts(bias: Tensor, call: AttentionCall) -> Tensor:
    """Allocate the workspace for partial sums of the bias gradient.

    The shape is (num_parts, bias_batch, bias_heads, rows, columns), in float32. The heads that
    share an element of bias are divided into num_parts groups, enough to occupy all
    multiprocessors. If bias is broadcast over queries or keys, the workspace has one row or column
    per tile.
    """
    bias_batch, bias_heads, bias_rows, bias_columns = bias.shape
    query, (batch, seqlen_q, seqlen_k) = call.query, call.sizes()
    tile = compiled().score_tile(query.element_size())
    num_m, num_n = -(-seqlen_q // tile), -(-seqlen_k // tile)
    shared = batch * query.shape[1] // (bias_batch * bias_heads)
    blocks = bias_batch * bias_heads * num_m * num_n
    # Split the work of each block so that the parts occupy all multiprocessors.
    wanted = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(query.device)
    times = max(1, -(-wanted // blocks))
    return torch.empty(
        min(shared, times), bias_batch, bias_heads,
        seqlen_q if bias_rows > 1 else num_m, seqlen_k if bias_columns > 1 else num_n,
        dtype=torch.float32, device=query.device,
    )  # fmt: skip
