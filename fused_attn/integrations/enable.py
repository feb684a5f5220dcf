"""`enable()` registers this package's kernels for F.scaled_dot_product_attention, process-wide.

Every call, from C++ or from Python under any name, reaches the op
`aten::scaled_dot_product_attention` with the caller's arguments. At this point, a bool mask is
still bool, and dropout has not yet affected the choice of kernel. The op has only a composite
kernel, so device kernels can be registered for it and removed again. Two alternatives would cover
fewer calls:

- Lower-level ops (`_scaled_dot_product_flash_attention_for_cpu` and similar) receive only some of
  the calls, with masks converted to float.
- Replacing the attribute of torch.nn.functional misses code that imported the function earlier.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.compiler.config
import torch.nn.attention
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import Library

from fused_attn import functional
from fused_attn.backends import AttentionProblem, default_backend, wanted_backend
from fused_attn.backends import sdpa as sdpa_backend
from fused_attn.backends.registry import choose
from fused_attn.base.torch_state import TENSOR_TYPES, in_transform, needs_grad
from fused_attn.call.call_counts import CallCounts

_config: Any = torch.compiler.config
_eval_frame: Any = torch._C._dynamo.eval_frame
_OP = torch.ops.aten.scaled_dot_product_attention.default
# Dispatch keys of the devices with kernels. Support is checked at each call, so that a later
# use_backend takes effect and registration does not initialize CUDA.
_KEYS = ("CPU", "CUDA")
_TRACED = frozenset({FakeTensor, FunctionalTensor})  # tensors in traces of torch.compile and export
# Added to the key of torch.compile's caches, including those on disk. Otherwise the key depends
# only on the caller's graph, which is the same with and without our kernels.
_TAG = "+fused_attn"

_lock = threading.Lock()
_library: Library | None = None  # our kernels, registered while _counts is not empty
_counts: list[CallCounts] = []  # one for `enable()`, one for each open `enabled()` block
_enabled_counts: CallCounts | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[CallCounts] = []  # counts of this thread's open `enabled()` blocks


_thread = _Thread()


def enable(*, call_sites: bool = False) -> CallCounts:
    """Run torch.nn.functional.scaled_dot_product_attention on this package's kernels.

    The kernels are registered process-wide, without changes to callers, for all code that calls the
    function, under any name, including timm, diffusers, torch.nn.MultiheadAttention and the
    torch.nn Transformer layers. MultiheadAttention bypasses the function if need_weights=True.
    The torch.nn modules also bypass it on their C++ inference path, which
    torch.backends.mha.set_fastpath_enabled(False) disables.
    `disable()` removes the kernels. Repeated calls of `enable()` return the same counts.

    Results differ from torch's in two cases. Fully masked rows give 0, where torch gives 0 or NaN
    depending on the path. Dropout drops different weights for the same torch.manual_seed.

    Unsupported calls fall back to torch, with its results and errors. These are calls with nested
    tensors or other tensor subclasses, torch.func transforms, forward-mode AD, devices and dtypes
    without a kernel, is_causal with a mask, and most invalid arguments; see docs/support.md. Calls
    within torch.nn.attention.sdpa_kernel also fall back unless it allows
    SDPBackend.FLASH_ATTENTION, because our kernels count as flash attention. If the selected
    backend is differentiable, such as "sdpa" or "eager", torch computes all calls.

    Code that torch.compile compiled before `enable()`, or before `disable()`, does not change, and
    its results stay the same. torch.compiler.reset() discards such code. The caches of
    torch.compile distinguish the two states by torch.compiler.config.cache_key_tag. This setting is
    per thread, so compile in a thread that called `enable()`. Exported programs contain torch's op,
    which runs our kernels if they are enabled at run time.

    Call this only while no other thread is executing the function.

    Args:
        call_sites: count calls separately for each line of code that makes them.

    Returns:
        A `CallCounts` that counts all later calls by shape, and those that fall back to torch by
        reason.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> counts = fused_attn.enable()
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fused_attn.disable()
    """
    global _enabled_counts
    if _enabled_counts is None:
        counts = CallCounts()
        _start(counts)
        _enabled_counts = counts
    _tag()
    _enabled_counts.call_sites |= call_sites
    return _enabled_counts


def disable() -> None:
    """Undo `enable()` and restore torch's kernels, unless a block of `enabled()` is still open."""
    global _enabled_counts
    if _enabled_counts is not None:
        _stop(_enabled_counts)
        _enabled_counts = None
    _tag()


def _activate() -> SimpleNamespace:
    """Enable our kernels, and return the handle with which torch disables them."""
    enable()
    return SimpleNamespace(remove=disable)


def register_with_torch() -> None:
    """Register "fused_attn" for torch.nn.attention.activate_flash_attention_impl (torch 2.11).

    Activation is `enable()`, and torch.nn.attention.restore_flash_attention_impl is `disable()`. An
    existing registration, such as that of another copy of this package, is not overwritten.
    """
    names = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    if names is not None and "fused_attn" not in names():
        torch.nn.attention.register_flash_attention_impl("fused_attn", register_fn=_activate)


@contextlib.contextmanager
def enabled(*, call_sites: bool = False) -> Iterator[CallCounts]:
    """Enable this package's kernels for all threads within a with block.

    Blocks may nest, and blocks of different threads may overlap. The value of the with statement is
    a `CallCounts` of the calls within the block.

    Args:
        call_sites: as in `enable()`.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> with fused_attn.enabled():
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    """
    counts = CallCounts(call_sites)
    _start(counts)
    blocks = _thread.blocks  # another thread may end the block
    blocks.append(counts)
    try:
        _tag()
        yield counts
    finally:
        blocks[:] = [other for other in blocks if other is not counts]
        _tag()
        _stop(counts)


