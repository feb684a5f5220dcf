"""Ours and the peers: functions of the operands of a problem, by name.

A peer that this torch or this GPU lacks raises, when it is made or when it is called; the runner
notes why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from shapes import Attention, Device, Norm
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_attn

OURS = "fused_attn"
COMPILING = ("flex", "compiled")  # peers whose first call takes seconds
Way = Callable[..., Any]  # of the operands; its results are a tensor or a tuple of them


def compiled(function: Way) -> Way:
    """For one problem only: nothing of it is dynamic."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the graph is kept for the next backward
    return torch.compile(function, dynamic=False)


def attention(shape: Attention, backend: str, device: Device) -> Way:
    """Ours; a fourth operand is a learnt bias."""
    mask = shape.own_mask(device)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return fused_attn.scaled_dot_product_attention(
            query, key, value, mask if bias is None else bias, shape.dropout_p, enable_gqa=True,
            backend=backend,
        )  # fmt: skip

    return call


def attention_peers(
    shape: Attention, dtype: torch.dtype, device: Device
) -> dict[str, Callable[[], Way]]:
    """What makes each peer, by name."""
    peers: dict[str, Callable[[], Way]] = {"sdpa": lambda: sdpa(shape, dtype, device)}
    if shape.mask in ("none", "causal"):  # else there is one kernel that takes the mask
        backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
        peers |= {
            name: lambda backend=backend: sdpa(shape, dtype, device, backend)
            for name, backend in backends.items()
        }
    if shape.dropout_p == 0.0:
        peers["flex"] = lambda: flex(shape, device)
    return peers


def sdpa(
    shape: Attention, dtype: torch.dtype, device: Device, backend: SDPBackend | None = None
) -> Way:
    """torch's own choice of kernel, or one kernel."""
    causal = shape.mask == "causal"
    mask = None if causal else shape.torch_mask(dtype, device)
    if mask is not None and mask.dim() == 3:
        mask = mask[None]

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        context = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
        with context:
            return F.scaled_dot_product_attention(
                query, key, value, mask if bias is None else bias[None], shape.dropout_p, causal,
                enable_gqa=shape.kv_heads != shape.num_heads,
            )  # fmt: skip

    return call


def flex(shape: Attention, device: Device) -> Way:
    """FlexAttention, compiled, with its block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    run = compiled(flex_attention)
    visible = _flex_mask(shape, device)
    block_mask = None
    if visible is not None:
        batch = shape.batch if shape.mask == "padding" else None
        block_mask = create_block_mask(
            visible, batch, None, shape.seqlen_q, shape.seqlen_k, device=str(device)
        )
    slopes = shape.slopes(device)

    def with_alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[h, i, j]

        score_mod = with_alibi if shape.mask == "alibi" else None
        return run(
            query, key, value, score_mod if bias is None else with_bias, block_mask,
            enable_gqa=shape.kv_heads != shape.num_heads,
        )  # fmt: skip

    return call


def _flex_mask(shape: Attention, device: Device) -> Callable[..., Tensor] | None:
    """mask_mod, by a formula where there is one."""
    span = shape.span
    if shape.mask in ("none", "bias"):
        return None
    if shape.mask in ("causal", "alibi"):
        return lambda b, h, i, j: i >= j
    if shape.mask == "window":
        return lambda b, h, i, j: (i >= j) & (i - j < span)
    if shape.mask == "padding":
        lengths = shape.lengths(device)
        return lambda b, h, i, j: j < lengths[b]
    if shape.mask == "documents":
        ids = shape.document_ids(device)
        return lambda b, h, i, j: ids[i] == ids[j]
    dense = shape.bool_mask(device)
    assert dense is not None
    return lambda b, h, i, j: dense[i, j]


def packed(shape: Attention, backend: str, cu_seqlens: Tensor) -> Way:
    """Ours, of sequences without padding."""
    where = (cu_seqlens, cu_seqlens, shape.seqlen_q, shape.seqlen_k)
    return lambda *rows: fused_attn.varlen_attention(*rows, *where, backend=backend)


def packed_peers(shape: Attention, cu_seqlens: Tensor) -> dict[str, Callable[[], Way]]:
    """torch's function for it, and jagged nested tensors."""
    longest = shape.seqlen_q

    def varlen() -> Way:
        from torch.nn.attention.varlen import varlen_attn

        where = (cu_seqlens.int(), cu_seqlens.int(), longest, longest)
        return lambda *rows: varlen_attn(*rows, *where)

    def nested() -> Way:
        shortest = int(cu_seqlens.diff().min())

        def jagged(rows: Tensor) -> Tensor:
            tensor = torch.nested.nested_tensor_from_jagged(
                rows, cu_seqlens, min_seqlen=shortest, max_seqlen=longest
            )
            return tensor.transpose(1, 2)

        def call(*rows: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(*map(jagged, rows))
            return out.transpose(1, 2).values()

        return call

    return {"varlen_attn": varlen, "nested": nested}


def norm_operands(shape: Norm, dtype: torch.dtype, device: Device, seed: int) -> list[Tensor]:
    """input, weight, for layer_norm bias, where there is one residual."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype, device=device)

    operands = [random(shape.rows, shape.columns), 1.0 + 0.1 * random(shape.columns)]
    if shape.kind == "layer_norm":
        operands.append(random(shape.columns))
    if shape.residual:
        operands.append(random(shape.rows, shape.columns))
    return operands


def _named(shape: Norm, rest: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The operands after weight."""
    names = ["bias"] * (shape.kind == "layer_norm") + ["residual"] * shape.residual
    return dict(zip(names, rest, strict=True))


def norm(shape: Norm, backend: str) -> Way:
    """Ours; also returns the sum where there is a residual, as the next block needs it."""
    function = getattr(fused_attn, shape.kind)

    def call(input: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        return function(
            input, shape.columns, weight, **_named(shape, rest), eps=1e-5,
            dropout_p=shape.dropout_p, return_residual=shape.residual, backend=backend,
        )  # fmt: skip

    return call


def norm_peers(shape: Norm) -> dict[str, Callable[[], Way]]:
    """torch's composition, the same compiled, and Liger's kernels where they are installed."""
    function = getattr(F, shape.kind)

    def eager(input: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        named = _named(shape, rest)
        residual = named.pop("residual", None)
        total = input if residual is None else residual + F.dropout(input, shape.dropout_p)
        out = function(total, (shape.columns,), weight, **named, eps=1e-5)
        return out if residual is None else (out, total)

    def liger() -> Way:
        if shape.kind == "layer_norm":
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return lambda *operands: LigerLayerNormFunction.apply(*operands, 1e-5)
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda *operands: LigerRMSNormFunction.apply(*operands, 1e-5, 0.0, "llama", False)

    peers: dict[str, Callable[[], Way]] = {
        "torch": lambda: eager,
        "compiled": lambda: compiled(eager),
    }
    return peers if shape.residual else peers | {"liger": liger}
