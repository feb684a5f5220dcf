"""Tile sizes, warps and stages: one row a pass, element size and head_dim, by architecture.

No kernel is tuned while a user waits: `python -m fused_attn.tools.tune_triton` measures the
candidates on the GPU it runs on, and prints rows to put here.

Who measured: nobody yet. Every row is the largest tile of a list (large ones first: fewer reads of
keys) that Triton 3.6 compiled without spills and within the chip's shared memory, for each kind of
mask by itself. tests/backends/test_ahead_of_time.py holds the rows to that (sm_86's are not in it).
Several kinds at once may spill, up to hundreds of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """The cut of a kernel: rows of queries and of keys in a tile, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Up to so many queries without gradients go to the decode kernel: with more, the rows of a forward
# tile are filled well enough.
MAX_DECODE_QUERIES = 16
# Keys of a part are read in several steps, or starting it takes longer than its work; more parts
# than that take longer to merge than they save.
DECODE_KEYS_PER_PART, DECODE_MAX_PARTS = 256, 128
# Programs wanted where work can be split: one computes while the other waits for memory.
PROGRAMS_PER_CORE = 2
WIDTHS = (64, 128, 256)  # of head_dim; smaller ones take the row of 64
# Rows of a program that reads two tiles once: 8 to 32 KB in flight.
_STATISTICS_ROWS = {64: 32, 128: 32, 256: 16}


def _row(*configs: tuple[int, int, int, int]) -> dict[int, Config]:
    """For each of WIDTHS."""
    return {width: Config(*c) for width, c in zip(WIDTHS, configs, strict=True)}


