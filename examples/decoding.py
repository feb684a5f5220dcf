"""Autoregressive decoding with key-value caches: greedy and beam search."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fused_attn.nn import DecoderCache, TransformerDecoder


class Generated(NamedTuple):
    """Result of `generate`.

    Attributes:
        tokens: (N, longest) int64; generated tokens without <bos>, padded with <eos>.
        lengths: (N,) int64; number of tokens of each sequence, including <eos>.
        scores: (N,) float32; log-probability of each sequence. Beam search divides it by
            length ** length_penalty.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor


@torch.no_grad()
def generate(
    decoder: TransformerDecoder,
    memory: Tensor,
    embed: Callable[[Tensor, int], Tensor],
    project: Callable[[Tensor], Tensor],
    *,
    bos: int,
    eos: int,
    max_length: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    memory_key_padding_mask: Tensor | None = None,
) -> Generated:
    """Decode sequences until <eos>, one token per step, by greedy or beam search.

    Finished sequences are removed from the batch. On a GPU, every step synchronizes with the device
    to check which sequences have finished.

    Args:
        decoder: a stack of fused layers. Call its `eval()` first to disable dropout.
        memory: output of the encoder, (N, S, d_model) with batch_first, else (S, N, d_model).
        embed: function of tokens (sequences, 1) and their position, an int, that returns embeddings
            (sequences, 1, d_model).
        project: function from hidden states (sequences, d_model) to logits (sequences, vocabulary).
        bos, eos: ids of the tokens that begin and end a sequence.
        max_length: maximum number of tokens, including <eos>.
        num_beams: number of hypotheses per sequence; 1 selects greedy search.
        length_penalty: beam search ranks hypotheses by log-probability / length ** length_penalty.
        memory_key_padding_mask: (N, S); see `MultiheadAttention.forward`.

    Returns:
        The tokens, lengths and scores of the best hypothesis of each sequence.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: Sutskever et al. 2014, "Sequence to Sequence Learning with Neural Networks", section
    3.2 (beam search).
    """
    if max_length < 1 or num_beams < 1:
        raise ValueError(
            f"max_length and num_beams must be at least 1, got {max_length} and {num_beams}"
        )
    cache = decoder.prepare(memory, memory_key_padding_mask)
    batch_first = decoder.batch_first

    def log_probabilities(tokens: Tensor) -> Tensor:
        x = embed(tokens[:, None], cache.length)
        hidden = decoder.step(x if batch_first else x.transpose(0, 1), cache)
        hidden = hidden[:, 0] if batch_first else hidden[0]
        return project(hidden).float().log_softmax(-1)

    first = torch.full((memory.shape[0 if batch_first else 1],), bos, device=memory.device)
    if num_beams == 1:
        return _greedy(log_probabilities, cache, first, eos, max_length)
    return _beams(log_probabilities, cache, first, eos, max_length, num_beams, length_penalty)


def _greedy(
    log_probabilities: Callable[[Tensor], Tensor],
    cache: DecoderCache,
    first: Tensor,
    eos: int,
    max_length: int,
) -> Generated:
    batch = first.shape[0]
    tokens = torch.full((batch, max_length), eos, device=first.device)
    lengths = torch.full((batch,), max_length, device=first.device)
    scores = torch.zeros(batch, dtype=torch.float32, device=first.device)
    active, last = torch.arange(batch, device=first.device), first
    for t in range(max_length):
        if not active.numel():
            break
        best, last = log_probabilities(last).max(-1)
        tokens[active, t] = last
        scores[active] += best
        ended = last == eos
        lengths[active[ended]] = t + 1
        if ended.any():
            alive = (~ended).nonzero().squeeze(1)
            active, last = active[alive], last[alive]
            cache.select(alive, alive)
    return Generated(tokens[:, : int(lengths.max()) if batch else 0], lengths, scores)


