"""Decoding with caches, compared with teacher forcing; greedy search and beam search."""

import itertools

import pytest
import torch
from example_runs import EXAMPLES  # noqa: F401  # adds examples/ to sys.path
from nn_helpers import EMBED, HEADS, perturb, randn

import fused_attn
import fused_attn.nn as fnn
from fused_attn.nn import caches

# isort: split
import decoding

BATCH, LEN_T, LEN_S, VOCABULARY, BOS, EOS = 3, 7, 5, 6, 1, 0
PADDING = torch.arange(LEN_S) >= torch.tensor([[5], [2], [4]])


def decoder(norm=True, **kwargs):
    layer = torch.nn.TransformerDecoderLayer(
        EMBED, HEADS, 40, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **kwargs}
    )
    last = torch.nn.LayerNorm(EMBED, dtype=torch.float64) if norm else None
    theirs = perturb(torch.nn.TransformerDecoder(layer, 2, last))
    return theirs, fnn.TransformerDecoder.from_torch(theirs)


class Words(torch.nn.Module):
    """Token and position embeddings, and the output layer, of a model with 6 tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, EMBED, dtype=torch.float64)
        self.positions = torch.nn.Embedding(20, EMBED, dtype=torch.float64)
        self.logits = torch.nn.Linear(EMBED, VOCABULARY, dtype=torch.float64)

    def embed(self, tokens, start):
        at = torch.arange(start, start + tokens.shape[1])
        return self.tokens(tokens) + self.positions(at)


@pytest.mark.parametrize("steps", [[1] * LEN_T, [3, 1, 3], [LEN_T]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "kwargs", [{}, {"batch_first": False, "norm_first": True}, {"bias": False}], ids=str
)
@torch.no_grad()
def test_step_by_step_is_teacher_forcing(kwargs, padded, steps, monkeypatch):
    monkeypatch.setattr(caches, "BLOCK", 2)
    theirs, ours = decoder(norm=not kwargs, **kwargs)
    dim = 1 if ours.batch_first else 0
    tgt, memory = randn(BATCH, LEN_T, EMBED), randn(BATCH, LEN_S, EMBED)
    if dim == 0:
        tgt, memory = tgt.transpose(0, 1), memory.transpose(0, 1)
    own = torch.zeros(BATCH, LEN_T, dtype=torch.bool)
    own[1, 3] = padded  # a key that is masked for later queries
    ignored = PADDING if padded else None
    causal = torch.nn.Transformer.generate_square_subsequent_mask(LEN_T, dtype=torch.float64)
    expected = theirs(
        tgt, memory, causal.isinf(), tgt_key_padding_mask=own, memory_key_padding_mask=ignored
    )
    cache, outs, start = ours.prepare(memory, ignored), [], 0
    for step in steps:
        part = tgt.narrow(dim, start, step)
        start += step
        outs.append(ours.step(part, cache, own[:, :start] if padded else None))
        assert cache.length == start
    torch.testing.assert_close(torch.cat(outs, dim), expected, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_sequences_that_share_a_memory():
    _, ours = decoder()
    memory, tgt = randn(BATCH, LEN_S, EMBED), randn(2 * BATCH, 3, EMBED)
    cache = ours.prepare(memory, PADDING)
    repeated = ours.prepare(memory.repeat_interleave(2, 0), PADDING.repeat_interleave(2, 0))
    for step in (tgt[:, :2], tgt[:, 2:]):
        torch.testing.assert_close(ours.step(step, cache), ours.step(step, repeated))
    rows, kept = torch.tensor([5, 4, 0, 0]), torch.tensor([2, 0])
    cache.select(rows, kept)
    repeated.select(rows, rows)
    more = randn(4, 1, EMBED)
    torch.testing.assert_close(ours.step(more, cache), ours.step(more, repeated))


def test_caches_grow_by_blocks_and_keep_what_is_there():
    cache, seen, buffers = caches.KeyValueCache(), [], set()
    for _ in range(5 * caches.BLOCK):
        key = torch.randn(2, 3, 1, 4)
        seen.append(key)
        keys, values = cache.append(key, 2 * key)
        buffers.add(keys.data_ptr())
        assert torch.equal(values, 2 * keys)
    assert torch.equal(keys, torch.cat(seen, 2)) and cache.length == len(seen)
    assert len(buffers) <= 5


@pytest.mark.parametrize("length", [3, caches.BLOCK])  # the buffer fits, or must grow
def test_caches_take_only_tensors_like_their_own(length):
    cache, kept = fnn.KeyValueCache(), torch.randn(2, 4, length, 8)
    cache.append(kept, kept)
    new = torch.randn(2, 4, 1, 8)
    for other in (new[:1], new[:, :1], new[..., :1], new.double(), torch.randn(3, 4, 1, 8)):
        with pytest.raises(ValueError, match="key must have the batch, heads, head_dim and dtype"):
            cache.append(other, other)
    for other in (new[..., :1], new.double()):
        with pytest.raises(ValueError, match="value must have the batch"):
            cache.make_room(new, other)
    for first in (cache, fnn.KeyValueCache()):
        for other in (new[:1], torch.cat([new, new], 2), new[0]):
            with pytest.raises(ValueError, match="same batch, heads and positions"):
                first.append(new, other)
    keys, values = cache.append(new, 2 * new)
    assert torch.equal(keys, torch.cat([kept, new], 2)) and values.shape == keys.shape


@pytest.mark.parametrize("takes_in", [False, True])
@torch.no_grad()
def test_decode_attention_on_the_cache_of_a_decoder(takes_in, monkeypatch):
    monkeypatch.setattr(caches, "BLOCK", 2)
    attention = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    theirs, ours = fnn.KeyValueCache(), fnn.KeyValueCache()
    for step in (3, 1, 1, 2, 1):
        x = randn(BATCH, step, EMBED)
        expected = attention.forward_cached(x, theirs)
        query, key, value = attention._project(x, x, x)
        new = {"key": key, "value": value} if takes_in else {}
        (ours.make_room if takes_in else ours.append)(key, value)
        before = ours.keys.data_ptr(), ours.values.data_ptr()
        assert ours.lengths.tolist() == [ours.length] * BATCH
        out = fused_attn.decode_attention(
            query, ours.keys, ours.values, cache_lengths=ours.lengths, **new
        )
        ours.length += step if takes_in else 0
        assert (ours.keys.data_ptr(), ours.values.data_ptr()) == before
        torch.testing.assert_close(attention.out_proj(attention._merge_heads(out, True)), expected)
    assert ours.length == theirs.length == 8
    for kept, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert torch.equal(kept[:, :, :8], other[:, :, :8])


def test_caches_return_views_of_their_memory():
    cache = fnn.KeyValueCache()
    for name in ("keys", "values", "lengths"):
        with pytest.raises(ValueError, match="must not be empty"):
            getattr(cache, name)
    views = cache.append(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 6))
    for whole, view in zip((cache.keys, cache.values), views, strict=True):
        assert whole.shape == (2, 3, caches.BLOCK, view.shape[3])
        assert whole.data_ptr() == view.data_ptr() and whole.stride() == view.stride()
    query, key, value = (torch.randn(2, 3, 1, dim) for dim in (4, 4, 6))
    fused_attn.decode_attention(
        query, cache.keys, cache.values, cache_lengths=cache.lengths, key=key, value=value
    )
    for view, new in zip(views, (key, value), strict=True):
        torch.testing.assert_close(view.as_strided(new.shape, view.stride(), 5 * new.shape[3]), new)
    cache.select(torch.tensor([1, 1, 0]))
    assert cache.lengths.tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match="no_grad"):
        cache.make_room(key.requires_grad_(), value)


def test_gradients_through_a_cache_are_refused():
    _, ours = decoder()
    with pytest.raises(ValueError, match="no_grad"):
        ours.prepare(randn(1, LEN_S, EMBED))
    with torch.no_grad():
        cache = ours.prepare(randn(1, LEN_S, EMBED))
    with pytest.raises(ValueError, match="no_grad"):
        ours.step(randn(1, 1, EMBED), cache)


@torch.no_grad()
def test_an_exception_leaves_the_cache_as_it_was():
    _, ours = decoder()
    tgt = randn(2, 3, EMBED)
    cache, other = (ours.prepare(randn(2, LEN_S, EMBED)) for _ in range(2))
    other.memory = cache.memory
    for kept in (cache, other):
        ours.step(tgt[:, :2], kept)
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        ours.step(tgt[:, 2:], cache, torch.zeros(2, 7).bool())
    torch.testing.assert_close(ours.step(tgt[:, 2:], cache), ours.step(tgt[:, 2:], other))


@torch.no_grad()
def test_sequences_keep_their_memory():
    _, ours = decoder()
    cache = ours.prepare(randn(2, LEN_S, EMBED))
    ours.step(randn(4, 1, EMBED), cache)
    with pytest.raises(ValueError, match="unless memories is given"):
        cache.select(torch.tensor([0, 1]))
    cache.select(torch.tensor([1, 3]))
    assert ours.step(randn(2, 1, EMBED), cache).shape == (2, 1, EMBED)


def test_caches_of_inference_mode_can_be_continued():
    _, ours = decoder()
    tgt = randn(2, 2, EMBED)
    with torch.inference_mode():
        cache = ours.prepare(randn(2, LEN_S, EMBED))
        ours.step(tgt[:, :1], cache)
    with torch.no_grad():
        ours.step(tgt[:, 1:], cache)
    assert cache.length == 2


@torch.no_grad()
def test_wrong_arguments():
    theirs, ours = decoder()
    cache = ours.prepare(randn(2, LEN_S, EMBED))
    with pytest.raises(ValueError, match=r"the memory's batch size \(2\)"):
        ours.step(randn(3, 1, EMBED), cache)
    with pytest.raises(ValueError, match="memory must have 3"):
        ours.prepare(randn(LEN_S, EMBED))
    with pytest.raises(ValueError, match="at least 1"):
        decoding.generate(ours, randn(2, LEN_S, EMBED), None, None, bos=0, eos=1, max_length=0)
    handle = ours.layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match="no hooks"):
        ours.prepare(randn(2, LEN_S, EMBED))
    handle.remove()
    ours.layers[1] = theirs.layers[1]
    with pytest.raises(TypeError, match=r"got torch\.nn\.modules\.transformer\.T"):
        ours.prepare(randn(2, LEN_S, EMBED))


# ---- generate ------------------------------------------------------------------------------------


def searched(seed=0, **kwargs):
    """Return the output of `generate` on a random decoder, and `score_of` for torch's decoder."""
    torch.manual_seed(seed)
    theirs, ours = decoder(**kwargs.pop("layer", {}))
    words = perturb(Words())
    memory = randn(BATCH, LEN_S, EMBED, grad=False)
    given = memory if ours.batch_first else memory.transpose(0, 1)
    out = decoding.generate(
        ours, given, words.embed, words.logits, bos=BOS, eos=EOS,
        memory_key_padding_mask=PADDING, **kwargs,
    )  # fmt: skip
    return out, score_of(theirs, words, given)


