"""Hostile arguments give a correct result or an exception, never a crash (docs/security.md)."""

from __future__ import annotations

import subprocess
import sys
import threading

import hostile_calls
import pytest
import torch
from hostile_calls import ints, resized

import fused_attn.functional as F
from fused_attn.backends import cuda
from fused_attn.backends.cpp import _cpu
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.spec import NO_MASK, MaskSpec


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "part"), [("cpp", 0), ("cpp", 1), ("cuda", 0)])
def test_hostile_calls(backend, part):
    """At least 1000 hostile calls neither crash their process nor return a wrong result."""
    if backend == "cuda" and not cuda.emulated():
        pytest.skip("reason: CUDA_EMULATED is not set")
    groups = [*hostile_calls.public(), *hostile_calls.bindings()][part::2]
    if backend == "cuda":
        groups = [group for group in hostile_calls.bindings() if group.startswith("_cuda")]
    command = [sys.executable, "-X", "faulthandler", hostile_calls.__file__, *groups]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]} ended the process: {done.stderr[-3000:]}"
    assert [line for line in lines if "WRONG: " in line] == []
    assert int(lines[-1].removeprefix("calls ")) >= 1000


def direct(spec: MaskSpec = NO_MASK, query: torch.Tensor | None = None) -> torch.Tensor:
    query = torch.randn(2, 2, 5, 16) if query is None else query
    return _cpu.attention_fwd(
        AttentionCall(query, query, query, spec, AttentionOptions(0.2)), False, False, 1
    )[0]


@pytest.mark.parametrize(
    ("field", "table", "message"),
    [
        ("bias", torch.zeros(2, 2, 5, 6), "bias must have shape"),
        ("dense", torch.ones(2, 3, 5, 5) > 0, "dense must have shape"),
        ("key_mask", torch.ones(2, 1, 5, 5) > 0, "key_mask must have shape"),
        ("bounds", torch.zeros(1, 8, dtype=torch.int64), "bounds must have shape"),
        ("bounds", torch.full((2, 8), 1 << 62), "bounds must be in"),
        ("intervals", torch.zeros(2, 2, 4, 2, dtype=torch.int64), "intervals must have shape"),
        ("bits", torch.zeros(2, 2, 5, 2, dtype=torch.int64), "bits must have shape"),
        ("slopes", torch.zeros(2, 1), "slopes must have shape"),
        ("query_documents", torch.zeros(2, 5, dtype=torch.int64), "must be set together"),
        ("cu_seqlens_q", ints(0, 5), "packed sequences must have one batch"),
        ("bounds", torch.zeros(2, 8, dtype=torch.int32), "bounds must be int64"),
        ("query_documents", torch.zeros(2, 5).int(), "query_documents must be int64"),
        ("slopes", torch.zeros(2, 2, dtype=torch.float64), "slopes must be float32"),
        ("intervals", torch.zeros(1, 1, 5, 2), "intervals must be int64"),
        ("bits", torch.zeros(1, 1, 5, 1, dtype=torch.uint8), "bits must be int64"),
    ],
)
def test_rules_of_tables(field, table, message):
    """The C++ module refuses mask tables with which a kernel would read out of bounds."""
    with pytest.raises(ValueError, match=message):
        direct(MaskSpec(**{field: table}))


@pytest.mark.parametrize("ends", [(0, 9, 5), (0, -1, 5), (1, 2, 5), (0, 2, 4), (0, 5, 1 << 40)])
def test_values_of_cu_seqlens(ends):
    spec = MaskSpec(
        cu_seqlens_q=ints(*ends), cu_seqlens_k=ints(0, 2, 5), max_seqlen_q=3, max_seqlen_k=3
    )
    with pytest.raises(ValueError, match="cu_seqlens_q must be in"):
        direct(spec, torch.randn(1, 2, 5, 16))


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (0, 5), (8, 0), (1280, 5)])
def test_resized_storage(size, offset):
    for call in (direct, lambda query: F.layer_norm(query, 16)):
        with pytest.raises(ValueError, match="must have storage"):
            call(query=resized(torch.randn(2, 2, 5, 16), size, offset))


def test_tensors_that_another_thread_replaces():
    """A call keeps a tensor's storage alive if another thread replaces it with `.data =`."""
    x, stop = torch.randn(4, 4, 512, 32), threading.Event()
    want = F.scaled_dot_product_attention(x, x, x)

    def replace() -> None:
        while not stop.is_set():
            x.data = x.data.clone()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert all(torch.equal(F.scaled_dot_product_attention(x, x, x), want) for _ in range(20))
    finally:
        stop.set()
        thread.join()


def test_packed_masks_are_no_decoding_step():
    """A decoding step whose mask describes packed sequences is refused before it writes a cache."""
    cache, new = torch.zeros(2, 1, 5, 4), torch.ones(2, 1, 1, 4)
    mask = MaskSpec(
        cu_seqlens_q=ints(0, 0, 1), cu_seqlens_k=ints(0, 0, 5), max_seqlen_q=1, max_seqlen_k=5
    )
    options = AttentionOptions(0.5, decoding=True)
    step = AttentionCall(torch.zeros(1, 1, 1, 4), cache[:1], cache[:1], mask, options)
    assert _cpu.attention_decode(step, None, 5, (4, 4), new, new, False, 1) is None
    assert not cache.any()
