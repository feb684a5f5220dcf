"""BERT: pretraining on Shakespeare, then fine-tuning for texts and for single words.

    python examples/bert.py

Pretraining needs no labels. The model predicts masked tokens, and whether the second of two
passages follows the first or comes from another work. As in the paper, training starts with short
sequences, from which the model learns soonest that neighboring tokens matter. With 128 tokens from
the start, the loss stayed at the unigram entropy for over a thousand steps.

Fine-tuning uses three hundred labeled texts. Two heads classify passages as verse or prose, one
from the vector of [CLS] and one from the mean over all tokens. A third head restores the
punctuation of texts, word by word. Each head is also fine-tuned from random weights, to measure the
gain from pretraining.

Three plays are held out of all training. `--validation` instead holds out three other plays, on
which the sizes were chosen. The model has the size of BERT-Mini (Turc et al. 2019, "Well-Read
Students Learn Better"). Matmuls run in bfloat16 if the CPU has instructions for them.

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import common
import curves
import fitting
import torch
import torch.nn.functional as F
from bert_data import Pairs, Pretraining, train_tokenizer, works
from bert_model import Bert, BertConfig, PretrainingHeads
from bert_tasks import Amount, compare_heads
from terminal import console, table
from torch import Tensor

MAX_SEQLEN = 128
SHORT = 32  # tokens per sequence in the first steps
PEAK = 2e-3  # peak learning rate of pretraining
DROPOUT = 0.1  # only for fine-tuning, which repeats a few texts


@dataclass(frozen=True)
class Size:
    """Sizes of a full run or of a smoke test."""

    works: int
    vocab_size: int
    d_model: int
    num_layers: int
    short_steps: int  # number of first steps (included in `steps`) with short sequences
    steps: int
    warmup: int
    tokens: int  # upper bound per batch
    pairs: int  # number of held-out pairs for validation
    curve_steps: int
    fine_tuning: Amount


FULL = Size(38, 2000, 256, 4, 1500, 4400, 220, 4096, 2048, 30, Amount(300, 6, 3))
SMOKE = Size(3, 300, 32, 2, 2, 4, 2, 256, 64, 3, Amount(64, 1, 2))


def new_bert(size: Size, dropout: float) -> Bert:
    """Return a BERT with random weights."""
    num_heads = max(1, size.d_model // 64)
    sizes = (size.d_model, size.num_layers, num_heads, 4 * size.d_model, MAX_SEQLEN)
    return Bert(BertConfig(size.vocab_size, *sizes, dropout))


def pretraining_losses(model: PretrainingHeads, batch: Pretraining) -> tuple[Tensor, Tensor]:
    """Return the cross-entropies of masked tokens and of next-passage prediction."""
    tokens, is_next = model(*batch.inputs, batch.chosen)
    return F.cross_entropy(tokens, batch.targets), F.cross_entropy(is_next, batch.is_next)


def pretrain(
    model: PretrainingHeads, short: Pairs, long: Pairs, size: Size
) -> tuple[list[float], list[float]]:
    """Train on the sum of both losses; return the losses per step: masked tokens, next passage."""
    each = []

    def loss(step: int) -> Tensor:
        pairs = short if step <= size.short_steps else long
        batch = pairs.batch(size.tokens // pairs.max_seqlen)
        with fitting.mixed_precision():
            mlm, nsp = pretraining_losses(model, batch)
        each.append((mlm.item(), nsp.item()))
        return mlm + nsp

    schedule = fitting.cosine(PEAK, size.warmup, size.steps)
    fitting.train(model.parameters(), loss, range(1, size.steps + 1), schedule, "Pretraining")
    mlm, nsp = zip(*each, strict=True)
    return list(mlm), list(nsp)


@torch.no_grad()
def validate(model: PretrainingHeads, batches: list[Pretraining]) -> tuple[float, float]:
    """Return the loss of masked tokens in nats, and the accuracy of next-passage prediction."""
    model.eval()
    loss = tokens = right = pairs = 0.0
    for batch in batches:
        with fitting.mixed_precision():
            scores, is_next = model(*batch.inputs, batch.chosen)
        loss += F.cross_entropy(scores.float(), batch.targets, reduction="sum").item()
        tokens += len(batch.targets)
        right += (is_next.argmax(1) == batch.is_next).sum().item()
        pairs += len(batch.is_next)
    return loss / tokens, right / pairs


def report_pretraining(
    run: common.Example, model: PretrainingHeads, validation: list[Pretraining], pairs: Pairs
) -> None:
    """Compare the loss on held-out plays with the unigram entropy, which uses no context."""
    mlm, nsp = validate(model, validation)
    targets = torch.cat([batch.targets for batch in validation])
    # Cross-entropy of held-out tokens under the token frequencies of the training text.
    entropy = -pairs.log_frequencies()[targets].mean().item()
    error = math.sqrt(0.25 / sum(len(batch.is_next) for batch in validation))
    run.figures |= {
        "mlm_loss": round(mlm, 4),
        "unigram_entropy": round(entropy, 4),
        "nsp_accuracy": round(nsp, 4),
        "nsp_standard_error": round(error, 4),
    }
    table(
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


def curve(pairs: Pairs, size: Size, prepare: curves.Prepare) -> list[float]:
    """Return the losses of the first steps of pretraining in full precision."""
    model = prepare(PretrainingHeads(new_bert(size, dropout=0.0)))
    rows = size.tokens // pairs.max_seqlen
    schedule = fitting.cosine(PEAK, size.warmup, size.steps)
    steps = range(size.curve_steps)
    return fitting.train(
        model.parameters(),
        lambda _: torch.stack(pretraining_losses(model, pairs.batch(rows))).sum(),
        steps,
        schedule,
        "Comparing",
    )


def main() -> None:
    with common.example("bert", __doc__, validation=False) as run:
        size = SMOKE if run.smoke else FULL
        texts, held_out = works(run.flags["validation"])
        texts = texts[: size.works]
        tokenizer = train_tokenizer(texts, size.vocab_size)
        short, long = (Pairs(texts, tokenizer, seqlen) for seqlen in (SHORT, MAX_SEQLEN))
        held_out_pairs = Pairs(held_out, tokenizer, MAX_SEQLEN)
        validation = [held_out_pairs.batch(64) for _ in range(size.pairs // 64)]

        model = PretrainingHeads(new_bert(size, dropout=0.0))
        console.print(f"{len(texts)} works to learn from, {len(held_out)} held out")
        mlm, nsp = pretrain(model, short, long, size)
        report_pretraining(run, model, validation, long)
        pair = curves.compare(run, lambda prepare: curve(long, size, prepare))
        with run.figure("curves", 1, 3 if pair else 2, size=(13, 3.6)) as axes:
            entropy = run.figures["unigram_entropy"]
            axes[0].axhline(entropy, color="black", linestyle="--", label="unigram entropy")
            fitting.plot_curves(axes[0], {"hidden tokens": fitting.smoothed(mlm)}, "Pretraining")
            axes[1].axhline(math.log(2), color="black", linestyle="--", label="chance")
            fitting.plot_curves(axes[1], {"next passage": fitting.smoothed(nsp)}, "Pretraining")
            for axis in axes[:2]:
                axis.axvline(size.short_steps, color="gray", linestyle=":")  # long sequences follow
            if pair:
                fitting.plot_curves(axes[2], pair, "Both, first steps, of two backends")

        def random_bert() -> Bert:
            return new_bert(size, DROPOUT)

        compare_heads(run, model.bert, random_bert, texts, held_out, tokenizer, size.fine_tuning)


if __name__ == "__main__":
    main()
