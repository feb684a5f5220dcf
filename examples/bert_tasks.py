"""Fine-tuning of `python examples/bert.py`: three heads, each from pretrained and random weights.

Pretraining helps when labels are few: fine-tuning uses three hundred texts, pretraining 38 works.
Each fine-tuning is repeated with several seeds. For each seed, pretrained and random weights are
trained on the same texts in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import common
import fitting
import torch
import torch.nn.functional as F
from bert_data import Batch
from bert_labels import (
    FORMS,
    IGNORED,
    MARKS,
    Labeled,
    form_examples,
    mark_examples,
    speeches,
)
from bert_model import Bert, SentenceClassifier, TokenClassifier
from terminal import table
from tokenizers import Tokenizer
from torch import Tensor, nn

PEAK = 1e-3  # learning rate for pretrained and random weights; with 3e-4, both learn less
BATCH = 32
FORM_SEQLEN = 32  # tokens per passage of verse or prose; shorter passages are more numerous

HEADS: dict[str, Callable[[Bert], nn.Module]] = {
    "form_cls": lambda bert: SentenceClassifier(bert, len(FORMS), "cls"),
    "form_mean": lambda bert: SentenceClassifier(bert, len(FORMS), "mean"),
    "marks": lambda bert: TokenClassifier(bert, len(MARKS)),
}
# Heads that must gain from pretraining. The mean over tokens gains less, only one to three standard
# errors, because random embeddings separate verse from prose by the words alone.
REQUIRED = ("form_cls", "marks")


@dataclass(frozen=True)
class Amount:
    """Amount of fine-tuning: number of labeled texts, of epochs and of seeds."""

    texts: int
    epochs: int
    seeds: int


class Score(NamedTuple):
    """Number of correct labels and of all labels per text, and macro F1 over all labels."""

    right: Tensor  # (texts,) float32
    labels: Tensor  # (texts,) float32
    macro_f1: float


def fine_tune(model: nn.Module, examples: Labeled, amount: Amount, title: str) -> None:
    """Train all weights of a model on labeled texts or tokens."""
    texts = torch.randperm(len(examples.rows))[: amount.texts]
    orders = [texts[torch.randperm(len(texts))] for _ in range(amount.epochs)]
    batches = [batch for order in orders for batch in examples.batches(order, BATCH)]

    def loss(batch: tuple[Batch, Tensor]) -> Tensor:
        inputs, labels = batch
        with fitting.mixed_precision():
            scores = model(*inputs)
        return F.cross_entropy(scores.float().flatten(0, -2), labels.flatten())

    schedule = fitting.cosine(PEAK, len(batches) // 10 + 1, len(batches))
    fitting.train(model.parameters(), loss, batches, schedule, title)


@torch.no_grad()
def score(model: nn.Module, examples: Labeled) -> Score:
    """Return the scores of a model on labeled texts that it was not trained on."""
    model.eval()
    right, labels, true, given = [], [], [], []
    for inputs, wanted in examples.batches(torch.arange(len(examples.rows)), BATCH):
        with fitting.mixed_precision():
            found = model(*inputs).argmax(-1).view_as(wanted)
        kept = wanted != IGNORED
        right.append(((found == wanted) & kept).sum(1).float())
        labels.append(kept.sum(1).float())
        true.append(wanted[kept])
        given.append(found[kept])
    macro_f1 = fitting.macro_f1(torch.cat(true), torch.cat(given))
    return Score(torch.cat(right), torch.cat(labels), macro_f1)


def gain(ours: list[Score], others: list[Score]) -> tuple[float, float]:
    """Return the mean gain in accuracy of `ours` over `others`, and its standard error.

    The error combines the variance over seeds, whose scores are paired, and over texts. Texts are
    the sampled units, because labels of one text are not independent.
    """
    labels = ours[0].labels
    more = torch.stack([a.right - b.right for a, b in zip(ours, others, strict=True)])
    of_seeds = more.sum(1) / labels.sum()
    mean = of_seeds.mean()
    of_texts = (more.mean(0) - mean * labels).square().sum().sqrt() / labels.sum()
    seeds = of_seeds.std() / math.sqrt(len(ours)) if len(ours) > 1 else torch.tensor(0.0)
    return mean.item(), math.hypot(seeds.item(), of_texts.item())


def summary(scores: list[Score]) -> dict[str, float | list[float]]:
    """Return accuracy and macro F1 as means over seeds, and the accuracy of each seed."""
    accuracies = [(s.right.sum() / s.labels.sum()).item() for s in scores]
    return {
        "accuracy": round(sum(accuracies) / len(scores), 4),
        "macro_f1": round(sum(s.macro_f1 for s in scores) / len(scores), 4),
        "accuracies": [round(accuracy, 4) for accuracy in accuracies],
    }


def majority(examples: Labeled) -> float:
    """Return the frequency of the most frequent label."""
    labels = torch.tensor([label for row in examples.labels for label in row])
    return labels[labels != IGNORED].bincount().max().item() / (labels != IGNORED).sum().item()


def compare_heads(
    run: common.Example,
    pretrained: Bert,
    new_bert: Callable[[], Bert],
    texts: list[str],
    held_out: list[str],
    tokenizer: Tokenizer,
    amount: Amount,
) -> None:
    """Fine-tune each head from pretrained and from random weights, and compare the two.

    Args:
        new_bert: returns a model of the same size with random weights.
    """
    tests = speeches(held_out)
    known = {" ".join(lines).lower() for lines in tests}
    training = [lines for lines in speeches(texts) if " ".join(lines).lower() not in known]
    seqlen = pretrained.config.max_seqlen
    forms = [form_examples(found, tokenizer, FORM_SEQLEN) for found in (training, tests)]
    marks = [mark_examples(found, tokenizer, seqlen) for found in (training, tests)]
    rows = []
    for head, add_head in HEADS.items():
        known_texts, new_texts = marks if head == "marks" else forms
        scores: dict[str, list[Score]] = {head: [], f"{head}_random": []}
        for seed in range(amount.seeds):
            for task, found in scores.items():
                torch.manual_seed(1000 * run.seed + seed)
                model = add_head(new_bert())
                if task == head:
                    model.bert.load_state_dict(pretrained.state_dict())
                fine_tune(model, known_texts, amount, f"Fine-tuning, {task}, seed {seed}")
                found.append(score(model, new_texts))
        frequent = majority(new_texts)
        for task, found in scores.items():
            figures = run.figures[task] = summary(found) | {"majority": round(frequent, 4)}
            rows.append((task, *(figures[k] for k in ("accuracy", "majority", "macro_f1"))))
        more, error = gain(*scores.values())
        run.figures[head] |= {"gain": round(more, 4), "gain_standard_error": round(error, 4)}
        accuracies = [run.figures[task]["accuracy"] for task in scores]
        if head not in REQUIRED:
            continue
        run.require(
            more > 2 * error,
            f"{head}, held-out plays: accuracy {accuracies[0]:.3f}, from random weights "
            f"{accuracies[1]:.3f}, the most frequent label {frequent:.3f}; the gain must be more "
            f"than two standard errors over {amount.seeds} seeds, {2 * error:.3f}, got {more:.3f}",
        )
    header = ("task", "accuracy", "majority", "macro F1")
    title = f"Held-out plays, {amount.seeds} seeds: verse or prose, and which mark follows a word"
    table(title, header, rows)
