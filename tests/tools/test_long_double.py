"""The reference for float64 results, compared with 50-digit mpmath results on a small problem."""

import mpmath
import pytest
import torch
from helpers import Reference, attention, random_qkv, run_with_gradients
from long_double import PRECISION, LongDouble

from fused_attn import masks


def by_mpmath(query, key, value, scale, weights, weights_lse):
    """Return flat lists of out, lse and the gradient of query, for one head with a causal mask."""
    seqlen, head_dim = query.shape
    columns = range(head_dim)
    numbers = [[mpmath.mpf(x) for x in row] for t in (query, key, value) for row in t.tolist()]
    q, k, v = numbers[:seqlen], numbers[seqlen : 2 * seqlen], numbers[2 * seqlen :]
    out, lse, grad_query = [], [], []
    for i in range(seqlen):
        scores = [scale * mpmath.fdot(q[i], k[j]) for j in range(i + 1)]
        terms = [mpmath.exp(s) for s in scores]
        total = mpmath.fsum(terms)
        p = [t / total for t in terms]
        row = [mpmath.fsum(p[j] * v[j][c] for j in range(i + 1)) for c in columns]
        grad = [mpmath.mpf(x) for x in weights[i].tolist()]
        delta = mpmath.fdot(grad, row)
        ds = [
            p[j] * (mpmath.fdot(grad, v[j]) - delta + mpmath.mpf(float(weights_lse[i])))
            for j in range(i + 1)
        ]
        out += row
        lse.append(mpmath.log(total))
        grad_query += [scale * mpmath.fsum(ds[j] * k[j][c] for j in range(i + 1)) for c in columns]
    return {"out0": out, "out1": lse, "grad_query": grad_query}


def test_results_equal_those_of_mpmath():
    seqlen, head_dim = 4, 5
    tensors = random_qkv(1, 1, 1, seqlen, seqlen, head_dim)
    function = attention(masks.causal(), scale=0.5)("eager")
    with LongDouble() as mode:
        truth = run_with_gradients(function, tensors, torch.float64)
    generator = torch.Generator().manual_seed(7)
    shapes = (1, 1, seqlen, head_dim), (1, 1, seqlen)
    weights = [torch.randn(s, generator=generator).bfloat16().double()[0, 0] for s in shapes]
    with mpmath.workdps(50):
        exact = by_mpmath(*(t[0, 0].double() for t in tensors.values()), 0.5, *weights)
        for name, numbers in exact.items():
            parts = truth[name].flatten().tolist(), mode.residual(truth[name]).flatten().tolist()
            for number, value, residual in zip(numbers, *parts, strict=True):
                got = mpmath.mpf(value) + mpmath.mpf(residual)
                assert abs(got - number) <= 64 * mpmath.mpf(2) ** -PRECISION * 4, name


def test_results_are_more_precise_than_float64():
    assert PRECISION >= 64
    function = attention()("eager")
    reference = Reference(
        lambda dtype: run_with_gradients(function, random_qkv(1, 2, 2, 9, 17, 16), dtype),
        torch.float64,
    )
    for name, residual in reference.residuals.items():
        eps = torch.finfo(torch.float64).eps
        assert 0.0 < residual.abs().max() <= eps * reference.truth[name].abs().max(), name
        assert reference.eager[name].ne(reference.truth[name]).any(), name


def test_an_operation_without_a_rule_is_an_error():
    with LongDouble(), pytest.raises(NotImplementedError, match=r"no rule for aten\.erfinv"):
        torch.erfinv(torch.zeros(2, dtype=torch.float64))


def test_views_share_their_residuals():
    x = torch.ones(2, 3, dtype=torch.float64)
    with LongDouble() as mode:
        third = x / 3
        third[0].add_(third[1])
        assert torch.equal(mode.residual(third[0]), 2 * mode.residual(third[1]))
        assert mode.residual(third.mT.reshape(-1)).ne(0).all()
