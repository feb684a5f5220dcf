"""Engines of backend "flash": FlashAttention 4, 3 and 2, and torch's varlen_attn.

Each engine states its limits for a problem, and runs a call with the arguments of its function. The
three versions of FlashAttention share one calling convention. All arguments are passed by keyword,
because their order differs between versions. The packages are imported by statements, which
torch.compile can trace.

Sources: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3"; the Python interfaces
of flash-attn 2.8, flash-attn-3 (hopper/flash_attn_interface.py), flash-attn-4 4.0.0b36, torch 2.13.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from fused_attn.backends import denylist
from fused_attn.backends.flash.plan import MaskPlan, Sequences
from fused_attn.backends.machine import capability_of, version_of
from fused_attn.backends.problem import AttentionProblem
from fused_attn.base.torch_state import is_intercepted, traced_as_constant

TORCH = "torch.nn.attention.varlen"  # the engine that is not a separate package


class EngineCall(NamedTuple):
    """One call of an engine.

    Attributes:
        query, key, value: (batch, seqlen, num_heads, dim), or (rows, num_heads, dim) if
            `sequences` is set.
        sequences: the sequences of a varlen call.
        max_seqlen_q, max_seqlen_k: upper bounds of their lengths.
        left, right: window, see MaskPlan.
        slopes: float32 (num_heads,) or (sequences, num_heads), ALiBi slopes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sequences: Sequences | None
    max_seqlen_q: int
    max_seqlen_k: int
    left: int | None
    right: int | None
    scale: float
    softcap: float
    slopes: Tensor | None
    want_lse: bool


Results = tuple[Tensor, Tensor | None]


