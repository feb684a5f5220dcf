"""The decode kernels: a few queries, many keys, no gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    ONE_16_BIT_TYPE,
    assert_outputs_like_eager,
    attention,
    device_of,
    random_qkv,
    short,
)
from mask_cases import FIELDS, MASKS, OTHER_MASKS

from fused_attn import decode_attention, masks
from fused_attn import functional as F
from fused_attn.backends import cpp
from fused_attn.backends.verdicts import WIDTHS

IN_TILES = [("amx", torch.bfloat16), ("amx", torch.float16), ("amx_fp16", torch.float16)]


def check(tensors, mask, dtype, backend="cpp", **options):
    """Assert that out and lse of a call without gradients are within the numerics contract."""
    assert_outputs_like_eager(attention(mask, enable_gqa=True, **options), tensors, dtype, backend)


@OTHER_MASKS
@pytest.mark.thinned("FIELDS covers the kernels' code paths", name=set(MASKS) - set(FIELDS))
@pytest.mark.thinned("covered by 1 and 16 queries", seqlen_q=[5])
@pytest.mark.thinned(
    "masks are read alike in each dtype", dtype=[torch.bfloat16], name=set(MASKS) - {"ragged_left"}
)
@ONE_16_BIT_TYPE
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("seqlen_q", [1, 5, 16])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, seqlen_q, dtype, backend):
    shape = (2, 4, 2, seqlen_q, 300)
    check(random_qkv(*shape, 40, 24), MASKS[name](2, 4, seqlen_q, 300), dtype, backend)


def test_compiled_calls_run_on_the_decode_kernel():
    """Compiled inference of 16 queries is bitwise equal to eager inference, but not to training."""
    query, key, value = random_qkv(1, 4, 4, 16, 2000, 64).values()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(compiled(query, key, value), out)
    trained = F.scaled_dot_product_attention(query.requires_grad_(), key, value)
    # The generic kernels sum in the same order.
    assert not torch.equal(out, trained) or cpp.isa() == "generic"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("group", "seqlen_q"), [(8, 2), (1, 3), (1, 6), (3, 9), (1, 20), (2, 32)])
def test_isas(group, seqlen_q, isa, dtype):
    """Decoding is within the numerics contract, even with more rows than one query tile has."""
    shape = (1, 2 * group, 2, seqlen_q, 1000)
    check(random_qkv(*shape, 64), masks.causal(align="bottom_right"), dtype)
    check(random_qkv(*shape, 20, 72), None, dtype, dropout_p=0.2)


@pytest.mark.parametrize(("isa", "dtype"), IN_TILES, indirect=["isa"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_heads_in_tile_registers(rows, name, isa, dtype):
    """AMX decoding is within the numerics contract for 12 heads that share keys."""
    mask = MASKS[name](2, 24, rows, 300)
    check(random_qkv(2, 24, 2, rows, 300, 72, 40), mask, dtype, dropout_p=0.3)
    check(random_qkv(2, 24, 2, rows, 300, 64, 160), mask, dtype)


@pytest.mark.parametrize(("isa", "dtype"), IN_TILES, indirect=["isa"])
def test_large_scores_in_tile_registers(isa, dtype):
    """AMX decoding is within the numerics contract if each KV block raises the row maximum."""
    tensors = random_qkv(1, 8, 1, 2, 600, 64)
    tensors["key"] *= torch.linspace(0.1, 12, 600).view(-1, 1)
    check(tensors, None, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_softcap_scale_and_single_head(dtype, backend):
    check(random_qkv(1, 1, 1, 1, 5000, 128), None, dtype, backend, softcap=5.0, scale=0.3)
    check(random_qkv(1, 1, 1, 2, 700, 5), None, dtype, backend, scale=-0.3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_whose_scores_differ_in_magnitude(backend):
    """KV splits are merged with the maximum of their row, not with that of the next row."""
    tensors = random_qkv(1, 2, 2, 1, 1500, 16)
    tensors["query"][:, 1] *= 300.0
    check(tensors, None, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_that_of_the_reference(backend):
    """Decoding drops the same weights as the eager reference."""
    mask = masks.padding([333, 100])
    check(random_qkv(2, 4, 2, 5, 333, 16), mask, torch.float32, backend, dropout_p=0.4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_invisible_nan_stays_where_it_is(dtype, backend):
    """Non-finite keys and values affect only the outputs of queries that attend to them."""
    tensors = random_qkv(2, 2, 2, 3, 400, 32).values()
    query, key, value = (t.to(device_of(backend), dtype) for t in tensors)
    for t in (key, value):
        t[0, :, 300:] = float("nan")
        t[1, :, 7] = float("inf")
    visible = torch.ones(2, 1, 3, 400, dtype=torch.bool, device=query.device)
    visible[0, :, :, 300:] = False
    visible[1, :, 1:, 7] = False
    out = F.scaled_dot_product_attention(query, key, value, visible, backend=backend)
    assert out[0].isfinite().all()
    assert not out[1, :, 0].isfinite().any()
    if backend == "cpp":  # other kernels compute 0 * inf if a query of the same tile attends
        assert out[1, :, 1:].isfinite().all()


@ONE_16_BIT_TYPE
@pytest.mark.thinned("all widths are covered in float32", dtype=[torch.bfloat16], dim=[32, 96, 192])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dim", WIDTHS)
def test_head_dims(dim, dtype, backend):
    tensors = random_qkv(1, 4, 2, 3, 400, dim)
    check(tensors, masks.sliding_window(300, align="bottom_right"), dtype, backend)


@ONE_16_BIT_TYPE
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("seqlen_q", [1, 2, 40])
def test_values_that_are_a_part_of_the_keys(seqlen_q, dtype):
    """Values that are the first 512 columns of the keys, as in multi-head latent attention."""
    tensors = random_qkv(2, 16, 1, seqlen_q, 300, 576)
    tensors["value"] = tensors["key"][..., :512]
    check(tensors, masks.causal(align="bottom_right"), dtype)
    query, key, _ = (t.to(dtype) for t in tensors.values())
    view, copy = (
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        for value in (key[..., :512], key[..., :512].clone())
    )
    torch.testing.assert_close(view, copy)


@pytest.mark.thinned("covered by 3 rows", rows=[1])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [masks.dense, lambda t: masks.bias(t.float().log())])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_that_share_keys_see_others(rows, kind, backend):
    """Results are correct if a tile is visible to only one head of a group, or to none."""
    visible = torch.zeros(2, 4, rows, 640, dtype=torch.bool)
    visible[:, 0, :, :256] = visible[:, 1, :, 192:448] = visible[:, 2, :, :128] = True
    visible[1, :, :, 128:256] = True
    tensors = random_qkv(2, 4, 1, rows, 640, 32)
    for name in ("key", "value"):
        tensors[name][0, :, 448:] = tensors[name][1, :, 448:] = float("nan")
    for mask in (visible, visible[:, :, :1]):
        check(tensors, kind(mask), torch.float32, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [3, 8, 48, 128], ids="pages of {}".format)
def test_pages(size, isa, dtype, monkeypatch):
    """Pages of any size are read in place; results are bitwise equal to a contiguous cache's."""
    capacity, lengths = 384, torch.tensor([384, 0, 130, 29])
    used = torch.arange(capacity) < lengths.view(-1, 1, 1, 1)
    table = torch.randperm(4 * capacity // size).view(4, -1)
    spare = torch.arange(table.shape[1]) * size >= lengths.view(-1, 1)
    junk = table.masked_fill(spare, -(10**6)).int()
    options = {"cache_lengths": lengths, "return_lse": True}
    window = masks.sliding_window(40, align="bottom_right")
    for heads, heads_kv, seqlen_q, *dims in (2, 2, 1, 64, 64), (12, 1, 2, 64, 96), (2, 1, 4, 20, 5):
        tensors = random_qkv(4, heads, heads_kv, seqlen_q, capacity, *dims).values()
        query, *caches = (t.to(dtype) for t in tensors)
        caches = [t.masked_fill(~used.mT, torch.nan) for t in caches]
        pages = [
            t.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)[table.flatten().argsort()]
            for t in caches
        ]
        for mask in (None, window):
            expected = decode_attention(query, *caches, attn_mask=mask, **options)
            with monkeypatch.context() as patch:
                patch.setattr("fused_attn.ops.decode_step.contiguous_rows", None)
                got = decode_attention(query, *pages, attn_mask=mask, block_table=junk, **options)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
