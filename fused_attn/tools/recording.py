"""Runs of a model that record its outputs, layer outputs and gradients for `compare`.

Forward methods are wrapped instead of hooked, because a layer with hooks on its norms would not use
the fused residual addition.
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

# Recorded tensors by (name, kind), in the order of recording.
Tensors = dict[tuple[str, str], Tensor]


class Recorder:
    """Runs models on the same inputs and records the tensors that `compare` compares.

    The first run records the sign of every ReLU input, and all later runs reuse it. The derivative
    is discontinuous at 0: if rounding changes a sign, the error of a gradient is as large as the
    gradient, independent of the attention.

    Args:
        watched: names of the modules whose outputs and input gradients are recorded; "" is the
            model.
        backward: also run the backward, from a fixed random projection of all float outputs.
        dtype: dtype to which the projection is rounded, so that it is equal in all runs.
        advance: callback that is called after each forward and each backward.
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
        """Run `model` in evaluation mode and return the recorded tensors. Modifies the model.

        Args:
            again: run the forward only, with another seed, to detect models that draw random
                numbers.
            layers: record outputs and input gradients of the watched modules. A stack of encoder
                layers then does not pack the batch.
        """
        found: Tensors = {}
        model.eval()
        # "" is excluded because the model's result is recorded below as "output".
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
            watched = any(not w or name.startswith(f"{w}.") for w in self.watched)
            if parameter.grad is not None and watched:
                found[name, "param grad"] = parameter.grad
        return found

    def _watch(self, module: Module, name: str, found: Tensors) -> None:
        """Wrap `module.forward` to record the module's output and the gradient of its input."""
        forward = module.forward
        calls = 0

        def recording_forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            label = name if calls == 1 else f"{name} (call {calls})"
            # Only the first float tensor is compared. Attention also returns weights, and fused
            # norms also return the residual sum.
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
                self._record_packing(module)
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

    def _record_packing(self, stack: Any) -> None:
        """Record the packing of a stack, which `_relu` applies to signs of the padded batch."""
        choose = stack._choose_packing

        def recording_packing(*args: Any) -> Packing | None:
            self._packing = choose(*args)
            return self._packing

        stack._choose_packing = recording_packing


def device_of(model: Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next(model.parameters()).device


def float_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each float tensor in a nested container or dataclass."""
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
    """Copy the inputs of a run to new leaves, with float tensors in `dtype`.

    A tensor that occurs several times is copied once.
    """
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                to = dtype if value.is_floating_point() else None
                own = value.detach().clone().to(device, to)
                copies[id(value)] = own.requires_grad_(value.requires_grad)
            return copies[id(value)]
        if isinstance(value, Mapping):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [copy(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    return copy(value)
