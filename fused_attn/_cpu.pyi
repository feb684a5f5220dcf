"""Compiled CPU kernels (csrc/bind_cpu.cpp); keyword fields are listed in csrc/fields."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fused_attn.call.attention import AttentionCall, AttentionOutputs, UncheckedAttention
from fused_attn.call.norm import NormCall, UncheckedNorm
from fused_attn.masks.spec import MaskSpec

SUMMARY_TILE: tuple[int, int]
FIELDS: list[str]

# The passes return None if the call needs validation, or tensors in another layout.
def attention_fwd(
    call: AttentionCall | UncheckedAttention,
    for_backward: bool,
    want_lse: bool,
    num_threads: int,
    /,
) -> Any: ...
def attention_bwd(
    call: AttentionCall,
    outputs: AttentionOutputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_bias: bool,
    num_threads: int,
    /,
) -> Any: ...
def attention_decode(
    call: AttentionCall,
    block_table: Tensor | None,
    seqlen_k: int,
    ends: tuple[int, ...],
    new_key: Tensor | None,
    new_value: Tensor | None,
    want_lse: bool,
    num_threads: int,
    /,
) -> Any: ...
def norm_fwd(
    call: NormCall | UncheckedNorm, for_backward: bool, want_total: bool, num_threads: int, /
) -> Any: ...
def norm_bwd(
    call: NormCall,
    mean: Tensor | None,
    rstd: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
    num_threads: int,
    /,
) -> Any: ...
def attention_weights(call: AttentionCall, **fields: Any) -> None: ...
def attention_weights_bwd(call: AttentionCall, **fields: Any) -> None: ...
def set_torch(
    exchange_api: object,
    empty: Callable[[tuple[int, ...], tuple[int, ...], int], Tensor],
    /,
) -> None: ...
def set_no_mask(spec: MaskSpec, /) -> None: ...
def environment(name: str, /) -> str | None: ...
def empty_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: int, /) -> Tensor: ...
def activation(**fields: Any) -> None: ...
def rotary(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    per_dimension: bool,
    backward: bool,
    out: Tensor,
    num_threads: int,
) -> None: ...
def tile_summary(**fields: Any) -> None: ...
def tile_kinds(call: AttentionCall, **fields: Any) -> None: ...
def tile_size(dtype: int) -> tuple[int, int]: ...
def multiply_add_peak(threads: int, /) -> float: ...
def product_peak(dtype: int, threads: int, /) -> float: ...
def release_workspace() -> None: ...
def isa() -> str: ...
def set_isa(isa: str) -> None: ...
