"""Namespace of this package's ops in torch: the package's name.

The name differs if the package is loaded from the Hugging Face Hub, which allows several versions
in one process.
"""

from __future__ import annotations

import torch

NAMESPACE = __name__.partition(".")[0]
OPS = getattr(torch.ops, NAMESPACE)
