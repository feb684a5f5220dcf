"""A seed gives the same dropout mask on every backend, instruction set and number of threads."""

from __future__ import annotations

import numpy
import pytest
import torch
from helpers import BACKENDS, device_of, use_threads

from fused_attn import functional as F
from fused_attn import masks, varlen_attention
from fused_attn.backends import cpp
from fused_attn.base import philox

SHAPE = (2, 3, 45, 201)  # batch, heads, seqlen_q, seqlen_k


def kept_by_attention(backend, dropout_p, dtype=torch.float32, mask=None, seed=None):
    """Return a bool tensor that is True for the weights that dropout keeps.

    The output equals the weights, because value is the identity.
    """
    batch, heads, seqlen_q, seqlen_k = SHAPE
    like = {"dtype": dtype, "device": device_of(backend)}
    query = torch.zeros(batch, heads, seqlen_q, 8, **like)
    key = torch.zeros(batch, heads, seqlen_k, 8, **like)
    value = torch.eye(seqlen_k, **like).expand(batch, heads, -1, -1)
    if seed is None:
        torch.manual_seed(11)
    out = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, seed=seed, backend=backend
    )
    return (out != 0).cpu()


def rng_states():
    """Return the states of torch's generators on the CPU and all GPUs."""
    return torch.get_rng_state(), *torch.cuda.get_rng_state_all()


def expected_by_attention(backend, dropout_p):
    torch.manual_seed(11)
    return philox.attention_keep(philox.new_seed(device_of(backend)).cpu(), dropout_p, *SHAPE)


