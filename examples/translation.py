"""Code shared by translate.py and rnn.py: data, batches, training and scores, but no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import common
import curves
import data
import fitting
import sacrebleu
import torch
import torch.nn.functional as F
from terminal import console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

Pair = tuple[str, str]  # English, Korean
Search = Callable[[Tensor], Tensor]  # source (N, S) -> translation (N, T), <eos> after its end
SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
PAD, UNK, BOS, EOS = range(4)
VOCABULARY = 2000
MAX_TOKENS = 250  # maximum tokens per batch in one language, including padding
LABEL_SMOOTHING = 0.1  # Vaswani et al. 2017, section 5.4
LONGER_BY = 50  # tokens by which a translation may exceed its source (section 6.1)
Schedule = Callable[[int], float]  # step, counted from 1 -> learning rate
# Steps compared. After 200 steps, the maximum deviations of correct trainings vary more, from
# 3.7e-4 to 2.4e-3 (see curves.FACTOR).
COMPARED_STEPS = 100
BINS = {"1-4": 4, "5-8": 8, "9-16": 16, "17-32": 32, "33+": 999}  # name -> maximum source tokens


class Batch(NamedTuple):
    """Sentence pairs of similar lengths, padded on the right.

    Attributes:
        source: (N, S) tokens that end with <eos>.
        target: (N, T) tokens that begin with <bos> and end with <eos>.
    """

    source: Tensor
    target: Tensor

    def shifted(self) -> tuple[Tensor, Tensor]:
        """Return the decoder's inputs and its targets, (N, T - 1) each, for teacher forcing.

        The input at each position is the target of the preceding position.
        """
        return self.target[:, :-1], self.target[:, 1:]


@dataclass
class Corpus:
    """Training pairs, held-out pairs, and their tokenizer."""

    train: list[Pair]
    held_out: list[Pair]
    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the tokens of each text, followed by <eos>."""
        return [torch.tensor([*e.ids, EOS]) for e in self.tokenizer.encode_batch(texts)]

    def batches(self, pairs: Sequence[Pair], epochs: int = 1) -> list[Batch]:
        """Return batches of all pairs, `epochs` times, shuffled by torch's default generator."""
        source, target = (self.encode(texts) for texts in zip(*pairs, strict=True))
        target = [torch.cat([torch.tensor([BOS]), t]) for t in target]
        result = []
        for _ in range(epochs):
            order = torch.randperm(len(pairs)).tolist()
            groups = group([max(len(source[i]), len(target[i])) for i in order], MAX_TOKENS)
            for at in torch.randperm(len(groups)).tolist():
                rows = [order[i] for i in groups[at]]
                result.append(
                    Batch(*(padded([side[i] for i in rows]) for side in (source, target)))
                )
        return result

    def translate(self, texts: Sequence[str], search: Search) -> list[str]:
        """Return the translation of each text, in the order of texts."""
        tokens = self.encode(texts)
        result = [""] * len(texts)
        for rows in group([len(t) for t in tokens], 8 * MAX_TOKENS):
            found = search(padded([tokens[i] for i in rows])).tolist()
            for i, text in zip(rows, self.tokenizer.decode_batch(found), strict=True):
                result[i] = text
        return result


