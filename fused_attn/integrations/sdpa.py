"""`enable()`: our kernels behind torch's own scaled_dot_product_attention, in the whole process.

Every call of it, from Python under whatever name or from C++, reaches the op
`aten::scaled_dot_product_attention`, with the caller's own arguments: a bool mask is still bool,
dropout not yet a reason for another path. That op has no kernels but a composite one, so kernels
for a device can be added, and taken away again. The ops below it
(`_scaled_dot_product_flash_attention_for_cpu` and its like) see some of the calls only, with masks
made float; replaced attributes of torch.nn.functional are not seen by those who imported the
function before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.compiler.config
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import Library
from torch.nn import Parameter

from fused_attn import functional
from fused_attn.backends import AttentionProblem, default_backend, select, verdicts, wanted_backend
from fused_attn.backends import sdpa as torchs
from fused_attn.base import small_calls
from fused_attn.base.torch_state import in_transform

_config: Any = torch.compiler.config
_OP = torch.ops.aten.scaled_dot_product_attention.default
# Of these devices there are kernels. Whether one takes a call is asked at every call, so that
# use_backend counts, and so that nothing here starts CUDA.
_KEYS = ("CPU", "CUDA")
_PLAIN = frozenset({Tensor, Parameter})
_TRACED = frozenset({FakeTensor, FunctionalTensor})  # by torch.compile and export
# In the key of torch.compile's caches, on disk too: what they are keyed by otherwise is the graph
# of the caller, which is the same with our kernels and without.
_TAG = "+fused_attn"

_lock = threading.Lock()
_switched_on = False
_open_blocks = 0
_library: Library | None = None


def enable() -> None:
    """Compute torch.nn.functional.scaled_dot_product_attention by the kernels of this package.

    From now on, in the whole process, and without a change to any caller: modules that call the
    function under any name, torch.nn.MultiheadAttention and the Transformer layers (where they
    call it: not with need_weights=True, and not on their inference path in C++, which
    torch.backends.mha.set_fastpath_enabled(False) switches off), timm, diffusers. Nothing happens
    before this is called; `disable()` undoes it; calling it twice is the same as once.

    What differs from torch: rows with no visible key give 0, where torch gives 0 or NaN depending
    on the path; dropout drops other weights for the same seed of torch.manual_seed.

    What stays torch's own, with torch's results and errors: calls that no kernel takes (see
    docs/support.md; nested tensors, other tensor subclasses, torch.func transforms, forward mode,
    devices and types without a kernel; is_causal with a mask; most wrong arguments) and those
    within torch.nn.attention.sdpa_kernel where SDPBackend.FLASH_ATTENTION, which our kernels count
    as, is not among the backends. Where the choice of a backend falls on "eager", torch computes.

    torch.compile and export: what was compiled before stays as it was, and so does, after
    `disable()`, what was compiled now, with the same numbers; torch.compiler.reset() drops it.
    The caches of torch.compile keep the two apart by torch.compiler.config.cache_key_tag, which is
    one setting a thread: compile in a thread that called this. Exported programs hold torch's op,
    which our kernels compute where this is enabled at run time.

    Switch while no other thread is within a call of the function.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> fused_attn.enable()
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fused_attn.disable()
    """
    _switch(on=True)
    _config.cache_key_tag = _tagged()


def disable() -> None:
    """Undo `enable()`: torch's own kernels again, except within open blocks of `enabled()`."""
    _switch(on=False)
    _config.cache_key_tag = _config.cache_key_tag.replace(_TAG, "")


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`enable()` for the length of a block, for all threads; blocks may be nested or overlap.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> with fused_attn.enabled():
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    """
    _switch(blocks=1)
    try:
        with _config.patch(cache_key_tag=_tagged()):
            yield
    finally:
        _switch(blocks=-1)


def _switch(on: bool | None = None, blocks: int = 0) -> None:
    """Set the switch, or count blocks, and register or remove the kernels accordingly."""
    global _switched_on, _open_blocks, _library
    with _lock:
        switched_on = _switched_on if on is None else on
        open_blocks = _open_blocks + blocks
        if (switched_on or open_blocks > 0) and _library is None:
            _library = _registered()
        elif not (switched_on or open_blocks > 0) and _library is not None:
            _library = None  # torch drops the kernels of a library with it
            torchs.attend = torch.nn.functional.scaled_dot_product_attention
            _forget_dispatch()
        _switched_on, _open_blocks = switched_on, open_blocks


def _registered() -> Library:
    """A library that holds our kernels of torch's op as long as it lives.

    Somebody else's kernels are hidden until then: torch warns of that, or refuses.
    """
    library = Library("aten", "IMPL")
    try:
        for key in _KEYS:
            library.impl(_OP, _attention, f"Autograd{key}")
            library.impl(_OP, _below_autograd, key)
    except RuntimeError:
        library._destroy()  # whoever holds the error would keep the kernels that it has
        raise
    _forget_dispatch()
    _has_kernel.cache_clear()
    torchs.attend = _torchs_own
    return library


def _forget_dispatch() -> None:
    """torch.compile's dispatcher keeps what it found for a key; torch.library does not tell it."""
    for key in _KEYS:
        _OP._uncache_dispatch(getattr(DispatchKey, key))
        _OP._uncache_dispatch(getattr(DispatchKey, f"Autograd{key}"))


