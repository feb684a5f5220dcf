"""`fused-attn bench`: the timed calls, and the accuracy check that precedes the timing."""

import pytest
import torch

from fused_attn.tools import bench, cases, contract
from fused_attn.tools.cases import MASKS, Shape, make_mask
from fused_attn.tools.contract import GRAD_FACTOR, OUTPUT_FACTOR


def test_shapes():
    for text in ("2,8,512,256,64", "2,8/2,512,256,64"):
        assert str(Shape.parse(text)) == text
    shape = Shape.parse("2,8/2,512,256,64")
    operands = shape.operands(torch.bfloat16, torch.device("cpu"))
    assert [tuple(t.shape) for t in operands.values()] == [
        (2, 8, 512, 64), (2, 2, 256, 64), (2, 2, 256, 64),
    ]  # fmt: skip
    assert make_mask("none", shape) is None


@pytest.mark.parametrize(
    "mask",
    [
        "none",
        *MASKS,
        "window:5",
        "documents:9",
        "ragged_documents:9",
        "blocks:9",
        "ragged_blocks:9",
        "causal+padding+alibi",
        "window:5+documents:9",
    ],
)
def test_bench_times_sdpa_with_the_same_mask(mask):
    for backward in (False, True):
        result = bench.measure(
            Shape.parse("3,4/2,33,47,16"), mask, "float32", backward=backward, rounds=1
        )
        assert result.ok and result.speedup is not None, result
    one_block = ("documents", "ragged_documents", "blocks", "ragged_blocks")
    everything = mask in ("none", "alibi", *one_block)
    assert result.visible == 1.0 if everything else 0.0 < result.visible < 1.0


def test_bench_checks_parts_of_large_problems(monkeypatch):
    monkeypatch.setattr(cases, "MAX_SCORES", 33 * 47 * 4)
    shape = Shape.parse("3,4/2,33,47,16")
    part = shape.reduced().part_of(shape)
    assert part(torch.empty(3, 4, 33, 47)).shape == (2, 2, 33, 47)
    assert part(torch.empty(3, 2, 47, 16)).shape == (2, 1, 47, 16)
    assert part(torch.empty(1, 1, 33, 47)).shape == (1, 1, 33, 47)
    for bias in (False, True):
        result = bench.measure(
            shape, "padding+alibi", "float32", backward=True, bias=bias, dropout_p=0.1, rounds=1
        )
        assert result.ok and result.speedup is not None, result


@pytest.mark.parametrize("mask", ["none", "causal", "window:5+alibi", "documents:9"])
@pytest.mark.parametrize("largest", [cases.MAX_SCORES, 33 * 47 * 4])
def test_bench_of_packed_sequences(mask, largest, monkeypatch):
    monkeypatch.setattr(cases, "MAX_SCORES", largest)
    for backward, bias in ((False, False), (True, False), (True, True)):
        result = bench.measure(
            Shape.parse("3,4/2,33,47,16"), mask, "float32", backward=backward, bias=bias,
            packed=True, rounds=1,
        )  # fmt: skip
        assert result.ok and result.speedup is not None, result
        assert result.visible < 0.5, "padded queries and keys must not count as visible"


@pytest.mark.parametrize(("share", "ok"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("gradient", [False, True])
def test_check_applies_the_limit(share, ok, gradient):
    """Errors of 0.9 times the contract's limit pass the check; errors of 1.1 times it fail."""
    x = torch.linspace(-2.0, 2.0, 64)
    eps, eager_error = torch.finfo(torch.float32).eps, 1e-3

    def off(x, out_error, grad_error):
        out = x + out_error
        out.register_hook(lambda grad: grad + grad_error)
        return out

    def eager(x):
        error = 0.0 if x.dtype == torch.float64 else eager_error
        return off(x, error, error)

    def wrong(x):
        if gradient:  # the largest element of the random output gradient is above 1
            return off(x, 0.0, share * (GRAD_FACTOR * eager_error + eps))
        return off(x, share * (OUTPUT_FACTOR * eager_error + eps * 2.0), 0.0)

    verdict = contract.check(wrong, eager, {"x": x}, torch.float32, True)
    assert [finding.name for finding in verdict.findings] == ["out", "grad x"]
    assert verdict.ok == ok
    assert verdict.findings[not gradient].ok
    assert verdict.agrees(x + 9 * eager_error) and not verdict.agrees(x + 11 * eager_error)
