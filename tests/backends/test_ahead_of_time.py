"""Triton kernels compile for four GPU architectures, within limits on spills and shared memory."""

import itertools
import os
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_attn import masks
from fused_attn.masks import Mask

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("reason: interpreted kernels are not compiled", allow_module_level=True)

from triton_compiler import ARCHS, SHARED_LIMITS, Compiled, compiling_for

from fused_attn.backends import get_backend
from fused_attn.backends.triton.tuning import WIDTHS
from fused_attn.call.attention import AttentionBackward, AttentionCall, AttentionOptions
from fused_attn.call.norm import NormBackward, NormCall, NormOptions
from fused_attn.call.options import with_options
from fused_attn.masks.spec import spec_of_mask

BACKEND = get_backend("triton")

# Matrix instructions for 16-bit types: of a warp group (for 64 rows or more) and of a warp.
GROUP_ROWS = 64
GROUP_PRODUCTS = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
PRODUCTS = {"sm_80": "mma.sync", "sm_90": "mma.sync", "sm_100": "mma.sync", "gfx942": "mfma"}
BATCH, HEADS, LENGTH = 2, 8, 256
# Allowed bytes per thread: the fastest configs spill a few registers with some masks.
MEASURED_SPILLS = 128


def mask_classes(dtype: torch.dtype) -> dict[str, Mask]:
    """Return one mask for each mask code path of the kernels."""
    ids = torch.arange(LENGTH) // 64
    return {
        "causal": masks.causal(),  # calls without a mask use the same kernel
        "padding": masks.padding([200, 100]) & masks.prefix_lm([20, 0]),
        "alibi": masks.causal() & masks.alibi(torch.ones(HEADS)),
        "documents": masks.documents(ids) & masks.causal(),
        "key_mask": masks.dense(torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)),
        "dense": masks.dense(torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
        "bias": masks.causal() & masks.bias(torch.zeros(BATCH, HEADS, LENGTH, LENGTH, dtype=dtype)),
    }