def _start(counts: CallCounts) -> None:
    """Count calls, and register our kernels if nothing else uses them."""
    global _library
    with _lock:
        if _library is None:
            _library = _registered()
        _counts.append(counts)


def _stop(counts: CallCounts) -> None:
    """Stop counting calls, and remove our kernels if nothing else uses them."""
    global _library
    with _lock:
        _counts[:] = [other for other in _counts if other is not counts]
        if not _counts and _library is not None:
            _library = None  # torch unregisters the kernels of a deleted library
            sdpa_backend.torch_sdpa = torch.nn.functional.scaled_dot_product_attention
            _forget_dispatch()


def _registered() -> Library:
    """Register our kernels for torch's op until the returned library is deleted.

    They override kernels that other packages registered. torch warns about this or raises
    RuntimeError.
    """
    library = Library("aten", "IMPL")
    # If torch.compile runs a caller's frame eagerly, such as after a graph break in a loop, Dynamo
    # would compile our kernels as separate frames and trace them incorrectly.
    skip = _eval_frame._FrameExecStrategy(*[_eval_frame._FrameAction.SKIP] * 2)  # includes callees
    for kernel in (_attention, _below_autograd):
        _eval_frame.set_code_exec_strategy(kernel.__code__, skip)
    try:
        for key in _KEYS:
            library.impl(_OP, _attention, f"Autograd{key}")
            library.impl(_OP, _below_autograd, key)
    except RuntimeError:
        library._destroy()  # the traceback would keep the library and its kernels alive
        raise
    _forget_dispatch()
    sdpa_backend.torch_sdpa = _torch_implementation
    return library


def _forget_dispatch() -> None:
    """Clear torch.compile's cached kernel lookups, which torch.library does not invalidate."""
    for key in _KEYS:
        _OP._uncache_dispatch(getattr(DispatchKey, key))
        _OP._uncache_dispatch(getattr(DispatchKey, f"Autograd{key}"))


def _tag() -> None:
    """Add _TAG to the thread's cache key if `enable()` or `enabled()` applies, else remove it."""
    key = _config.cache_key_tag.replace(_TAG, "")
    in_effect = _enabled_counts is not None or bool(_thread.blocks)
    _config.cache_key_tag = key + _TAG if in_effect else key


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
    """Compute torch's op with our kernels, or with torch's for unsupported calls."""
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    reason = _fallback_reason(*args)
    if not reason:
        try:
            out = functional.scaled_dot_product_attention(*args, scale, enable_gqa)
        except (ValueError, TypeError) as error:  # let torch reject or compute it
            reason = str(error)
        else:
            _count("", query, key)
            return cast(Tensor, out)
    _count(reason, query, key)
    with _kernels_for(query, key, value, attn_mask):
        return _torch_implementation(*args, scale=scale, enable_gqa=enable_gqa)


def _kernels_for(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables defective cuDNN kernels, unless the caller chose kernels."""
    plain = query.is_cuda and query.dim() == 4 and type(query) in TENSOR_TYPES | _TRACED
    flags = torch.backends.cuda
    if plain and flags.flash_sdp_enabled() and flags.math_sdp_enabled():
        return sdpa_backend.allowed_kernels(query, key, value, mask)
    return contextlib.nullcontext()


def _count(reason: str, query: Tensor, key: Tensor) -> None:
    if type(query) in TENSOR_TYPES:
        for counts in _counts:
            counts.add(reason, query, key)


def _torch_implementation(*args: Any, **options: Any) -> Tensor:
    return _OP._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **options)


def _fallback_reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str:
    """Return the reason why a valid call falls back to torch; empty if our kernels compute it."""
    if in_transform():
        return "under a torch.func transform or forward-mode AD"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "FLASH_ATTENTION is disabled by torch.nn.attention.sdpa_kernel or enable_flash_sdp"
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        return "query, key or value has fewer than 2 dimensions"
    types = {type(query), type(key), type(value)}
    bias_dtype = None
    if attn_mask is not None:
        if is_causal:
            return "both attn_mask and is_causal are given"
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask is {attn_mask.dtype}, not bool, float32 or the dtype of query"
        types.add(type(attn_mask))
        bias_dtype = None if attn_mask.dtype == torch.bool else attn_mask.dtype
    is_traced = types <= TENSOR_TYPES | _TRACED and _TAG in _config.cache_key_tag
    if not (types <= TENSOR_TYPES or is_traced):
        return "an argument is a tensor subclass"
    # If one backend is the default for all calls, leave the other fields at their defaults: one
    # cached choice then serves all lengths, and torch.compile adds no guards on them.
    problem = AttentionProblem(
        query.device, query.dtype, query.shape[-1], value.shape[-1], bias_dtype
    )
    if default_backend(query.device) is None:
        problem.needs_grad = needs_grad(query, key, value, attn_mask)
        problem.mask = "none" if attn_mask is None else "dense" if bias_dtype is None else "bias"
        problem.mask = "causal" if is_causal else problem.mask
        problem.learned_bias = bias_dtype is not None and needs_grad(attn_mask)
        problem.seqlen_q, problem.seqlen_k = query.shape[-2], key.shape[-2]
        problem.dropout = dropout_p > 0.0
    chosen, refusals = choose(problem)
    if chosen is not None and not chosen.differentiable:
        return ""
    if refusals:
        name, reasons = refusals[0]
        return f"{name} {reasons[0]}"
    return f"backend {wanted_backend()} is requested"


def _below_autograd(*args: Any, **kwargs: Any) -> Tensor:
    """Compute calls that bypass the autograd keys, such as those in inference mode."""
    if not torch.is_grad_enabled():
        return _attention(*args, **kwargs)
    with torch.no_grad():
        return _attention(*args, **kwargs)
