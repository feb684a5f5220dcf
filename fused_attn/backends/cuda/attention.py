"""The CUDA kernels of attention: tensors to the fields of csrc/params.h and gpu_params.h."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.cuda.module import (
    BLOCKS_PER_MULTIPROCESSOR,
    compiled,
    num_multiprocessors,
    run,
    times_to_fill,
)
from fused_attn.backends.fields import add, attention_fields, summary_fields
from fused_attn.core.layout import gradient_layout, out_layout
from fused_attn.masks.spec import MaskSpec

# Kernels read rows in chunks of so many bytes, and count within a tile in 32 bits.
CHUNK_BYTES = 16
MAX_ROW_STRIDE = 1 << 22
# The decode kernel has the queries of a group of heads as rows, 16 a block, and reads keys once for
# each block: up to so many rows they come to no more than a block of the other kernel has.
DECODE_BLOCK_ROWS = 16
MAX_DECODE_ROWS = 64
MIN_KEYS_PER_SPLIT = 128  # two tiles


def attention_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    for_backward: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `cpp.attention_fwd`."""
    out = torch.empty_strided(*out_layout(query, value), dtype=query.dtype, device=query.device)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    lse_low = torch.empty_like(lse) if for_backward else lse.new_empty(0)
    batch, seqlen_q, seqlen_k = spec.sizes(query, key)
    if 0 in (lse.numel(), batch, seqlen_q, seqlen_k):
        return out.zero_(), lse.fill_(-math.inf), lse_low.zero_()
    fields, _kept = call_fields(query, key, value, out, spec, scale, softcap, dropout_p, seed)
    fields["lse"] = lse.data_ptr()
    if for_backward:
        fields["lse_low"] = lse_low.data_ptr()
    elif decode_rows(query, key, seqlen_q) <= MAX_DECODE_ROWS:
        _run_decode(query, key, value, lse, fields)
        return out, lse, lse_low
    run("attention_fwd", query.device, fields)
    return out, lse, lse_low