def attention(
    arch: str, dtype: torch.dtype, head_dim: int, mask: Mask | None,
    dropout_p: float = 0.0, softcap: float = 0.0, packed: bool = False, seqlen_q: int = LENGTH,
    head_dim_v: int | None = None, group: int = 1, shard: bool = False, partial: bool = False,
    nan_pass: bool = False,
) -> list[Compiled]:  # fmt: skip
    """Compile the forward and backward kernels, or the decode kernels if seqlen_q < LENGTH."""
    query = torch.empty(BATCH, HEADS, seqlen_q, head_dim, dtype=dtype)
    key = torch.empty(BATCH, HEADS // group, LENGTH, head_dim, dtype=dtype)
    value = torch.empty(BATCH, HEADS // group, LENGTH, head_dim_v or head_dim, dtype=dtype)
    spec = spec_of_mask(mask, BATCH, HEADS, seqlen_q, LENGTH, query.device)
    if packed:
        cu_seqlens = torch.tensor([0, 100, LENGTH])
        query, key, value = query[:1], key[:1], value[:1]
        spec = replace(
            spec_of_mask(masks.padding([100, 156]), BATCH, HEADS, LENGTH, LENGTH, query.device),
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=LENGTH, max_seqlen_k=LENGTH,
        )  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64)
    offsets = torch.zeros(BATCH, 3, dtype=torch.int64) if shard else None
    options = AttentionOptions(0.1, softcap, dropout_p, seed, offsets, partial)
    call = AttentionCall(query, key, value, spec, options)
    decodes = seqlen_q < LENGTH
    with compiling_for(arch, nan_pass) as kernels:
        BACKEND.attention_fwd(call, not decodes, True)
        if not decodes:
            outputs = with_options(call, partial=False).outputs(True)
            out, lse, *_ = outputs
            BACKEND.attention_bwd(AttentionBackward(call, outputs, out, lse, spec.bias is not None))
    return kernels


def check(kernels: list[Compiled], arch: str, dtype: torch.dtype = torch.float32) -> None:
    """Check spills and shared memory, and that 16-bit attention uses matrix instructions."""
    assert kernels
    allowed = MEASURED_SPILLS if (arch, dtype.itemsize) == ("sm_90", 2) else 0
    for kernel in kernels:
        assert kernel.spilled <= allowed, f"{kernel.name} spills {kernel.spilled} bytes a thread"
        assert kernel.shared <= SHARED_LIMITS[arch], f"{kernel.name}: {kernel.shared} bytes"
        if dtype.itemsize == 2 and kernel.name.startswith("attention_"):
            products = GROUP_PRODUCTS if kernel.rows >= GROUP_ROWS else PRODUCTS
            wanted = products.get(arch, PRODUCTS[arch])
            assert wanted in kernel.text, f"{kernel.name} has no {wanted}"


def thorough(cases: Iterable[tuple], core: Container[tuple]) -> list[Any]:
    """Mark cases outside `core` as thorough. Compiling all cases takes half an hour."""
    return [
        pytest.param(*case, marks=[] if case in core else [pytest.mark.thorough]) for case in cases
    ]


NAMES = tuple(mask_classes(torch.float32))
GRID = list(itertools.product(ARCHS, (torch.bfloat16, torch.float16, torch.float32), WIDTHS, NAMES))
# Two architectures, all dtypes, and the two mask code paths that need the most registers.
CORE = {
    ("sm_90", torch.bfloat16, 128, "causal"),
    ("sm_90", torch.float32, 64, "causal"),
    ("gfx942", torch.float16, 128, "bias"),
}


@pytest.mark.parametrize(("arch", "dtype", "head_dim", "name"), thorough(GRID, CORE), ids=str)
def test_attention(arch, dtype, head_dim, name):
    """Attention kernels compile for each architecture, dtype, head_dim and mask code path."""
    check(attention(arch, dtype, head_dim, mask_classes(dtype)[name]), arch, dtype)


OPTIONS: list[dict[str, Any]] = [
    {"dropout_p": 0.1},
    {"softcap": 2.0},
    {"packed": True},
    {"seqlen_q": 3},
    {"head_dim": 80, "head_dim_v": 16},
    {"group": 4},
    {"group": 4, "head_dim": 128},
    {"group": 4, "seqlen_q": 3},
    {"dropout_p": 0.1, "shard": True},
    {"partial": True, "head_dim": 128},
    {"partial": True, "seqlen_q": 3},
]


@pytest.mark.parametrize(
    ("options", "arch"),
    thorough(itertools.product(OPTIONS, ARCHS), [(OPTIONS[2], "sm_90"), (OPTIONS[7], "gfx942")]),
    ids=str,
)
def test_options(options, arch):
    options = {"head_dim": 64, **options}
    mask = None if "packed" in options else masks.causal(align="bottom_right")
    check(attention(arch, torch.bfloat16, mask=mask, **options), arch, torch.bfloat16)


@pytest.mark.parametrize("arch", thorough(zip(ARCHS), [("sm_100",)]))
def test_nan_pass(arch):
    """The pass that recomputes tiles with NaN compiles within the limit of shared memory."""
    mask = mask_classes(torch.bfloat16)["key_mask"]
    for kernel in attention(arch, torch.bfloat16, 64, mask, nan_pass=True):
        assert kernel.shared <= SHARED_LIMITS[arch], f"{kernel.name}: {kernel.shared} bytes"


def test_lengths_do_not_recompile_kernels():
    """Calls of different lengths, for example with a growing KV cache, share compiled kernels."""
    hashes: dict[str, set[str]] = {}
    decoding = [(1, 1), (1, 47), (1, 48), (1, 2000), (2, 64), (1, 7)]
    for seqlen_q, seqlen_k in (*decoding, (50, 7), (64, 80)):
        query = torch.empty(BATCH, HEADS, seqlen_q, 64, dtype=torch.bfloat16)
        key = torch.empty(BATCH, HEADS, seqlen_k, 64, dtype=torch.bfloat16)
        mask = masks.causal(align="bottom_right") & masks.padding([seqlen_k] * BATCH)
        spec = spec_of_mask(mask, BATCH, HEADS, seqlen_q, seqlen_k, query.device)
        call = AttentionCall(query, key, key, spec, AttentionOptions(0.1))
        with compiling_for("sm_90") as kernels:
            BACKEND.attention_fwd(call, False, True)
        for kernel in kernels:
            hashes.setdefault(kernel.name, set()).add(kernel.hash)
    assert set(hashes) == {"attention_decode_kernel", "merge_parts_kernel", "attention_fwd_kernel"}
    assert all(len(found) == 1 for found in hashes.values()), hashes


@pytest.mark.parametrize(
    ("dtype", "name", "arch"),
    thorough(
        itertools.product((torch.float32, torch.bfloat16), ("causal", "bias"), ARCHS),
        [(torch.bfloat16, "bias", "sm_90")],
    ),
)
def test_weights(dtype, name, arch):
    query = torch.empty(BATCH, HEADS, LENGTH, 128, dtype=dtype)
    lse, seed = torch.empty(BATCH, HEADS, LENGTH), torch.zeros((), dtype=torch.int64)
    spec = spec_of_mask(mask_classes(dtype)[name], BATCH, HEADS, LENGTH, LENGTH, query.device)
    call = AttentionCall(query, query, query, spec, AttentionOptions(0.1, 0.0, 0.1, seed))
    with compiling_for(arch) as kernels:
        for average in (False, True):
            BACKEND.attention_weights(call, lse, lse, average)
    check(kernels, arch, dtype)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_is_used_only_if_torch_allows_it(precision):
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        kernels = attention("sm_80", torch.float32, 16, None)
    finally:
        matmul.fp32_precision = before
    assert any("tf32" in kernel.text for kernel in kernels) == (precision == "tf32")


@pytest.mark.parametrize(
    ("dtype", "columns", "arch"),
    thorough(
        itertools.product((torch.float32, torch.bfloat16), (64, 768, 4096, 65536), ARCHS),
        [(torch.bfloat16, 768, "sm_90"), (torch.bfloat16, 65536, "gfx942")],
    ),
)
def test_norm(dtype, columns, arch):
    rows, weight = torch.empty(64, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
    seed = torch.zeros((), dtype=torch.int64)
    view = torch.empty(8, 9, columns, dtype=dtype)[:, 1:]
    with compiling_for(arch) as kernels:
        call = NormCall(rows, rows, weight, weight, NormOptions(1e-5, False, 0.1, seed))
        sharded = with_options(call, dropout_offsets=torch.zeros(4, dtype=torch.int64))
        for given in (call, sharded, replace(call, input=view, residual=view)):
            _, _, mean, rstd = BACKEND.norm_fwd(given, True, True)
            of_total, grad = replace(given, residual=None), given.input
            BACKEND.norm_bwd(NormBackward(of_total, mean, rstd, grad, grad, True, True))
    check(kernels, arch)
    wide = "_load_dwordx4" if arch == "gfx942" else ".v4."
    assert all(wide in kernel.text for kernel in kernels)
