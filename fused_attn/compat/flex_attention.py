"""FlexAttention's function on the kernels of this package, with gradients on CPUs.

A score_mod may scale the scores or cap them by tanh, and add a bias, which may have gradients and
may be -inf. It is called with a range of scores to find out which of these it does.

Example:
    >>> from fused_attn.compat.flex_attention import create_block_mask, flex_attention
    >>> block_mask = create_block_mask(
    ...     lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256, device="cpu"
    ... )
    >>> query, key, value = (torch.randn(2, 4, 256, 64, requires_grad=True) for _ in range(3))
    >>> flex_attention(query, key, value, block_mask=block_mask).sum().backward()

Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
    Kernels".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dis import opmap
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.overrides import TorchFunctionMode

from fused_attn import functional, masks
from fused_attn.base.torch_state import in_transform
from fused_attn.call.attention import default_scale
from fused_attn.integrations.bytecode import closure_of, codes
from fused_attn.masks.fields import Shape
from fused_attn.masks.mask_mod import CHUNK, row_blocks, used_shape

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Results = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]

_TOLERANCE = 1e-6  # relative error of a score_mod that computes in float32
_LARGE = 1e9  # a score for which tanh is 1 in every score_mod
_SAMPLES, _LEAST_SCORES = 4, 256  # minimum number of scores in [-6, 6] per position, and in total
# Other ranges of scores; each position is tested with one score from each range.
_RANGES = ((6.0, 1e3), (-6.0, -1e3), (1e3, _LARGE), (-1e3, -_LARGE), (_LARGE,) * 2, (-_LARGE,) * 2)


@torch.compiler.disable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Results:
    """Compute attention with the arguments of torch.nn.attention.flex_attention.flex_attention.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        score_mod: score_mod(score, b, h, q_idx, kv_idx) returns the score to use. It must be
            score -> a * score + c or c1 * tanh(score / c1) + c, with numbers a and c1, and a
            function c of the positions, which may have gradients. To find a, c1 and c, it is called
            with scores from -1e9 to 1e9, once for each shape and each version of the tensors and
            numbers that it reads. If it reads anything else, this happens in each call. A nonzero c
            becomes a float32 tensor of shape (batch or 1, num_heads or 1, seqlen_q, seqlen_k).
        block_mask: see `masks.from_mask_mod`.
        scale: factor of query @ key^T; None means 1 / sqrt(head_dim).
        enable_gqa: allow num_heads to be a multiple of num_heads_kv.
        return_lse: also return lse, the natural log of the softmax denominator.
        kernel_options: options of FlexAttention's kernels, such as tile sizes. They are ignored.
        return_aux: which of lse and max_scores to return in an AuxOutput.

    Returns:
        out, (batch, num_heads, seqlen_q, head_dim_v). With return_lse, also lse, (batch, num_heads,
        seqlen_q); with return_aux, an AuxOutput.

    Raises:
        NotImplementedError: score_mod does something else, or max_scores are requested.
        ValueError, TypeError: an argument is invalid.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux must not both be given")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("max_scores of AuxRequest is not supported")
    mask, softcap = masks.as_mask(cast(Any, block_mask)), None
    if score_mod is not None:
        shape = (*query.shape[:3], key.shape[2])
        terms = _terms(score_mod, shape, query.device)
        softcap = terms.softcap
        if terms.factor != 1.0:
            scale = terms.factor * (default_scale(query.shape[3]) if scale is None else scale)
        if terms.bias is not None:
            bias = masks.bias(terms.bias)
            mask = bias if mask is None else mask & bias
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    results = functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, softcap=softcap, enable_gqa=enable_gqa,
        return_lse=wants_lse,
    )  # fmt: skip
    if return_aux is None:
        return results
    out, lse = results if wants_lse else (results, None)
    return out, AuxOutput(lse=lse)  # type: ignore[return-value]


class _Terms(NamedTuple):
    """Formula of a score_mod: factor * score or softcap * tanh(score / softcap), plus bias."""

    factor: float
    softcap: float | None
    bias: Tensor | None


_EXAMINED: WeakKeyDictionary[Any, dict[Any, _Terms]] = WeakKeyDictionary()
_MOST_EXAMINED = 8  # maximum number of cached entries per score_mod


