"""Implementations to compare: fused_attn and its peers, as functions of a problem's operands.

A peer that this torch or this GPU does not support raises when it is made or called. The runner
records the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from shapes import Attention, Device, Norm
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_attn
from fused_attn.backends import get_backend
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.masks import UNLIMITED, Mask
from fused_attn.tools import verify
from fused_attn.tools.cases import as_dense_mask, as_one_tensor

OURS = "fused_attn"
# Peers whose first call compiles for seconds.
COMPILING = ("flex", "compiled", f"{OURS}, flex", f"{OURS}, flex_flash")
EAGER_SCORES = 2**26  # maximum number of scores that fit in memory with eager attention
Way = Callable[..., Any]  # operands -> a tensor or a tuple of tensors
MaskMod = Callable[..., Tensor]  # mask_mod of FlexAttention: (batch, head, query, key) -> bool
Peers = dict[str, Callable[[], "Way | Apart"]]  # name -> function that makes the peer


def compiled(function: Way) -> Way:
    """Compile a function with static shapes, for the shapes of one problem."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # allow repeated backwards of one graph
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class Apart:
    """Peer that takes its own operands and returns results in a different layout."""

    way: Way
    operands: Sequence[Tensor]


# ---- attention ----------------------------------------------------------------------------------


def attention(shape: Attention, backend: str | None, device: Device) -> Way:
    """Return fused_attn. A fourth operand (learned bias or mask tensor) replaces the mask."""
    return _on(shape, shape.own_mask(device), backend)


def eager_part(shape: Attention, device: Device) -> tuple[Way, Callable[[Tensor], Tensor]]:
    """Return eager attention on a part that fits in memory, and a function that slices the part."""
    part = shape.checked().part_of(shape.size)
    visible, bias = (None if t is None else part(t).clone() for t in shape.tensors(device))

    def call(*operands: Tensor) -> Tensor:
        added = None if bias is None else bias.to(statistics_dtype(operands[0].dtype))
        return _on(shape, as_dense_mask(visible, added), "eager")(*operands)

    return call, part


def _on(shape: Attention, mask: Mask | None, backend: str | None) -> Way:
    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return fused_attn.scaled_dot_product_attention(
            query, key, value, mask if bias is None else bias, shape.dropout_p, enable_gqa=True,
            softcap=shape.softcap, backend=backend,
        )  # fmt: skip

    return call


def attention_peers(
    shape: Attention, dtype: torch.dtype, backend: str | None, device: Device, *, gpu: bool
) -> Peers:
    """Return SDPA and the other peers of fused_attn's attention on a device.

    On a CPU, the other peer is eager attention, if its scores fit in memory. On a GPU, the others
    are torch's kernels, the other fused_attn backends and, if the mask is dense, `backend` with the
    mask passed as a tensor.

    Args:
        backend: fused_attn backend to compare with the peers.
    """
    peers: Peers = {"sdpa": lambda: sdpa(shape, dtype, device)}
    if not gpu:
        size = shape.size
        if size.batch * size.num_heads * size.seqlen_q * size.seqlen_k <= EAGER_SCORES:
            peers["eager"] = lambda: attention(shape, "eager", device)
        return peers
    if shape.mask in ("none", "causal") and not shape.bias:  # other masks have only one kernel
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
    peers |= {
        f"{OURS}, {name}": lambda name=name: attention(shape, name, device)
        for name in verify.candidates()
        if name != backend and not get_backend(name).unavailable()
    }
    mask = shape.own_mask(device)
    if mask is not None and mask.dense_masks:
        own, (dense,) = attention(shape, backend, device), mask.dense_masks
        # The summary of a mask tensor is recomputed in each call, but a Mask caches it.
        peers[f"{OURS}, mask as tensor"] = lambda: lambda *operands: own(*operands, dense)
    return peers


def sdpa(
    shape: Attention, dtype: torch.dtype, device: Device, backend: SDPBackend | None = None
) -> Way:
    """Return torch's SDPA without softcap, on the kernel that it selects or on a given one."""
    causal = shape.mask == "causal"
    mask = None if causal else as_one_tensor(*shape.tensors(device, torch.float32), dtype)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        context = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
        with context:
            return F.scaled_dot_product_attention(
                query, key, value, mask if bias is None else bias[None], shape.dropout_p, causal,
                enable_gqa=shape.size.num_heads_kv != shape.size.num_heads,
            )  # fmt: skip

    return call


