"""Decoding with caches, compared with teacher forcing; greedy search and beam search."""

import itertools

import pytest
import torch
from example_runs import EXAMPLES  # noqa: F401  # adds examples/ to sys.path
from nn_helpers import EMBED, HEADS, causal_bias, perturb, randn

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
    """Token and position embeddings and the output layer of a language model."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, EMBED, dtype=torch.float64)
        self.positions = torch.nn.Embedding(20, EMBED, dtype=torch.float64)
        self.logits = torch.nn.Linear(EMBED, VOCABULARY, dtype=torch.float64)

    def embed(self, tokens, start):
        positions = torch.arange(start, start + tokens.shape[1])
        return self.tokens(tokens) + self.positions(positions)


@pytest.mark.parametrize("steps", [[1] * LEN_T, [3, 1, 3], [LEN_T]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "kwargs", [{}, {"batch_first": False, "norm_first": True}, {"bias": False}], ids=str
)
@torch.no_grad()
def test_steps_match_teacher_forcing(kwargs, padded, steps, monkeypatch):
    monkeypatch.setattr(caches, "BLOCK", 2)
    theirs, ours = decoder(norm=not kwargs, **kwargs)
    dim = 1 if ours.batch_first else 0
    tgt, memory = randn(BATCH, LEN_T, EMBED), randn(BATCH, LEN_S, EMBED)
    if dim == 0:
        tgt, memory = tgt.transpose(0, 1), memory.transpose(0, 1)
    ignored = torch.zeros(BATCH, LEN_T, dtype=torch.bool)
    ignored[1, 3] = padded
    padding = PADDING if padded else None
    expected = theirs(
        tgt, memory, causal_bias(LEN_T).isinf(),
        tgt_key_padding_mask=ignored, memory_key_padding_mask=padding,
    )  # fmt: skip
    cache, outs = ours.prepare(memory, padding), []
    for part, end in zip(tgt.split(steps, dim), itertools.accumulate(steps), strict=True):
        outs.append(ours.step(part, cache, ignored[:, :end] if padded else None))
        assert cache.length == end
    torch.testing.assert_close(torch.cat(outs, dim), expected, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_sequences_that_share_a_memory():
    _, ours = decoder()
    memory, tgt = randn(BATCH, LEN_S, EMBED), randn(2 * BATCH, 3, EMBED)
    cache = ours.prepare(memory, PADDING)
    repeated = ours.prepare(memory.repeat_interleave(2, 0), PADDING.repeat_interleave(2, 0))
    for step in (tgt[:, :2], tgt[:, 2:]):
        torch.testing.assert_close(ours.step(step, cache), ours.step(step, repeated))
    rows = torch.tensor([5, 4, 0, 0])
    cache.select(rows, torch.tensor([2, 0]))
    repeated.select(rows, rows)
    more = randn(4, 1, EMBED)
    torch.testing.assert_close(ours.step(more, cache), ours.step(more, repeated))


def test_caches_grow_by_blocks_and_copy_their_contents():
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
def test_caches_reject_mismatched_tensors(length):
    cache, cached = fnn.KeyValueCache(), torch.randn(2, 4, length, 8)
    cache.append(cached, cached)
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
    assert torch.equal(keys, torch.cat([cached, new], 2)) and values.shape == keys.shape


@pytest.mark.parametrize("written_by", ["cache", "decode_attention"])
@torch.no_grad()
def test_decode_attention_on_the_cache_of_a_decoder(written_by, monkeypatch):
    monkeypatch.setattr(caches, "BLOCK", 2)
    attention = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    theirs, ours = fnn.KeyValueCache(), fnn.KeyValueCache()
    for step in (3, 1, 1, 2, 1):
        x = randn(BATCH, step, EMBED)
        expected = attention.forward_cached(x, theirs)
        query, key, value = attention._project(x, x, x)
        new = {}
        if written_by == "cache":
            ours.append(key, value)
        else:
            ours.make_room(key, value)
            new = {"key": key, "value": value}
        before = ours.keys.data_ptr(), ours.values.data_ptr()
        assert ours.lengths.tolist() == [ours.length] * BATCH
        out = fused_attn.decode_attention(
            query, ours.keys, ours.values, cache_lengths=ours.lengths, **new
        )
        ours.length += step if new else 0
        assert (ours.keys.data_ptr(), ours.values.data_ptr()) == before
        torch.testing.assert_close(attention.out_proj(attention._merge_heads(out, True)), expected)
    assert ours.length == theirs.length == 8
    assert torch.equal(ours.keys[:, :, :8], theirs.keys[:, :, :8])
    assert torch.equal(ours.values[:, :, :8], theirs.values[:, :, :8])


def test_caches_return_views_of_their_memory():
    cache = fnn.KeyValueCache()
    for name in ("keys", "values", "lengths"):
        with pytest.raises(ValueError, match="must not be empty"):
            getattr(cache, name)
    views = cache.append(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 6))
    for buffer, view in zip((cache.keys, cache.values), views, strict=True):
        assert buffer.shape == (2, 3, caches.BLOCK, view.shape[3])
        assert buffer.data_ptr() == view.data_ptr() and buffer.stride() == view.stride()
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


def test_gradients_through_a_cache_are_an_error():
    _, ours = decoder()
    with pytest.raises(ValueError, match="no_grad"):
        ours.prepare(randn(1, LEN_S, EMBED))
    with torch.no_grad():
        cache = ours.prepare(randn(1, LEN_S, EMBED))
    with pytest.raises(ValueError, match="no_grad"):
        ours.step(randn(1, 1, EMBED), cache)


@torch.no_grad()
def test_exceptions_do_not_change_the_cache():
    _, ours = decoder()
    tgt = randn(2, 3, EMBED)
    cache, other = (ours.prepare(randn(2, LEN_S, EMBED)) for _ in range(2))
    other.memory = cache.memory
    for each in (cache, other):
        ours.step(tgt[:, :2], each)
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        ours.step(tgt[:, 2:], cache, torch.zeros(2, 7).bool())
    torch.testing.assert_close(ours.step(tgt[:, 2:], cache), ours.step(tgt[:, 2:], other))


@torch.no_grad()
def test_selected_sequences_must_match_their_memory():
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


def searched(seed=0, layer=None, **kwargs):
    """Return the output of `generate` on a random decoder, and a function that scores sequences.

    score(b, tokens) returns torch's log-probabilities, (len(tokens) + 1, VOCABULARY).
    """
    torch.manual_seed(seed)
    theirs, ours = decoder(**(layer or {}))
    words, memory = perturb(Words()), randn(BATCH, LEN_S, EMBED, grad=False)
    dim = 0 if ours.batch_first else 1
    out = decoding.generate(
        ours, memory.transpose(0, dim), words.embed, words.logits, bos=BOS, eos=EOS,
        memory_key_padding_mask=PADDING, **kwargs,
    )  # fmt: skip

    @torch.no_grad()
    def score(b, tokens):
        embedded = words.embed(torch.tensor([[BOS, *tokens]]), 0)
        hidden = theirs(
            embedded.transpose(0, dim), memory[b : b + 1].transpose(0, dim),
            causal_bias(len(tokens) + 1).isinf(), memory_key_padding_mask=PADDING[b : b + 1],
        )  # fmt: skip
        return words.logits(hidden.select(dim, 0)).log_softmax(-1)

    return out, score


def total(steps, tokens):
    """Return the log-probability of a sequence."""
    return steps[:-1].gather(1, torch.tensor(tokens)[:, None]).sum()


def sequences(out):
    """Return the generated sequences without padding, as lists."""
    return [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


@pytest.mark.parametrize(("seed", "layer"), [(0, {}), (1, {}), (2, {"batch_first": False})])
def test_greedy_search_matches_teacher_forcing(seed, layer):
    """Each token is the likeliest one, and sequences end at EOS or at max_length."""
    out, score = searched(seed, max_length=12, layer=layer)
    for b, tokens in enumerate(sequences(out)):
        steps = score(b, tokens)
        assert tokens == steps[:-1].argmax(-1).tolist()
        assert EOS not in tokens[:-1] and (len(tokens) == 12 or tokens[-1] == EOS)
        torch.testing.assert_close(
            out.scores[b].double(), total(steps, tokens), rtol=1e-5, atol=1e-5
        )
    assert (out.tokens[torch.arange(out.tokens.shape[1]) >= out.lengths[:, None]] == EOS).all()


@pytest.mark.parametrize(("seed", "length_penalty"), [(0, 0.0), (1, 1.0), (0, 2.0), (1, -1.0)])
def test_wide_beams_find_the_best_sequence(seed, length_penalty):
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
    for b, found in enumerate(sequences(out)):
        best, tokens = max(
            (float(total(score(b, t), t)) / len(t) ** length_penalty, t) for t in every
        )
        assert found == tokens
        assert abs(out.scores[b].item() - best) < 1e-5


def test_scores_of_few_beams():
    """Returned scores are the length-normalized log-probabilities of the returned sequences."""
    out, score = searched(max_length=8, num_beams=3)
    for b, tokens in enumerate(sequences(out)):
        assert EOS not in tokens[:-1]
        expected = total(score(b, tokens), tokens) / len(tokens)
        torch.testing.assert_close(out.scores[b].double(), expected, rtol=1e-5, atol=1e-5)


def test_one_beam_is_greedy_search(monkeypatch):
    greedy, _ = searched(max_length=10)
    monkeypatch.setattr(decoding, "_greedy", lambda *args: decoding._beams(*args, 1, 0.0))
    single, _ = searched(max_length=10)
    assert torch.equal(single.tokens, greedy.tokens)
    torch.testing.assert_close(single.scores, greedy.scores)
