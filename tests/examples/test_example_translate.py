"""examples/translate.py and translation.py: data, loss, masks, and greedy and beam search."""

import math
import re

import pytest
import torch
from example_runs import run_example  # adds examples/ to sys.path

# isort: split
import data
import rnn
import translate
import translation
from translation import BOS, EOS, PAD, Batch

WORDS = 30  # size of the small models' vocabulary


@pytest.fixture(scope="module")
def corpus() -> translation.Corpus:
    return translation.load(smoke=True)


def new_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "rnn":
        return rnn.Recurrent(WORDS, embed_dim=8, hidden=16).eval()
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 2, "dim_feedforward": 32}
    return translate.Translator(WORDS, kind == "shared", **sizes).eval()


@pytest.fixture(params=["shared", "separate"])
def model(request) -> torch.nn.Module:
    return new_model(request.param)


def sentences(*lengths: int) -> torch.Tensor:
    """Return sentences of random tokens, padded to shape (N, longest)."""
    return translation.padded([torch.randint(EOS + 1, WORDS, (n,)) for n in lengths])


def after_end(tokens: torch.Tensor) -> torch.Tensor:
    """Return True for all tokens after the first <eos> of a sentence."""
    ends = (tokens == EOS).long()
    return ends.cumsum(1) > ends


def test_smoke(tmp_path):
    out, figures = run_example("translate", tmp_path)
    assert figures["curves"]["holds"]
    assert figures["train"]["all"]["pairs"] + figures["held_out"]["all"]["pairs"] == 60
    assert sum(n["pairs"] for key, n in figures["train"].items() if key != "all") == 54
    for part in (figures["held_out"]["all"], figures["held_out_beams"]):
        assert 0 <= part["exact"] <= 1 and 0 <= part["chrf"] <= 100
    assert figures["cache_changes_nothing"] is True
    for name in ("backends", "loss", "attention"):
        assert (tmp_path / f"translate_{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert "reference" in out


def test_split_is_free_of_leaks():
    pairs = [("Open", "a"), ("OPEN…", "b"), *((f"File {i}", str(i)) for i in range(40))]
    pairs += [("Bare", "c"), ("Naked", "c.")]
    train, held_out = data.split_pairs(pairs)
    keys = [
        {re.sub(r"\W", "", text.lower()) for pair in part for text in pair}
        for part in (train, held_out)
    ]
    assert not keys[0] & keys[1]
    assert sorted(train + held_out) == sorted(pairs)
    # Pairs with equal English or equal translations stay in the same part for every share.
    for share in (0.3, 0.5, 0.7):
        for part in data.split_pairs(pairs, share):
            english = {pair[0] for pair in part}
            assert ("Open" in english) == ("OPEN…" in english)
            assert ("Bare" in english) == ("Naked" in english)
    torch.manual_seed(7)  # the split does not depend on the seed
    assert data.split_pairs(pairs) == (train, held_out)


def test_tokens_decode_to_the_text(corpus):
    texts = [text for pair in corpus.train for text in pair]
    tokens = [t.tolist() for t in corpus.encode(texts)]
    assert all(t[-1] == EOS and BOS not in t and PAD not in t for t in tokens)
    assert corpus.tokenizer.decode_batch(tokens) == texts


def test_batches(corpus):
    torch.manual_seed(0)
    batches = corpus.batches(corpus.train, epochs=2)
    assert len(batches) % 2 == 0
    for batch in batches:
        assert (batch.target[:, 0] == BOS).all()
        for side in batch:
            assert len(batch.source) == 1 or side.numel() <= translation.MAX_TOKENS
            assert torch.equal(after_end(side), side == PAD)
    decode = corpus.tokenizer.decode_batch
    epoch = batches[: len(batches) // 2]
    pairs = [p for b in epoch for p in zip(*(decode(t.tolist()) for t in b), strict=True)]
    assert sorted(pairs) == sorted(corpus.train)


def test_loss_has_label_smoothing_and_ignores_padding():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, WORDS, dtype=torch.float64)
    target = torch.tensor([[BOS, 7, 8, EOS], [BOS, 9, EOS, PAD]])
    loss = translation.batch_loss(lambda source, read: logits, Batch(target, target))
    log_p, smoothing = logits.log_softmax(-1), translation.LABEL_SMOOTHING
    expected = [
        (1 - smoothing) * -log_p[n, t, target[n, t + 1]] + smoothing * -log_p[n, t].mean()
        for n, t in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))  # real tokens only
    ]
    assert math.isclose(loss, sum(expected) / len(expected), rel_tol=1e-12)