def score_of(theirs, words, memory):
    """Return function(b, tokens): torch's log-probabilities, (len(tokens) + 1, VOCABULARY)."""

    @torch.no_grad()
    def score(b, tokens):
        batch_first = theirs.layers[0].self_attn.batch_first
        row = memory[b : b + 1] if batch_first else memory[:, b : b + 1]
        embedded = words.embed(torch.tensor([[BOS, *tokens]]), 0)
        hidden = theirs(
            embedded if batch_first else embedded.transpose(0, 1), row,
            torch.ones(len(tokens) + 1, len(tokens) + 1).triu(1).bool(),
            memory_key_padding_mask=PADDING[b : b + 1],
        )  # fmt: skip
        hidden = hidden[0] if batch_first else hidden[:, 0]
        return words.logits(hidden).log_softmax(-1)

    return score


@pytest.mark.parametrize(("seed", "layer"), [(0, {}), (1, {}), (2, {"batch_first": False})])
def test_greedy_takes_the_likeliest_token_of_teacher_forcing(seed, layer):
    out, score = searched(seed, max_length=12, layer=layer)
    for b, (tokens, length) in enumerate(zip(out.tokens.tolist(), out.lengths, strict=True)):
        tokens = tokens[:length]
        steps = score(b, tokens)[:-1]
        assert tokens == steps.argmax(-1).tolist()
        assert EOS not in tokens[:-1] and (length == 12 or tokens[-1] == EOS)
        total = steps.gather(1, torch.tensor(tokens)[:, None]).sum()
        torch.testing.assert_close(out.scores[b].double(), total, rtol=1e-5, atol=1e-5)
    assert (out.tokens[torch.arange(out.tokens.shape[1]) >= out.lengths[:, None]] == EOS).all()


