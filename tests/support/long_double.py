"""Execution of torch code in long double, which serves as the reference for float64 results.

`LongDouble` shadows each float64 storage with an array of numpy's long double (64 bits of precision
on x86, 113 on ARM) and computes every operation on the shadows. The float64 tensors contain the
rounded values. Views share a storage and need no rule. Any other operation without a rule raises
NotImplementedError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten, prims = torch.ops.aten, torch.ops.prims
Array = Any  # np.ndarray of np.longdouble, or a scalar
PRECISION = np.finfo(np.longdouble).nmant + 1


class LongDouble(TorchDispatchMode):
    """Dispatch mode in which operations on float64 CPU tensors are computed in long double."""

    def __init__(self) -> None:
        super().__init__()
        # Keyed by storage address. The storages are kept alive so that addresses are not reused.
        self._shadows: dict[int, tuple[Any, Array]] = {}

    def residual(self, tensor: Tensor) -> Tensor:
        """Return the long double value minus its float64 rounding; 0 where that is not finite."""
        value = self._value(tensor)
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = value.astype(np.float64)
            rest = np.where(np.isfinite(rounded), value - rounded, 0.0)
        return torch.from_numpy(rest.astype(np.float64))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet, schema = func.overloadpacket, func._schema
        composition = _compositions().get(func)
        if composition is not None:
            with self:
                return composition(*args, **kwargs)
        if schema.is_mutable:
            return self._in_place(func, args, kwargs)
        if any(r.alias_info is not None for r in schema.returns) or packet in _AS_TORCH:
            return func(*args, **kwargs)
        rule = RULES.get(packet)
        if rule is None:
            result = func(*args, **kwargs)
            if _has_float64(result) or _is_complex(result):
                raise NotImplementedError(f"long double has no rule for {func}")
            return result
        dtype = kwargs.get("dtype")
        if dtype not in (None, torch.float64):
            return func(*args, **kwargs)
        if not _has_float64((*args, dtype)) and not _has_float64(result := func(*args, **kwargs)):
            return result
        return self._tensor(self._compute(rule, args, kwargs))

    def _compute(self, rule: Callable[..., Array], args: Any, kwargs: Any) -> Array:
        values = [self._argument(a) for a in args]
        named = {k: self._argument(v) for k, v in kwargs.items() if k not in _IGNORED}
        with np.errstate(all="ignore"):
            return np.asarray(rule(*values, **named), dtype=np.longdouble)

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = args[0]
        if not _has_float64(target):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        rule = (lambda _, source: source) if name == "copy" else RULES.get(getattr(aten, name))
        if rule is None:
            raise NotImplementedError(f"long double has no rule for {func}")
        value = self._compute(rule, args, kwargs)
        shadow = self._value(target)
        shadow[...] = value
        rounded = np.asarray(shadow.astype(np.float64))
        return aten.copy_.default(target, torch.from_numpy(rounded))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._value(value)
        if isinstance(value, (list, tuple)):
            return [self._argument(v) for v in value]
        return np.longdouble(value) if isinstance(value, float) else value

    def _value(self, tensor: Tensor) -> Array:
        """Return the tensor's values. For float64, return a view of its storage's shadow."""
        if tensor.dtype != torch.float64:
            array = tensor.detach().float() if tensor.dtype.itemsize == 2 else tensor.detach()
            is_float = tensor.dtype.is_floating_point
            return array.numpy().astype(np.longdouble) if is_float else array.numpy()
        if tensor.numel() == 0:
            return np.zeros(tuple(tensor.shape), dtype=np.longdouble)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._shadows:
            numbers = torch.empty(0, dtype=torch.float64).set_(storage)
            with np.errstate(invalid="ignore"):  # unused memory may contain NaN
                self._shadows[address] = (storage, numbers.numpy().astype(np.longdouble))
        flat = self._shadows[address][1]
        strides = [s * flat.itemsize for s in tensor.stride()]
        start = flat[tensor.storage_offset() :]
        return np.lib.stride_tricks.as_strided(start, tuple(tensor.shape), strides)

    def _tensor(self, value: Array) -> Tensor:
        value = np.ascontiguousarray(value).reshape(value.shape)
        with np.errstate(over="ignore"):
            tensor = torch.from_numpy(value.astype(np.float64))
        if tensor.numel():
            storage = tensor.untyped_storage()
            self._shadows[storage.data_ptr()] = (storage, value.reshape(-1))
        return tensor


def _is_complex(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_complex()


def _has_float64(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(_has_float64(v) for v in values)
    if isinstance(values, torch.dtype):
        return values == torch.float64
    return isinstance(values, Tensor) and values.dtype == torch.float64


@functools.cache
def _compositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import get_decompositions

    return get_decompositions(
        (
            aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm,
            aten._fused_rms_norm_backward, aten.var_mean, aten.select_backward,
            aten.slice_backward, aten.addmm,
        )
    )  # fmt: skip


_AS_TORCH = frozenset({
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten.zeros, aten.ones, aten.full, aten.scalar_tensor, aten.arange, aten.randn, aten.rand,
    aten._unsafe_view,  # shares the storage, although its schema does not declare it
})  # fmt: skip
_IGNORED = ("dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking")

# ---- rules, on numpy arrays ---------------------------------------------------------------------


def _sum(x: Array, dim: Sequence[int] | None = None, keepdim: bool = False) -> Array:
    axis = None if dim is None or len(dim) == 0 else tuple(dim)
    return np.sum(x, axis=axis, keepdims=keepdim, dtype=np.longdouble)


def _mean(x: Array, dim: Sequence[int] | None = None, keepdim: bool = False) -> Array:
    total = _sum(x, dim, keepdim)
    return total * np.longdouble(total.size) / np.longdouble(x.size)


def _var(x: Array, dim: Sequence[int] | None, correction: float = 1.0) -> Array:
    mean = _mean(x, dim, keepdim=True)
    return _sum(np.square(x - mean), dim) / (x.size / max(mean.size, 1) - correction)


def _amax(x: Array, dim: Sequence[int] = (), keepdim: bool = False) -> Array:
    return np.amax(x, axis=tuple(dim) or None, keepdims=keepdim)


def _index_select(x: Array, dim: int, index: Array) -> Array:
    return np.take(x, index, axis=dim)


def _index(x: Array, indices: list[Array | None]) -> Array:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def _index_add(x: Array, dim: int, index: Array, source: Array, alpha: Array = 1) -> Array:
    result = x.copy()
    np.add.at(np.moveaxis(result, dim, 0), index, alpha * np.moveaxis(source, dim, 0))
    return result


def _index_put(x: Array, indices: Any, values: Array, accumulate: bool = False) -> Array:
    result, where = x.copy(), tuple(slice(None) if i is None else i for i in indices)
    if accumulate:
        np.add.at(result, where, values)
    else:
        result[where] = values
    return result


def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Array:  # fmt: skip
    result = x.copy()
    np.moveaxis(result, dim, 0)[start:end:step] = np.moveaxis(source, dim, 0)
    return result


def _full_like(x: Array, value: Any = 0.0, **_: Any) -> Array:
    return np.full(x.shape, value, dtype=np.longdouble)


RULES: dict[Any, Callable[..., Array]] = {
    aten.add: lambda a, b, alpha=1: a + alpha * b,
    aten.sub: lambda a, b, alpha=1: a - alpha * b,
    aten.rsub: lambda a, b, alpha=1: b - alpha * a,
    aten.mul: lambda a, b: a * b,
    aten.div: lambda a, b: a / b,
    aten.neg: np.negative,
    aten.abs: np.abs,
    aten.sgn: np.sign,
    aten.exp: np.exp,
    aten.log: np.log,
    aten.tanh: np.tanh,
    aten.sqrt: np.sqrt,
    aten.rsqrt: lambda x: 1 / np.sqrt(x),
    aten.reciprocal: lambda x: 1 / x,
    aten.square: np.square,
    aten.pow: lambda a, b: a**b,
    aten.bmm: np.matmul,
    aten.mm: np.matmul,
    aten.mv: np.matmul,
    aten.dot: np.dot,
    aten.sum: _sum,
    aten.mean: _mean,
    prims.var: _var,
    **{getattr(prims, n): r for n, r in (("sum", _sum), ("div", np.divide), ("mul", np.multiply))},
    aten.sigmoid: lambda x: 1 / (1 + np.exp(-x)),
    aten.softplus: lambda x, *beta_and_threshold: np.logaddexp(0, x),
    aten.softplus_backward: lambda grad, x, *beta_and_threshold: grad / (1 + np.exp(-x)),
    aten.sigmoid_backward: lambda grad, y: grad * (1 - y) * y,
    aten.tanh_backward: lambda grad, y: grad * (1 - y * y),
    aten.cumsum: lambda x, dim: np.cumsum(x, axis=dim),
    aten.amax: _amax,
    aten.maximum: np.maximum,
    aten.minimum: np.minimum,
    aten.where: np.where,
    aten.masked_fill: lambda x, mask, value: np.where(mask, value, x),
    aten.clamp: lambda x, low=None, high=None: np.clip(x, low, high),
    aten.clamp_min: np.maximum,
    aten.clone: np.copy,
    aten._to_copy: np.copy,
    aten.cat: lambda parts, dim=0: np.concatenate(parts, axis=dim),
    aten.stack: lambda parts, dim=0: np.stack(parts, axis=dim),
    aten.repeat: lambda x, repeats: np.tile(x, repeats),
    aten.index: _index,
    aten.index_select: _index_select,
    aten.index_add: _index_add,
    aten.index_put: _index_put,
    aten.slice_scatter: _slice_scatter,
    aten.select_scatter: lambda x, source, dim, i: _slice_scatter(
        x, np.expand_dims(source, dim), dim, i, i + 1 or None
    ),
    aten.zeros_like: _full_like,
    aten.ones_like: lambda x: _full_like(x, 1.0),
    aten.full_like: _full_like,
    aten.new_zeros: lambda x, size: np.zeros(size, dtype=np.longdouble),
    aten.new_ones: lambda x, size: np.ones(size, dtype=np.longdouble),
    aten.new_full: lambda x, size, value: np.full(size, value, dtype=np.longdouble),
}