def test_mean_loss_weights_batches_by_their_tokens(corpus):
    torch.manual_seed(0)
    model = translate.Translator(corpus.tokenizer.get_vocab_size(), True, d_model=16, num_heads=2)
    pairs = sorted(corpus.train, key=lambda pair: len(pair[0]))[-12:]
    one_by_one = [b for pair in pairs for b in corpus.batches([pair])]
    together = corpus.batches(pairs)
    assert len(together) < len(one_by_one)
    means = [translation.mean_loss(model, batches) for batches in (one_by_one, together)]
    assert math.isclose(*means, rel_tol=1e-5) and model.training


MODELS = pytest.mark.parametrize("kind", ["shared", "separate", "rnn"])


@MODELS
@torch.no_grad()
def test_padding_does_not_change_logits(kind):
    model = new_model(kind)
    source, target = sentences(9, 4), sentences(8, 5)
    logits = model(source, target)
    for n, (s, t) in enumerate(((9, 8), (4, 5))):
        alone = model(source[n : n + 1, :s], target[n : n + 1, :t])
        torch.testing.assert_close(logits[n, :t], alone[0], rtol=1e-4, atol=1e-5)


@MODELS
@torch.no_grad()
def test_logits_do_not_depend_on_later_tokens(kind):
    model = new_model(kind)
    source, target = sentences(6, 6), sentences(8, 8)
    logits = model(source, target)
    target[:, 5:] = sentences(3, 3)
    changed = model(source, target)
    torch.testing.assert_close(changed[:, :5], logits[:, :5])
    assert not torch.allclose(changed[:, 5:], logits[:, 5:])


def test_search_with_and_without_cache_is_equal(model):
    source = sentences(12, 7, 3)
    found = model.search(source)
    assert torch.equal(found, model.search_uncached(source)) and found.shape[1] > 1


@torch.no_grad()
def test_beams_increase_the_likelihood(model):
    """Beam search finds a higher length-normalized log-probability than greedy search."""
    source = sentences(6, 6, 6, 6)
    likelihoods = []
    for beams in (1, 8):
        tokens = model.search(source, num_beams=beams)
        read, after = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=BOS), after_end(tokens)
        log_p = model(source, read).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        lengths = (~after).sum(1) ** translate.LENGTH_PENALTY
        likelihoods.append((log_p.masked_fill(after, 0.0).sum(1) / lengths).mean())
    assert likelihoods[1] > likelihoods[0]


def test_embeddings(model):
    """Embeddings are scaled by sqrt(d_model); source and target share one matrix if requested."""
    shared = model.source is model.target
    assert (model.project.weight is model.source.weight) == shared
    names = {name for name, _ in model.named_parameters()}
    assert ("target.weight" in names) == (not shared)
    tokens = torch.tensor([[7, 8]])
    table = model.positions.weight[:2]
    torch.testing.assert_close(model.embed(tokens)[0], model.target.weight[[7, 8]] * 4 + table)
    torch.testing.assert_close(model.embed(tokens[:, 1:], 1), model.embed(tokens)[:, 1:])


def test_cross_attention(model):
    source, target = sentences(6)[0], sentences(4)[0]
    weights = model.cross_attention(source, target)
    assert weights.shape == (4, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4))
    assert not any(layer.multihead_attn._forward_hooks for layer in model.decoder.layers)
