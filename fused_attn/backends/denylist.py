"""Known defects of other projects' kernels, and the calls for which an engine must not run.

An entry applies to versions of a package, GPU architectures and a feature. It names its source, so
that it can be removed once the defect is fixed. Limits that the engine's project documents are not
defects: backends state them in `unsupported`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fused_attn.backends.machine import capability_of, version_of
from fused_attn.base.torch_state import traced_as_constant


@dataclass(frozen=True)
class Defect:
    """A known defect of an engine.

    Attributes:
        package, versions: the package that determines the version, and the versions affected.
        capabilities: affected CUDA compute capabilities, by major number.
        effect: description of the error.
        source: URL of the report.
    """

    package: str
    versions: str
    capabilities: tuple[int, ...]
    effect: str
    source: str


MASK_WITH_GRADIENTS = "mask tensor with gradients"
GROUPED_HEADS = "grouped heads"
ONE_QUERY = "one query"
ONE_QUERY_WITH_GRADIENTS = "one query with gradients"
BAND_WITH_GRADIENTS = "causal mask or window with gradients"
HEAD_DIM_192_128_WITH_GRADIENTS = "head_dim 192 and head_dim_v 128 with gradients"
HEAD_DIM_256_WITH_GRADIENTS = "head_dim 256 with gradients"

# By engine ("cudnn" or the name of a package) and by the feature of the affected calls.
DEFECTS = {
    ("cudnn", MASK_WITH_GRADIENTS): Defect(
        "torch",
        ">=2.11",  # from this version on, cuDNN is torch's first choice on Hopper
        (9,),
        "computes NaN gradients of query if seqlen_k % 128 == 64 and lse < -88",
        "https://github.com/pytorch/pytorch/issues/196678",
    ),
    ("cudnn", ONE_QUERY_WITH_GRADIENTS): Defect(
        "torch",
        ">=2.11",
        (9,),
        "computes NaN gradients of key and value if lse is far below 0",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    ("cudnn", ONE_QUERY): Defect(
        "torch",
        ">=2.11",  # cuDNN 9.19; pytorch/pytorch#194927 excludes such versions in a later release
        (10, 11),
        "computes wrong outputs of one query with grouped heads",
        "https://github.com/pytorch/pytorch/issues/193893",
    ),
    ("memory-efficient", GROUPED_HEADS): Defect(
        "torch",
        "<2.14",  # estimated from the date of the merge
        (8, 9, 10, 11, 12),
        "leaves the call to the kernel that stores all scores",
        "https://github.com/pytorch/pytorch/pull/191085",
    ),
    # No known release of flash-attn-4 fixes these defects.
    ("flash-attn-4", BAND_WITH_GRADIENTS): Defect(
        "flash-attn-4",
        ">=4.0.0b1",
        (9,),
        "computes wrong causal gradients on H200",
        "https://github.com/Dao-AILab/flash-attention/issues/1915",
    ),
    ("flash-attn-4", HEAD_DIM_192_128_WITH_GRADIENTS): Defect(
        "flash-attn-4",
        ">=4.0.0b1",
        (9,),
        "fails to compile the backward of head_dim 192 with head_dim_v 128 on Hopper",
        "https://github.com/Dao-AILab/flash-attention/issues/2087",
    ),
    ("flash-attn-4", HEAD_DIM_256_WITH_GRADIENTS): Defect(
        "flash-attn-4",
        ">=4.0.0b1",
        (10, 11),
        "computes wrong gradients for batches with head_dim 256 on Blackwell",
        "https://github.com/NVIDIA/TransformerEngine/issues/3216",
    ),
}


@traced_as_constant
def reason_against(engine: str, feature: str, device: torch.device) -> str:
    """Return the known defect that affects calls with a feature on a device; empty if none does.

    Args:
        device: a CUDA device; without a GPU, every architecture counts as affected.
    """
    defect = DEFECTS.get((engine, feature))
    if defect is None:
        return ""
    capability = capability_of(device)
    if capability is not None and capability // 10 not in defect.capabilities:
        return ""
    if defect.package == "torch":  # a nightly build counts as the release that it precedes
        version = Version(torch.__version__).base_version
    else:
        version = version_of(defect.package) or "0"
    affected = SpecifierSet(defect.versions).contains(version, prereleases=True)
    return f"{defect.effect} ({defect.source})" if affected else ""


@traced_as_constant
def is_denied(engine: str, feature: str, device: torch.device) -> bool:
    """Return True if an engine must not run calls with a feature on a device."""
    return _is_denied(engine, feature, device)


@functools.cache
def _is_denied(engine: str, feature: str, device: torch.device) -> bool:
    return bool(reason_against(engine, feature, device))
