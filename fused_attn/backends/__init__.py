"""Backends of the ops, and the selection of a backend for each problem."""

from fused_attn.backends.base import Backend
from fused_attn.backends.problem import AttentionProblem, NormProblem, problem_of
from fused_attn.backends.registry import (
    available_backends,
    default_backend,
    get_backend,
    select,
    use_backend,
    wanted_backend,
)

__all__ = [
    "AttentionProblem",
    "Backend",
    "NormProblem",
    "available_backends",
    "default_backend",
    "get_backend",
    "problem_of",
    "select",
    "use_backend",
    "wanted_backend",
]
