"""Labeled text of `python examples/bert.py`: verse or prose, and punctuation after words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from bert_data import Batch, make_batch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # label that F.cross_entropy ignores
FORMS = ["verse", "prose"]
MARKS = ["none", ",", ".", ";:", "?!"]  # punctuation after a word, by class


def speeches(texts: Iterable[str]) -> list[list[str]]:
    """Return speeches of at least three printed lines, without speakers and stage directions."""
    found = []
    for text in texts:
        spoken = re.sub(r"\[[^]]*\]", "", text)
        for paragraph in re.split(r"\n\s*\n", spoken):
            speaker, *lines = paragraph.strip().split("\n")
            if len(lines) >= 3 and re.fullmatch(r"[A-Z][\w'. -]{0,30}", speaker.strip()):
                found.append([line.strip() for line in lines if line.strip()])
    return found


def form_of(lines: list[str]) -> int | None:
    """Return 0 for verse, 1 for prose, or None if the form is unclear.

    In print, each line of verse begins with a capital letter, and lines of prose continue in lower
    case. The model cannot use these clues, because its input is lower-cased and has no line breaks.
    """
    small = [line.lstrip("'\"(-")[:1].islower() for line in lines[1:]]
    if not any(small):
        return 0
    return 1 if sum(small) * 2 >= len(small) else None


def marks_of(lines: list[str]) -> tuple[list[str], list[int]]:
    """Return the lower-cased words of a speech, and the class of the mark after each word."""
    pairs = re.findall(r"([a-z']*[a-z][a-z']*)([^a-z']*)", " ".join(lines).lower())
    marks = [
        next((i for i, m in enumerate(MARKS[1:], 1) if behind.strip()[:1] in list(m)), 0)
        for _, behind in pairs
    ]
    return [word for word, _ in pairs], marks


class Labeled(NamedTuple):
    """Labeled texts for fine-tuning."""

    rows: list[list[int]]  # token ids of each text, without special tokens
    labels: list[list[int]]  # per text: [label], or one label for each of [CLS], tokens, [SEP]

    def batches(self, order: Tensor, size: int) -> list[tuple[Batch, Tensor]]:
        """Return batches of texts in the given order, with labels (batch, 1) or (batch, seqlen)."""
        result = []
        for part in order.split(size):
            labels = [torch.tensor(self.labels[i]) for i in part]
            padded = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
            result.append((make_batch([self.rows[i] for i in part]), padded))
        return result


def form_examples(found: list[list[str]], tokenizer: Tokenizer, max_seqlen: int) -> Labeled:
    """Return passages of speeches labeled with their form, as many of verse as of prose."""
    length = max_seqlen - 2
    by_form: list[list[list[int]]] = [[], []]
    for lines in found:
        form = form_of(lines)
        if form is not None:
            ids = tokenizer.encode(" ".join(lines)).ids
            by_form[form] += [ids[i : i + length] for i in range(0, len(ids) - length // 2, length)]
    count = min(map(len, by_form))
    rows = [rows[i] for rows in by_form for i in torch.randperm(len(rows))[:count]]
    return Labeled(rows, [[0]] * count + [[1]] * count)


def mark_examples(found: list[list[str]], tokenizer: Tokenizer, max_seqlen: int) -> Labeled:
    """Return speeches without punctuation; the last token of a word is labeled with its mark."""
    rows, labels = [], []
    for lines in found:
        words, marks = marks_of(lines)
        encoded = tokenizer.encode(words, is_pretokenized=True)
        of_token = encoded.word_ids[: max_seqlen - 2]
        # The mark of the last token is unknown, because the text may be cut inside a word.
        last = [a != b for a, b in itertools.pairwise(of_token)] + [False]
        own = [marks[word] if end else IGNORED for word, end in zip(of_token, last, strict=True)]
        rows.append(encoded.ids[: max_seqlen - 2])
        labels.append([IGNORED, *own, IGNORED])
    return Labeled(rows, labels)
