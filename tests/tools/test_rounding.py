"""Random rounding, which estimates the expected error of eager attention."""

import pytest
import torch
from helpers import attention, random_qkv, run_with_gradients

from fused_attn.tools import contract
from fused_attn.tools.rounding import FIRST_RUNS, RUNS, WIDTH, Decisions, Expected, RandomRounding

ROUNDOFF = 2.0**-24


def samples(function, *tensors, runs=400):
    results = []
    for seed in range(runs):
        with RandomRounding(seed):
            results.append(function(*tensors).double())
    return torch.stack(results)


def test_error_of_a_product_follows_the_formula():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 64, generator=generator), torch.randn(64, 2, generator=generator)
    exact = a.double() @ b.double()
    terms = (a.double().square() @ b.double().square()).sqrt()
    size = exact.abs() + 64**0.5 / 3 * (exact.square() + terms.square()).sqrt()
    error = (samples(torch.mm, a, b) - exact).square().mean(0).sqrt()
    assert (error / (WIDTH * ROUNDOFF * size)).sub(1.0).abs().le(0.15).all()


def test_error_of_other_arithmetic_is_a_few_roundings():
    x = torch.linspace(0.1, 3.0, 100)
    error = (samples(torch.exp, x) - x.double().exp()).abs().amax(0)
    assert error.le(6 * ROUNDOFF * x.double().exp()).all() and error.gt(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_results_are_not_rounded(dtype):
    x = torch.tensor([1.0, -0.5, 3.0, 0.0, float("inf"), float("nan")]).to(dtype)
    for function in (lambda x: x * 2, lambda x: x + 1, torch.relu, lambda x: x.softmax(0)[4:]):
        with RandomRounding(0):
            result = function(x)
        assert result.dtype == dtype
        assert torch.equal(result.nan_to_num(7.0), function(x).nan_to_num(7.0))


def test_bfloat16_products_are_rounded_once():
    """The error of a bfloat16 product is at most 0.51 ulp."""
    a = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = a.double() @ a.double().mT
    results = samples(lambda x: x @ x.mT, a)
    ulp = torch.finfo(torch.bfloat16).eps * exact.abs()
    assert (results - exact).abs().le(0.51 * ulp + 1e-5).all()


def test_composite_operations_are_rounded():
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    for function in (torch.softmax, torch.log_softmax):
        results = samples(lambda x, f=function: f(x, -1), x, runs=3)
        assert not torch.equal(results[0], results[1])
    results = samples(lambda x: torch.layer_norm(x, (200,)), x, runs=3)
    assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0].float(), torch.layer_norm(x, (200,)))


def test_recorded_decisions_do_not_change():
    """With recorded decisions, rounding noise changes no index, comparison or ReLU."""
    x = torch.linspace(-1.0, 1.0, 4001)

    def decide(x):
        steps = (x.exp().log() * 8.0).to(torch.int64)
        below = x.sin().asin() < 0.5
        return steps, below, torch.relu(x.exp().log()) * 1e9

    decisions = Decisions()
    with RandomRounding(None, decisions):
        first = decide(x)
    assert all(torch.equal(a, b) for a, b in zip(first, decide(x), strict=True))
    decisions.replay()
    with RandomRounding(0, decisions):
        second = decide(x)
    with RandomRounding(0):
        third = decide(x)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert torch.equal(first[2] == 0.0, second[2] == 0.0) and not torch.equal(first[2], second[2])
    assert not torch.equal(first[0], third[0])


def test_constants_are_not_rounded():
    with RandomRounding(0):
        filled = torch.full((100,), -1e30)
        assert filled.eq(filled[0]).all() and torch.arange(5.0).tolist() == [0, 1, 2, 3, 4]


def test_operations_without_float64_are_not_rounded():
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    lstm, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with RandomRounding(0):
        assert (nested * 2.5).is_nested
        torch.testing.assert_close(lstm(x)[0], lstm(x)[0])


def test_views_random_numbers_and_in_place_results_are_not_rounded():
    x = torch.randn(4, 5)
    with RandomRounding(0):
        assert x.mT.data_ptr() == x.data_ptr() and x[1:].data_ptr() == x[1].data_ptr()
        y = x.clone()
        y.mul_(3.0)
        torch.manual_seed(0)
        drawn = torch.rand(5)
    torch.manual_seed(0)
    assert torch.equal(y, x * 3.0) and torch.equal(drawn, torch.rand(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_expected_error_of_eager_attention(dtype):
    """The expected error is between one and ten times the error of eager attention.

    In float64, the truth has the same error as eager, so only an upper limit is checked.
    """
    tensors = {n: t.bfloat16().float() for n, t in random_qkv(2, 4, 2, 33, 70, 64).items()}
    function = attention(None, enable_gqa=True)("eager")
    truth = run_with_gradients(function, tensors, torch.float64)
    eager = run_with_gradients(function, tensors, dtype)
    runs = []

    def run(dtype):
        runs.append(dtype)
        return run_with_gradients(function, tensors, dtype)

    expected = Expected(run, truth, dtype, most=32)
    for name, reference in truth.items():
        if dtype != torch.float64:
            error = contract.errors(eager[name], reference)[0]
            assert error <= expected.error(name) <= 10 * error, name
        scale = contract.largest(reference)
        assert 0.0 < expected.error(name) < 300 * torch.finfo(dtype).eps * scale, name
    assert len(runs) == 33 * (2 if dtype == torch.bfloat16 else 1)  # one more run records decisions


def test_runs_stop_at_a_large_enough_error_or_far_below_it():
    truth = {"x": torch.zeros(1, dtype=torch.float64)}

    def expected():
        return Expected(lambda dtype: {"x": torch.ones(1, dtype=dtype)}, truth, torch.float32)

    for needed, runs in ((0.5, 1), (2.0, RUNS), (3.5, FIRST_RUNS), (float("inf"), RUNS)):
        error = expected()
        assert error.error("x", needed) == 1.0
        assert error.runs == runs
        assert error.error("x", 0.9) == 1.0 and error.runs == runs


def test_the_expected_error_is_computed_only_if_needed():
    def expected(needed):
        raise AssertionError("must not be called for an error within the limit")

    truth = torch.ones(3, dtype=torch.float64)
    eager = truth.float() + 1e-3
    off = truth.float() + 1.9e-3
    assert contract.judge("out", off, truth, eager, gradient=False, expected=expected).ok
    off = truth.float() + 2.1e-3
    for error, ok in ((1.0e-3, False), (1.2e-3, True)):
        finding = contract.judge(
            "out", off, truth, eager, gradient=False, expected=lambda needed, error=error: error
        )
        assert finding.ok is ok
    assert "expected of eager" in str(finding)
