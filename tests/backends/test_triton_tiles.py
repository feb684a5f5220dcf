"""The Triton backend classifies tiles by rows and by columns, like csrc/block_ranges.h."""

import functools
import itertools
import operator

import pytest
import torch
from cpu_tiles import tile_kinds
from helpers import BACKENDS
from mask_cases import MASKS

if "triton" not in BACKENDS:
    pytest.skip("reason: needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl
from helpers import device_of

from fused_attn import masks
from fused_attn.backends import get_backend
from fused_attn.backends.triton import attention
from fused_attn.backends.triton.launch import launch
from fused_attn.backends.triton.masks import Sizes, sequence_bounds
from fused_attn.backends.triton.spec_args import mask_args
from fused_attn.backends.triton.tiles import query_tiles
from fused_attn.call.attention import AttentionOptions
from fused_attn.call.validation import attention_call
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask
from fused_attn.masks.tables import without_tables

SHAPE = (3, 2, 77, 300)  # batch, num_heads, seqlen_q, seqlen_k
SKIP, PARTIAL, FULL = 0, 1, 2
DEVICE = torch.empty(0, device=device_of("triton")).device  # includes the index
PAIRS = list(itertools.combinations(("window", "ragged", "prefix", "documents", "dense_blocks"), 2))


def combined(names):
    return functools.reduce(operator.and_, (MASKS[name](*SHAPE) for name in names))


def sizes_of(spec):
    batch, num_heads, seqlen_q, seqlen_k = SHAPE
    band = (spec.band_lo, spec.band_hi, spec.alibi_offset)
    return Sizes(batch, num_heads, num_heads, seqlen_q, seqlen_k, seqlen_q, *band)


# ALiBi is excluded, because it makes every tile partial on the CPU, but not in Triton.
SINGLE = [(name,) for name in MASKS if not name.startswith("alibi")]


@pytest.mark.parametrize("names", [*SINGLE, *PAIRS], ids="-".join)
def test_kinds_equal_those_of_the_cpu(names):
    check_kinds(combined(names))


def test_kinds_if_a_key_mask_masks_full_tiles():
    visible = torch.arange(SHAPE[3]) >= torch.tensor([128, 0, 290])[:, None, None, None]
    kinds = check_kinds(masks.dense(visible))
    assert (kinds == SKIP).any() and (kinds == FULL).any()


def check_kinds(mask):
    """Check that Triton and the CPU classify each tile alike; return the kinds of the tiles."""
    spec = without_tables(spec_of_mask(mask, *SHAPE, torch.device("cpu")), SHAPE[3])
    wanted, (block_m, block_n) = tile_kinds(spec, *SHAPE, torch.float32)
    # On the CPU, a shorter last block may be full, because no keys beyond the end are loaded.
    ragged = torch.arange(wanted.shape[3]) * block_n + block_n > SHAPE[3]
    wanted = wanted.where(~ragged | (wanted != FULL), PARTIAL)
    spec = without_tables(spec_of_mask(mask.to(DEVICE), *SHAPE, DEVICE), SHAPE[3])
    got = attention.tile_kinds(spec, sizes_of(spec), block_m, block_n, DEVICE).cpu()
    assert torch.equal(got.expand_as(wanted), wanted)
    return got


@pytest.mark.parametrize("name", ["dense", "dense_blocks", "key_mask", "bias_with_inf"])
def test_summaries_equal_those_of_the_cpu(name):
    (tensor,) = MASKS[name](*SHAPE).tensors()
    tensor = tensor[(None,) * (4 - tensor.dim())]
    got = attention.tile_summary(tensor.to(DEVICE)).cpu()
    assert torch.equal(got, get_backend("cpp").tile_summary(tensor))


LISTED = ("documents", "key_mask", "dense", "bias_with_inf")


@pytest.mark.parametrize("name", ["causal", "ragged", "prefix", "alibi", *LISTED])
def test_tiles_are_listed_where_ranges_do_not_suffice(name):
    """Kernels read a list of tiles if the visible keys of a tile may not be a range."""
    query, key = (torch.zeros(*SHAPE[:2], n, 16, device=DEVICE) for n in SHAPE[2:])
    mask = MASKS[name](*SHAPE).to(DEVICE)
    call = attention_call(query, key, key, mask, AttentionOptions(0.25, None))
    assert attention.LaunchArguments(call).has_lists == (name in LISTED)


@triton.jit
def query_tiles_kernel(kinds, mask, sizes, num_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Classify a column of tiles with `query_tiles`, and store 0, 1 or 2 per tile in `kinds`."""
    b, n = tl.program_id(0), tl.program_id(1)
    bounds = sequence_bounds(mask, sizes, b)
    lo, hi, full_lo, full_hi = query_tiles(
        bounds, n * BLOCK_N, n * BLOCK_N + BLOCK_N, sizes.seqlen_q, sizes.seqlen_k, BLOCK_M
    )
    for m in range(num_m):
        visible = ((m >= lo) & (m < hi)).to(tl.int32)
        full = ((m >= full_lo) & (m < full_hi)).to(tl.int32)
        tl.store(kinds + (b * num_m + m) * tl.num_programs(1) + n, visible + full)


@pytest.mark.parametrize(
    "names",
    [
        "causal",
        "causal_bottom_right",
        "window",
        "window_right_only",
        "padding",
        "padding_left",
        "ragged",
        "ragged_left",
        "prefix",
        "prefix-window",
        "prefix-padding_left",
        "ragged-causal_bottom_right",
    ],
)
def test_columns_of_tiles_agree_with_rows(names):
    """The tiles of the dK/dV pass (by columns) agree with those of the dQ pass (by rows).

    Both mark the same tiles as full. Columns skip every tile that rows skip, but no visible tile.
    """
    block_m, block_n = 16, 32
    spec = spec_of_mask(combined(names.split("-")).to(DEVICE), *SHAPE, DEVICE)
    sizes = sizes_of(spec)
    rows = attention.tile_kinds(spec, sizes, block_m, block_n, DEVICE)[:, 0]
    kinds = torch.full_like(rows, 9)
    num_m, num_n = kinds.shape[1:]
    launch(
        query_tiles_kernel, DEVICE, (SHAPE[0], num_n), kinds, mask_args(spec), sizes, num_m,
        BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    assert torch.equal(kinds == FULL, rows == FULL)
    visible = materialize(spec, *SHAPE, DEVICE, torch.float32)[0]
    visible = torch.ones(SHAPE).bool() if visible is None else visible.expand(SHAPE)[:, 0]
    pad = (0, -SHAPE[3] % block_n, 0, -SHAPE[2] % block_m)
    padded = torch.nn.functional.pad(visible, pad)
    shows = padded.unflatten(2, (-1, block_n)).unflatten(1, (-1, block_m)).any(4).any(2)
    assert not (shows & (kinds == SKIP)).any()
    assert (kinds == SKIP)[rows == SKIP].all()