class _Hypotheses:
    """Finished hypotheses of one source sequence: the `size` best, sorted by score."""

    def __init__(self, size: int, length_penalty: float) -> None:
        self.size, self.length_penalty = size, length_penalty
        self.best: list[tuple[float, list[int]]] = []

    def add(self, log_probability: float, tokens: list[int]) -> None:
        self.best.append((log_probability / len(tokens) ** self.length_penalty, tokens))
        self.best.sort(key=lambda scored: scored[0], reverse=True)
        del self.best[self.size :]

    def complete(self, log_probability: float, length: int, max_length: int) -> bool:
        """Return True if no unfinished hypothesis can still enter the list.

        Args:
            log_probability: highest log-probability of the unfinished hypotheses.
            length: their length after the next step.
            max_length: maximum length of a hypothesis.
        """
        longest = max_length if self.length_penalty > 0 else length
        return (
            len(self.best) == self.size
            and self.best[-1][0] >= log_probability / longest**self.length_penalty
        )


def _beams(
    log_probabilities: Callable[[Tensor], Tensor],
    cache: DecoderCache,
    first: Tensor,
    eos: int,
    max_length: int,
    num_beams: int,
    length_penalty: float,
) -> Generated:
    device, batch = first.device, first.shape[0]
    ended = [_Hypotheses(num_beams, length_penalty) for _ in range(batch)]
    active = list(range(batch))  # source sequences with unfinished beams
    beams: list[list[list[int]]] = [[[] for _ in range(num_beams)] for _ in range(batch)]
    # The beams of a sequence are identical at first, so only the first gets a finite score.
    scores = torch.full((batch, num_beams), float("-inf"), device=device)
    scores[:, 0] = 0.0
    last = first.repeat_interleave(num_beams)
    for t in range(1, max_length + 1):
        if not active:
            break
        steps = log_probabilities(last)
        total = (scores.reshape(-1, 1) + steps).reshape(len(active), -1)
        # At most one candidate per beam is <eos>, so 2 * num_beams candidates refill all beams.
        values, at = total.topk(min(2 * num_beams, total.shape[1]))
        survivors, items = [], []
        for item, row in enumerate(active):
            chosen: list[tuple[float, int, list[int]]] = []
            candidates = zip(values[item].tolist(), at[item].tolist(), strict=True)
            for rank, (value, index) in enumerate(candidates):
                beam, token = divmod(index, steps.shape[1])
                if value == float("-inf"):
                    continue
                tokens = [*beams[item][beam], token]
                if token == eos or t == max_length:
                    if rank < num_beams:
                        ended[row].add(value, tokens)
                elif len(chosen) < num_beams:
                    chosen.append((value, item * num_beams + beam, tokens))
            if chosen and not ended[row].complete(chosen[0][0], t + 1, max_length):
                while len(chosen) < num_beams:  # too few candidates: pad with -inf
                    chosen.append((float("-inf"), *chosen[0][1:]))
                survivors.append(chosen)
                items.append(item)
        active = [active[item] for item in items]
        beams = [[tokens for _, _, tokens in chosen] for chosen in survivors]
        scores = torch.tensor([[s for s, _, _ in chosen] for chosen in survivors], device=device)
        last = torch.tensor([tokens[-1] for b in beams for tokens in b], device=device)
        rows = [origin for chosen in survivors for _, origin, _ in chosen]
        cache.select(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(items, dtype=torch.int64, device=device),
        )
    best = [hypotheses.best[0] for hypotheses in ended]
    longest = max((len(tokens) for _, tokens in best), default=0)
    filled = torch.tensor([t + [eos] * (longest - len(t)) for _, t in best], device=device)
    lengths = torch.tensor([len(t) for _, t in best], dtype=torch.int64, device=device)
    best_scores = torch.tensor([s for s, _ in best], dtype=torch.float32, device=device)
    return Generated(filled.to(torch.int64).reshape(batch, longest), lengths, best_scores)
