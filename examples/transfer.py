"""Transfer learning: a pretrained BERT learns the genre of passages from 150 labeled examples.

    python examples/transfer.py

The pretrained model is all-MiniLM-L6-v2, which embeds English sentences. In the first phase, all
its weights are frozen, and a linear head learns to classify embeddings of Shakespeare passages as
comedy, history or tragedy. In the second phase, all weights are trained, at a lower learning rate.
To measure the gain from pretraining, the same architecture is trained from random weights, with the
same passages and number of steps. Training and test use different plays.

Source: Devlin et al. 2019, "BERT", section 5.3 (features and fine-tuning); Howard and Ruder 2018,
"Universal Language Model Fine-tuning for Text Classification", section 3.3 (unfreezing).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import common
import curves
import data
import fitting
import torch
import torch.nn.functional as F
from bert_data import pad_batch
from bert_labels import speeches
from bert_model import Bert, SentenceClassifier, load_minilm
from terminal import console, table
from tokenizers import Tokenizer
from torch import Tensor

TRAINING = {
    "comedy": ["alls_well_that_ends_well", "as_you_like_it", "comedy_of_errors",
               "loves_labours_lost", "measure_for_measure", "merry_wives_of_windsor",
               "midsummer_nights_dream", "taming_of_the_shrew", "tempest",
               "two_gentlemen_of_verona", "winters_tale"],
    "history": ["henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1",
                "henry_vi_part_2", "henry_vi_part_3", "richard_ii", "richard_iii"],
    "tragedy": ["antony_and_cleopatra", "julius_caesar", "lear", "macbeth", "othello",
                "timon_of_athens", "tragedy_of_titus_andronicus"],
}  # fmt: skip
# No test play is a sequel to a training play, because sequels share characters. A few names, such
# as Antonio, still occur in comedies of both sets.
TEST = {
    "comedy": ["merchant_of_venice", "much_ado_about_nothing", "twelfth_night"],
    "history": ["henry_viii", "john"],
    "tragedy": ["coriolanus", "hamlet", "romeo_and_juliet"],
}
GENRES = list(TRAINING)
BATCH = 16
DROPOUT = 0.1
# Peak learning rates: of the head alone, of all layers afterwards, of training from random weights.
HEAD_PEAK = 3e-3
PEAK = 5e-5
SCRATCH_PEAK = 3e-4


@dataclass(frozen=True)
class Size:
    """Sizes of a full run or of a smoke test."""

    training: int  # training passages per genre
    test: int  # test passages per genre
    words: int  # words per passage
    head_epochs: int
    epochs: int
    curve_steps: int


FULL = Size(50, 150, 100, 14, 6, 25)
SMOKE = Size(4, 4, 8, 2, 1, 2)


class Passages(NamedTuple):
    """Labeled passages as token ids."""

    ids: list[list[int]]  # token ids, including [CLS] and [SEP]
    labels: Tensor  # (passages,) int64

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a model's arguments for the passages at `index`: ids, segments, padding."""
        ids, padding = pad_batch([self.ids[i] for i in index])
        return ids, torch.zeros_like(ids), padding


def read_passages(
    plays: dict[str, list[str]], count: int, words: int, tokenizer: Tokenizer
) -> Passages:
    """Return random passages of consecutive speeches, without the names of the speakers.

    Args:
        plays: names of plays by genre.
        count: number of passages per genre.
        words: number of words per passage.
    """
    texts = data.shakespeare()
    chosen = []
    for names in plays.values():
        passages = []
        for name in names:
            spoken = [line for lines in speeches([texts[name]]) for line in lines]
            every = " ".join(spoken).split()
            starts = range(0, len(every) - words, words)
            passages += [" ".join(every[i : i + words]) for i in starts]
        chosen += [passages[i] for i in torch.randperm(len(passages))[:count]]
    ids = [encoded.ids for encoded in tokenizer.encode_batch(chosen)]
    return Passages(ids, torch.arange(len(plays)).repeat_interleave(count))


@torch.no_grad()
def embed(model: SentenceClassifier, passages: Passages) -> Tensor:
    """Return one vector per passage, (passages, d_model), computed without dropout."""
    model.eval()
    order = torch.arange(len(passages.ids))
    return torch.cat([model.pooled(*passages.batch(part)) for part in order.split(BATCH)])


@torch.no_grad()
def accuracy(model: SentenceClassifier, passages: Passages) -> float:
    """Return the accuracy of a model on labeled passages."""
    predicted = model.head(embed(model, passages)).argmax(1)
    return (predicted == passages.labels).float().mean().item()


def epochs_of(count: int, epochs: int) -> list[Tensor]:
    """Return batches of indices below `count`, reshuffled for each epoch."""
    return [part for _ in range(epochs) for part in torch.randperm(count).split(BATCH)]


