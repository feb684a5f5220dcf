"""Stand-in for torchvision, which timm needs only for transforms and data sets."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

# Names that timm's modules use at import. All are classes, because some serve as base classes.
_NAMES = {
    "torchvision": (),
    "torchvision.datasets": (
        "CIFAR10", "CIFAR100", "FashionMNIST", "ImageFolder", "KMNIST", "MNIST",
    ),
    "torchvision.models": (),
    "torchvision.models.feature_extraction": ("create_feature_extractor", "get_graph_node_names"),
    "torchvision.ops": (),
    "torchvision.ops.misc": ("FrozenBatchNorm2d",),
    "torchvision.transforms": ("ToTensor",),
    "torchvision.transforms.functional": (),
}  # fmt: skip


def import_timm() -> ModuleType:
    """Import timm and return it; skip the test if timm is not installed.

    The stub of torchvision is removed afterwards, so that other libraries do not detect it.
    """
    if importlib.util.find_spec("timm") is None:
        pytest.skip("reason: timm is not installed")
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    modules = {name: ModuleType(name) for name in _NAMES}
    for name, module in modules.items():
        module.__dict__.update({inner: type(inner, (), {}) for inner in _NAMES[name]})
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["torchvision.transforms.functional"].InterpolationMode = enum.Enum(
        "InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS"
    )
    sys.modules.update(modules)
    try:
        return importlib.import_module("timm")
    finally:
        for name in modules:
            del sys.modules[name]