@pytest.mark.parametrize(("seed", "length_penalty"), [(0, 0.0), (1, 1.0), (0, 2.0), (1, -1.0)])
def test_wide_beams_find_the_best_of_all_sequences(seed, length_penalty):
    longest = 3
    out, score = searched(
        seed, max_length=longest, num_beams=VOCABULARY**2, length_penalty=length_penalty
    )
    words = [w for w in range(VOCABULARY) if w != EOS]
    every = [
        [*start, end]
        for n in range(longest)
        for start in itertools.product(words, repeat=n)
        for end in (range(VOCABULARY) if n == longest - 1 else [EOS])
    ]
    for b in range(BATCH):
        best, tokens = max(
            (float(_total(score(b, t), t)) / len(t) ** length_penalty, t) for t in every
        )
        assert out.tokens[b, : out.lengths[b]].tolist() == tokens
        assert abs(out.scores[b].item() - best) < 1e-5


def _total(steps, tokens):
    return steps[:-1].gather(1, torch.tensor(tokens)[:, None]).sum()


def test_scores_of_few_beams():
    """Returned scores are the length-normalized log-probabilities of the returned sequences."""
    out, score = searched(max_length=8, num_beams=3)
    for b, (tokens, length) in enumerate(
        zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)
    ):
        tokens = tokens[:length]
        assert EOS not in tokens[:-1]
        expected = _total(score(b, tokens), tokens) / length
        torch.testing.assert_close(out.scores[b].double(), expected, rtol=1e-5, atol=1e-5)


def test_one_beam_is_greedy():
    greedy, _ = searched(max_length=10)
    beam = decoding._beams
    decoding._greedy, kept = (lambda *args: beam(*args, 1, 0.0)), decoding._greedy
    try:
        single, _ = searched(max_length=10)
    finally:
        decoding._greedy = kept
    assert torch.equal(single.tokens, greedy.tokens)
    torch.testing.assert_close(single.scores, greedy.scores)