def train(
    model: SentenceClassifier, passages: Passages, batches: list[Tensor], peak: float, title: str
) -> list[float]:
    """Train all weights that are not frozen; return the losses."""

    def loss(index: Tensor) -> Tensor:
        return F.cross_entropy(model(*passages.batch(index)), passages.labels[index])

    model.train()
    schedule = fitting.cosine(peak, len(batches) // 10 + 1, len(batches))
    return fitting.train(model.parameters(), loss, batches, schedule, title)


def check_frozen(run: common.Example, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check that frozen weights are bitwise unchanged and that the head changed."""
    same = {name: torch.equal(before[name], after[name]) for name in before}
    frozen = all(equal for name, equal in same.items() if not name.startswith("head."))
    head = not any(equal for name, equal in same.items() if name.startswith("head."))
    count = sum(not name.startswith("head.") for name in same)
    console.print(
        f"After the first phase: {count} frozen tensors {'un' * frozen}changed, "
        f"head {'changed' if head else 'unchanged'}"
    )
    run.figures |= {"frozen_bit_identical": frozen, "head_changed": head}
    run.require(frozen, f"{count} frozen tensors must have the same bits after the first phase")
    run.require(head, "the head must have changed in the first phase")


def report(run: common.Example, results: dict[str, float], tested: int) -> None:
    """Report accuracies, and require that pretraining improves them."""
    error = math.sqrt(2 * 0.25 / tested)  # standard error of a difference, at most
    run.figures |= {name: round(value, 4) for name, value in results.items()}
    run.figures["standard_error_of_differences"] = round(error, 4)
    rows = [(name.replace("_", " "), f"{value:.3f}") for name, value in results.items()]
    table("Plays not trained on", ("", "accuracy"), rows)
    for name in ("frozen", "unfrozen"):
        for baseline in ("majority", "from_scratch"):
            run.require(
                results[name] > results[baseline] + 2 * error,
                f"accuracy on plays not trained on, {name}, must be two standard errors above "
                f"{baseline.replace('_', ' ')} ({results[baseline]:.3f}), got {results[name]:.3f}",
            )


def curve(training: Passages, steps: int, prepare: curves.Prepare) -> list[float]:
    """Return the losses of a short training of all weights without dropout."""
    model = prepare(SentenceClassifier(load_minilm(dropout=0.0)[0], len(GENRES), "mean"))
    batches = [torch.randint(len(training.ids), (8,)) for _ in range(steps)]
    return train(model, training, batches, PEAK, "Comparing")


def main() -> None:
    with common.example("transfer", __doc__) as run:
        size = SMOKE if run.smoke else FULL
        bert, tokenizer = load_minilm(DROPOUT)
        training = read_passages(TRAINING, size.training, size.words, tokenizer)
        test = read_passages(TEST, size.test, size.words, tokenizer)
        console.print(
            f"{len(training.ids)} passages of {size.words} words to train on, "
            f"{len(test.ids)} of other plays to test"
        )
        model = SentenceClassifier(bert, len(GENRES), "mean")
        before = copy.deepcopy(model.state_dict())
        head_batches = epochs_of(len(training.ids), size.head_epochs)
        model.bert.requires_grad_(False)
        train(model, training, head_batches, HEAD_PEAK, "Head alone")
        model.bert.requires_grad_(True)
        check_frozen(run, before, model.state_dict())
        results = {"majority": test.labels.bincount().max().item() / len(test.labels)}
        results["frozen"] = accuracy(model, test)

        batches = epochs_of(len(training.ids), size.epochs)
        losses = {"unfrozen": train(model, training, batches, PEAK, "All layers")}
        results["unfrozen"] = accuracy(model, test)

        # Use as many steps as both phases together. Random weights need a higher learning rate.
        scratch = SentenceClassifier(Bert(bert.config), len(GENRES), "mean")
        losses["from scratch"] = train(
            scratch, training, head_batches + batches, SCRATCH_PEAK, "From random weights"
        )
        results["from_scratch"] = accuracy(scratch, test)
        report(run, results, len(test.ids))

        pair = curves.compare(run, lambda prepare: curve(training, size.curve_steps, prepare))
        with run.figure("curves", 1, 2 if pair else 1, size=(10, 3.6)) as axes:
            first = axes[0] if pair else axes
            for name in ("unfrozen", "from scratch"):
                first.plot(fitting.smoothed(losses[name]), label=name)
            first.set(title="Training passages", xlabel="step", ylabel="loss (nats)")
            first.legend()
            if pair:
                fitting.plot_curves(axes[1], pair, "All layers, without dropout")


if __name__ == "__main__":
    main()