def _terms(score_mod: ScoreMod, shape: Shape, device: torch.device) -> _Terms:
    """Return the formula of a score_mod, cached by the shape and by the values that it reads.

    A bias with gradients is evaluated in each call. Nothing is cached if the state of the score_mod
    is unknown, or in a torch.func transform, which may wrap the values that it reads.
    """
    state = None if in_transform() else _state(score_mod, set())
    examined = {} if state is None else _EXAMINED.setdefault(score_mod, {})
    key = shape, device, state
    if key not in examined:
        if len(examined) >= _MOST_EXAMINED:
            examined.clear()
        with torch.inference_mode(False):
            examined[key] = _examine(score_mod, shape, device)
    terms = examined[key]
    if terms.bias is not None and terms.bias.requires_grad:
        bias = _applied(score_mod, 0.0, _used(score_mod, shape, device), range(shape[2]), device)
        return terms._replace(bias=bias.float())
    return terms


_CONSTANT_MODULES = ("torch", "math", "builtins")
# Names with which a function may read values outside of its closure, defaults and globals.
_UNKNOWN_READS = {
    "globals", "vars", "eval", "exec", "open", "__import__", "get_default_dtype",
}  # fmt: skip
_IMPORT = opmap["IMPORT_NAME"]


def _state(function: Any, known: set[Any]) -> tuple[Any, ...] | None:
    """Return a cache key of the values that a function reads, or None if they are unknown.

    Args:
        known: functions whose values are already part of the key.
    """
    if not isinstance(function, FunctionType) or function.__dict__:  # it may read its attributes
        return None
    known.add(function)
    own = tuple(codes(function.__code__))
    names = {name for code in own for name in code.co_names}
    if names & _UNKNOWN_READS or any(_IMPORT in code.co_code[::2] for code in own):
        return None
    names = names & function.__globals__.keys()
    read = [function.__globals__[name] for name in sorted(names)]
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    captured = closure_of(function)
    key: list[Any] = [function.__code__, tuple(captured), tuple(sorted(names))]
    for value in (*read, *captured.values()):
        if isinstance(value, Tensor):
            if value.is_inference():
                return None
            key.append((value, value._version, value.requires_grad))  # by identity
        elif isinstance(value, FunctionType):
            nested = () if value in known else _state(value, known)
            if nested is None:
                return None
            key.append(nested)
        elif isinstance(value, (int, float, str, torch.dtype, torch.device, type(None))):
            key.append((type(value), value))  # 1 == 1.0 == True
        elif not _is_constant(value):
            return None
    return tuple(key)


def _is_constant(value: Any) -> bool:
    """Return True for a function, class or module whose attributes do not change."""
    if not isinstance(value, (ModuleType, BuiltinFunctionType, type)):
        return False
    if isinstance(value, BuiltinFunctionType) and not isinstance(
        value.__self__, (ModuleType, type(None))
    ):
        return False  # a method of an object that may change
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return (home or "builtins").partition(".")[0] in _CONSTANT_MODULES


