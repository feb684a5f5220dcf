"""Namespace of this package's ops in torch.ops: the name of the package.

The Hugging Face Hub loads the package under a different name, so several versions can be loaded in
one process.
"""

from __future__ import annotations

import torch

NAMESPACE = __name__.partition(".")[0]
OPS = getattr(torch.ops, NAMESPACE)