def flex(shape: Attention, device: Device) -> Way:
    """Return compiled FlexAttention, with its block mask built in advance."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    run, size = compiled(flex_attention), shape.size
    mask = shape.own_mask(device)
    visible = _flex_mask(mask)
    block_mask = None
    if mask is not None and visible is not None:
        batch = size.batch if mask.paddings else None
        block_mask = create_block_mask(
            visible, batch, None, size.seqlen_q, size.seqlen_k, device=str(device)
        )
    alibi = mask.slopes[0].slopes if mask is not None and mask.slopes else None

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if shape.softcap is not None:
                score = shape.softcap * torch.tanh(score / shape.softcap)
            if alibi is not None:
                score = score - alibi[h] * (i - j).abs()
            return score if bias is None else score + bias[h, i, j]

        plain = shape.softcap is None and alibi is None and bias is None
        return run(
            query, key, value, None if plain else changed, block_mask,
            enable_gqa=size.num_heads_kv != size.num_heads,
        )  # fmt: skip

    return call


def _flex_mask(mask: Mask | None) -> MaskMod | None:
    """Return the mask_mod of a Mask, as formulas except for dense masks; None without a mask."""
    from torch.nn.attention.flex_attention import and_masks

    if mask is None:
        return None
    conditions = [
        *map(_flex_band, mask.bands),
        *(_flex_lengths(padding.key_lengths) for padding in mask.paddings),
        *(_flex_documents(pair.query_ids, pair.key_ids) for pair in mask.document_pairs),
        *map(_flex_dense, mask.dense_masks),
    ]
    return and_masks(*conditions) if conditions else None


def _flex_band(band: Any) -> MaskMod:
    left = band.left
    if left >= UNLIMITED:
        return lambda b, h, i, j: i >= j
    return lambda b, h, i, j: (i >= j) & (i - j <= left)


def _flex_lengths(lengths: Tensor) -> MaskMod:
    return lambda b, h, i, j: j < lengths[b]


def _flex_documents(query_ids: Tensor, key_ids: Tensor) -> MaskMod:
    return lambda b, h, i, j: query_ids[i] == key_ids[j]


def _flex_dense(dense: Tensor) -> MaskMod:
    return lambda b, h, i, j: dense[i, j]


# ---- packed sequences ---------------------------------------------------------------------------


def packed(shape: Attention, backend: str | None, cu_seqlens: Tensor) -> Way:
    """Return fused_attn on packed sequences without padding."""
    where = (cu_seqlens, cu_seqlens, shape.size.seqlen_q, shape.size.seqlen_k)
    return lambda *rows: fused_attn.varlen_attention(*rows, *where, backend=backend)


def packed_peers(
    shape: Attention, dtype: torch.dtype, cu_seqlens: Tensor, device: Device, *, gpu: bool
) -> Peers:
    """Return SDPA on the padded batch for a CPU; varlen_attn and jagged tensors for a GPU."""
    longest = shape.size.seqlen_q

    def padded() -> Apart:
        operands = [t.requires_grad_() for t in shape.operands(dtype, device)]
        return Apart(sdpa(shape, dtype, device), operands)

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

    return {"varlen_attn": varlen, "nested": nested} if gpu else {"sdpa": padded}


# ---- norms --------------------------------------------------------------------------------------


def norm_operands(shape: Norm, dtype: torch.dtype, device: Device, seed: int) -> list[Tensor]:
    """Return input, weight, bias (layer_norm only), and the residual if the problem has one."""
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
    """Return the operands after weight by argument name."""
    names = ["bias"] * (shape.kind == "layer_norm") + ["residual"] * shape.residual
    return dict(zip(names, rest, strict=True))


def norm(shape: Norm, backend: str | None) -> Way:
    """Return the norm of fused_attn as a function of the operands."""
    function = getattr(fused_attn, shape.kind)

    def call(input: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        return function(
            input, shape.columns, weight, **_named(shape, rest), eps=1e-5,
            dropout_p=shape.dropout_p, return_residual=shape.returns_sum, backend=backend,
        )  # fmt: skip

    return call


def norm_peers(shape: Norm, *, gpu: bool) -> Peers:
    """Return torch's composition; on a GPU also its compiled form, and Liger's kernels."""
    function = getattr(F, shape.kind)

    def eager(input: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        named = _named(shape, rest)
        residual = named.pop("residual", None)
        total = input if residual is None else residual + F.dropout(input, shape.dropout_p)
        out = function(total, (shape.columns,), weight, **named, eps=1e-5)
        return (out, total) if shape.returns_sum else out

    def liger() -> Way:
        if shape.kind == "layer_norm":
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return lambda *operands: LigerLayerNormFunction.apply(*operands, 1e-5)
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda *operands: LigerRMSNormFunction.apply(*operands, 1e-5, 0.0, "llama", False)

    peers: Peers = {"torch": lambda: eager}
    if gpu:
        peers["compiled"] = lambda: compiled(eager)
    if gpu and not shape.residual:
        peers["liger"] = liger
    return peers