class Engine:
    """Base class of the engines, with the calling convention of FlashAttention.

    Attributes:
        name: name of the package, also in messages and in the denylist.
        min_version: the first supported version.
        min_capability, max_capability: range of supported compute capabilities.
        head_dim_multiple: head_dim must be a multiple of it.
        dense: True if the engine accepts dense batches; otherwise it requires packed rows.
        has_softcap, has_alibi, has_lse_gradient: options of the functions.
        traceable: True if torch.compile can trace the functions.
        limits_right_side: True if the engine treats a right side >= seqlen_k as unlimited, and an
            unlimited right side next to a limited left side as seqlen_k. Both change masks with
            more queries than keys.
        unlimited: the value that means no limit for a side of the window.
        lse_option: the argument that requests lse.
    """

    name: ClassVar[str]
    min_version: ClassVar[str]
    min_capability: ClassVar[int] = 80
    max_capability: ClassVar[int] = 129
    head_dim_multiple: ClassVar[int] = 8
    dense: ClassVar[bool] = True
    has_softcap: ClassVar[bool] = True
    has_alibi: ClassVar[bool] = False
    has_lse_gradient: ClassVar[bool] = False
    traceable: ClassVar[bool] = True
    limits_right_side: ClassVar[bool] = False
    unlimited: ClassVar[int | None] = -1
    lse_option: ClassVar[str] = "return_attn_probs"
    max_deterministic_head_dim: ClassVar[int] = 256

    def is_traceable(self) -> bool:
        """Return True if torch.compile can trace the functions."""
        return self.traceable

    def unavailable(self) -> list[str]:
        """Return the reason why no supported version is installed; empty if one is."""
        return missing(self.name, self.min_version)

    def refusals(self, problem: AttentionProblem, plan: MaskPlan) -> list[str]:
        """Return the reasons why this engine does not support a problem; empty if it does."""
        reasons = self.unavailable()
        if reasons:
            return reasons
        if is_intercepted() and not self.is_traceable():
            reasons.append("cannot be traced by torch.compile")
        capability = capability_of(problem.device)
        if capability is not None:
            low, high = self.min_capability, self.max_capability
            if not low <= capability <= high:
                reasons.append(f"does not support compute capability {capability / 10}")
        reasons += self.head_dim_refusals(problem, capability)
        if problem.softcap and not self.has_softcap:
            reasons.append("does not support softcap")
        if problem.mask == "structured" and problem.bias_dtype and not self.has_alibi:
            reasons.append("does not support ALiBi")
        if problem.result == "lse" and problem.needs_grad and not self.has_lse_gradient:
            reasons.append("cannot backpropagate through lse")
        most = self.max_deterministic_head_dim
        repeatable = torch.are_deterministic_algorithms_enabled()
        if problem.needs_grad and repeatable and problem.head_dim > most:
            reasons.append(f"has no deterministic backward for head_dim above {most}")
        if self.limits_right_side and _exceeds_limit(problem, plan):
            reasons.append("clamps the right window size to seqlen_k, which changes this mask")
        for feature in _features_of(problem, plan):
            defect = denylist.reason_against(self.name, feature, problem.device)
            reasons += [defect] if defect else []
        return [f"{self.name} {reason}" for reason in reasons]

    def head_dim_refusals(self, problem: AttentionProblem, capability: int | None) -> list[str]:
        """Return the reasons why this engine does not support the head dimensions."""
        size, size_v = problem.head_dim, problem.head_dim_v
        if size != size_v:
            return [f"requires equal head_dim and head_dim_v, not {size} and {size_v}"]
        multiple = self.head_dim_multiple
        if not 1 <= size <= 256 or size % multiple:
            step = "" if multiple == 1 else f" in multiples of {multiple}"
            return [f"supports head_dim up to 256{step}, not {size}"]
        return []

    def function(self, name: str) -> Any:
        """Return a function of the package, and import the package if necessary."""
        raise NotImplementedError

    def window(self, left: int | None, right: int | None) -> dict[str, Any]:
        """Return the arguments causal and window_size for the window of a MaskPlan."""
        if left is None and right == 0:
            return {"causal": True, "window_size": (self.unlimited, self.unlimited)}
        sides = tuple(self.unlimited if side is None else side for side in (left, right))
        return {"causal": False, "window_size": sides}

    def run(self, call: EngineCall) -> Results:
        """Compute out, in the layout of query, and lse; rows without keys have out 0, lse -inf.

        lse is (batch, num_heads, seqlen_q) or (num_heads, rows); None unless want_lse.
        """
        options: dict[str, Any] = {
            "q": call.query,
            "k": call.key,
            "v": call.value,
            "softmax_scale": call.scale,
            **self.window(call.left, call.right),
            "softcap": call.softcap,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.has_alibi:
            options["alibi_slopes"] = call.slopes
        name = "flash_attn_func"
        if call.sequences is not None:
            name = "flash_attn_varlen_func"
            options["cu_seqlens_q"] = call.sequences.cu_seqlens_q
            options["cu_seqlens_k"] = call.sequences.cu_seqlens_k
            options["max_seqlen_q"] = call.max_seqlen_q
            options["max_seqlen_k"] = call.max_seqlen_k
        function = self.function(name)
        # Early builds of flash-attn-3 lack the argument, and always return lse.
        if call.want_lse and self.lse_option in inspect.signature(function).parameters:
            options[self.lse_option] = True
        results = function(**options)
        if isinstance(results, Tensor):
            return results, None
        out, lse = results[:2]
        return out, masked_lse(lse) if call.want_lse else None


class FlashAttention4(Engine):
    """FlashAttention 4, in CuTe DSL for Hopper and Blackwell; it compiles at the first call."""

    name = "flash-attn-4"
    min_version = "4.0.0b36"
    min_capability, max_capability = 90, 119
    has_lse_gradient = True
    traceable = False
    unlimited = None
    lse_option = "return_lse"

    def head_dim_refusals(self, problem: AttentionProblem, capability: int | None) -> list[str]:
        sizes = problem.head_dim, problem.head_dim_v
        most = 256 if capability is None or capability // 10 == 9 else 128
        fits = all(8 <= size <= most for size in sizes) or sizes in ((192, 128), (256, 256))
        if fits and not any(size % 8 for size in sizes):
            return []
        return [f"does not support head_dim {sizes[0]} with head_dim_v {sizes[1]}"]

    def run(self, call: EngineCall) -> Results:
        # The package chooses kernels for torch's current device.
        with torch.cuda.device_of(call.query):
            return super().run(call)

    def function(self, name: str) -> Any:
        from flash_attn import cute

        return getattr(cute, name)


class FlashAttention3(Engine):
    """FlashAttention 3, for Hopper."""

    name = "flash-attn-3"
    min_version = "3.0.0b1"
    min_capability = max_capability = 90
    max_deterministic_head_dim = 192

    def is_traceable(self) -> bool:
        return _fa3_is_custom_op()

    def function(self, name: str) -> Any:
        import flash_attn_interface

        return getattr(flash_attn_interface, name)


class FlashAttention2(Engine):
    """FlashAttention 2."""

    name = "flash-attn"
    # The first version that supports Blackwell. Before 2.6.2, gradients with softcap are wrong.
    min_version = "2.7.3"
    head_dim_multiple = 1
    has_alibi = True
    limits_right_side = True

    def alibi_left(self, left: int | None, right: int | None, seqlen_k: int) -> int | None:
        """Return a left side of the window with which the kernel's ALiBi lse is exact.

        With causal=True, the kernel adds slope * key instead of -slope * distance, which shifts
        the lse of each row by a constant. A left side of seqlen_k - 1 masks nothing, and selects
        the kernel for windows, which subtracts slope * distance.
        """
        return seqlen_k - 1 if left is None and right == 0 else left

    def run(self, call: EngineCall) -> Results:
        if call.slopes is not None and call.want_lse:
            call = call._replace(left=self.alibi_left(call.left, call.right, call.max_seqlen_k))
        return super().run(call)

    def function(self, name: str) -> Any:
        import flash_attn

        return getattr(flash_attn, name)


class TorchVarlen(Engine):
    """torch's varlen_attn, with torch's build of FlashAttention 2."""

    name = TORCH
    min_version = "2.13"
    dense = False
    has_softcap = False
    limits_right_side = True

    def function(self, name: str) -> Any:
        from torch.nn.attention import varlen

        return getattr(varlen, name)

    def run(self, call: EngineCall) -> Results:
        assert call.sequences is not None
        window = self.window(call.left, call.right)
        arguments = {
            "query": call.query,
            "key": call.key,
            "value": call.value,
            "cu_seq_q": call.sequences.cu_seqlens_q,
            "cu_seq_k": call.sequences.cu_seqlens_k,
            "max_q": call.max_seqlen_q,
            "max_k": call.max_seqlen_k,
            "scale": call.scale,
            # (-1, 0) requests a causal mask.
            "window_size": (-1, 0) if window["causal"] else window["window_size"],
            "enable_gqa": call.query.shape[1] != call.key.shape[1],
        }
        attend = self.function("varlen_attn")
        if not call.want_lse:
            return attend(**arguments), None
        out, lse = attend(**arguments, return_aux=self.function("AuxRequest")(lse=True))
        return out, masked_lse(lse)


# In order of preference.
_CLASSES = (FlashAttention4, FlashAttention3, FlashAttention2, TorchVarlen)
ENGINES: tuple[Engine, ...] = tuple(engine() for engine in _CLASSES)


def aligned(tensor: Tensor) -> Tensor:
    """Return a (batch, seqlen, num_heads, dim) tensor that kernels can load 16 bytes at a time."""
    if tensor.shape[3] % (16 // tensor.itemsize) or is_aligned(tensor):
        return tensor  # the engine pads other head dimensions
    # contiguous() would return a dense tensor unchanged, even if its address is misaligned.
    return tensor.clone(memory_format=torch.contiguous_format)


def is_aligned(tensor: Tensor) -> bool:
    unit, strides = 16 // tensor.itemsize, tensor.stride()
    remainders = [stride % unit for stride in strides[:3]]
    fits = strides[3] == 1 and not any(remainders)
    if fits and not is_intercepted():  # torch.compile cannot trace storage_offset
        fits = tensor.storage_offset() % unit == 0
    return fits


def masked_lse(lse: Tensor) -> Tensor:
    """Return lse with -inf in rows without keys, where FlashAttention 2 returns +inf."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))


@traced_as_constant
def _fa3_is_custom_op() -> bool:
    """Return True if flash-attn-3 registers its forward as an op (builds since 2025-11)."""
    import flash_attn_interface

    return hasattr(getattr(flash_attn_interface, "_flash_attn_forward", None), "_opoverload")


@traced_as_constant
def no_gpu() -> list[str]:
    """Return the reason why no engine can run on this machine; empty with an NVIDIA GPU."""
    has_gpu = torch.version.hip is None and torch.cuda.is_available()
    return [] if has_gpu else ["requires an NVIDIA GPU"]


def _features_of(problem: AttentionProblem, plan: MaskPlan) -> list[str]:
    """Return the features of a problem that have denylist entries."""
    if not problem.needs_grad:
        return []
    features = []
    if plan.left is not None or plan.right is not None:
        features.append(denylist.BAND_WITH_GRADIENTS)
    if (problem.head_dim, problem.head_dim_v) == (192, 128):
        features.append(denylist.HEAD_DIM_192_128_WITH_GRADIENTS)
    if problem.head_dim == 256:
        features.append(denylist.HEAD_DIM_256_WITH_GRADIENTS)
    return features


def _exceeds_limit(problem: AttentionProblem, plan: MaskPlan) -> bool:
    """Return True if an engine with `limits_right_side` would change the mask of a plan."""
    seqlen_k = plan.key_end - plan.key_begin or problem.seqlen_k
    if plan.right is None:
        return plan.left is not None and problem.seqlen_q > seqlen_k + 1
    return plan.right >= seqlen_k


@traced_as_constant
def missing(name: str, min_version: str) -> list[str]:
    """Return the reason why no supported version of an engine is installed; empty if one is."""
    version = torch.__version__ if name == TORCH else version_of(name)
    if version is None:
        return [f"{name} is not installed"]
    if Version(version) < Version(min_version):
        return [f"{name} must be {min_version} or newer, got {version}"]
    return []