def _tagged() -> str:
    tag = _config.cache_key_tag
    return tag if _TAG in tag else tag + _TAG


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel of torch's op: ours, or torch's own where ours take no such call."""
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    small = attn_mask is None and dropout_p == 0.0 and _is_small(query, key, value)
    if not small and _taken(*args):
        # Validation comes before all else. What it refuses is torch's to refuse, or to take.
        with contextlib.suppress(ValueError, TypeError):
            return cast(Tensor, functional.scaled_dot_product_attention(*args, scale, enable_gqa))
    return _torchs_own(*args, scale=scale, enable_gqa=enable_gqa)


def _is_small(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if torch's own kernels are faster, with the same result and no second derivative, as
    they have it without `enable()`; of a call without a mask or dropout."""
    if type(query) not in _PLAIN or key.dim() < 2:
        return False
    work, limits = query.numel() * key.size(-2), small_calls.limits
    if work > limits.attention_training or query.dtype != torch.float32:
        return False
    return work <= limits.attention_forward or (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


def _torchs_own(*args: Any, **options: Any) -> Tensor:
    return _OP._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **options)


def _taken(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """True if a valid call is one for our kernels."""
    if in_transform() or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        return False
    types = {type(query), type(key), type(value)}
    bias_dtype = None
    if attn_mask is not None:
        if is_causal or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return False
        types.add(type(attn_mask))
        bias_dtype = None if attn_mask.dtype == torch.bool else attn_mask.dtype
    sizes = query.shape[-1], value.shape[-1]
    facts: tuple[Any, ...] = (query.device, query.dtype, *sizes, bias_dtype, wanted_backend())
    if default_backend(query.device) is None:
        tensors = (query, key, value, attn_mask)
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        kind = "causal" if is_causal else "none" if attn_mask is None else "dense"
        kind = kind if bias_dtype is None else "bias"
        learned_bias = learns and kind == "bias" and cast(Tensor, attn_mask).requires_grad
        lengths = query.shape[-2], key.shape[-2]
        facts += (verdicts.changes, kind, *lengths, dropout_p > 0.0, learns, learned_bias)
    if types <= _PLAIN:
        return _has_kernel(*facts)
    traced = types <= _PLAIN | _TRACED and _TAG in _config.cache_key_tag
    return traced and _has_kernel.__wrapped__(*facts)  # sizes may be symbols, which have no hash


@functools.lru_cache(maxsize=256)
def _has_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    bias_dtype: torch.dtype | None,
    backend: str | None,
    changes: int = 0,
    mask: str = "none",
    seqlen_q: int = 0,
    seqlen_k: int = 0,
    dropout: bool = False,
    learns: bool = False,
    learned_bias: bool = False,
) -> bool:
    """True if the choice of a backend falls on kernels; cached: it takes as long as a call.

    Args:
        changes: `verdicts.changes`; it and what follows matter only where verdicts decide.
    """
    problem = AttentionProblem(
        device, dtype, head_dim, head_dim_v, bias_dtype, mask=mask, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, dropout=dropout, learns=learns, learned_bias=learned_bias,
    )  # fmt: skip
    try:
        return not select(problem, backend).differentiable
    except NotImplementedError:  # the backend that is asked for does not take it
        return False


def _below_autograd(*args: Any, **kwargs: Any) -> Tensor:
    """The same for calls that autograd does not see: those in inference mode, for one."""
    if not torch.is_grad_enabled():
        return _attention(*args, **kwargs)
    with torch.no_grad():
        return _attention(*args, **kwargs)
