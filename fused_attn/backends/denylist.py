"""Known defects of other projects' kernels, and the calls for which an engine must not run.

An entry applies to versions of a package, GPU architectures and a feature. It names its source, so
that it can be removed once the defect is fixed. Limits that the engine's project documents are not
defects: backends state them in `unsupported`.
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
        engine: "cudnn" or the name of a package.
        feature: the calls that are affected, one of the words that backends pass to `defects`.
        package, versions: the package that determines the version, and the versions affected.
        capabilities: affected CUDA compute capabilities, by major number; empty for all.
        effect: description of the error.
        source: URL of the report.
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
BAND_WITH_GRADIENTS = "causal mask or window with gradients"
HEAD_DIM_192_128_WITH_GRADIENTS = "head_dim 192 and head_dim_v 128 with gradients"
HEAD_DIM_256_WITH_GRADIENTS = "head_dim 256 with gradients"

# flex_flash always passes block lists, so it needs a later version.
BLOCK_SPARSE = Defect(
    "flash-attn-4",
    "block lists with gradients",
    "flash-attn-4",
    SpecifierSet("<4.0.0b26"),
    (9,),
    "has a race in the backward with block lists, so gradients are sometimes wrong or NaN",
    "https://github.com/Dao-AILab/flash-attention/pull/2756",
)

DEFECTS = (
    BLOCK_SPARSE,
    Defect(
        "cudnn",
        MASK_WITH_GRADIENTS,
        "torch",
        SpecifierSet(">=2.11"),  # from this version on, cuDNN is torch's first choice on Hopper
        (9,),
        "computes NaN gradients of query if seqlen_k % 128 == 64 and lse < -88",
        "https://github.com/pytorch/pytorch/issues/196678",
    ),
    Defect(
        "cudnn",
        ONE_QUERY_WITH_GRADIENTS,
        "torch",
        SpecifierSet(">=2.11"),
        (9,),
        "computes NaN gradients of key and value if lse is far below 0",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    # No known release of flash-attn-4 fixes these defects.
    Defect(
        "flash-attn-4",
        BAND_WITH_GRADIENTS,
        "flash-attn-4",
        SpecifierSet(">=4.0.0b1"),
        (9,),
        "computes wrong causal gradients on H200",
        "https://github.com/Dao-AILab/flash-attention/issues/1915",
    ),
    Defect(
        "flash-attn-4",
        HEAD_DIM_192_128_WITH_GRADIENTS,
        "flash-attn-4",
        SpecifierSet(">=4.0.0b1"),
        (9,),
        "fails to compile the backward of head_dim 192 with head_dim_v 128 on Hopper",
        "https://github.com/Dao-AILab/flash-attention/issues/2087",
    ),
    Defect(
        "flash-attn-4",
        HEAD_DIM_256_WITH_GRADIENTS,
        "flash-attn-4",
        SpecifierSet(">=4.0.0b1"),
        (10, 11),
        "computes wrong gradients for batches with head_dim 256 on Blackwell",
        "https://github.com/NVIDIA/TransformerEngine/issues/3216",
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
        and defect.versions.contains(_version(defect.package), prereleases=True)
    )


def is_denied(engine: str, feature: str, device: torch.device) -> bool:
    """Return True if an engine must not run calls with a feature on a device."""
    return _is_denied(engine, feature, device)


@functools.cache
def _is_denied(engine: str, feature: str, device: torch.device) -> bool:
    return bool(defects(engine, feature, device))


def reason_against(engine: str, feature: str, device: torch.device) -> str:
    """Return the first known defect that affects calls with a feature; empty if there is none."""
    known = defects(engine, feature, device)
    return f"{known[0].effect} ({known[0].source})" if known else ""


# torch.compile calls the functions while tracing, and treats the results as constants.
is_denied._dynamo_marked_constant = True  # type: ignore[attr-defined]
defects._dynamo_marked_constant = True  # type: ignore[attr-defined]
reason_against._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _capability(device: torch.device) -> int | None:
    """Return the major compute capability of a GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)[0]


def _version(package: str) -> Version:
    """Return the version of a package; of torch, the release that a nightly build precedes."""
    if package == "torch":
        return Version(Version(torch.__version__).base_version)
    return Version(metadata.version(package))
