"""The problems that are measured on a GPU, and what is aimed at."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from shapes import Attention, Device, Norm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# A part of the scores counts as visible, for "share of unmasked", in tiles of this many queries
# and keys: what kernels of this head_dim compute at once.
TILE_M, TILE_N = 128, 64

_SWEEP = "hidden size 2048, 32768 tokens: as in FlashAttention-2 (Dao 2023), figures 4 to 6"
_MASKS = "16 heads of 128, 32768 tokens, under each mask"
_LLAMA = "Llama-3-8B: 8 of 32 heads of 128, one token"


def _sweep(head_dim: int, seqlen: int, mask: str = "none", **options: Any) -> Attention:
    """A batch of 32768 tokens; the name says head_dim, length and mask."""
    length = f"{seqlen // 1024}k"
    name = options.pop("name", mask if mask != "none" else "full")
    batch, heads = 32768 // seqlen, 2048 // head_dim
    source = _SWEEP if mask == "none" else _MASKS
    return Attention(
        f"{name}-D{head_dim}-{length}", batch, heads, seqlen, seqlen, head_dim, source, mask=mask,
        span=1024, **options,
    )  # fmt: skip


UNMASKED = [
    _sweep(128, 16384, quick=True),
    *(_sweep(128, n) for n in (1024, 4096)),
    *(_sweep(64, n) for n in (1024, 4096, 16384)),
]
MASKED = [
    _sweep(128, 8192, "causal", quick=True),
    _sweep(128, 8192, "ragged_blocks", name="dense_blocks", quick=True),
    _sweep(128, 8192, "random", name="dense_random"),
    _sweep(128, 8192, "padding"),
    _sweep(128, 8192, "window"),
    _sweep(128, 8192, "documents"),
    _sweep(128, 8192, "alibi"),
    _sweep(128, 4096, "bias"),
    _sweep(64, 8192, "causal"),
]
FORWARD = [(shape, BF16) for shape in (*UNMASKED, *MASKED)] + [
    (_sweep(128, 4096), F16),
    (_sweep(64, 4096), F32),
]
BACKWARD = [(shape, BF16) for shape in (*UNMASKED[:2], UNMASKED[4], *MASKED)] + [
    (_sweep(128, 4096, name="dropout", dropout_p=0.1), BF16),
    (_sweep(128, 4096), F16),
]
PACKED = [Attention("packed-D128", 16, 16, 4096, 4096, 128, "62 % of 65536 tokens", mask="padding")]

DECODE = [
    Attention(
        f"decode-B{batch}-{length}k", batch, 32, 1, length * 1024, 128, _LLAMA, 8,
        quick=(batch, length) == (64, 8),
    )
    for batch, length in ((64, 8), (1, 8), (1, 64), (8, 8), (8, 64), (64, 32))
]  # fmt: skip

SMALL = Attention("call", 1, 8, 32, 32, 64, "call overhead", quick=True)

_WIDTH = "hidden sizes of current models"
NORMS = [
    Norm("layer_norm", 16384, 4096, _WIDTH, quick=True),
    Norm("layer_norm", 65536, 1024, _WIDTH),
    Norm("layer_norm", 8192, 16384, _WIDTH),
    Norm("rms_norm", 16384, 4096, _WIDTH, kind="rms_norm"),
    Norm("rms_norm", 8192, 16384, _WIDTH, kind="rms_norm"),
    Norm("layer_norm-residual", 16384, 4096, _WIDTH, 0.1, True, quick=True),
    Norm("rms_norm-residual", 16384, 8192, _WIDTH, 0.0, True, kind="rms_norm"),
]

MATMUL_SIZE, COPY_BYTES = 8192, 1 << 30  # of the ceilings


def aims(group: str, shape: Any) -> dict[str, float]:
    """What figures of a record are to reach on an H200 (a share: anywhere)."""
    if isinstance(shape, Norm) or group == "decode":
        return {"share_of_copy": 0.85}
    if group not in ("forward", "backward"):
        return {}
    wanted = {}
    if shape.mask != "none":
        wanted["share_of_unmasked"] = 0.85
    if shape.mask in ("ragged_blocks", "random") and group == "forward":
        wanted["times_sdpa"] = 4.0
    if shape.mask == "none" and shape.head_dim == 128 and shape.seqlen_k == 16384:
        wanted["teraflops"] = {"forward": 480.0, "backward": 400.0}[group]
    return wanted


def visible_tiles(shape: Attention, device: Device) -> float:
    """The share of tiles of TILE_M queries and TILE_N keys that a query sees some key of."""
    mask = shape.bool_mask(device)
    if mask is None:
        return 1.0
    while mask.dim() < 4:
        mask = mask[None]
    rows, columns = mask.shape[2:]
    mask = mask.expand(-1, -1, shape.seqlen_q if rows == 1 else rows, columns)
    size = (TILE_M, TILE_N)
    tiles = [F.max_pool2d(m.half(), size, ceil_mode=True) for m in mask]  # a sequence at a time
    return torch.stack(tiles).float().mean().item()


def visible_pairs(shape: Attention, device: Device) -> float:
    """The share of pairs of a query and a key that see each other."""
    mask = shape.bool_mask(device)
    return 1.0 if mask is None else mask.float().mean().item()


def flops(shape: Attention) -> float:
    """Of a forward in which everything is visible; a backward has 2.5 times as many."""
    pairs = shape.batch * shape.num_heads * shape.seqlen_q * shape.seqlen_k
    return 4.0 * pairs * shape.head_dim