# arch -> (pass, bytes of an element) -> width -> Config. Passes called "_masked" have dropout,
# masks that are read from memory, or (by keys) groups of heads: more values a thread. Decoding has
# the rows that the matrix instructions need at least; where a group of heads has more, keys are
# read again, from L2.
TABLES: dict[str, dict[tuple[str, int], dict[int, Config]]] = {
    "sm_80": {
        ("fwd", 2): _row((128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2)),
        ("fwd_masked", 2): _row((64, 32, 4, 2), (64, 64, 8, 1), (32, 32, 8, 1)),
        ("dq", 2): _row((128, 64, 8, 2), (64, 128, 8, 1), (64, 64, 8, 2)),
        ("dq_masked", 2): _row((128, 16, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        ("dkdv", 2): _row((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((32, 32, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        ("bias", 2): _row((64, 64, 8, 1), (128, 16, 8, 1), (16, 16, 8, 1)),
        ("fwd", 4): _row((64, 32, 8, 2), (16, 64, 8, 2), (32, 16, 16, 1)),
        ("fwd_masked", 4): _row((16, 16, 8, 1), (32, 32, 8, 2), (32, 16, 4, 1)),
        ("dq", 4): _row((64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
        ("dq_masked", 4): _row((32, 32, 8, 1), (16, 16, 8, 1), (32, 32, 8, 1)),
        ("dkdv", 4): _row((32, 64, 8, 1), (64, 16, 8, 1), (32, 16, 8, 1)),
        ("dkdv_masked", 4): _row((32, 32, 8, 1), (16, 64, 8, 1), (32, 16, 8, 1)),
        ("bias", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1)),
        ("decode", 2): _row((16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
        ("decode", 4): _row((16, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "sm_86": {
        ("fwd", 2): _row((128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
        ("fwd_masked", 2): _row((64, 32, 4, 2), (128, 16, 8, 2), (32, 32, 8, 1)),
        ("dq", 2): _row((128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
        ("dq_masked", 2): _row((128, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
        ("dkdv", 2): _row((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((32, 32, 8, 1), (32, 64, 8, 2), (16, 32, 8, 1)),
        ("bias", 2): _row((128, 32, 8, 1), (64, 32, 8, 1), (16, 32, 8, 1)),
        ("fwd", 4): _row((64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 1)),
        ("fwd_masked", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (32, 16, 4, 1)),
        ("dq", 4): _row((64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 8, 1)),
        ("dq_masked", 4): _row((128, 16, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
        ("dkdv", 4): _row((32, 64, 8, 1), (16, 64, 8, 1), (32, 16, 8, 1)),
        ("dkdv_masked", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
        ("bias", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
        ("decode", 2): _row((16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
        ("decode", 4): _row((16, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "sm_90": {
        ("fwd", 2): _row((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        ("fwd_masked", 2): _row((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        ("dq", 2): _row((128, 128, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        ("dq_masked", 2): _row((128, 32, 8, 2), (128, 32, 8, 2), (32, 32, 8, 1)),
        ("dkdv", 2): _row((64, 128, 8, 2), (32, 128, 8, 2), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        ("bias", 2): _row((64, 64, 8, 1), (64, 64, 8, 1), (64, 32, 8, 1)),
        ("fwd", 4): _row((64, 32, 8, 2), (32, 16, 8, 1), (16, 16, 4, 1)),
        ("fwd_masked", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (32, 16, 16, 1)),
        ("dq", 4): _row((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
        ("dq_masked", 4): _row((16, 16, 8, 1), (16, 16, 8, 1), (32, 16, 16, 1)),
        ("dkdv", 4): _row((32, 64, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1)),
        ("dkdv_masked", 4): _row((32, 32, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1)),
        ("bias", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
        ("decode", 2): _row((16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
        ("decode", 4): _row((16, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "sm_100": {
        ("fwd", 2): _row((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        ("fwd_masked", 2): _row((128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 8, 2)),
        ("dq", 2): _row((64, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 2)),
        ("dq_masked", 2): _row((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 1)),
        ("dkdv", 2): _row((64, 128, 8, 1), (32, 32, 8, 2), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((64, 128, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
        ("bias", 2): _row((128, 32, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        ("fwd", 4): _row((64, 32, 8, 2), (32, 16, 8, 1), (16, 16, 4, 1)),
        ("fwd_masked", 4): _row((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 16, 1)),
        ("dq", 4): _row((64, 32, 8, 2), (32, 16, 8, 1), (32, 32, 8, 1)),
        ("dq_masked", 4): _row((32, 16, 8, 1), (16, 16, 16, 1), (32, 16, 16, 1)),
        ("dkdv", 4): _row((32, 64, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1)),
        ("dkdv_masked", 4): _row((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
        ("bias", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
        ("decode", 2): _row((16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
        ("decode", 4): _row((16, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "gfx942": {
        ("fwd", 2): _row((128, 64, 4, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
        ("fwd_masked", 2): _row((128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2)),
        ("dq", 2): _row((128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        ("dq_masked", 2): _row((128, 32, 8, 1), (64, 32, 4, 2), (32, 32, 4, 1)),
        ("dkdv", 2): _row((32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 8, 1)),
        ("dkdv_masked", 2): _row((32, 64, 4, 2), (32, 32, 4, 1), (16, 32, 8, 1)),
        ("bias", 2): _row((64, 64, 8, 1), (64, 64, 8, 1), (32, 32, 4, 1)),
        ("fwd", 4): _row((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
        ("fwd_masked", 4): _row((64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        ("dq", 4): _row((64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        ("dq_masked", 4): _row((64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        ("dkdv", 4): _row((32, 32, 4, 2), (16, 64, 8, 1), (16, 16, 4, 1)),
        ("dkdv_masked", 4): _row((32, 32, 4, 2), (16, 64, 8, 1), (16, 16, 4, 1)),
        ("bias", 4): _row((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
        ("decode", 2): _row((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 1)),
        ("decode", 4): _row((16, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
}
# The tests' shapes take a few tiles of these, and each costs the interpreter the same time.
TABLES["interpreter"] = {
    key: dict.fromkeys(WIDTHS, Config(16 if key[0] == "decode" else 64, 64, 4, 1))
    for key in TABLES["sm_86"]
}
# Architectures that take the rows of another; any that is not here takes those of sm_86, which fit
# into the least shared memory that an NVIDIA GPU from sm_80 on has (99 KB).
_LIKE = {"sm_87": "sm_80", "sm_103": "sm_100"}


def padded(head_dim: int) -> int:
    """The head_dim of the tiles: a power of two that the matrix instructions take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def width_of(head_dim: int) -> int:
    """The row that a head_dim takes."""
    return next(width for width in WIDTHS if width >= head_dim)


def config(kind: str, arch: str, element_size: int, head_dim: int) -> Config:
    """The row for a pass.

    Args:
        kind: a pass of TABLES, or "statistics".
        arch: as `launch.Arch.name`.
        element_size: bytes of an element of query.
        head_dim: the larger of that of query and of value.
    """
    if kind == "statistics":
        return Config(_STATISTICS_ROWS[width_of(head_dim)], 16, 4, 1)
    table = TABLES.get(_LIKE.get(arch, arch), TABLES["sm_86"])
    return table[kind, element_size][width_of(head_dim)]
