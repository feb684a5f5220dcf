"""Base class of the engines of backend "flash": limits, and the arguments of a call."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any, ClassVar, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from fused_attn.backends import denylist
from fused_attn.backends.flash.plan import Plan, Sequences
from fused_attn.backends.problem import AttentionProblem
from fused_attn.base.torch_state import is_intercepted

TORCH = "torch.nn.attention.varlen"  # the engine that is no package


class Arguments(NamedTuple):
    """One call of an engine.

    Attributes:
        query, key, value: (batch, seqlen, num_heads, dim), or (rows, num_heads, dim) if
            `sequences` is set.
        sequences: the sequences of a varlen call.
        max_seqlen_q, max_seqlen_k: upper bounds of their lengths.
        left, right: window, see Plan.
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
    """Base class of the engines.

    Attributes:
        name: the package that is installed; in messages, and in the denylist.
        min_version: the first version whose interface is known to fit.
        min_capability, max_capability: GPUs that it has kernels for.
        dense: True if it takes a batch without lengths as it is. Otherwise it takes packed rows.
        has_softcap, has_alibi, has_lse_gradient: options of the functions.
        traceable: True if torch.compile can trace the functions.
        limits_right_side: True if a right side >= seqlen_k means no limit, and no limit means
            seqlen_k for a window with a left side. With more queries than keys, both are wrong.
    """

    name: ClassVar[str]
    min_version: ClassVar[str]
    min_capability: ClassVar[tuple[int, int]] = (8, 0)
    max_capability: ClassVar[tuple[int, int]] = (12, 9)
    dense: ClassVar[bool] = True
    has_softcap: ClassVar[bool] = True
    has_alibi: ClassVar[bool] = False
    has_lse_gradient: ClassVar[bool] = False
    traceable: ClassVar[bool] = True
    limits_right_side: ClassVar[bool] = False

    def unavailable(self) -> list[str]:
        """Return the reason why this engine is not installed in a known version."""
        reason = _missing(self.name, self.min_version)
        return [reason] if reason else []

    def refusals(self, problem: AttentionProblem, plan: Plan) -> list[str]:
        """Return the reasons why this engine does not take a problem; empty if it does."""
        reasons = self.unavailable()
        if reasons:
            return reasons
        if not self.traceable and is_intercepted():
            reasons.append("cannot be traced by torch.compile")
        capability = capability_of(problem.device)
        if capability is not None:
            low, high = self.min_capability, self.max_capability
            if not low <= capability <= high:
                reasons.append("has no kernels for compute capability {}.{}".format(*capability))
        reasons += self.head_dim_refusals(problem, capability)
        if problem.softcap and not self.has_softcap:
            reasons.append("has no softcap")
        if problem.mask == "structured" and problem.bias_dtype and not self.has_alibi:
            reasons.append("has no ALiBi")
        if problem.result == "lse" and problem.needs_grad and not self.has_lse_gradient:
            reasons.append("ignores the gradient of lse")
        if self.limits_right_side and _exceeds_limit(problem, plan):
            reasons.append("limits the right side of this window to seqlen_k")
        for feature in features_of(problem, plan):
            defect = denylist.reason_against(self.name, feature, problem.device)
            reasons += [defect] if defect else []
        return [f"{self.name} {reason}" for reason in reasons]

    def head_dim_refusals(
        self, problem: AttentionProblem, capability: tuple[int, int] | None
    ) -> list[str]:
        """Return the reasons why this engine does not take the head dimensions."""
        return equal_head_dims(problem, multiple=8)

    def run(self, call: Arguments) -> Results:
        """Compute out, in the layout of query, and lse, (batch, num_heads, seqlen_q) or
        (num_heads, rows); None if it is not wanted. Rows without keys have out 0 and lse -inf.
        """
        raise NotImplementedError

    def function(self, name: str) -> Any:
        """Return a function of the package, which the first call imports."""
        raise NotImplementedError


def no_gpu() -> list[str]:
    """Return the reason why no engine can run on this machine; empty with an NVIDIA GPU."""
    has_gpu = torch.version.hip is None and torch.cuda.is_available()
    return [] if has_gpu else ["needs an NVIDIA GPU"]


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def features_of(problem: AttentionProblem, plan: Plan) -> list[str]:
    """Return the features of a problem that the denylist has entries for."""
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


def _exceeds_limit(problem: AttentionProblem, plan: Plan) -> bool:
    """Return True if a limit of seqlen_k on the right side changes the window, see Engine."""
    seqlen_k = plan.key_end - plan.key_begin or problem.seqlen_k
    if plan.right is None:
        return plan.left is not None and problem.seqlen_q > seqlen_k + 1
    return plan.right >= seqlen_k


def _missing(name: str, min_version: str) -> str:
    """Return the reason why an engine is not installed in a known version; empty if it is."""
    version = torch.__version__ if name == TORCH else _installed(name)
    if version is None:
        return f"{name} is not installed"
    if Version(version) < Version(min_version):
        return f"{name} needs version {min_version}, not {version}"
    return ""


@functools.cache
def _installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed. It is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# torch.compile calls these functions while tracing, and treats the results as constants.
no_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]
capability_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def equal_head_dims(problem: AttentionProblem, multiple: int) -> list[str]:
    size, size_v = problem.head_dim, problem.head_dim_v
    if size != size_v:
        return [f"takes equal head_dim and head_dim_v, not {size} and {size_v}"]
    if not 1 <= size <= 256 or size % multiple:
        step = "" if multiple == 1 else f" in multiples of {multiple}"
        return [f"takes head_dim up to 256{step}, not {size}"]
    return []


def window_of(
    left: int | None, right: int | None, unlimited: int | None
) -> tuple[bool, tuple[Any, Any]]:
    """Return the arguments causal and window_size.

    Args:
        left, right: see Plan.
        unlimited: the engine's number for a side without limit.
    """
    if left is None and right == 0:
        return True, (unlimited, unlimited)
    return False, (unlimited if left is None else left, unlimited if right is None else right)


def lengths_of(call: Arguments) -> dict[str, Any]:
    """Return the arguments that only the varlen functions of FlashAttention have."""
    if call.sequences is None:
        return {}
    return {
        "cu_seqlens_q": call.sequences.cu_seqlens_q,
        "cu_seqlens_k": call.sequences.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
    }
