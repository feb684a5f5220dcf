"""scaled_dot_product_attention on every backend: outputs, lse and all gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    ONE_16_BIT_TYPE,
    SLOW_BACKENDS,
    assert_like_eager,
    attention,
    deterministic,
    device_of,
    drawn,
    leaves_of,
    random_qkv,
    short,
)
from mask_cases import FIELDS, MASKS, OTHER_MASKS, PAIRS

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.masks import Mask
from fused_attn.masks.tables import as_bits

# batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v. The shapes cover one position,
# odd lengths around a query tile (8, 16, 32) and a KV block (128), GQA and MQA, seqlen_q below and
# above seqlen_k, head_dim not a multiple of a vector, and head_dim_v below and above head_dim.
SHAPES = [
    (1, 1, 1, 1, 1, 8, 8),
    (2, 4, 4, 63, 111, 64, 64),
    (2, 4, 2, 129, 40, 40, 24),
    (1, 6, 1, 33, 300, 80, 96),
    (1, 2, 2, 160, 160, 256, 256),
    (1, 2, 1, 70, 90, 128, 128),
    (1, 1, 1, 40, 70, 192, 160),
    (3, 2, 1, 5, 257, 1, 3),
]


def shape_id(shape: tuple[int, ...]) -> str:
    return "B{}-H{}-Hk{}-Sq{}-Sk{}-D{}-Dv{}".format(*shape)


@pytest.mark.thinned(
    "covered by causal calls", dtype=[torch.float16, torch.bfloat16], causal=[False]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_shapes(shape, dtype, backend, causal):
    options = {"is_causal": causal, "enable_gqa": True}
    assert_like_eager(attention(**options), random_qkv(*shape), dtype, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_wide_heads(dtype, causal):
    test_shapes((1, 2, 1, 40, 150, 576, 512), dtype, "cpp", causal)


@ONE_16_BIT_TYPE
@OTHER_MASKS
@pytest.mark.thinned("FIELDS covers the kernels' code paths", name=set(MASKS) - set(FIELDS))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype, backend):
    heads, heads_kv = (2, 1) if backend in SLOW_BACKENDS else (4, 2)
    mask = MASKS[name](3, heads, 101, 149)
    tensors = random_qkv(3, heads, heads_kv, 101, 149, 32, 16)
    got = assert_like_eager(attention(mask, enable_gqa=True), tensors, dtype, backend)
    empty = got["out1"] == float("-inf")
    assert got["out0"][empty].eq(0).all()
    assert got["grad_query"][empty].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_that_only_some_heads_or_sequences_mask(backend):
    """Results are correct if tiles are fully masked in only some heads or only some sequences."""
    tensors, key = random_qkv(2, 4, 2, 130, 260, 16), torch.arange(260)
    by_head = (key // 64 != torch.arange(4)[:, None, None]).repeat(1, 130, 1)
    by_head[1, :64] = False
    by_sequence = (key >= torch.tensor([128, 0]).view(2, 1, 1, 1)) & (key < 250)
    for mask in (masks.dense(by_head), masks.dense(by_sequence)):
        assert_like_eager(attention(mask, enable_gqa=True), tensors, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_weights_are_accurate(backend):
    """Weights from 1/2 down to exp(-79) have a relative error below 8e-7."""
    x, device = torch.arange(0.0, 80.0, 0.625), device_of(backend)
    query, key, value = (torch.zeros(1, 1, n, 8) for n in (len(x), 2, 2))
    query[..., 0], key[..., 1, 0], value[..., 1, :] = -x, 1.0, 1.0
    tensors = (t.to(device) for t in (query, key, value))
    out = F.scaled_dot_product_attention(*tensors, scale=1.0, backend=backend).cpu()
    expected = (-x.double()).exp() / (1.0 + (-x.double()).exp())
    assert ((out[0, 0, :, 0] - expected) / expected).abs().max() < 8e-7


@pytest.mark.parametrize("rows", [1, 70])
def test_bits_beyond_the_keys(rows):
    """Bits after the last key are ignored, and one row of bits may apply to all queries."""
    table = as_bits(torch.rand(2, 1, rows, 139, generator=drawn(0)) < 0.5)
    table[..., -1] |= -1 << 139 % 64
    mask, tensors = Mask(bits=(table,)), random_qkv(2, 2, 1, 70, 139, 16)
    assert_like_eager(attention(mask, enable_gqa=True), tensors, torch.float32, "cpp")


@pytest.mark.thinned(
    "other backends read intervals as a dense mask",
    pair=[p for case in PAIRS for p in case.values if "intervals" in p],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_masks(pair, backend):
    one, other = (MASKS[name](2, 2, 70, 139) for name in pair)
    tensors = random_qkv(2, 2, 1, 70, 139, 16)
    assert_like_eager(attention(one & other, enable_gqa=True), tensors, torch.float32, backend)


@pytest.mark.thinned("covered in float32", dtype=[torch.bfloat16], mask=["causal", "padding"])
@ONE_16_BIT_TYPE
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("mask", [None, "causal", "padding", "bias_with_inf"])
def test_softcap_and_dropout(mask, dtype, backend):
    mask = None if mask is None else MASKS[mask](2, 4, 50, 140)
    tensors = random_qkv(2, 4, 2, 50, 140, 32)
    for softcap, dropout_p in ((2.0, 0.0), (None, 0.3), (5.0, 0.5)):
        options = {"softcap": softcap, "dropout_p": dropout_p, "enable_gqa": True}
        assert_like_eager(attention(mask, **options), tensors, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scale_and_strides(dtype, backend):
    """Results are correct for transposed tensors, slices and a last dimension with stride 2."""
    generator, device = drawn(0), device_of(backend)
    shapes = {"query": (2, 37, 4, 48), "key": (2, 90, 2, 48), "value": (2, 90, 2, 48)}
    tensors = {n: torch.randn(s, generator=generator).transpose(1, 2) for n, s in shapes.items()}
    assert_like_eager(attention(scale=0.3, enable_gqa=True), tensors, dtype, backend)
    packed = torch.randn(2, 90, 3, 4, 48).to(device, dtype)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    spread = torch.randn(2, 4, 90, 96).to(device, dtype)[..., ::2]
    for strided in ((query, key, value), (spread, key, value)):
        contiguous = [t.contiguous() for t in strided]
        assert contiguous[0] is not strided[0]
        got = F.scaled_dot_product_attention(*strided, backend=backend)
        assert torch.equal(got, F.scaled_dot_product_attention(*contiguous, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_large_scores(dtype, backend):
    """Calls with large scores are within the contract; very negative finite biases do not mask."""
    tensors, device = random_qkv(1, 2, 2, 40, 150, 64), device_of(backend)
    tensors["query"] *= 40.0
    assert_like_eager(attention(masks.causal()), tensors, dtype, backend)
    bias = torch.full((40, 150), -1.0e4 if dtype == torch.float16 else -1.0e30, device=device)
    x = [t.to(device, dtype) for t in tensors.values()]
    out, lse = F.scaled_dot_product_attention(*x, bias, return_lse=True, backend=backend)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_low_scores(dtype, backend):
    """The padding of the last KV block has no weight, even if all scores are very negative."""
    tensors = random_qkv(1, 2, 2, 40, 150, 64)
    tensors["query"] = 5.0 * (tensors["query"].abs() + 1.0)
    tensors["key"] = -tensors["key"].abs() - 1.0
    assert_like_eager(attention(), tensors, dtype, backend)


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_empty_tensors(dtype, backend):
    for batch, heads, seqlen_q, seqlen_k in (
        (0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (1, 1, 0, 0),
    ):  # fmt: skip
        tensors = [
            torch.randn(batch, heads, n, 8).to(device_of(backend), dtype).requires_grad_()
            for n in (seqlen_q, seqlen_k, seqlen_k)
        ]
        out, lse = F.scaled_dot_product_attention(
            *tensors, is_causal=True, return_lse=True, backend=backend
        )
        assert out.shape == (batch, heads, seqlen_q, 8)
        assert out.eq(0).all() and lse.eq(float("-inf")).all()
        out.sum().backward()
        assert all(t.grad is None or t.grad.eq(0).all() for t in tensors)
        with torch.no_grad():  # runs decode kernels
            out = F.scaled_dot_product_attention(*tensors, backend=backend)
        assert out.shape == (batch, heads, seqlen_q, 8) and out.eq(0).all()


SEQLEN_Q, SEQLEN_K = 75, 210


def mask_and_visible_keys(kind):
    """Return a mask, and which keys any query attends to, as a bool tensor (batch, seqlen_k)."""
    lengths, position = torch.tensor([133, 40]), torch.arange(SEQLEN_K)
    real, offset = position < lengths[:, None], SEQLEN_K - SEQLEN_Q
    if kind == "padding":
        return masks.padding(lengths), real
    if kind == "padding_left":
        return masks.padding(lengths, side="left"), real.flip(1)
    if kind == "ragged":  # the first sequence has no queries
        return masks.padding(lengths, [0, 50]), real & torch.tensor([[False], [True]])
    if kind == "key_mask":
        visible = real & (position != 3)
        return masks.dense(visible[:, None, None]), visible
    if kind == "key_bias":
        return masks.bias(torch.where(real, 0.0, -torch.inf)[:, None, None]), real
    if kind == "dense":
        visible = real[:, None] & (torch.rand(SEQLEN_Q, SEQLEN_K) < 0.8)
        return masks.dense(visible[:, None]), visible.any(1)
    if kind == "window":
        return masks.sliding_window(10, 5), (position < SEQLEN_Q + 5).expand(2, -1)
    if kind == "empty_window":  # two bands that do not overlap
        band = masks.sliding_window(offset - 2, 0, align="bottom_right")
        return band & masks.causal(), torch.zeros_like(real)
    if kind == "prefix_window":  # keys from i + 2 on, so the last queries are fully masked
        band = masks.sliding_window(offset - 2, -1, align="bottom_right")
        visible = (position >= 2) & (position < torch.tensor([[30], [50]]))
        return masks.prefix_lm([30, 50]) & band, visible
    assert kind == "documents"
    query_ids = torch.ones(2, SEQLEN_Q, dtype=torch.int64)
    return masks.documents(query_ids, torch.where(real, 1, 9)), real


@pytest.mark.thinned(
    "covered by NaN",
    poison=[float("inf")],
    kind=["padding_left", "window", "empty_window", "prefix_window", "documents", "key_mask"],
)
@pytest.mark.thinned(
    "infinities are covered in float32", dtype=[torch.bfloat16], poison=[float("inf")]
)
@pytest.mark.thinned(
    "other masks cover each field",
    dtype=[torch.bfloat16],
    kind=["padding", "padding_left", "key_mask", "window", "empty_window", "prefix_window"],
)
@ONE_16_BIT_TYPE
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize(
    "kind",
    [
        "padding", "padding_left", "ragged", "key_mask", "key_bias", "dense", "window", "documents",
        "empty_window", "prefix_window",
    ],
)  # fmt: skip
def test_invisible_keys_do_not_matter(kind, poison, dtype, backend, monkeypatch):
    """Results are bitwise identical if fully masked keys and values are NaN or Inf instead of 0."""
    # By default, CUDA kernels sum the gradients of 16-bit queries in no fixed order.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    mask, visible = mask_and_visible_keys(kind)
    mask = mask.to(device_of(backend))
    results = []
    for fill in (0.0, poison):
        tensors = random_qkv(2, 2, 1, SEQLEN_Q, SEQLEN_K, 24)
        for name in ("key", "value"):
            tensors[name][~visible[:, None]] = fill
        leaves = leaves_of(tensors.values(), dtype, backend)
        out, lse = F.scaled_dot_product_attention(
            *leaves, mask, enable_gqa=True, return_lse=True, backend=backend, softcap=3.0
        )
        (out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
        results.append([out, lse, *(leaf.grad for leaf in leaves)])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
        assert not torch.isnan(poisoned).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["key", "value"])
def test_nonfinite_keys_reach_only_queries_that_attend_to_them(where, poison, dtype):
    """In the CPU kernels, NaN or infinity reaches only queries that attend to it.

    A Triton kernel multiplies all queries and keys of a tile, so NaN may reach all of its queries.
    """
    results = []
    for fill in (0.0, poison):
        tensors = random_qkv(2, 8, 8, 300, 300, 24)  # each thread computes complete heads
        tensors[where][:, :, 40] = fill
        leaves = leaves_of(tensors.values(), dtype, "cpp")
        out = F.scaled_dot_product_attention(*leaves, masks.causal(), backend="cpp")
        grad_query, _, _ = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append((out, grad_query))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean[:, :, :40], poisoned[:, :, :40])
    if where == "value" or poison != poison:  # an infinite key may have a score of -inf
        assert not results[1][0][:, :, 40:].isfinite().all(-1).any()


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_padded_queries_do_not_matter(dtype, backend):
    """Padded queries have output 0 and gradient 0, and their NaN values reach no other result."""
    tensors = random_qkv(1, 2, 2, 70, 90, 16)
    tensors["query"][:, :, 50:] = float("nan")
    leaves = leaves_of(tensors.values(), dtype, backend)
    out = F.scaled_dot_product_attention(*leaves, masks.padding([90], [50]), backend=backend)
    grad = torch.ones_like(out)
    grad[:, :, 50:] = float("nan")
    out.backward(grad)
    assert out[:, :, 50:].eq(0).all() and leaves[0].grad[:, :, 50:].eq(0).all()
    assert all(torch.isfinite(t).all() for t in (out, *(leaf.grad for leaf in leaves)))


HIDDEN_ROWS = {  # masks in which queries 20 to 39 have no visible key
    "bool": torch.arange(70)[:, None].expand(70, 90) // 20 != 1,
    "float": torch.zeros(70, 1).index_fill(0, torch.arange(20, 40), -torch.inf).expand(70, 90),
    "documents": masks.documents(torch.arange(70) // 20, torch.arange(90) // 30 * 2),
    "intervals": masks.from_mask_mod(lambda b, h, i, j: (i < 20) | (i >= 40)),
}


@pytest.mark.parametrize("kind", HIDDEN_ROWS)
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows_without_visible_keys(kind, dtype, backend):
    """Queries without visible keys have output 0, gradient 0 and lse -inf."""
    leaves = leaves_of(random_qkv(1, 2, 2, 70, 90, 16).values(), dtype, backend)
    mask = HIDDEN_ROWS[kind]
    mask = mask.to(leaves[0].device) if isinstance(mask, torch.Tensor) else mask
    out, lse = F.scaled_dot_product_attention(*leaves, mask, return_lse=True, backend=backend)
    (out.sum() + lse.exp().sum()).backward()
    hidden = slice(20, 40)
    assert out[:, :, hidden].eq(0).all() and lse[:, :, hidden].eq(-torch.inf).all()
    assert leaves[0].grad[:, :, hidden].eq(0).all()
    assert lse[:, :, :20].isfinite().all() and leaves[0].grad[:, :, :20].any(-1).all()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_with_large_strides(backend):
    """Masks with element offsets of 2**31 are read correctly."""
    if device_of(backend).type != "cpu":
        pytest.skip("reason: a GPU allocates the 2 GiB, of which a CPU touches three pages")
    storage = torch.empty(2**31 + 512, dtype=torch.bool)
    mask = storage.as_strided((3, 1, 8, 8), (2**30, 64, 8, 1))
    mask.copy_(torch.rand(3, 1, 8, 8, generator=drawn(0)) < 0.7)
    tensors = random_qkv(3, 2, 2, 8, 8, 16)
    assert_like_eager(attention(masks.dense(mask)), tensors, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_visible_nan_is_not_hidden(backend):
    """NaN in a key reaches all queries that attend to it, and no others."""
    tensors = random_qkv(1, 1, 1, 40, 200, 16)
    tensors["key"][0, 0, 7, 3] = float("nan")
    query, key, value = (t.to(device_of(backend)) for t in tensors.values())
    assert torch.isnan(F.scaled_dot_product_attention(query, key, value, backend=backend)).all()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, backend=backend)
    assert torch.isfinite(out[:, :, :7]).all() and torch.isnan(out[:, :, 7:]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_written_whole(backend):
    """Kernels write every element of their outputs, which torch.empty fills with NaN."""
    mask = MASKS["ragged"](2, 2, 45, 150) & MASKS["documents"](2, 2, 45, 150)
    tensors = random_qkv(2, 2, 1, 45, 150, 40)
    tensors["bias"] = torch.randn(2, 1, 45, 150)
    with deterministic():
        assert torch.empty(1).isnan()
        assert_like_eager(attention(mask, enable_gqa=True), tensors, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_the_backward_are_not_scaled_by_the_rounding_of_lse(backend):
    for seqlen_k in (3100, 4753, 4935):  # lse has rounding errors of up to 4.8e-7
        tensors = random_qkv(1, 1, 1, 1, seqlen_k, 4)
        tensors["query"].zero_()
        assert_like_eager(attention(), tensors, torch.float32, backend)
