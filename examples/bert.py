"""BERT: pretraining on Shakespeare, then fine-tuning for whole texts and for single words.

    python examples/bert.py

Pretraining has no labels: tokens are hidden and have to be found again, and of two passages the
model says whether the second one follows the first, or comes from another work. Then passages are
classified as verse or prose, by the vector of [CLS] and by the mean over all tokens, and the
punctuation of texts that have none is restored, word by word. The same from random weights shows
what pretraining is worth. Three plays are held out, of everything. The model has the size of
BERT-Tiny (Turc et al. 2019, "Well-Read Students Learn Better").

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import common
import fitting
import torch
import torch.nn.functional as F
from bert_data import (
    FORMS,
    IGNORED,
    MARKS,
    Batch,
    Labelled,
    Pairs,
    Pretraining,
    form_examples,
    mark_examples,
    speeches,
    train_tokenizer,
    works,
)
from bert_model import Bert, BertConfig, PretrainingHeads, SentenceClassifier, TokenClassifier
from common import console
from tokenizers import Tokenizer
from torch import Tensor, nn

MAX_SEQLEN = 32
PEAK = 3e-3  # learning rate of pretraining
FINE_TUNING_PEAK = 1e-3
DROPOUT = 0.1  # of fine-tuning, which sees its texts often
BATCH = 32  # of fine-tuning and of validation


@dataclass(frozen=True)
class Size:
    """What differs between a full run and a smoke test."""

    works: int
    vocab_size: int
    d_model: int
    num_layers: int
    steps: int
    warmup: int
    batch: int
    pairs: int  # held out, for validation
    curve_steps: int
    texts: int  # for fine-tuning
    epochs: int


FULL = Size(38, 1000, 128, 2, 4000, 200, 64, 2048, 200, 6000, 2)
SMOKE = Size(3, 300, 32, 2, 4, 2, 8, 64, 3, 64, 1)


def new_bert(size: Size, dropout: float) -> Bert:
    """A BERT with random weights."""
    sizes = (size.d_model, size.num_layers, size.d_model // 32, 4 * size.d_model, MAX_SEQLEN)
    return Bert(BertConfig(size.vocab_size, *sizes, dropout))


def pretraining_losses(model: PretrainingHeads, batch: Pretraining) -> tuple[Tensor, Tensor]:
    """Cross entropy of the hidden tokens, and of whether the second passage is the next one."""
    tokens, is_next = model(*batch.inputs, batch.chosen)
    return F.cross_entropy(tokens, batch.targets), F.cross_entropy(is_next, batch.is_next)


def pretrain(
    model: PretrainingHeads, pairs: Pairs, size: Size, steps: int, title: str
) -> tuple[list[float], list[float]]:
    """Trains on the sum of both losses; returns those of hidden tokens and of the next passage."""
    each = []

    def loss(step: int) -> Tensor:
        mlm, nsp = pretraining_losses(model, pairs.batch(size.batch))
        each.append((mlm.item(), nsp.item()))
        return mlm + nsp

    schedule = fitting.cosine(PEAK, size.warmup, size.steps)
    fitting.train(model.parameters(), loss, range(1, steps + 1), schedule, title)
    mlm, nsp = zip(*each, strict=True)
    return list(mlm), list(nsp)


@torch.no_grad()
def validate(model: PretrainingHeads, batches: list[Pretraining]) -> tuple[float, float]:
    """Loss of the hidden tokens, and accuracy on the next passage."""
    model.eval()
    loss = tokens = right = pairs = 0.0
    for batch in batches:
        scores, is_next = model(*batch.inputs, batch.chosen)
        loss += F.cross_entropy(scores, batch.targets, reduction="sum").item()
        tokens += len(batch.targets)
        right += (is_next.argmax(1) == batch.is_next).sum().item()
        pairs += len(batch.is_next)
    return loss / tokens, right / pairs


def fine_tune(model: nn.Module, examples: Labelled, size: Size, title: str) -> None:
    """Trains all weights, on the labels of texts or of tokens."""
    orders = [torch.randperm(len(examples.rows))[: size.texts] for _ in range(size.epochs)]
    batches = [batch for order in orders for batch in examples.batches(order, BATCH)]

    def loss(batch: tuple[Batch, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(*inputs).flatten(0, -2), labels.flatten())

    schedule = fitting.cosine(FINE_TUNING_PEAK, len(batches) // 10 + 1, len(batches))
    fitting.train(model.parameters(), loss, batches, schedule, title)


@torch.no_grad()
def score(model: nn.Module, examples: Labelled) -> dict[str, float]:
    """Accuracy, that of the most frequent label, and the mean of the F1 of all labels."""
    model.eval()
    true, given = [], []
    for inputs, labels in examples.batches(torch.arange(len(examples.rows)), BATCH):
        kept = labels.flatten() != IGNORED
        true.append(labels.flatten()[kept])
        given.append(model(*inputs).argmax(-1).flatten()[kept])
    labels, predicted = torch.cat(true), torch.cat(given)
    return {
        "accuracy": round((labels == predicted).float().mean().item(), 4),
        "majority": round(labels.bincount().max().item() / len(labels), 4),
        "macro_f1": round(fitting.macro_f1(labels, predicted), 4),
        "majority_macro_f1": round(
            fitting.macro_f1(labels, labels.mode().values.expand_as(labels)), 4
        ),
    }


def report_pretraining(
    run: common.Example, model: PretrainingHeads, validation: list[Pretraining], pairs: Pairs
) -> None:
    """What the model knows of held-out plays, against what it could know without context."""
    mlm, nsp = validate(model, validation)
    targets = torch.cat([batch.targets for batch in validation])
    # Of held-out tokens, by the frequencies of the text that is trained on.
    entropy = -pairs.log_frequencies()[targets].mean().item()
    error = math.sqrt(0.25 / sum(len(batch.is_next) for batch in validation))
    run.figures |= {
        "mlm_loss": round(mlm, 4),
        "unigram_entropy": round(entropy, 4),
        "nsp_accuracy": round(nsp, 4),
        "nsp_standard_error": round(error, 4),
    }
    common.table(
        "Held-out plays",
        ("task", "model", "without context"),
        [
            ("hidden tokens, nats", f"{mlm:.3f}", f"{entropy:.3f} (unigram entropy)"),
            ("next passage, accuracy", f"{nsp:.3f}", f"0.500 (standard error {error:.3f})"),
        ],
    )
    run.require(
        mlm < entropy - 0.5,
        f"loss of hidden tokens of held-out plays must be 0.5 nats under the unigram entropy "
        f"({entropy:.3f}), got {mlm:.3f}",
    )
    chance = max(0.55, 0.5 + 3 * error)
    run.require(nsp > chance, f"accuracy on the next passage must be > {chance:.3f}, got {nsp:.3f}")


def curve(pairs: Pairs, size: Size) -> list[float]:
    """The losses of the first steps of pretraining."""
    model = PretrainingHeads(new_bert(size, dropout=0.0))
    mlm, nsp = pretrain(model, pairs, size, size.curve_steps, "Comparing")
    return [a + b for a, b in zip(mlm, nsp, strict=True)]


def compare_heads(
    run: common.Example,
    pretrained: Bert,
    texts: list[str],
    held_out: list[str],
    tokenizer: Tokenizer,
    size: Size,
) -> None:
    """Fine-tunes each kind of head, and the same models from random weights."""
    tests = speeches(held_out)
    known = {" ".join(lines).lower() for lines in tests}
    training = [lines for lines in speeches(texts) if " ".join(lines).lower() not in known]
    forms = [form_examples(found, tokenizer, MAX_SEQLEN) for found in (training, tests)]
    marks = [mark_examples(found, tokenizer, MAX_SEQLEN) for found in (training, tests)]
    rows = []
    for task in ("form_cls", "form_mean", "form_mean_random", "marks", "marks_random"):
        bert = new_bert(size, DROPOUT)
        if not task.endswith("random"):
            bert.load_state_dict(pretrained.state_dict())
        if task.startswith("marks"):
            examples, model = marks, TokenClassifier(bert, len(MARKS))
        else:
            examples, model = forms, SentenceClassifier(bert, len(FORMS), task.split("_")[1])
        fine_tune(model, examples[0], size, f"Fine-tuning, {task}")
        figures = run.figures[task] = score(model, examples[1])
        rows.append((task, *(f"{value:.3f}" for value in figures.values())))
    header = ("task", "accuracy", "majority", "macro F1", "majority")
    common.table("Held-out plays: verse or prose, and which mark follows a word", header, rows)
    for task, accuracy, majority, f1, other in rows:
        run.report(
            f"fine-tuned, {task}, held-out plays: accuracy {accuracy} (most frequent label "
            f"{majority}), macro F1 {f1} ({other})"
        )


def main() -> None:
    with common.example("bert", __doc__) as run:
        size = SMOKE if run.smoke else FULL
        texts, held_out = works()
        texts = texts[: size.works]
        tokenizer = train_tokenizer(texts, size.vocab_size)
        pairs = Pairs(texts, tokenizer, MAX_SEQLEN)
        held_out_pairs = Pairs(held_out, tokenizer, MAX_SEQLEN)
        validation = [held_out_pairs.batch(64) for _ in range(size.pairs // 64)]

        model = PretrainingHeads(new_bert(size, dropout=0.0))
        console.print(f"{len(texts)} works to learn from, {len(held_out)} held out")
        mlm, nsp = pretrain(model, pairs, size, size.steps, "Pretraining")
        report_pretraining(run, model, validation, pairs)
        curves = run.compare_curves(lambda: curve(pairs, size))
        with run.figure("curves", 1, 3 if curves else 2, size=(13, 3.6)) as axes:
            entropy = run.figures["unigram_entropy"]
            axes[0].axhline(entropy, color="black", linestyle="--", label="unigram entropy")
            fitting.plot_curves(axes[0], {"hidden tokens": fitting.smoothed(mlm)}, "Pretraining")
            axes[1].axhline(math.log(2), color="black", linestyle="--", label="chance")
            fitting.plot_curves(axes[1], {"next passage": fitting.smoothed(nsp)}, "Pretraining")
            if curves:
                fitting.plot_curves(axes[2], curves, "Both, first steps, of two backends")
        compare_heads(run, model.bert, texts, held_out, tokenizer, size)


if __name__ == "__main__":
    main()
