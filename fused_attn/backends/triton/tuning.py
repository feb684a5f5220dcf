"""Tile sizes, warps and stages for each architecture, pass, element size and head_dim.

There is no autotuning at run time. `python scripts/tune_triton.py` benchmarks the candidates on the
local GPU, and prints rows for this file.

The 16-bit rows of sm_90 for head_dim up to 128 were measured on an H200 (all candidates and times:
benchmarks/results/triton-tiles-h200.json). Small tiles with four warps, two programs of which fit
on a core, are fastest: one computes while the other waits. They spill up to 128 bytes.

Other rows are untuned. Each is the largest candidate tile that Triton 3.6 compiles without
register spills and within the shared memory of the GPU, for each kind of mask alone. Larger tiles
are preferred because they read the keys less often. Combinations of mask kinds may spill hundreds
of bytes. tests/backends/test_ahead_of_time.py checks all rows except those of sm_86.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Tile size of a kernel (block_m queries, block_n keys), its warps and its pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Largest seqlen_q for which calls without gradients use the decode kernel. More queries fill enough
# rows of a forward tile.
MAX_DECODE_QUERIES = 16
# A KV split must have several KV blocks, because otherwise its startup takes longer than its work.
# With more than DECODE_MAX_PARTS splits, the merge takes longer than the splits save.
DECODE_KEYS_PER_PART, DECODE_MAX_PARTS = 256, 128
# Target for work that can be split: one program computes while another waits for memory.
PROGRAMS_PER_CORE = 2
WIDTHS = (64, 128, 256)  # head_dim is rounded up to the next of these
# Rows per program of the statistics kernel. Each program loads one tile of out and one of grad_out,
# so 8 to 32 KB are in flight.
_STATISTICS_ROWS = {64: 32, 128: 32, 256: 16}


def _row(*configs: tuple[int, int, int, int]) -> dict[int, Config]:
    """Return a dict with the Config of each of WIDTHS."""
    return {width: Config(*c) for width, c in zip(WIDTHS, configs, strict=True)}


# arch -> (pass, element size in bytes) -> width -> Config. Passes ending in "_masked" need more
# registers per thread. They are used for dropout, for masks that are read from memory, for 16-bit
# types with head_dim > 128 if a backward follows, and in dkdv for grouped heads. Decode tiles have
# the fewest rows that the matrix instructions support. With larger groups of heads, several tiles
# read the same keys, the later ones from L2.
TABLES: dict[str, dict[tuple[str, int], dict[int, Config]]] = {
    "sm_80": {
        ("fwd", 2): _row((128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2)),
        ("fwd_masked", 2): _row((64, 32, 8, 2), (64, 64, 8, 1), (32, 32, 8, 1)),
        ("dq", 2): _row((128, 64, 8, 2), (64, 128, 8, 1), (64, 64, 8, 2)),
        ("dq_masked", 2): _row((128, 16, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        ("dkdv", 2): _row((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((32, 32, 4, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        ("bias", 2): _row((64, 64, 8, 1), (128, 16, 8, 1), (16, 32, 8, 1)),
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
        ("fwd", 2): _row((64, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 2)),
        ("fwd_masked", 2): _row((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        ("dq", 2): _row((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        ("dq_masked", 2): _row((64, 32, 4, 3), (64, 64, 4, 2), (32, 32, 8, 1)),
        ("dkdv", 2): _row((64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((32, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 2)),
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
        ("dq_masked", 2): _row((128, 64, 8, 2), (128, 64, 8, 1), (64, 32, 8, 1)),
        ("dkdv", 2): _row((64, 128, 8, 1), (32, 32, 8, 2), (32, 32, 8, 2)),
        ("dkdv_masked", 2): _row((64, 64, 8, 2), (32, 32, 8, 1), (16, 32, 8, 1)),
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
        ("dkdv_masked", 4): _row((32, 32, 4, 1), (16, 64, 8, 1), (16, 16, 4, 1)),
        ("bias", 4): _row((32, 32, 8, 1), (32, 32, 4, 1), (16, 16, 8, 1)),
        ("decode", 2): _row((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 1)),
        ("decode", 4): _row((16, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
}
# Triton's interpreter takes the same time for a tile of any size, so larger tiles run faster. With
# these sizes, a test shape still has a few tiles.
TABLES["interpreter"] = {
    key: dict.fromkeys(WIDTHS, Config(16 if key[0] == "decode" else 64, 64, 4, 1))
    for key in TABLES["sm_86"]
}
# Architectures that use the rows of another architecture. Architectures in neither table use the
# rows of sm_86. These fit in 99 KB, the smallest shared memory of NVIDIA GPUs since sm_80.
_LIKE = {"sm_87": "sm_80", "sm_103": "sm_100"}


def padded(head_dim: int) -> int:
    """Return head_dim padded to a power of two that the matrix instructions support."""
    return max(16, 1 << (head_dim - 1).bit_length())


def width_of(head_dim: int) -> int:
    """Return head_dim rounded up to the next of WIDTHS."""
    return next(width for width in WIDTHS if width >= head_dim)


def config(kind: str, arch: str, element_size: int, head_dim: int) -> Config:
    """Return the configuration for a pass.

    Args:
        kind: a pass in TABLES such as "fwd", or "statistics".
        arch: name of the architecture, see `launch.Arch`.
        element_size: size of an element of query, in bytes.
        head_dim: max(head_dim, head_dim_v).
    """
    if kind == "statistics":
        return Config(_STATISTICS_ROWS[width_of(head_dim)], 16, 4, 1)
    table = TABLES.get(_LIKE.get(arch, arch), TABLES["sm_86"])
    return table[kind, element_size][width_of(head_dim)]
