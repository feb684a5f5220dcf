"""Known defects of other projects' kernels, and the calls for which an engine must not run.

An entry holds for versions of a package, GPU architectures and a feature. It names its source, so
that it can be removed once the defect is fixed. Limits that are documented by the engine's project
are not defects: backends state them in `unsupported`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version


@dataclass(frozen=True)
class Defect:
    """A known defect of an engine.

    Attributes:
        engine: the kernels: "cudnn", or a package.
        feature: the calls that are affected, one of the words that backends pass to `defects`.
        package, versions: the package that determines the version, and the versions affected.
        capabilities: affected CUDA compute capabilities, by major number; empty for all.
        effect: what goes wrong.
        source: address of the report.
    """

    engine: str
    feature: str
    package: str
    versions: SpecifierSet
    capabilities: tuple[int, ...]
    effect: str
    source: str


MASK_WITH_GRADIENTS = "mask tensor with gradients"
ONE_QUERY_WITH_GRADIENTS = "one query with gradients"

DEFECTS = (
    Defect(
        "cudnn",
        MASK_WITH_GRADIENTS,
        "torch",
        SpecifierSet(">=2.11"),  # from this version on, cuDNN is torch's first choice on Hopper
        (9,),
        "the gradient of query is NaN if seqlen_k % 128 == 64 and lse < -88",
        "https://github.com/pytorch/pytorch/issues/196678",
    ),
    Defect(
        "cudnn",
        ONE_QUERY_WITH_GRADIENTS,
        "torch",
        SpecifierSet(">=2.11"),
        (9,),
        "the gradients of key and value are NaN if lse is far below 0",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
)


def defects(engine: str, feature: str, device: torch.device) -> tuple[Defect, ...]:
    """Return the known defects that affect calls with a feature on a device.

    Args:
        device: a CUDA device; without a GPU, every architecture counts as affected.
    """
    capability = _capability(device)
    return tuple(
        defect
        for defect in DEFECTS
        if (defect.engine, defect.feature) == (engine, feature)
        and (capability is None or not defect.capabilities or capability in defect.capabilities)
        and _version(defect.package) in defect.versions
    )


@functools.cache
def is_denied(engine: str, feature: str, device: torch.device) -> bool:
    """Return True if an engine must not run calls with a feature on a device."""
    return bool(defects(engine, feature, device))


# torch.compile calls the function while tracing, and treats the result as a constant.
is_denied._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _capability(device: torch.device) -> int | None:
    """Return the major compute capability of a GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)[0]


def _version(package: str) -> Version:
    """Return the release of a package, without its pre-release and local parts."""
    name = torch.__version__ if package == "torch" else metadata.version(package)
    return Version(Version(name).base_version)
