"""Where torch has the ops of this package: under its own name.

That is another one where the package is loaded from a folder of Hugging Face's Hub, where several
versions may be in one process.
"""

from __future__ import annotations

import torch

NAMESPACE = __name__.partition(".")[0]
OPS = getattr(torch.ops, NAMESPACE)
