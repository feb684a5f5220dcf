"""compat.flex_attention, compared with FlexAttention's definition in torch operations."""

from __future__ import annotations

import math

import pytest
import torch

from fused_attn.compat import flex_attention as ours

flex = pytest.importorskip("torch.nn.attention.flex_attention")

B, H, LQ, LK, D = 2, 4, 40, 50, 16
SLOPES, TABLE = torch.linspace(0.1, 1.0, H), torch.linspace(-1, 1, LQ + LK)
FACTOR = torch.tensor(2.0, requires_grad=True)
SLOPE = 1.0
LEARNED = torch.linspace(-1, 1, H * (LQ + LK)).view(H, -1).requires_grad_()

SCORE_MODS = {
    "nothing": lambda score, b, h, q, k: score,
    "alibi": lambda score, b, h, q, k: score + (k - q) * SLOPES[h],
    "relative": lambda score, b, h, q, k: score + TABLE[q - k + LK],
    "of sequences": lambda score, b, h, q, k: score + 0.1 * b * k,
    "learned": lambda score, b, h, q, k: score + LEARNED[h, q - k + LK],
    "causal": lambda score, b, h, q, k: torch.where(q >= k, score, float("-inf")),
    "capped": lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0),
    "capped, biased": lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0) + TABLE[q],
    "scaled": lambda score, b, h, q, k: score * 0.5,
    "in float32": lambda score, b, h, q, k: (score.float() + 100.0 * TABLE[k]).to(score.dtype),
    "small factor": lambda score, b, h, q, k: score / 1000.0,
}


def tensors(heads_kv=H, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, LQ, D), (B, heads_kv, LK, D), (B, heads_kv, LK, D)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def dense(score_mod, leaves, block_mask=None, enable_gqa=False):
    """Return out, lse and gradients of attention as FlexAttention defines it."""
    query, key, value = leaves
    if enable_gqa:
        key, value = (t.repeat_interleave(H // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT / D**0.5
    sizes = [torch.arange(n) for n in scores.shape]
    at = [size.view([-1 if i == dim else 1 for i in range(4)]) for dim, size in enumerate(sizes)]
    scores = score_mod(scores, *at)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask(*at), float("-inf"))
    out = scores.softmax(-1).nan_to_num(0.0) @ value
    return with_gradients(out, scores.logsumexp(-1), score_mod, leaves)


def with_gradients(out, lse, score_mod, leaves):
    """Return out, lse and the gradients of a loss on them, including that of a learned bias."""
    loss = out.square().sum() + lse.masked_fill(lse == float("-inf"), 0.0).sum()
    extra = [LEARNED] if score_mod is SCORE_MODS["learned"] else []
    return out, lse, *torch.autograd.grad(loss, [*leaves, *extra])


def dense_out(score_mod, *leaves):
    return dense(score_mod, [leaf.requires_grad_() for leaf in leaves])[0].detach()


@pytest.mark.parametrize("score_mod", SCORE_MODS.values(), ids=SCORE_MODS)
@pytest.mark.parametrize("masked", [False, True])
def test_score_mods(score_mod, masked):
    mask_mod = (lambda b, h, q, k: (q - k).abs() < 12) if masked else None
    block_mask = ours.create_block_mask(mask_mod, None, None, LQ, LK, "cpu") if masked else None
    leaves = tensors()
    expected = dense(score_mod, leaves, mask_mod)
    results = ours.flex_attention(*leaves, score_mod, block_mask, return_lse=True)
    for one, other in zip(with_gradients(*results, score_mod, leaves), expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


def test_options():
    leaves = tensors(heads_kv=2, dtype=torch.float32)
    score_mod = SCORE_MODS["alibi"]
    options = {"enable_gqa": True, "kernel_options": {"BLOCK_M": 32}}
    expected = dense(score_mod, leaves, enable_gqa=True)[0]
    torch.testing.assert_close(ours.flex_attention(*leaves, score_mod, **options), expected)
    out, aux = ours.flex_attention(
        *leaves, score_mod, return_aux=ours.AuxRequest(lse=True), scale=D**-0.5, **options
    )
    torch.testing.assert_close(out, expected)
    assert aux.lse.shape == (B, H, LQ) and aux.max_scores is None
    with pytest.raises(NotImplementedError, match="max_scores"):
        ours.flex_attention(*leaves, return_aux=ours.AuxRequest(max_scores=True), **options)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, k: score * (q + 1),
        lambda score, b, h, q, k: torch.relu(score),
        lambda score, b, h, q, k: score.square(),
        lambda score, b, h, q, k: -2.0 * torch.tanh(score / 2.0),
        lambda score, b, h, q, k: torch.where(score > 0, score, float("-inf")),
        lambda score, b, h, q, k: torch.where(k > 40, score + score.square(), score),
        lambda score, b, h, q, k: score.clamp(min=-20),
        lambda score, b, h, q, k: torch.where(h == 1, score.clamp(max=30), score),
        lambda score, b, h, q, k: torch.where(score.abs() > 25, 0.1 * score, score),
        lambda score, b, h, q, k: torch.where((score > 100) & (score < 900), 0.0, score),
        lambda score, b, h, q, k: score * FACTOR,
        lambda score, b, h, q, k: FACTOR * torch.tanh(score / FACTOR),
        lambda score, b, h, q, k: (score - (q - k).abs()) * FACTOR,
        lambda score, b, h, q, k: score.abs_(),
        lambda score, b, h, q, k: score.round_(),
        lambda score, b, h, q, k: score.relu_(),
    ],
)
def test_other_functions_of_the_score_are_refused(score_mod):
    with pytest.raises(NotImplementedError, match="score_mod must return score"):
        ours.flex_attention(*tensors(), score_mod)