def test_generator_against_known_answers():
    """philox4x32 reproduces Random123's known-answer vectors for philox4x32-7."""
    every = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, want in (
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((every,) * 4, -1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (pi, 0x299F31D0A4093822, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ):
        words = philox.philox4x32(tuple(map(torch.tensor, counter)), torch.tensor(seed))
        assert tuple(map(int, words)) == want


# A share or correlation of 2^22 decisions has a standard deviation of at most 2^-11. LIMIT is a
# number of standard deviations. An error of 0.005, ten of them, is found with p > 0.9999998.
DRAWN = (2, 8, 512, 512)
LIMIT = 5.0


def drawn(seed, dropout_p=0.5):
    return philox.attention_keep(torch.tensor(seed), dropout_p, *DRAWN)


@pytest.mark.parametrize("dropout_p", [2.0**-16, 0.1, 0.5, 0.9])
def test_share_of_kept_weights(dropout_p):
    keep = drawn(-5, dropout_p)
    step = round(dropout_p * 65536) / 65536
    deviation = (step * (1 - step) / keep.numel()) ** 0.5
    assert abs(keep.double().mean().item() - (1 - step)) < LIMIT * deviation


def test_decisions_are_independent():
    """Dropout decisions of neighbors in each dimension and of different seeds are uncorrelated."""
    signs = drawn(7).double() * 2 - 1
    pairs = {f"seed + {1 << e}": drawn(7 + (1 << e)).double() * 2 - 1 for e in (0, 1, 31, 32, 48)}
    correlations = {name: (signs * other).mean() for name, other in pairs.items()}
    for dim, size in enumerate(DRAWN):
        for apart in (n for n in (1, 2, 3, 4, 7, 8, 16, 32, 64, 256) if n < size):
            one, two = signs.narrow(dim, 0, size - apart), signs.narrow(dim, apart, size - apart)
            # Scaled so that all correlations have the standard deviation of a mean over `signs`.
            scale = (one.numel() / signs.numel()) ** 0.5
            correlations[f"dim {dim}, {apart} apart"] = (one * two).mean() * scale
    worst = max(correlations, key=lambda name: abs(correlations[name]))
    assert abs(correlations[worst]) < LIMIT * signs.numel() ** -0.5, worst


def test_decisions_of_a_counter():
    """The 8 decisions of a Philox counter are uniform over 256 patterns (chi-squared test)."""
    octets = drawn(11).reshape(-1, 8).long() @ (1 << torch.arange(8))
    counts = torch.bincount(octets, minlength=256).double()
    expected = octets.numel() / 256
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(statistic - 255) < LIMIT * (2 * 255) ** 0.5


@pytest.mark.thinned("covered by 0.5", dropout_p=[0.1, 0.9], dtype=[torch.bfloat16])
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_attention_mask(dtype, dropout_p, backend):
    """Attention drops the weights that philox.attention_keep drops, in each dtype."""
    got = kept_by_attention(backend, dropout_p, dtype)
    assert torch.equal(got, expected_by_attention(backend, dropout_p))
    assert abs(got.double().mean().item() - (1 - dropout_p)) < 0.02


@pytest.mark.parametrize("number", [1, 2, 3])
def test_attention_mask_on_every_isa_and_number_of_threads(number, isa):
    assert cpp.isa() == isa
    with use_threads(number):
        test_attention_mask(torch.float32, 0.3, "cpp")


@pytest.mark.parametrize("dropout_p", [2.0**-18, 2.0**-16, 1 - 2.0**-16, 1 - 2.0**-18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dropout_p_near_0_and_1(dtype, dropout_p, isa):
    """dropout_p is rounded to a multiple of 2**-16 in attention and in norms."""
    got = kept_by_attention("cpp", dropout_p, dtype)
    x = torch.ones(30, 193, dtype=dtype)
    options = {"dropout_p": dropout_p, "seed": 3, "return_residual": True, "backend": "cpp"}
    total = F.rms_norm(x, 193, **options)[1]
    assert torch.equal(got, expected_by_attention("cpp", dropout_p))
    assert torch.equal(total != 0, philox.norm_keep(torch.tensor(3), dropout_p, 30, 193))


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_do_not_move_the_dropout_mask(backend):
    visible = torch.ones(SHAPE[2:], dtype=torch.bool).tril()
    got = kept_by_attention(backend, 0.3, mask=masks.causal())
    assert torch.equal(got, expected_by_attention(backend, 0.3) & visible)


@pytest.mark.thinned("covered by an odd width", columns=[3, 64])
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("columns", [3, 64, 193])
def test_norm_mask(columns, backend):
    x = torch.ones(50, columns, device=device_of(backend))
    torch.manual_seed(4)
    total = F.rms_norm(x, columns, dropout_p=0.4, return_residual=True, backend=backend)[1].cpu()
    torch.manual_seed(4)
    keep = philox.norm_keep(philox.new_seed(x.device).cpu(), 0.4, 50, columns)
    assert torch.equal(total != 0, keep)
    kept = 1 - round(0.4 * 65536) / 65536
    torch.testing.assert_close(total[keep], torch.full_like(total[keep], 1 / kept))


@pytest.mark.parametrize("columns", [3, 64, 193])
def test_norm_mask_on_every_isa(columns, isa):
    test_norm_mask(columns, "cpp")


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_each_call_draws_a_seed(backend):
    x = torch.randn(1, 1, 40, 8, device=device_of(backend))
    one, two = (F.scaled_dot_product_attention(x, x, x, None, 0.5, backend=backend) for _ in "ab")
    assert not torch.equal(one, two)


SEEDS = [0, 7, -3, (1 << 63) + 5, (1 << 64) - 1]


@pytest.mark.thinned("covered by 64-bit seeds", seed=SEEDS[:3])
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("seed", SEEDS)
def test_seed_of_the_caller(seed, backend):
    """The argument `seed` determines the dropout mask, and torch's generators are not used."""
    before = rng_states()
    signed = torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed)
    keep = philox.attention_keep(signed, 0.3, *SHAPE)
    scalar = numpy.uint64(seed) if seed >= 0 else numpy.int64(seed)
    for same in (seed, scalar, signed.to(device_of(backend))):
        assert torch.equal(kept_by_attention(backend, 0.3, seed=same), keep)
    x = torch.ones(50, 40, device=device_of(backend))
    options = {"dropout_p": 0.3, "seed": seed, "return_residual": True, "backend": backend}
    for norm in (F.layer_norm, F.rms_norm):
        total = norm(x, 40, **options)[1].cpu()
        assert torch.equal(total != 0, philox.norm_keep(signed, 0.3, 50, 40))
    assert all(map(torch.equal, before, rng_states()))


def test_seed_of_packed_sequences():
    qkv, ends = torch.randn(3, 12, 2, 8), torch.tensor([0, 5, 12])
    got, want = (
        varlen_attention(*qkv, ends, ends, 7, 7, dropout_p=0.4, seed=9, backend=backend)
        for backend in ("cpp", "eager")
    )
    torch.testing.assert_close(got, want)


def test_compiled_with_a_seed():
    """A compiled call accepts changing int seeds and equals a plain call with a NumPy seed."""
    x = torch.randn(1, 2, 40, 8, requires_grad=True)

    def step(x, seed):
        return F.scaled_dot_product_attention(x, x, x, None, 0.4, seed=seed)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for seed in (7, 8, 9):
        got, want = compiled(x, seed), step(x, numpy.int64(seed))
        assert torch.equal(got, want)
        # Each gradient is a sum of three terms, whose order is not defined.
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x) for out in (got, want)))


def test_invalid_seeds():
    x = torch.randn(1, 1, 4, 8)
    for seed, error in (
        (1.0, TypeError), (True, TypeError), (torch.tensor(1.0), TypeError),
        (torch.tensor([1]), TypeError), (1 << 64, ValueError), (-(1 << 63) - 1, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match="seed must"):
            F.scaled_dot_product_attention(x, x, x, None, 0.1, seed=seed)
        with pytest.raises(error, match="seed must"):
            F.layer_norm(x, 8, dropout_p=0.1, seed=seed)
    with pytest.raises(NotImplementedError, match="does not support a dropout seed"):
        F.scaled_dot_product_attention(x, x, x, None, 0.1, seed=1, backend="sdpa")


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_dropout_of_everything_and_of_nothing(backend):
    """With dropout_p 1, output and gradients are 0; with 0, no seed is drawn."""
    x = torch.randn(1, 2, 20, 8, device=device_of(backend), requires_grad=True)
    out = F.scaled_dot_product_attention(x, x, x, None, 1.0, backend=backend)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.eq(0).all()
    before = rng_states()
    F.scaled_dot_product_attention(x, x, x, None, 0.0, backend=backend)
    assert all(map(torch.equal, before, rng_states()))
