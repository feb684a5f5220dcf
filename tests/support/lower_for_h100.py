"""Generate FlexAttention's Triton kernels for an H100, on a machine without one.

Inductor lowers the backend's functions for CUDA tensors without values, on a simulated device. Run
this file in a separate process, because it replaces much of torch.cuda:

    python tests/support/lower_for_h100.py GUARD_LIBRARY PROBLEMS OUTPUT

GUARD_LIBRARY is built from cuda_guard.cpp. PROBLEMS and OUTPUT are files of torch.save: a list of
problems (arguments of `lower`), and the list of `Lowering` for them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from dataclasses import dataclass, field
from typing import Any

CAPABILITY = (9, 0)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
    uuid="none",
)


@dataclass
class Lowering:
    """Generated code of a problem.

    Attributes:
        inputs: for each argument of the forward's `call`, its place in [query, key, value,
            *operands], where the block lists are expanded; or (place, dim) for a size.
        code: source of the forward, and of the backward if there is one.
    """

    inputs: list[Any] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def pretend() -> None:
    """Make torch, Inductor and Triton detect one H100."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()
    torch.version.cuda = "12.8"
    cuda: Any = torch.cuda
    constants = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_properties": PROPERTIES,
        "get_device_name": PROPERTIES.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, value in constants.items():
        setattr(cuda, name, _constant(value))
    for name, value in {
        "_cuda_getDevice": 0,
        "_cuda_getDeviceCount": 1,
        "_cuda_setDevice": None,
        "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0,
        "_cuda_getCurrentRawStream": 0,
        "_cuda_isCurrentStreamCapturing": False,
    }.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, _constant(value))
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_compute_capability": 90,
        "get_device_properties": PROPERTIES,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }.items():
        setattr(CudaInterface, name, staticmethod(_constant(value)))
    CudaInterface.Worker.get_device_properties = staticmethod(_constant(PROPERTIES))
    CudaInterface.Worker.current_device = staticmethod(_constant(0))

    driver: Any = types.SimpleNamespace(
        get_current_target=_constant(GPUTarget("cuda", 90, 32)),
        get_current_device=_constant(0),
        set_current_device=_constant(None),
        get_current_stream=_constant(0),
        get_active_torch_device=_constant(torch.device("cuda", 0)),
        get_device_interface=_constant(cuda),
        get_benchmarker=_constant(lambda *a, **k: [0.0, 0.0, 0.0]),
        is_active=_constant(True),
        map_python_to_cpp_type=lambda name: name,
        utils=None,
    )
    triton.runtime.driver.set_active(driver)


def _constant(value: Any) -> Any:
    return lambda *arguments, **options: value


def _configure() -> None:
    """Disable everything that Inductor would run on the device during compilation."""
    import inspect
    import sys

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
    # The function copies the output into another layout; here tensors have no values to copy.
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

    def keep(self: GraphLowering, wrapper_code: Any) -> Any:
        found.code.append(wrapper_code.value)
        return types.SimpleNamespace(call=None, __file__="", runner=None)

    GraphLowering._compile_to_module_lines = keep  # type: ignore[assignment, method-assign]

    def backend(graph: Any, inputs: Any) -> Any:
        places = {id(tensor): i for i, tensor in enumerate(flat) if tensor is not None}
        nodes = graph.graph.find_nodes(op="placeholder")
        arguments = [node.meta["grapharg"] for node in nodes]
        of_source = {a.source.name: places.get(id(a.example)) for a in arguments}
        found.inputs = [
            places.get(id(a.example))
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
        compile_ = torch.compile
        torch.compile = functools.partial(compile_, backend=backend)  # type: ignore[assignment]
        try:
            compiled.run(problem["variant"], query, key, value, operands)
        except Exception:  # the generated code is not loaded, only recorded
            if len(found.code) != count:
                raise
        finally:
            torch.compile = compile_  # type: ignore[assignment]
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
