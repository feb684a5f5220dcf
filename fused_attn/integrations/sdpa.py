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
from fused_attn.backends.cpp import masks_like_torch
from fused_attn.backends.registry import asks_for_a_backend, choose
from fused_attn.base import small_calls
from fused_attn.base.torch_state import in_transform, needs_grad
from fused_attn.call.call_counts import CallCounts

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
_counts: list[CallCounts] = []  # of `enable()` and of each open block
_enabled_counts: CallCounts | None = None


def enable(*, call_sites: bool = False) -> CallCounts:
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

    Args:
        call_sites: count the calls of each line of code apart.

    Returns:
        Counts of the calls from now on, by shape, and of those that torch computed by the reason.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> counts = fused_attn.enable()
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fused_attn.disable()
    """
    global _enabled_counts
    _switch(on=True)
    _config.cache_key_tag = _tagged()
    if _enabled_counts is None:
        _enabled_counts = CallCounts()
        _counts.append(_enabled_counts)
    _enabled_counts.call_sites |= call_sites
    return _enabled_counts


def disable() -> None:
    """Undo `enable()`: torch's own kernels again, except within open blocks of `enabled()`."""
    global _enabled_counts
    _switch(on=False)
    if _enabled_counts is not None:
        _counts.remove(_enabled_counts)
        _enabled_counts = None
    _config.cache_key_tag = _config.cache_key_tag.replace(_TAG, "")


@contextlib.contextmanager
def enabled(*, call_sites: bool = False) -> Iterator[CallCounts]:
    """`enable()` for the length of a block, for all threads; blocks may be nested or overlap.

    Gives the block the counts of the calls within it, as `enable()` returns them.

    Args:
        call_sites: as in `enable()`.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> with fused_attn.enabled():
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    """
    counts = CallCounts(call_sites)
    _switch(blocks=1)
    _counts.append(counts)
    try:
        with _config.patch(cache_key_tag=_tagged()):
            yield counts
    finally:
        _counts.remove(counts)
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
    _choice_against.cache_clear()
    torchs.attend = _torch_implementation
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
    if dropout_p == 0.0 and _is_small(query, key, value, attn_mask, is_causal):
        reason = "small: torch's kernels are faster"
    else:
        reason = _reason_against(*args)
    if not reason:
        try:
            out = functional.scaled_dot_product_attention(*args, scale, enable_gqa)
        except (ValueError, TypeError) as error:  # torch's to refuse, or to take
            reason = str(error)
        else:
            _count("", query, key)
            return cast(Tensor, out)
    _count(reason, query, key)
    return _torch_implementation(*args, scale=scale, enable_gqa=enable_gqa)


def _count(reason: str, query: Tensor, key: Tensor) -> None:
    if type(query) in _PLAIN:
        for counts in _counts:
            counts.add(reason, query, key)


def _is_small(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> bool:
    """Return True if torch's own kernels are faster and give the same result of a call without
    dropout; there is no second derivative then, as without `enable()`."""
    if type(query) not in _PLAIN or query.dim() < 2 or key.dim() < 2:
        return False
    seqlen_k, limits = key.size(-2), small_calls.limits
    work = query.numel() * seqlen_k
    if not 0 < work <= limits.attention_training or query.dtype != torch.float32:
        return False
    if is_causal and query.size(-2) != seqlen_k:  # torch multiplies keys that no query sees by 0
        return False
    if (work > limits.attention_forward or attn_mask is not None) and not needs_grad(
        query, key, value
    ):
        return False
    if not query.is_cpu or asks_for_a_backend():
        return False
    return attn_mask is None or _masks_like_torch(query, key, value, attn_mask)


def _masks_like_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return True if torch's kernels give this masked call the result of ours: every row has a key,
    and nothing behind the mask is NaN or infinite. It reads small tensors on the CPU."""
    if mask.dtype != torch.bool or masks_like_torch is None or in_transform():
        return False
    if not all(type(t) in _PLAIN and t.is_cpu for t in (key, value, mask)):
        return False
    if not (key.dtype == value.dtype == torch.float32):
        return False
    return masks_like_torch(query, key, value, mask)


def _torch_implementation(*args: Any, **options: Any) -> Tensor:
    return _OP._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **options)


def _reason_against(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str:
    """Return the reason to leave a valid call to torch's own kernels; empty if ours take it."""
    if in_transform():
        return "under a torch.func transform or forward-mode AD"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "within torch.nn.attention.sdpa_kernel without FLASH_ATTENTION"
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        return "fewer than 2 dimensions"
    types = {type(query), type(key), type(value)}
    bias_dtype = None
    if attn_mask is not None:
        if is_causal:
            return "attn_mask with is_causal"
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask of {attn_mask.dtype}"
        types.add(type(attn_mask))
        bias_dtype = None if attn_mask.dtype == torch.bool else attn_mask.dtype
    sizes = query.shape[-1], value.shape[-1]
    facts: tuple[Any, ...] = (query.device, query.dtype, *sizes, bias_dtype, wanted_backend())
    if default_backend(query.device) is None:
        tensors = (query, key, value, attn_mask)
        trains = needs_grad(*tensors)
        kind = "causal" if is_causal else "none" if attn_mask is None else "dense"
        kind = kind if bias_dtype is None else "bias"
        learned_bias = trains and kind == "bias" and cast(Tensor, attn_mask).requires_grad
        lengths = query.shape[-2], key.shape[-2]
        facts += (verdicts.changes, kind, *lengths, dropout_p > 0.0, trains, learned_bias)
    if types <= _PLAIN:
        return _choice_against(*facts)
    if types <= _PLAIN | _TRACED and _TAG in _config.cache_key_tag:
        return _choice_against.__wrapped__(*facts)  # sizes may be symbols, which have no hash
    return "a tensor subclass"


@functools.lru_cache(maxsize=256)
def _choice_against(
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
    needs_grad: bool = False,
    learned_bias: bool = False,
) -> str:
    """Return the reason why no kernel of ours is chosen; empty if one is. Cached: the choice takes
    as long as a call.

    Args:
        changes: `verdicts.changes`; it and what follows matter only where verdicts decide.
    """
    problem = AttentionProblem(
        device, dtype, head_dim, head_dim_v, bias_dtype, mask=mask, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, dropout=dropout, needs_grad=needs_grad, learned_bias=learned_bias,
    )  # fmt: skip
    chosen, refusals = choose(problem, backend)
    if chosen is not None and not chosen.differentiable:
        select(problem, backend)  # which may warn
        return ""
    if refusals:
        name, reasons = refusals[0]
        return f"{name} {reasons[0]}"
    return f"backend {backend} is asked for"


def _below_autograd(*args: Any, **kwargs: Any) -> Tensor:
    """The same for calls that autograd does not see: those in inference mode, for one."""
    if not torch.is_grad_enabled():
        return _attention(*args, **kwargs)
    with torch.no_grad():
        return _attention(*args, **kwargs)
