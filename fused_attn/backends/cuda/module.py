"""Access to the compiled CUDA module, and kernel launches."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from fused_attn.backends.fields import check_fields
from fused_attn.base.namespace import NAMESPACE
from fused_attn.base.torch_state import traced_as_constant
from fused_attn.call.attention import AttentionCall
from fused_attn.call.norm import NormCall

try:
    from fused_attn import _cuda
except ImportError as error:
    _cuda = None  # type: ignore[assignment]
    _missing = (
        "was built without the CUDA module: build with FUSED_ATTN_CUDA=1 (docs/install.md)"
        if importlib.util.find_spec(f"{NAMESPACE}._cuda") is None
        else f"fused_attn._cuda cannot be imported: {error}"
    )


def _initialize(module: Any) -> None:
    check_fields(module.FIELDS)
    if not hasattr(module, "launch_obstacle"):
        raise ImportError("fused_attn._cuda is older than the package: build it again")
    module.set_exchange_api(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


if _cuda is not None:
    _initialize(_cuda)

BLOCKS_PER_MULTIPROCESSOR = 2
_emulated = False


def use_module(module: Any) -> None:
    """Replace the compiled module by an emulation on CPU tensors, process-wide. For tests."""
    global _cuda, _emulated
    _cuda, _emulated = module, True
    _initialize(module)


def emulated() -> bool:
    """Return True if `use_module` has installed an emulation, which runs on CPU tensors."""
    return _emulated


def compiled() -> Any:
    """Return the module that csrc/bind_cuda.cpp defines, or its emulation; None if not built."""
    return _cuda


def unavailable() -> list[str]:
    """Return the reasons why this backend cannot run on this machine; empty if it can."""
    if _cuda is None:
        return [_missing]
    if _emulated:
        return []
    if torch.version.hip is not None:
        return ["runs on NVIDIA GPUs only"]
    return [] if torch.cuda.is_available() else ["requires a GPU, but torch finds none"]


@traced_as_constant
def launch_obstacle(device: torch.device) -> list[str]:
    """Return the reason why no kernel can be launched on a GPU; empty if kernels can be launched.

    The module may have been compiled for other GPUs, or for a newer driver.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _launch_obstacle(torch.device(device.type, index))


@functools.cache
def _launch_obstacle(device: torch.device) -> list[str]:
    with torch.cuda.device(device):
        error = compiled().launch_obstacle()
    return [] if error is None else [f"its kernels cannot run on this GPU: {error}"]


def run(
    name: str,
    device: torch.device,
    call: AttentionCall | NormCall | None,
    fields: dict[str, Any],
) -> None:
    """Call a function of the module, which launches kernels on the current stream of a device.

    On the CPU, where kernels are emulated, the module receives device -1.
    """
    function = getattr(_cuda, name)
    if device.type == "cpu":
        function(call, **fields, device=-1, stream=0)
        return
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        function(call, **fields, device=torch.cuda.current_device(), stream=stream)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 4 if emulated, so that tests cover split work."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