def load(smoke: bool) -> Corpus:
    """Load English messages of JupyterLab with Korean translations; only 60 in smoke mode."""
    train, held_out = data.split_pairs(data.korean_pairs()[: 60 if smoke else None])
    return Corpus(train, held_out, train_tokenizer([text for pair in train for text in pair]))


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train a byte pair encoding (Sennrich, Haddow and Birch 2016) on both languages.

    It merges characters instead of bytes, so that tokens are readable. Characters that do not occur
    in the texts become <unk>.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def group(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices in order of ascending length; a padded group has at most max_tokens tokens.

    A sequence longer than max_tokens forms a separate group. The number of groups does not depend
    on the order of the lengths.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or (len(groups[-1]) + 1) * lengths[i] > max_tokens:
            groups.append([])
        groups[-1].append(i)
    return groups


def padded(sequences: Sequence[Tensor]) -> Tensor:
    """Pad sequences to (N, longest) tokens."""
    return pad_sequence(list(sequences), batch_first=True, padding_value=PAD)


def batch_loss(model: Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next tokens, excluding padding.

    The target distribution assigns 1 - LABEL_SMOOTHING to the next token and spreads
    LABEL_SMOOTHING uniformly over all tokens (Szegedy et al. 2016, section 7).

    Args:
        model: maps source (N, S) and target (N, T) to logits (N, T, VOCABULARY).
    """
    read, said = batch.shifted()
    logits = model(batch.source, read).flatten(0, 1)
    options = {"ignore_index": PAD, "label_smoothing": LABEL_SMOOTHING}
    return F.cross_entropy(logits, said.flatten(), **options)


@torch.no_grad()
def mean_loss(model: Module, batches: Sequence[Batch]) -> float:
    """Return the mean loss per token over the batches, without dropout."""
    model.eval()
    tokens = [int((batch.shifted()[1] != PAD).sum()) for batch in batches]
    losses = [batch_loss(model, batch).item() for batch in batches]
    model.train()
    return sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)


def compare(
    run: common.Example, corpus: Corpus, build: Callable[[], Module], schedule: Schedule
) -> None:
    """Compare the loss curves of two backends over the first steps of `fit`.

    Args:
        build: returns a new model without dropout.
    """
    steps = 3 if run.smoke else COMPARED_STEPS

    def train(prepare: curves.Prepare) -> list[float]:
        model = prepare(build())
        batches = corpus.batches(corpus.train, epochs=2)[:steps]  # an epoch has 100 batches
        loss = partial(batch_loss, model)
        return fitting.train(model.parameters(), loss, batches, schedule, "No dropout")

    if pair := curves.compare(run, train):
        with run.figure("backends", size=(6, 4)) as axis:
            fitting.plot_curves(axis, pair, "One training on two backends")


def fit(
    run: common.Example, model: Module, corpus: Corpus, epochs: int, schedule: Schedule
) -> None:
    """Train a model; plot its training loss and its loss on held-out pairs after each epoch."""
    batches = corpus.batches(corpus.train, epochs)
    held_out = corpus.batches(corpus.held_out)
    per_epoch = len(batches) // epochs
    validation: list[float] = []

    def validate(step: int) -> None:
        if step % per_epoch == 0:
            validation.append(mean_loss(model, held_out))

    loss = partial(batch_loss, model)
    begin = time.perf_counter()
    losses = fitting.train(model.parameters(), loss, batches, schedule, "Training", after=validate)
    seconds = (time.perf_counter() - begin) / epochs
    learned = torch.tensor(losses).reshape(epochs, per_epoch).mean(1).tolist()
    run.figures |= {
        "settings": f"{len(corpus.train)} pairs, {VOCABULARY} tokens, batches of {MAX_TOKENS}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": epochs,
        "seconds_per_epoch": round(seconds, 2),
        "loss": {"train": round(learned[-1], 4), "held_out": round(validation[-1], 4)},
    }
    console.print(f"{epochs} epochs, {seconds:.1f} s each; loss: {run.figures['loss']}")
    with run.figure("loss", size=(6, 4)) as axis:
        axis.plot(range(1, epochs + 1), learned, label="training, with dropout")
        axis.plot(range(1, epochs + 1), validation, label="held-out")
        axis.set(xlabel="epoch", ylabel="loss with label smoothing (nats)")
        axis.legend()


def evaluate(run: common.Example, corpus: Corpus, search: Search) -> list[str]:
    """Translate all pairs; record the fraction of exact matches and chrF (Popović 2015).

    Returns:
        The translations of the held-out pairs.
    """
    for name, pairs in (("train", corpus.train), ("held_out", corpus.held_out)):
        english, korean = zip(*pairs, strict=True)
        ours = corpus.translate(english, search)
        lengths = [len(tokens) - 1 for tokens in corpus.encode(english)]
        bins = [next(key for key, most in BINS.items() if n <= most) for n in lengths]
        run.figures[name] = {}
        for key in ("all", *BINS):
            rows = [i for i in range(len(pairs)) if key in ("all", bins[i])]
            found = scores([ours[i] for i in rows], [korean[i] for i in rows]) if rows else {}
            run.figures[name][key] = {"pairs": len(rows), **found}
    return ours


def scores(translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return the fraction of exact translations, and chrF from 0 to 100."""
    pairs = zip(translations, references, strict=True)
    return {
        "exact": round(sum(ours == theirs for ours, theirs in pairs) / len(references), 4),
        "chrf": round(sacrebleu.corpus_chrf(translations, [references]).score, 2),
    }
