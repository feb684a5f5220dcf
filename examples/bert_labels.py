"""Labelled text for `python examples/bert.py`: speeches, their form, and marks behind words."""

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

IGNORED = -100  # a label that F.cross_entropy skips
FORMS = ["verse", "prose"]
MARKS = ["none", ",", ".", ";:", "?!"]  # what follows a word


def speeches(texts: Iterable[str]) -> list[list[str]]:
    """Speeches of plays, three and more printed lines each, without speaker and directions."""
    found = []
    for text in texts:
        spoken = re.sub(r"\[[^]]*\]", "", text)
        for paragraph in re.split(r"\n\s*\n", spoken):
            speaker, *lines = paragraph.strip().split("\n")
            if len(lines) >= 3 and re.fullmatch(r"[A-Z][\w'. -]{0,30}", speaker.strip()):
                found.append([line.strip() for line in lines if line.strip()])
    return found


def form_of(lines: list[str]) -> int | None:
    """Verse (0) or prose (1), as the print has it: each line of verse begins with a capital, and
    prose goes on in small letters. None if it is not clear.

    A model that reads the lower-cased words in one row sees nothing of that.
    """
    small = [line.lstrip("'\"(-")[:1].islower() for line in lines[1:]]
    if not any(small):
        return 0
    return 1 if sum(small) * 2 >= len(small) else None


def marks_of(lines: list[str]) -> tuple[list[str], list[int]]:
    """The words of a speech in small letters, and for each the mark that follows it."""
    pairs = re.findall(r"([a-z']*[a-z][a-z']*)([^a-z']*)", " ".join(lines).lower())
    marks = [
        next((i for i, m in enumerate(MARKS[1:], 1) if behind.strip()[:1] in list(m)), 0)
        for _, behind in pairs
    ]
    return [word for word, _ in pairs], marks


class Labelled(NamedTuple):
    """Texts for fine-tuning."""

    rows: list[list[int]]  # tokens, without special ones
    labels: list[list[int]]  # of each text [label], or one for [CLS], each token and [SEP]

    def batches(self, order: Tensor, size: int) -> list[tuple[Batch, Tensor]]:
        """Texts in this order, with their labels, (batch, 1) or (batch, seqlen)."""
        result = []
        for part in order.split(size):
            labels = [torch.tensor(self.labels[i]) for i in part]
            padded = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
            result.append((make_batch([self.rows[i] for i in part]), padded))
        return result


def form_examples(found: list[list[str]], tokenizer: Tokenizer, max_seqlen: int) -> Labelled:
    """Passages of speeches with their form, as many of verse as of prose."""
    length = max_seqlen - 2
    by_form: list[list[list[int]]] = [[], []]
    for lines in found:
        form = form_of(lines)
        if form is not None:
            ids = tokenizer.encode(" ".join(lines)).ids
            by_form[form] += [ids[i : i + length] for i in range(0, len(ids) - length // 2, length)]
    count = min(map(len, by_form))
    rows = [rows[i] for rows in by_form for i in torch.randperm(len(rows))[:count]]
    return Labelled(rows, [[0]] * count + [[1]] * count)


def mark_examples(found: list[list[str]], tokenizer: Tokenizer, max_seqlen: int) -> Labelled:
    """Speeches without punctuation; the last token of each word has the mark that followed."""
    rows, labels = [], []
    for lines in found:
        words, marks = marks_of(lines)
        encoded = tokenizer.encode(words, is_pretokenized=True)
        of_token = encoded.word_ids[: max_seqlen - 2]
        # Behind the last token nothing is known: the text may be cut there.
        last = [a != b for a, b in itertools.pairwise(of_token)] + [False]
        own = [marks[word] if end else IGNORED for word, end in zip(of_token, last, strict=True)]
        rows.append(encoded.ids[: max_seqlen - 2])
        labels.append([IGNORED, *own, IGNORED])
    return Labelled(rows, labels)
