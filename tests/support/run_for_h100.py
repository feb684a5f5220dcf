"""Run the code of lower_for_h100.py on CPU tensors, by Triton's interpreter.

    TRITON_INTERPRET=1 python tests/support/run_for_h100.py LOWERED TENSORS OUTPUT

TENSORS and OUTPUT are files written by torch.save, with one entry per problem. An entry of TENSORS
is the list of tensors that `Lowering.inputs` indexes, and the gradients of out and lse. An entry of
OUTPUT is the result of `run`.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import lower_for_h100
import torch
import triton
import triton_interpreter

# What the generated code does to a device, and what it does here.
_REPLACED = {
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.cuda.set_device(0)": "pass",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "",
    "get_raw_stream(0)": "0",
    "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda": "",
    "async_compile = AsyncCompile()": "async_compile = interpreted",
}
_HEURISTICS = re.compile(r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton\.jit)", re.DOTALL)
# The interpreter has no libdevice.
_TANH = "@triton.jit\ndef _tanh(x):\n    return 2 * tl.sigmoid(2 * x) - 1\n\n\n"
_BLOCK = 256  # elements per program in kernels whose block size Inductor would tune


class Interpreted:
    """Stand-in for Inductor's AsyncCompile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def triton(self, name: str, source: str, **options: Any) -> Kernel:
        """Return a kernel from its source text."""
        source = _HEURISTICS.sub("", source).replace("triton_helpers.set_driver_to_gpu()", "")
        if "libdevice.tanh(" in source:
            source = source.replace("libdevice.tanh(", "_tanh(")
            source = source.replace("@triton.jit", _TANH + "@triton.jit", 1)
        path = self.folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return Kernel(getattr(module, name))

    def wait(self, names: dict[str, Any]) -> None:
        """Compile nothing."""


class Kernel:
    """Kernel with the interface of Inductor's kernels."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.parameters = list(inspect.signature(function.fn).parameters)

    def run(self, *arguments: Any, stream: int) -> None:
        """Run all programs. A template's arguments end with its grid, others' with their sizes."""
        count = len(self.parameters)
        if len(arguments) == count + 3:
            self.function[arguments[count:]](*arguments[:count])
            return
        blocks = self.parameters[len(arguments) :]
        assert blocks in (["XBLOCK"], []), f"{self.function} has a grid of another kind"
        sizes = dict(zip(self.parameters, arguments, strict=False))
        grid = (triton.cdiv(sizes["xnumel"], _BLOCK),) if blocks else (1,)
        self.function[grid](*arguments, *[_BLOCK] * len(blocks))


def load(code: str, folder: Path) -> Any:
    """Return the function `call` of generated code."""
    for there, here in _REPLACED.items():
        code = code.replace(there, here)
    names: dict[str, Any] = {
        "__name__": "generated",
        "interpreted": Interpreted(folder),
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype
        ).fill_(float("nan") if dtype.is_floating_point else -1),
    }
    exec(compile(code, "generated", "exec"), names)
    return names["call"]


def run(lowering: Any, tensors: list[Any], grads: list[torch.Tensor], folder: Path) -> list[Any]:
    """Return [out, lse, grads], where grads maps the index of a tensor to its gradient."""
    inputs = [
        tensors[own] if isinstance(own, int) else tensors[own[0]].shape[own[1]]
        for own in lowering.inputs
    ]
    results = load(lowering.code[0], folder)(list(inputs))
    if len(lowering.code) == 1:
        return list(results)
    saved = [x for x in results[2:] if isinstance(x, torch.Tensor)]
    sizes = [x for x in results[2:] if not isinstance(x, torch.Tensor)]
    found = load(lowering.code[1], folder)([*sizes, *saved, *grads])
    places = zip(lowering.inputs, found, strict=True)
    by_place = {place: grad for place, grad in places if isinstance(place, int)}
    by_place = {place: grad for place, grad in by_place.items() if grad is not None}
    return [*results[:2], by_place]


def main() -> None:
    lowered, tensors, output = sys.argv[1:]
    triton_interpreter.repair()
    sys.modules["__main__"].Lowering = lower_for_h100.Lowering  # type: ignore[attr-defined]
    problems = torch.load(tensors, weights_only=False)
    with tempfile.TemporaryDirectory() as folder:
        results = [
            run(own, *problem, Path(folder))
            for own, problem in zip(torch.load(lowered, weights_only=False), problems, strict=True)
        ]
    torch.save(results, output)


if __name__ == "__main__":
    main()
