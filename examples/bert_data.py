"""Data of `python examples/bert.py`: works, tokenizer, and passage pairs with masked tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import data
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
# A tragedy, a history and a comedy. None of these plays continues another play.
HELD_OUT = ["hamlet", "henry_viii", "twelfth_night"]
# Another tragedy, history and comedy, on which sizes and learning rates were chosen.
VALIDATION = ["macbeth", "john", "as_you_like_it"]
# A collection whose poems also occur in other works.
LEFT_OUT = ["passionate_pilgrim"]


class Batch(NamedTuple):
    """Texts of one or two segments. Each tensor has shape (batch, seqlen)."""

    ids: Tensor  # int64
    segments: Tensor  # int64: 0 up to the first [SEP], 1 after it
    padding: Tensor  # bool: True where there is no token


class Pretraining(NamedTuple):
    """Batch for both tasks of pretraining."""

    inputs: Batch  # with masked tokens
    chosen: Tensor  # (batch, seqlen) bool: positions to predict
    targets: Tensor  # (number of chosen positions,) int64: original tokens at these positions
    is_next: Tensor  # (batch,) int64: 1 if the second segment follows the first, else 0


def works(validation: bool = False) -> tuple[list[str], list[str]]:
    """Return the texts of the plays and poems to train on, and of the held-out plays.

    Args:
        validation: hold out the plays of VALIDATION, and omit those of HELD_OUT.
    """
    texts = {name: text for name, text in data.shakespeare().items() if name not in LEFT_OUT}
    held_out = [texts.pop(name) for name in HELD_OUT]
    if validation:
        held_out = [texts.pop(name) for name in VALIDATION]
    return list(texts.values()), held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of lower-cased subwords on the texts.

    The tokenizer is a BPE. BERT's WordPiece learns the same merges, but its training in this
    library is not deterministic.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Pairs:
    """Sampler of passage pairs, half of which are consecutive: Devlin et al. 2019, appendix A.2.

    A passage is a few printed lines. The second passage follows the first or comes from another
    work. Many pairs are shorter than `max_seqlen`, so that batches contain padding, as in practice.
    """

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer, max_seqlen: int) -> None:
        self.max_seqlen = max_seqlen
        self.vocab_size = tokenizer.get_vocab_size()
        self.works = []
        for text in texts:
            lines = [line for line in text.splitlines() if line.strip()]
            encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
            self.works.append([line.ids for line in encoded])
        # A pair may start at a line if enough text follows the line.
        self.starts = [
            (work, i)
            for work, lines in enumerate(self.works)
            for i in range(len(lines) - max_seqlen)
        ]

    def draw(self) -> tuple[list[int], list[int], int]:
        """Return the tokens of two passages, and 1 if the second follows the first, else 0."""
        work, i = self._start()
        longest = self.max_seqlen - len(["[CLS]", "[SEP]", "[SEP]"])
        total = int(torch.randint(longest // 2, longest + 1, ()))
        first, i = self._lines(work, i, total // 2)
        # Cut the front. The first passage then ends at a line break in both kinds of pairs.
        first = first[-(total // 2) :]
        is_next = int(torch.randint(2, ()))
        if not is_next:
            other = work
            while other == work:
                other, i = self._start()
            work = other
        return first, self._lines(work, i, total - len(first))[0][: total - len(first)], is_next

    def batch(self, size: int) -> Pretraining:
        """Return a batch of random pairs in which random tokens are masked."""
        firsts, seconds, is_next = zip(*(self.draw() for _ in range(size)), strict=True)
        inputs = make_batch(firsts, seconds)
        ids, chosen = mask_tokens(inputs.ids, self.vocab_size)
        targets = inputs.ids[chosen]
        return Pretraining(inputs._replace(ids=ids), chosen, targets, torch.tensor(is_next))

    def log_frequencies(self) -> Tensor:
        """Return log-frequencies of the tokens in these texts (a unigram model), (vocab_size,)."""
        counts = torch.ones(self.vocab_size)  # add-one smoothing, to avoid log(0)
        for lines in self.works:
            flat = torch.tensor([token for line in lines for token in line])
            counts += torch.bincount(flat, minlength=self.vocab_size)
        return (counts / counts.sum()).log()

    def _start(self) -> tuple[int, int]:
        return self.starts[int(torch.randint(len(self.starts), ()))]

    def _lines(self, work: int, i: int, length: int) -> tuple[list[int], int]:
        """Return at least `length` tokens of the lines from i on, and the next line's index."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self.works[work][i]
            i += 1
        return ids, i


def mask_tokens(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Mask random tokens for masked language modeling (Devlin et al. 2019, section 3.1, task 1).

    15 % of the tokens are chosen. Of these, 80 % become [MASK], 10 % become a random token, and
    10 % stay unchanged. The model must not rely on [MASK], because fine-tuning has none.

    Args:
        ids: (batch, seqlen) int64. Special tokens are never chosen.

    Returns:
        The masked ids, and the chosen positions, (batch, seqlen) bool.
    """
    chosen = (torch.rand(ids.shape) < 0.15) & (ids >= len(SPECIAL))
    kind = torch.rand(ids.shape)
    anything = torch.randint(len(SPECIAL), vocab_size, ids.shape)
    masked = torch.where(chosen & (kind < 0.8), MASK, ids)
    return torch.where(chosen & (kind >= 0.9), anything, masked), chosen


def make_batch(firsts: Iterable[list[int]], seconds: Iterable[list[int]] = ()) -> Batch:
    """Return a batch of [CLS] first [SEP] second [SEP], or [CLS] first [SEP] without seconds."""
    firsts = [[CLS, *first, SEP] for first in firsts]
    seconds = [[*second, SEP] for second in seconds] or [[] for _ in firsts]
    ids, padding = pad_batch([a + b for a, b in zip(firsts, seconds, strict=True)])
    behind = torch.arange(ids.shape[1]) >= torch.tensor([len(first) for first in firsts])[:, None]
    return Batch(ids, (behind & ~padding).long(), padding)


def pad_batch(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Pad rows of different lengths to a batch.

    Returns:
        ids (batch, seqlen) int64, and padding (batch, seqlen) bool, True where there is no token.
    """
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) >= lengths[:, None]
