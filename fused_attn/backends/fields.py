"""Tensors as the fields of csrc/params.h, for the backends whose kernels are compiled modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fused_attn.core.call import AttentionCall, NormCall
from fused_attn.core.layout import readable_in_place

# enum DType of csrc/params.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def attention_fields(
    call: AttentionCall,
    out: Tensor,
    summaries: Iterable[tuple[str, Tensor | None, Tensor | None]],
    summarize: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Any], list[Tensor]]:
    """The fields of AttentionParams but for seed and threads.

    Args:
        call, out: tensors as the kernels read and write them.
        summaries: masks that the kernels want a summary of: field, tensor, and its summary or None.
        summarize: the backend's `tile_summary`.

    Returns:
        The fields, and tensors that must outlive the call.
    """
    query, key, value, spec = call.query, call.key, call.value, call.mask
    batch, seqlen_q, seqlen_k = call.sizes()
    kept = [query, key, value]
    fields: dict[str, Any] = {
        "dtype": DTYPES[query.dtype],
        "batch": batch,
        "num_heads": query.shape[1],
        "num_heads_kv": key.shape[1],
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "total_q": query.shape[2],
        "head_dim": query.shape[3],
        "head_dim_v": value.shape[3],
        "softmax_scale": call.scale,
        "softcap": call.softcap,
        "dropout_p": call.dropout_p,
        "band_lo": spec.band_lo,
        "band_hi": spec.band_hi,
        "alibi_offset": spec.alibi_offset,
    }
    for name, tensor in (("query", query), ("key", key), ("value", value), ("out", out)):
        add(fields, name, tensor)
    if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
        kept += (spec.cu_seqlens_q.contiguous(), spec.cu_seqlens_k.contiguous())
        fields["cu_seqlens_q"], fields["cu_seqlens_k"] = (t.data_ptr() for t in kept[-2:])
    if spec.bounds is not None:
        kept.append(spec.bounds.contiguous())
        fields["bounds"] = kept[-1].data_ptr()
    if spec.query_documents is not None and spec.key_documents is not None:
        for name, ids in (
            ("query_documents", spec.query_documents),
            ("key_documents", spec.key_documents),
        ):
            kept.append(readable_in_place(ids))
            fields[name] = kept[-1].data_ptr()
            fields[f"{name}_stride"] = 0 if ids.shape[0] == 1 else kept[-1].stride(0)
    for name in ("slopes", "key_mask", "dense", "bias"):
        tensor = getattr(spec, name)
        if tensor is not None:
            fields[name] = tensor.data_ptr()
            fields[f"{name}_strides"] = broadcast_strides(tensor)
    for name, mask, known in summaries:
        if mask is None:
            continue
        summary = summarize(mask) if known is None else known
        kept.append(summary)
        fields[f"{name}_summary"] = summary.data_ptr()
        fields[f"{name}_summary_strides"] = tuple(
            0 if size == 1 else stride
            for size, stride in zip(mask.shape, summary.stride(), strict=True)
        )
    if spec.bias is not None:
        fields["bias_dtype"] = DTYPES[spec.bias.dtype]
    return fields, kept


def summary_fields(tensor: Tensor, tile: tuple[int, int]) -> tuple[Tensor, dict[str, Any]]:
    """An empty summary of a dense mask or bias, and the fields of SummaryParams but for threads.

    Args:
        tile: rows and columns of what an element sums up.
    """
    batch, num_heads, seqlen_q, seqlen_k = tensor.shape
    shape = (batch, num_heads, -(-seqlen_q // tile[0]), -(-seqlen_k // tile[1]))
    summary = torch.empty(shape, dtype=torch.uint8, device=tensor.device)
    is_bool = tensor.dtype == torch.bool
    return summary, {
        "data": tensor.data_ptr(),
        "is_bool": is_bool,
        "dtype": 0 if is_bool else DTYPES[tensor.dtype],
        "sizes": tuple(tensor.shape),
        "strides": tensor.stride(),
        "summary": summary.data_ptr(),
    }


def norm_fields(call: NormCall) -> dict[str, Any]:
    """The fields of NormParams that are neither tensors nor the seed and threads."""
    return {
        "dtype": DTYPES[call.input.dtype],
        "rows": call.input.shape[0],
        "columns": call.input.shape[1],
        "rms": call.rms,
        "dropout_p": call.dropout_p,
    }


def add(fields: dict[str, Any], name: str, tensor: Tensor) -> None:
    """A tensor and its strides."""
    fields[name] = tensor.data_ptr()
    fields[f"{name}_strides"] = tensor.stride()


def broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides with 0 for every dimension of size 1."""
    return tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def pointer(tensor: Tensor | None) -> int:
    """The address of what may be absent."""
    return 0 if tensor is None else tensor.data_ptr()


def contiguous_as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter of a norm in the type in which kernels read it."""
    return None if tensor is None else tensor.to(dtype).contiguous()
