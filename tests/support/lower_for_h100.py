"""Generate FlexAttention's Triton kernels for an H100, on a machine without one.

Inductor lowers the backend's functions for CUDA tensors without values, on a simulated device. Run
this file in a separate process, because it replaces many functions of torch.cuda:

    python tests/support/lower_for_h100.py GUARD_LIBRARY PROBLEMS OUTPUT

GUARD_LIBRARY is built from cuda_guard.cpp. PROBLEMS and OUTPUT are written by torch.save: a list of
problems (arguments of `lower`), and a list with the `Lowering` of each.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

# Inductor's decorator of a kernel.
HEURISTICS = re.compile(r"@triton_heuristics\.\w+\((.*?)\n\)\n(?=@triton\.jit)", re.DOTALL)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
)  # fmt: skip


@dataclass
class Lowering:
    """Generated code of a problem.

    Attributes:
        inputs: for each argument of the generated forward's `call`, its index in [query, key,
            value, *block lists, *other operands]; (index, dim) if the argument is a size.
        code: source of the forward, and of the backward if a tensor requires grad.
    """

    inputs: list[Any] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def plain_source(source: str) -> str:
    """Return a generated kernel's source without Inductor's decorator and driver selection."""
    return HEURISTICS.sub("", source).replace("triton_helpers.set_driver_to_gpu()", "")


def pretend() -> None:
    """Make torch, Inductor and Triton detect one H100."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()
    torch.version.cuda = "12.8"
    results = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": PROPERTIES,
        "get_device_name": PROPERTIES.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, result in results.items():
        setattr(torch.cuda, name, _constant(result))
    results = {
        "is_available": True,
        "get_compute_capability": 90,
        "get_device_properties": PROPERTIES,
        "raise_if_triton_unavailable": None,
    }
    for name, result in results.items():
        setattr(CudaInterface, name, staticmethod(_constant(result)))
    CudaInterface.Worker.get_device_properties = staticmethod(_constant(PROPERTIES))
    target = _constant(GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(types.SimpleNamespace(get_current_target=target))


def _constant(value: Any) -> Any:
    return lambda *arguments, **options: value


def _configure() -> None:
    """Disable everything that Inductor would run on the device during compilation."""
    import torch
    import torch._functorch.config
    import torch._higher_order_ops.flex_attention
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad

    joint_graph.lazy_init = post_grad.lazy_init = _constant(None)
    config.pattern_matcher = config.joint_graph_constant_folding = config.fx_graph_cache = False
    config.compile_threads = 1
    functorch: Any = torch._functorch.config
    functorch.force_non_lazy_backward_lowering = True
    functorch.enable_autograd_cache = False
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    # The function copies the output into another layout, but here the tensors have no values.
    op = sys.modules["torch._higher_order_ops.flex_attention"]
    source = inspect.getsource(op._permute_strides).replace("new_out.copy_(out)", "pass")
    exec(source, vars(op))


def lower(problem: dict[str, Any]) -> Lowering:
    """Return the code that Inductor generates for a problem.

    Args:
        problem: "variant", and "tensors": the size, stride, dtype and requires_grad of query, key,
            value and all operands, as dicts, or None.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fused_attn.backends.flex import compiled
    from fused_attn.backends.flex.operands import Operands
    from fused_attn.masks.intervals import BlockLists

    found = Lowering()
    count = 1 + any(t is not None and t["requires_grad"] for t in problem["tensors"])

    def record(self: GraphLowering, wrapper_code: Any) -> Any:
        found.code.append(wrapper_code.value)
        return types.SimpleNamespace(call=None, __file__="", runner=None)

    GraphLowering._compile_to_module_lines = record  # type: ignore[assignment, method-assign]

    def backend(graph: Any, inputs: Any) -> Any:
        indices = {id(tensor): i for i, tensor in enumerate(flat) if tensor is not None}
        nodes = graph.graph.find_nodes(op="placeholder")
        arguments = [node.meta["grapharg"] for node in nodes]
        of_source = {a.source.name: indices.get(id(a.example)) for a in arguments}
        found.inputs = [
            indices.get(id(a.example))
            if isinstance(a.example, torch.Tensor)
            else (of_source[a.source.base.name], a.source.idx)
            for a in arguments
        ]
        return compile_fx(graph, inputs)

    with FakeTensorMode():
        flat = [
            None if t is None else torch.empty_strided(
                t["size"], t["stride"], dtype=t["dtype"], device="cuda",
                requires_grad=t["requires_grad"],
            )
            for t in problem["tensors"]
        ]  # fmt: skip
        query, key, value, *rest = flat
        lists = BlockLists(*rest[:8]) if rest[0] is not None else None  # type: ignore[arg-type]
        operands = Operands(lists, *rest[8:])
        compiled._functions.clear()
        compile_ = functools.partial(torch.compile, backend=backend)
        try:
            with mock.patch.object(torch, "compile", compile_):
                compiled.run(problem["variant"], query, key, value, operands)
        except Exception:  # because `record` returns no callable code
            if len(found.code) != count:
                raise
    torch._dynamo.reset()
    return found


def main() -> None:
    guard, problems, output = sys.argv[1:]
    ctypes.CDLL(guard, ctypes.RTLD_GLOBAL)
    import torch

    pretend()
    _configure()
    torch.save([lower(p) for p in torch.load(problems, weights_only=False)], output)


if __name__ == "__main__":
    main()
