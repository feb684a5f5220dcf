"""Calls that look like an earlier one: what does not change is handed to the module once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fused_attn.backends.cuda.attention import (
    CHUNK_BYTES,
    MAX_DECODE_ROWS,
    call_fields,
    decode_rows,
    in_chunks,
    num_decode_splits,
    wants_tf32,
)
from fused_attn.backends.cuda.module import compiled, on_stream
from fused_attn.backends.fields import pointer
from fused_attn.core.layout import out_layout
from fused_attn.masks.spec import MaskSpec


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    mask_field: str,
    scale: float,
    softcap: float,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | None] | None:
    """As `cpp.attention_call`; None where kernels do not read such tensors in place.

    The function returns None, and has done nothing, for tensors that begin within a chunk.
    """
    qkv = (query, key, value)
    batch, seqlen_q, seqlen_k = spec.sizes(query, key)
    if 0 in (batch, query.shape[1], seqlen_q, seqlen_k):
        return None
    if any(in_chunks(t) is not t for t in qkv):
        return None
    shape, strides = out_layout(query, value)
    dtype, device = query.dtype, query.device
    out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    fields, kept = call_fields(query, key, value, out, spec, scale, softcap, 0.0, None)
    decodes = decode_rows(query, key, seqlen_q) <= MAX_DECODE_ROWS
    if decodes:
        fields["num_splits"] = num_decode_splits(query, key, fields)
    sizes = tuple(getattr(spec, mask_field).shape) if mask_field else (0, 0, 0, 0)
    native = compiled().AttentionCall(mask_field, sizes, decodes, **fields)
    run, workspace_size = native.run, native.workspace_size

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor | None:
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2]) % CHUNK_BYTES:
            return None
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        workspace = torch.empty(workspace_size, dtype=torch.uint8, device=device)
        with on_stream(device) as stream:
            run(
                *addresses, out.data_ptr(), pointer(mask), workspace.data_ptr(), stream,
                wants_tf32(),
            )  # fmt: skip
        return out

    # Tensors of the same mask; of another in each call, nothing of it is kept.
    call.addressed = () if mask_field else (*kept[3:], *spec.flat())  # type: ignore[attr-defined]
    return call
