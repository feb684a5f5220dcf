"""Recorded runs of a model for `compare`: outputs, layer outputs, gradients.

Forward methods are wrapped, not hooked: with hooks on its norms, a layer would not use the fused
residual addition that is to be measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from fused_attn.nn import TransformerEncoder
from fused_attn.nn.packing import Packing

# (name, kind) -> tensor, in the order of recording.
Tensors = dict[tuple[str, str], Tensor]


class Recorder:
    """Runs models on the same inputs and records what `compare` compares.

    The first run fixes, for all runs, on which side of 0 each ReLU input is. The derivative jumps
    there: if rounding moves a value to the other side, the error of a gradient is as large as the
    gradient, whatever the attention computes.

    Args:
        watched: names of modules whose outputs and input gradients are recorded; "" is the model.
        backward: run the backward too, from a random projection of all float outputs.
        dtype: type in which that projection must be exact.
        advance: called after each forward and backward.
    """

    def __init__(
        self,
        watched: set[str],
        backward: bool,
        dtype: torch.dtype,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.watched = watched
        self.backward = backward
        self.dtype = dtype
        self.advance = advance
        self._relu_sides: list[Tensor] = []
        self._relu_calls: int | None = None
        self._packing: Packing | None = None

    def run(
        self, model: Module, args: Any, kwargs: Any, again: bool = False, layers: bool = True
    ) -> Tensors:
        """Run `model` in evaluation mode; this modifies the model.

        Args:
            again: forward only, with another seed, which changes the outputs of a model that draws
                random numbers.
            layers: record outputs and input gradients of the watched modules; a stack of encoder
                layers does not pack the batch then.
        """
        found: Tensors = {}
        model.eval()
        # The model's result is recorded below as "output".
        for name in self.watched - {""} if layers else ():
            self._watch(model.get_submodule(name), name, found)
        if self.backward:
            self._pin_relus(model)
        device = device_of(model)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.set_grad_enabled(self.backward):
            torch.manual_seed(int(again))
            outputs = dict(float_tensors(model(*args, **kwargs), "output"))
            self.advance()
            for name, output in outputs.items():
                found[name, "output"] = output.detach().clone()
            if self.backward and not again:
                self._run_backward(outputs)
                self.advance()
        self._relu_calls = 0
        for name, tensor in (*float_tensors(args, "input"), *float_tensors(kwargs, "input")):
            if tensor.grad is not None:
                found[name, "input grad"] = tensor.grad
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and any(_within(name, w) for w in self.watched):
                found[name, "param grad"] = parameter.grad
        return found

    def _watch(self, module: Module, name: str, found: Tensors) -> None:
        """Record the output of `module` and the gradient of its input."""
        forward = module.forward
        calls = 0

        def recording_forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            label = name if calls == 1 else f"{name} (call {calls})"
            # Only the first float tensor: attention also returns weights, fused norms the sum.
            for _, tensor in itertools.islice(float_tensors((args, kwargs), ""), 1):
                if self.backward and tensor.requires_grad:
                    tensor.register_hook(
                        lambda grad: found.__setitem__((label, "input grad"), grad.detach().clone())
                    )
            result = forward(*args, **kwargs)
            for _, tensor in itertools.islice(float_tensors(result, ""), 1):
                found[label, "layer output"] = tensor.detach().clone()
            return result

        recording_forward.takes_residual = True  # type: ignore[attr-defined]
        module.forward = recording_forward

    def _run_backward(self, outputs: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        roots, grads = [], []
        for output in outputs.values():
            projection = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            if output.requires_grad:
                roots.append(output)
                grads.append(projection.to(self.dtype).to(output.device, output.dtype))
        if roots:
            torch.autograd.backward(roots, grads)

    def _pin_relus(self, model: Module) -> None:
        module: Any
        for module in model.modules():
            if isinstance(module, TransformerEncoder):
                self._note_packing(module)
            if type(module) is torch.nn.ReLU:
                module.__dict__["forward"] = self._relu
            elif module.__dict__.get("activation") in (F.relu, torch.relu):
                module.activation = self._relu  # in torch.nn's Transformer layers

    def _relu(self, x: Tensor) -> Tensor:
        if self._relu_calls is None:
            self._relu_sides.append(x > 0)
            return F.relu(x)
        positive = self._relu_sides[self._relu_calls]
        self._relu_calls += 1
        if self._packing is not None and positive.shape != x.shape:
            positive = self._packing.pack(positive)
        return torch.where(positive, x, torch.zeros_like(x))

    _relu.pointwise = True  # type: ignore[attr-defined]

    def _note_packing(self, stack: Any) -> None:
        """Record the packing of a stack; it packs ReLU signs recorded on the padded batch."""
        packing_of = stack._packing

        def noting(*args: Any) -> Packing | None:
            self._packing = packing_of(*args)
            return self._packing

        stack._packing = noting


def device_of(model: Module) -> torch.device:
    """Return the device of the first parameter."""
    return next(model.parameters()).device


def float_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors in `value`, with names."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from float_tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from float_tensors(item, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from float_tensors(getattr(value, entry.name), f"{name}.{entry.name}")


def copied(value: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Copy inputs for one run: new leaves, float tensors in `dtype`; shared tensors stay shared."""
    return _copy(value, dtype, device, {})


def _copy(
    value: Any, dtype: torch.dtype | None, device: torch.device | None, copies: dict[int, Any]
) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in copies:
            to = dtype if value.is_floating_point() else None
            copy_ = value.detach().clone().to(device, to)
            copies[id(value)] = copy_.requires_grad_(value.requires_grad)
        return copies[id(value)]
    if isinstance(value, Mapping):
        return {key: _copy(item, dtype, device, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copy(item, dtype, device, copies) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _within(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")