def test_a_factor_may_multiply_in_place():
    query, key, value = (t.detach() for t in tensors())
    out = ours.flex_attention(query, key, value, lambda score, b, h, q, k: score.mul_(2))
    torch.testing.assert_close(out, ours.flex_attention(query * 2, key, value))


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 2), (2, 2), (1, 64)])
def test_functions_of_few_scores_are_refused(rows, keys):
    """A nonlinear score_mod is refused even if there are only one or two scores to examine."""
    query, key = torch.randn(1, 1, rows, 8), torch.randn(1, 1, keys, 8)
    with pytest.raises(NotImplementedError, match="score_mod must return"):
        ours.flex_attention(query, key, key, lambda s, b, h, q, k: torch.where(s.abs() < 1, 0.0, s))


def test_lists_of_a_block_mask_may_be_replaced():
    query = torch.randn(1, 1, 64, 16)
    mask = ours.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu", BLOCK_SIZE=16
    )
    assert ours.flex_attention(query, query, query, block_mask=mask).any()
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    assert not ours.flex_attention(query, query, query, block_mask=mask).any()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_tensors_that_a_score_mod_reads_may_change(without_grad, learned):
    """A change of a tensor that score_mod reads takes effect, even if calls had no gradients."""
    table = torch.zeros(LK, requires_grad=learned)
    query, key, value = (t.detach() for t in tensors())

    def score_mod(score, b, h, q, k):
        return score + table[k]

    with without_grad():
        zero = ours.flex_attention(query, key, value, score_mod)
    with torch.no_grad():
        table.copy_(torch.linspace(-3, 3, LK))
        got = [ours.flex_attention(query, key, value, score_mod)]
    got.append(ours.flex_attention(query, key, value, score_mod))
    table.requires_grad_()
    ours.flex_attention(query, key, value, score_mod).sum().backward()
    assert table.grad.abs().max() > 0
    expected = dense_out(score_mod, query, key, value)
    for out in got:
        assert not torch.allclose(out, zero)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


class Settings:
    slope = 1.0


def test_attributes_nested_functions_and_keywords_may_change():
    """A change of any value that score_mod reads takes effect in the next call."""

    def by_class(score, b, h, q, k):
        return score - Settings.slope * (q - k).abs()

    def nested(score, b, h, q, k):
        return (lambda x: x * SLOPE)(score)

    def keyword(score, b, h, q, k, *, slope=1.0):
        return score * slope

    def own_attribute(score, b, h, q, k):
        return score * own_attribute.slope

    own_attribute.slope = 1.0

    settings = {"slope": 1.0}
    get = settings.get

    def by_method(score, b, h, q, k):
        return score * get("slope")

    def imported(score, b, h, q, k):
        from math import e

        return score * e

    def by_globals(score, b, h, q, k):
        return score * globals()["SLOPE"]

    def flag(score, b, h, q, k, *, double=1):
        return score * (2.0 if double is True else 1.0)

    def captures_a_later_value(score, b, h, q, k):
        return score * (Settings.slope if Settings.slope < 9 else later)

    query, key, value = (t.detach() for t in tensors())
    functions = [imported, by_globals, flag, captures_a_later_value, by_class, nested, keyword]
    for score_mod in (*functions, own_attribute, by_method):
        before = ours.flex_attention(query, key, value, score_mod)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Settings, "slope", 3.0)
            patch.setitem(globals(), "SLOPE", 3.0)
            patch.setattr(keyword, "__kwdefaults__", {"slope": 3.0})
            patch.setattr(own_attribute, "slope", 3.0)
            patch.setattr(math, "e", 3.0 * math.e)
            patch.setattr(flag, "__kwdefaults__", {"double": True})
            patch.setitem(settings, "slope", 3.0)
            after = ours.flex_attention(query, key, value, score_mod)
            torch.testing.assert_close(after, dense_out(score_mod, query, key, value))
        assert not torch.allclose(after, before)
        assert torch.equal(ours.flex_attention(query, key, value, score_mod), before)
    later = 1.0


def test_transforms():
    """Biases of heads are correct in torch.func transforms and in ordinary calls after them."""
    query, key, value = (t.detach() for t in tensors())
    slopes = torch.linspace(-1, 1, H, dtype=query.dtype)

    def fused(query, slopes):
        out = ours.flex_attention(query, key, value, lambda s, b, h, q, k: s + slopes[h] * k / 9.0)
        return out.square().sum()

    def plain(query, slopes):
        scores = query @ key.mT / D**0.5 + slopes[:, None, None] * torch.arange(LK) / 9.0
        return (scores.softmax(-1) @ value).square().sum()

    queries = query + torch.arange(3.0, dtype=query.dtype).view(3, 1, 1, 1, 1)
    for got, expected in (
        [torch.func.grad(f, (0, 1))(query, slopes) for f in (fused, plain)],
        [torch.vmap(f, (0, None))(queries, slopes) for f in (fused, plain)],
        [f(query, slopes) for f in (fused, plain)],
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # float32 biases


def test_block_masks_of_other_lengths_are_refused():
    block_mask = ours.create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu")
    with pytest.raises(ValueError, match="a BlockMask for lengths"):
        ours.flex_attention(*tensors(), block_mask=block_mask)
