"""The rounding error that eager attention is expected to make on a problem.

Which error eager attention makes depends on the BLAS, the vector width and the order of sums of one
machine, and on luck: with few elements it may be almost none. `RandomRounding` runs the same code
as other machines might round it (Monte Carlo arithmetic): every operation is computed in float64,
gets a random error of the size that rounding in its accumulator may have, and is then rounded to
its type once. For a result r of n terms, with u the unit roundoff of the accumulator (2^-24 for
float32, which 16-bit types use too, 2^-53 for float64), that error is normal, of standard deviation

    u * (|r| + sqrt(n) / 3 * sqrt(r^2 + ||terms||_2^2))     sums and matrix products, n > 1
    u * |r|                                                 all other arithmetic

and none where r needs no rounding. That is about twice what rounding to nearest makes, one term
after another: n steps of a random walk, as large as the partial sums are, sqrt(n / 2) ||terms||_2
in all where signs are random and sqrt(n / 3) |r| where they are one, times 0.4 u.

The expected error of a problem is the largest in RUNS such runs.

Source: Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic";
Higham and Mary 2019, "A new approach to probabilistic rounding error analysis".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

# With so many, eager attention is beyond the largest error of these runs in less than one of 10^6
# problems: scripts/calibrate_contract.py counts.
RUNS = 64
# After so many, what is not within a third of the error that is needed will hardly get there; nor
# will, after one, what is not within a thousandth.
FIRST_RUNS = 8

aten, prims = torch.ops.aten, torch.ops.prims

# Matrix products: the two arguments whose common dimension is summed over.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.mv: (0, 1), aten.dot: (0, 1), aten.linear: (0, 1),
    aten.addmm: (1, 2), aten.baddbmm: (1, 2), aten.addmv: (1, 2), aten.convolution: (0, 1),
}  # fmt: skip
_SUMS = frozenset({aten.sum, aten.mean, aten.cumsum, prims.sum})
# Results are elements of the arguments: nothing is rounded. Float64 results would not show it.
_MOVES = frozenset({
    aten._to_copy, aten.clone, aten.copy, aten.contiguous, aten.cat, aten.stack, aten.where,
    aten.masked_fill, aten.index, aten.index_select, aten.index_put, aten.gather, aten.embedding,
    aten.repeat, aten.amax, aten.amin, aten.max, aten.min, aten.maximum, aten.minimum, aten.relu,
    aten.neg, aten.abs, aten.threshold_backward, aten.slice_backward, aten.select_backward,
    aten.constant_pad_nd, aten.tril, aten.triu, aten.flip, aten.roll, aten.sort, aten.topk,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_full, aten.new_ones,
    aten.slice_scatter, aten.index_copy, aten.masked_select, aten.clamp, aten.clamp_min,
})  # fmt: skip
# Computed from smaller operations, each of which is rounded.
_COMPOSED = (
    aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data,
    aten._safe_softmax, aten.logsumexp, aten.native_layer_norm, aten.native_layer_norm_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.native_group_norm,
    aten.native_group_norm_backward, aten.var, aten.std, aten.var_mean,
)  # fmt: skip


@functools.cache
def _compositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import get_decompositions  # slow to import

    return get_decompositions(_COMPOSED)


class RandomRounding(TorchDispatchMode):
    """Within the block, torch's operations round at random, as described above.

    Operations in place, random numbers and operations without float results are left as they are.

    Args:
        seed: of the errors; each seed is another machine.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        composition = _compositions().get(func)
        if composition is not None:
            with self:
                return composition(*args, **kwargs)
        rounded = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in _MOVES or _aliases(func) or not _is_float(rounded):
            return rounded
        if torch.Tag.nondeterministic_seeded in func.tags:
            return rounded
        wide_args, wide_kwargs = tree_map(_widened, (args, kwargs))
        exact = func(*wide_args, **wide_kwargs)
        if isinstance(rounded, Tensor):
            size = _magnitude(packet, func, wide_args, wide_kwargs, exact)
            return self._round(rounded, exact, size)
        return type(rounded)(
            self._round(r, e, e.abs()) if _is_float(r) else r
            for r, e in zip(rounded, exact, strict=True)
        )

    def _round(self, rounded: Tensor, exact: Tensor, size: Tensor) -> Tensor:
        """`exact` with an error of that size, in the type and layout of `rounded`."""
        dtype = rounded.dtype
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        draw = torch.randn(exact.shape, generator=self._generator, dtype=torch.float64)
        error = draw.to(exact.device) * size * (torch.finfo(accumulator).eps / 2)
        needs = exact.isfinite()
        if dtype != torch.float64:
            needs = needs & (exact != exact.to(dtype))
        value = torch.where(needs, exact + error, exact)
        return torch.empty_like(rounded).copy_(value)


