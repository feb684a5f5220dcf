"""The backends and the choice among them, with reasons."""

from fused_attn.backends.problem import AttentionProblem, NormProblem
from fused_attn.backends.registry import (
    available_backends,
    get_backend,
    select,
    use_backend,
    wanted_backend,
)

__all__ = [
    "AttentionProblem",
    "NormProblem",
    "available_backends",
    "get_backend",
    "select",
    "use_backend",
    "wanted_backend",
]