def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    lengths: Tensor,
    block_table: Tensor | None,
    spec: MaskSpec,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor] | None:
    """out and lse of attention to a cache, behind whose rows the new ones are written.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key_cache, value_cache: (batch, num_heads_kv, max_len, dim), or (num_pages, num_heads_kv,
            page_size, dim) with a block table.
        key, value: (batch, num_heads_kv, seqlen_new, dim), or None.
        lengths: (batch,) integers, rows that the cache has of each sequence.
        block_table: (batch, max_pages) integers, or None.
        spec: the mask, whose bounds end each sequence.

    Returns:
        None where the kernel does not take the problem; nothing has been written then.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    num_pages, page_size = (1, key_cache.shape[2])
    if block_table is not None:
        num_pages = block_table.shape[1]
    seqlen_k = num_pages * page_size
    if 0 in (batch, num_heads, seqlen_q, seqlen_k, query.shape[3], value_cache.shape[3]):
        return None
    if decode_rows(query, key_cache, seqlen_q) > MAX_DECODE_ROWS:
        return None
    if any(in_chunks(cache) is not cache for cache in (key_cache, value_cache)):
        return None  # a copy would be written to
    out = torch.empty_strided(
        *out_layout(query, value_cache), dtype=query.dtype, device=query.device
    )
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    fields, kept = call_fields(query, key_cache, value_cache, out, spec, scale, softcap, 0.0, None)
    fields["seqlen_k"], fields["lse"] = seqlen_k, lse.data_ptr()
    if block_table is not None:
        kept.append(block_table.to(torch.int32).contiguous())
        fields["block_table"], fields["block_table_stride"] = kept[-1].data_ptr(), num_pages
        fields["page_size"] = page_size
    if key is not None and value is not None:
        for name, new in (("new_key", key), ("new_value", value)):
            kept.append(in_chunks(new))
            add(fields, name, kept[-1])
        kept.append(lengths.to(query.device, torch.int32).clamp(min=0))
        fields["cache_lengths"], fields["seqlen_new"] = kept[-1].data_ptr(), key.shape[2]
    _run_decode(query, key_cache, value_cache, lse, fields)
    return out, lse


def decode_rows(query: Tensor, key: Tensor, seqlen_q: int) -> int:
    """Rows that share keys."""
    return query.shape[1] // key.shape[1] * seqlen_q


def _run_decode(
    query: Tensor, key: Tensor, value: Tensor, lse: Tensor, fields: dict[str, Any]
) -> None:
    num_splits = fields["num_splits"] = num_decode_splits(query, key, fields)
    splits = lse.new_empty((*lse.shape, num_splits, 2 + value.shape[3]) if num_splits > 1 else 0)
    fields["splits"] = splits.data_ptr()
    run("attention_decode", query.device, fields)


def num_decode_splits(query: Tensor, key: Tensor, fields: dict[str, Any]) -> int:
    """Into how many parts keys are cut: as many as all multiprocessors take at once."""
    rows = decode_rows(query, key, fields["seqlen_q"])
    blocks = fields["batch"] * key.shape[1] * -(-rows // DECODE_BLOCK_ROWS)
    at_once = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(query.device)
    longest = -(-fields["seqlen_k"] // MIN_KEYS_PER_SPLIT)
    return max(1, min(longest, at_once // blocks))


def attention_bwd(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `cpp.attention_bwd`."""
    grad_query, grad_key, grad_value = (
        torch.empty_strided(*gradient_layout(t), dtype=t.dtype, device=t.device)
        for t in (query, key, value)
    )
    grad_bias = query.new_empty(0)
    if 0 in (query.shape[1], *spec.sizes(query, key)):
        for tensor in (grad_query, grad_key, grad_value):
            tensor.zero_()
        if needs_bias and spec.bias is not None:
            grad_bias = spec.bias.new_zeros(spec.bias.shape)
        return grad_query, grad_key, grad_value, grad_bias
    out, grad_out = in_chunks(out), in_chunks(grad_out)
    fields, _kept = call_fields(query, key, value, out, spec, scale, softcap, dropout_p, seed)
    fields["lse"], fields["lse_low"] = lse.data_ptr(), lse_low.data_ptr()
    add(fields, "grad_out", grad_out)
    add(fields, "grad_query", grad_query)
    add(fields, "grad_key", grad_key)
    add(fields, "grad_value", grad_value)
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float32).contiguous().resolve_neg()
        fields["grad_lse"] = grad_lse.data_ptr()
    row_statistics = lse.new_empty(3, query.shape[1], _statistics_rows(spec, query, key))
    fields["row_statistics"] = row_statistics.data_ptr()
    if needs_bias and spec.bias is not None:
        grad_bias = _bias_parts(spec.bias, spec, query, key)
        fields["grad_bias_parts"] = grad_bias.data_ptr()
        fields["num_bias_parts"] = grad_bias.shape[0]
        fields["bias_sizes"] = tuple(spec.bias.shape)
    elif _adds_atomically(query, value):
        grad_query_sums = lse.new_empty(*lse.shape, -(-query.shape[3] // 8) * 8)
        fields["grad_query_sums"] = grad_query_sums.data_ptr()
    fields["deterministic"] = "grad_query_sums" not in fields
    run("attention_bwd", query.device, fields)
    if needs_bias and spec.bias is not None:
        grad_bias = _add_parts(grad_bias, spec.bias)
    return grad_query, grad_key, grad_value, grad_bias


def attention_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    average: bool,
) -> Tensor:
    """As `cpp.attention_weights`."""
    batch, num_heads, seqlen_q, _ = query.shape
    shape = (batch, *(() if average else (num_heads,)), seqlen_q, key.shape[2])
    weights = query.new_empty(shape)
    if weights.numel() == 0 or num_heads == 0:
        return weights.zero_()
    value, out = key.new_empty(*key.shape[:3], 0), query.new_empty(*query.shape[:3], 0)
    fields, _kept = call_fields(query, key, value, out, spec, scale, softcap, dropout_p, seed)
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    fields["lse"], fields["lse_low"] = lse.data_ptr(), lse_low.data_ptr()
    fields["weights"], fields["average"] = weights.data_ptr(), average
    run("attention_weights", query.device, fields)
    return weights


def tile_summary(tensor: Tensor) -> Tensor:
    """As `cpp.tile_summary`."""
    summary, fields = summary_fields(tensor, compiled().SUMMARY_TILE)
    run("tile_summary", tensor.device, fields)
    return summary


def call_fields(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[dict[str, Any], list[Tensor]]:
    """The fields of AttentionParams and of GpuParams but for a pass's own workspaces, and tensors
    that must outlive the launch: memory that is freed then is not given away before the kernel has
    run, unless to another stream."""
    query, key, value = (in_chunks(t) for t in (query, key, value))
    summaries = (
        ("dense", spec.dense, spec.dense_summary),
        ("bias", spec.bias, spec.bias_summary),
        ("key_mask", spec.key_mask, None),
    )
    fields, kept = attention_fields(
        query, key, value, out, spec, scale, softcap, dropout_p, summaries, tile_summary
    )
    fields["tf32"] = wants_tf32()
    if dropout_p > 0.0:
        assert seed is not None
        kept.append(seed.to(query.device))
        fields["seed_address"] = kept[-1].data_ptr()
    for name, ids in (("query", spec.query_documents), ("key", spec.key_documents)):
        if ids is not None:
            shape = (ids.shape[0], -(-ids.shape[1] // compiled().ID_RANGE_TILE), 2)
            kept.append(ids.new_empty(shape, dtype=torch.int32))
            fields[f"{name}_id_ranges"] = kept[-1].data_ptr()
    return fields, kept


def wants_tf32() -> bool:
    """Whether products of float32 may be rounded, by torch's setting."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def in_chunks(tensor: Tensor) -> Tensor:
    """A tensor whose rows kernels can read in chunks, or a copy that is: behind each of its rows
    are zeros up to the next whole chunk."""
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


def _adds_atomically(query: Tensor, value: Tensor) -> bool:
    """Whether the gradient of query is added up by the kernel that owns keys, in any order."""
    if torch.are_deterministic_algorithms_enabled() or query.dtype == torch.float32:
        return False
    return max(query.shape[3], value.shape[3]) <= compiled().MAX_ADDED_HEAD_DIM


def _statistics_rows(spec: MaskSpec, query: Tensor, key: Tensor) -> int:
    """Rows of a head in the row statistics: each sequence begins with a tile."""
    tile = compiled().STATISTICS_TILE
    batch, seqlen_q, _ = spec.sizes(query, key)
    if spec.cu_seqlens_q is not None:
        return (query.shape[2] // tile + batch + 1) * tile
    return batch * -(-seqlen_q // tile) * tile


def _bias_parts(bias: Tensor, spec: MaskSpec, query: Tensor, key: Tensor) -> Tensor:
    """Workspace (num_parts, own_batch, own_heads, rows, columns) of the gradient of a float mask:
    of each of its entries so many blocks share the heads that all multiprocessors are busy, and of
    broadcast queries or keys each tile has one row or column."""
    own_batch, own_heads, own_rows, own_columns = bias.shape
    batch, seqlen_q, seqlen_k = spec.sizes(query, key)
    tile = compiled().score_tile(query.element_size())
    num_m, num_n = -(-seqlen_q // tile), -(-seqlen_k // tile)
    shared = batch * query.shape[1] // (own_batch * own_heads)
    blocks = own_batch * own_heads * num_m * num_n
    return torch.empty(
        min(shared, times_to_fill(blocks, query.device)), own_batch, own_heads,
        seqlen_q if own_rows > 1 else num_m, seqlen_k if own_columns > 1 else num_n,
        dtype=torch.float32, device=query.device,
    )  # fmt: skip


def _add_parts(parts: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a float mask in its shape and type, of what kernels left in `_bias_parts`."""
    dims = [0] + [d + 1 for d in (2, 3) if bias.shape[d] == 1]
    return parts.sum(dims).reshape(bias.shape).to(bias.dtype)