def _examine(score_mod: ScoreMod, shape: Shape, device: torch.device) -> _Terms:
    shape = _used(score_mod, shape, device)
    first: _Terms | None = None
    biases = []
    for rows in row_blocks(shape):
        size = (*shape[:2], len(rows), shape[3])
        # Multiples of the golden ratio modulo 1, because torch.vmap rejects random numbers.
        steps = torch.arange(math.prod(size), dtype=torch.float64, device=device)
        place = ((steps * 0.6180339887498949) % 1.0).view(size)
        # At least _SAMPLES scores in [-6, 6] per position, and _LEAST_SCORES in total.
        count = max(_SAMPLES, -(-_LEAST_SCORES // max(len(steps), 1)))
        starts = torch.arange(count, dtype=torch.float64, device=device) / count
        scores = ((place + starts.view(-1, 1, 1, 1, 1)) % 1.0 - 0.5) * 12.0
        score = scores[0]
        with torch.enable_grad():
            bias = _applied(score_mod, 0.0, shape, rows, device)
            biases.append(bias.float())
            result = _applied(score_mod, score, shape, rows, device)
            seen = bias.detach() > float("-inf")
            if result.requires_grad and bool(seen.any()):
                _check_gradients(result[seen], bias[seen])
        with torch.no_grad():
            several = scores.split(max(CHUNK // max(len(steps), 1), 1))
            ranges = (low * (high / low) ** place for low, high in _RANGES)
            for values in itertools.chain(several, ranges):
                result = _applied(score_mod, values, shape, rows, device)
                if not torch.equal(result > float("-inf"), seen.expand_as(result)):
                    raise _refusal()
                if not bool(seen.any()):
                    break
                change, values, added = (t[..., seen] for t in (result - bias, values, bias))
                if first is None:
                    large = _applied(score_mod, _LARGE, shape, rows, device)[seen]
                    first = _form(
                        float(change.flatten()[0] / values.flatten()[0]), float(large[0] - added[0])
                    )
                expected = first.factor * values
                if first.softcap is not None:
                    expected = first.softcap * torch.tanh(values / first.softcap)
                allowed = _TOLERANCE * (1.0 + values.abs() + added.abs())
                if bool(((change - expected).abs() > allowed).any()):
                    raise _refusal()
    terms = first or _Terms(1.0, None, None)
    if biases[0].requires_grad:
        return terms._replace(bias=torch.empty(0, requires_grad=True))
    whole = torch.cat(biases, dim=2)
    return terms._replace(bias=whole if bool(whole.any()) else None)


def _check_gradients(result: Tensor, bias: Tensor) -> None:
    """Raise NotImplementedError if a factor or cap has gradients; only `bias` may have them."""
    leaves, todo, done = [], [result.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        todo += [function for function, _ in node.next_functions]
    weights = torch.linspace(0.5, 1.5, len(result), dtype=result.dtype, device=result.device)
    of_change, of_result = (
        torch.autograd.grad((t * weights).sum(), leaves, retain_graph=True, allow_unused=True)
        for t in (result - bias, result)
    )
    for change, whole in zip(of_change, of_result, strict=True):
        if change is None or whole is None or change.numel() == 0:
            continue
        if bool(change.abs().max() > 1e-4 * whole.abs().max()):
            raise _refusal()


def _form(slope: float, change_of_large: float) -> _Terms:
    """Return the formula with the given slope at score 0 and the given value at score _LARGE."""
    if abs(change_of_large - slope * _LARGE) < 1e-3 * abs(change_of_large):
        factor = change_of_large / _LARGE
        return _Terms(1.0 if abs(factor - 1.0) < _TOLERANCE else factor, None, None)
    if not 0.0 < change_of_large < math.inf:
        raise _refusal()
    return _Terms(1.0, change_of_large, None)


def _refusal() -> NotImplementedError:
    return NotImplementedError(
        "score_mod must return score, c * score or c * tanh(score / c) for a constant c, plus a "
        "function of the positions"
    )


class _IndexByTensors(TorchFunctionMode):
    """Lets torch.vmap index by scalar tensors, as FlexAttention does."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor) for i in index):
                return torch.ops.aten.index(args[0], list(index))
        return function(*args, **(kwargs or {}))


def _applied(
    score_mod: ScoreMod, score: Tensor | float, shape: Shape, rows: range, device: torch.device
) -> Tensor:
    """Return the results of a score_mod for some rows, in the dtype of score or float64."""
    if not isinstance(score, Tensor):
        size = (*shape[:2], len(rows), shape[3])
        score = torch.full(size, score, dtype=torch.float64, device=device)
    else:
        score = score.clone()  # score_mod may change it in place
    function: Any = score_mod
    for dim in reversed(range(4)):
        own = [0 if i == dim else None for i in range(4)]
        function = torch.vmap(function, in_dims=(0, *own))
    if score.dim() > 4:
        function = torch.vmap(function, in_dims=(0, None, None, None, None))
    b, h, k = (torch.arange(shape[i], device=device) for i in (0, 1, 3))
    q = torch.arange(rows.start, rows.stop, device=device)
    with _IndexByTensors():
        return function(score, b, h, q, k)


def _used(score_mod: ScoreMod, shape: Shape, device: torch.device) -> Shape:
    """Return the shape with size 1 for batch and heads if a score_mod does not depend on them."""
    if in_transform():  # which would hide the positions from `used_shape`
        return shape
    score = torch.zeros((), device=device)
    return used_shape(lambda *positions: score_mod(score, *positions), shape, device)
