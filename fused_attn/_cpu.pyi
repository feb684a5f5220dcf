"""The compiled CPU kernels (csrc/bind_cpu.cpp); the fields are those of csrc/fields."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fused_attn.call.calls import AttentionCall, NormCall
from fused_attn.masks.spec import MaskSpec

SUMMARY_TILE: tuple[int, int]
CALL_FIELDS: list[str]

def attention_fwd(call: AttentionCall, **fields: Any) -> None: ...
def attention_bwd(call: AttentionCall, **fields: Any) -> None: ...
def attention_weights(call: AttentionCall, **fields: Any) -> None: ...
def norm_fwd(call: NormCall, **fields: Any) -> None: ...
def norm_bwd(call: NormCall, **fields: Any) -> None: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec | None,
    scale: float | None,
    enable_gqa: bool,
    grad_enabled: bool,
    num_threads: int,
    for_backward: bool,
    dropout_p: float,
    draw: Callable[[], int] | None,
    /,
) -> Any: ...
def attention_gradients(
    grad_out: Tensor,
    outputs: tuple[Tensor | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec | None,
    scale: float | None,
    num_threads: int,
    dropout_p: float,
    draw: Callable[[], int],
    /,
) -> tuple[Tensor, Tensor, Tensor] | None: ...
def norm(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    rms: bool,
    with_total: bool,
    grad_enabled: bool,
    num_threads: int,
    for_backward: bool,
    dropout_p: float,
    draw: Callable[[], int] | None,
    /,
) -> Any: ...
def norm_gradients(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float,
    rms: bool,
    needs_weight: bool,
    needs_bias: bool,
    num_threads: int,
    dropout_p: float,
    draw: Callable[[], int],
    /,
) -> tuple[Tensor | None, ...] | None: ...
def set_torch(tensor: type, parameter: type, exchange_api: object, /) -> None: ...
def empty_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: int, /) -> Tensor: ...
def activation(**fields: Any) -> None: ...
def tile_summary(**fields: Any) -> None: ...
def tile_kinds(call: AttentionCall, **fields: Any) -> None: ...
def tile_size(dtype: int) -> tuple[int, int]: ...
def multiply_add_peak(threads: int, /) -> float: ...
def product_peak(dtype: int, threads: int, /) -> float: ...
def release_workspace() -> None: ...
def isa() -> str: ...
def set_isa(isa: str) -> None: ...
