"""Random inputs, and comparison of modules with their torch.nn counterparts, with gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from helpers import assert_contract
from torch import Tensor
from torch.nn import Module

from fused_attn.swap import swap_modules
from fused_attn.tools.recording import copied
from fused_attn.tools.rounding import Expected

cast = copied
DRAWS = 4
EMBED, HEADS, BATCH, LEN_Q, LEN_K = 24, 3, 2, 5, 7


class Called(Module):
    """Module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def assert_within_contract(
    actual: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    rerun: Callable[[], Mapping[str, Tensor]] | None = None,
) -> None:
    """Assert that each tensor in `actual` is within the numerics contract.

    The limit for gradients applies to names that begin with "grad".

    Args:
        rerun: function that recomputes `eager`, to estimate its expected error.
    """
    assert actual.keys() == eager.keys() == truth.keys()
    expected = Expected(lambda _: rerun() if rerun else {}, truth, torch.float32)
    for name, reference in truth.items():
        assert actual[name].dtype == eager[name].dtype, name
        error = functools.partial(expected.error, name)
        assert_contract(name, actual[name], reference, eager[name], error)


def assert_equal_in_float64(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that float64 results are equal up to the order of summation."""
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        scale = reference.abs().max().item() if reference.numel() else 0.0
        torch.testing.assert_close(
            actual[name],
            reference,
            rtol=1e-10,
            atol=1e-12 * max(scale, 1.0),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def run(
    module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Return outputs of a module, and gradients of parameters and of inputs that require grad.

    A tensor passed as several inputs is copied once, so that self-attention stays self-attention.
    """
    args, kwargs = copied((args, kwargs or {}))
    module.zero_grad(set_to_none=True)
    outputs = module(*args, **kwargs)
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    results = {f"out{i}": o for i, o in enumerate(outputs) if o is not None}
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o)).sum()
        for o in results.values()
    )
    loss.backward()
    results = {name: o.detach() for name, o in results.items()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            results[f"grad {name}"] = parameter.grad
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.grad is not None:
            results[f"grad input {name}"] = value.grad
    return results


def check_against_torch(
    torch_module: Module,
    fused_class: type,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    truth_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Check a fused module against the torch module in float64, both in float64 and in float32.

    Args:
        truth_kwargs: keyword arguments of the torch module, if they differ from `kwargs`.
    """
    kwargs = kwargs or {}
    truth_kwargs = kwargs if truth_kwargs is None else truth_kwargs
    assert next(torch_module.parameters()).dtype == torch.float64
    fused = fused_class.from_torch(copy.deepcopy(torch_module))
    assert_equal_in_float64(run(fused, args, kwargs), run(torch_module, args, truth_kwargs))

    single = copy.deepcopy(torch_module).float()
    fused = fused_class.from_torch(copy.deepcopy(single))
    torch_module.load_state_dict(single.state_dict())  # use the rounded parameters in the truth
    kwargs, truth_kwargs = cast(kwargs, torch.float32), cast(truth_kwargs, torch.float32)
    results: dict[str, list[dict[str, Tensor]]] = {"truth": [], "eager": [], "fused": []}
    # The maximum error of a small tensor depends on chance, so it is computed over several draws.
    draws = []
    for _ in range(DRAWS):
        args = cast(redrawn(args), torch.float32)
        double = cast(args, torch.float64), cast(truth_kwargs, torch.float64)
        results["truth"].append(run(torch_module, *double))
        results["eager"].append(run(single, args, truth_kwargs))
        results["fused"].append(run(fused, args, kwargs))
        draws.append(args)
    assert_within_contract(
        *(pooled(results[key]) for key in ("fused", "eager", "truth")),
        lambda: pooled([run(single, args, truth_kwargs) for args in draws]),
    )


def redrawn(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return random inputs like `args`; a tensor that is repeated in `args` stays repeated."""
    drawn = {id(a): torch.randn_like(a).requires_grad_(a.requires_grad) for a in args}
    return tuple(drawn[id(a)] for a in args)


def pooled(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the results of several runs along a new first dimension, by name."""
    return {name: torch.stack([results[name] for results in runs]) for name in runs[0]}


def randn(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normally distributed values, by default in the reference's dtype, float64."""
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def perturb(module: Module) -> Module:
    """Perturb all parameters, so that tests fail if a module ignores one that starts at 0 or 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def swapped_copy(module: Module, **options: Any) -> Any:
    """Return a copy of a module after `swap_modules(copy, **options)`."""
    made = copy.deepcopy(module)
    swap_modules(made, **options)
    return made


def random_mask(kind: str, *shape: int) -> Tensor:
    """Draw a mask in torch.nn's convention (True = ignore).

    Key 0 stays visible, because torch returns NaN for fully masked rows.
    """
    ignored = torch.rand(shape) < 0.4
    ignored[..., 0] = False
    if kind == "bool":
        return ignored
    bias = torch.randn(shape, dtype=torch.float64).masked_fill_(ignored, float("-inf"))
    return bias.requires_grad_(kind == "learned")


def causal_bias(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return torch.nn's causal float mask, (size, size)."""
    return torch.nn.Transformer.generate_square_subsequent_mask(size, dtype=dtype)


def sequence(module_kwargs: Mapping[str, Any], length: int) -> Tensor:
    """Draw a batch of sequences in the layout (batch_first or not) that the module expects."""
    if module_kwargs.get("batch_first"):
        return randn(BATCH, length, EMBED)
    return randn(length, BATCH, EMBED)