def _magnitude(packet: Any, func: Any, args: Any, kwargs: Any, exact: Tensor) -> Tensor:
    """What u is multiplied by in the module's formula."""
    size = exact.abs()
    if packet in _PRODUCTS:
        first, second = _PRODUCTS[packet]
        other = args[second]
        terms = args[first].shape[-1]
        if packet is aten.convolution:
            terms = other.numel() // max(other.shape[0], 1)
        squares = func(*tree_map_only(Tensor, torch.square, args), **kwargs)
    elif packet in _SUMS:
        terms = args[0].numel() // max(exact.numel(), 1)
        if packet is aten.cumsum:
            terms = args[0].shape[args[1]] if args[0].dim() else 1
        squares = func(args[0].square(), *args[1:], **kwargs)
        if packet is aten.mean:  # of the terms x / n
            squares = squares / max(terms, 1)
    elif packet is prims.var:  # a sum of squares: terms of one sign
        terms, squares = args[0].numel() // max(exact.numel(), 1), exact.new_zeros(())
    else:
        return size
    if terms <= 1:
        return size
    return size + math.sqrt(terms) / 3 * (exact.square() + squares.abs()).sqrt()


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


def _is_float(result: Any) -> bool:
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    return any(isinstance(t, Tensor) and t.is_floating_point() for t in tensors)


@functools.cache
def _aliases(func: Any) -> bool:
    """The result shares memory with an argument: a view, or an operation in place."""
    schema = func._schema
    return schema.is_mutable or any(r.alias_info is not None for r in schema.returns)


# ---- the expected error -------------------------------------------------------------------------


class Expected:
    """The largest errors that eager attention is expected to make, computed when first needed.

    For 16-bit types they include those of the same problem in float32: a kernel that keeps its
    intermediates in 32 bits may be as far off as eager attention that does.

    Args:
        run: the results of eager attention in a type, by name.
        truth: the results in a higher precision, by name.
        dtype: the type that is judged.
        residuals: what truth lacks of a higher precision than float64, by name.

    Attributes:
        dtype: as given.
        runs: how many there have been.
    """

    def __init__(
        self,
        run: Callable[[torch.dtype], Mapping[Any, Tensor]],
        truth: Mapping[Any, Tensor],
        dtype: torch.dtype,
        residuals: Mapping[Any, Tensor] | None = None,
    ) -> None:
        self.dtype = dtype
        self._run, self._truth = run, truth
        self._dtypes = {dtype, torch.promote_types(dtype, torch.float32)}
        self._residuals = residuals or {}
        self._largest: dict[Any, float] = {}
        self.runs = 0

    def error(self, name: Any, needed: float = math.inf) -> float:
        """The largest error of one result in RUNS runs; fewer if it is `needed`, or far from it."""
        while self.runs < RUNS:
            largest = self._largest.get(name, 0.0)
            far = 3.0 if self.runs >= FIRST_RUNS else 1000.0
            if largest >= needed or (self.runs and far * largest < needed < math.inf):
                break
            self._run_once()
        return self._largest.get(name, 0.0)

    def _run_once(self) -> None:
        for dtype in self._dtypes:
            with RandomRounding(self.runs):
                results = self._run(dtype)
            for name in results.keys() & self._truth.keys():
                error = self._error(name, results[name])
                self._largest[name] = max(self._largest.get(name, 0.0), error)
        self.runs += 1

    def _error(self, name: Any, result: Tensor) -> float:
        truth = self._truth[name].double()
        error = (result.double() - truth).sub_(self._residuals.get(name, 0.0)).abs()
        error = error[truth.isfinite()]  # where it is not, results are compared for equality
        error = error[error.isfinite()]
        return error.max().item() if error.numel() else 0.0
