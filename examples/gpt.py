"""Train a GPT-style language model to write Shakespeare, character by character.

    python examples/gpt.py

The model is in gpt_model.py. This script trains it, evaluates it on held-out plays, writes a
sample, and generates text with and without a key/value cache.
"""

from __future__ import annotations

import math
import timeit
from functools import partial

import common
import curves
import data
import fitting
import torch
import torch.nn.functional as F
from common import Example
from gpt_model import GPT, WINDOW, generate
from terminal import console, table
from torch import Tensor

HELD_OUT = ["macbeth", "tempest", "twelfth_night"]  # share no passage with the other works
SEQLEN, BATCH, STEPS, LEARNING_RATE = 512, 3, 2000, 4e-3
MAX_LOSS = 1.7  # required of the held-out works, in nats per character
PROMPT = "MACBETH.\n"
LENGTHS = [64, 128, 256, 512]  # lengths of generated text whose speed is measured


def next_token_loss(model: GPT, windows: Tensor) -> Tensor:
    """Return the loss in nats per token on windows (batch, seqlen + 1), first tokens excluded."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: GPT, windows: Tensor) -> float:
    """Return the mean of `next_token_loss` over all windows."""
    parts = windows.split(64)
    return sum(next_token_loss(model, part).item() * len(part) for part in parts) / len(windows)


def read_works() -> tuple[Tensor, Tensor, list[str]]:
    """Return the training tokens, the held-out tokens, and the character of each token id."""
    works = data.shakespeare()
    text = "\n\n".join(works[name] for name in works if name not in HELD_OUT)
    characters = sorted(set(text))
    tokens = {ord(character): i for i, character in enumerate(characters)}
    held_out = "\n\n".join(works[name] for name in HELD_OUT)
    console.print(
        f"{len(text):,} characters of {len(works) - len(HELD_OUT)} works to learn from, "
        f"{len(held_out):,} of {', '.join(HELD_OUT)} held out; {len(characters)} are different"
    )
    # There are fewer than 256 distinct characters, so each token id fits in a byte.
    train, test = (
        torch.frombuffer(bytearray(part.translate(tokens), "latin-1"), dtype=torch.uint8).long()
        for part in (text, held_out)
    )
    return train, test, characters


def unigram_loss(train: Tensor, test: Tensor) -> float:
    """Return the loss in nats per token of the unigram model, which uses frequencies in `train`."""
    counts = train.bincount() + 1.0
    return -(counts / counts.sum()).log()[test].mean().item()


def fit(
    train: Tensor,
    steps: int,
    batch: int,
    seqlen: int,
    title: str,
    windows: Tensor | None = None,
    prepare: curves.Prepare = curves.as_is,
) -> tuple[GPT, list[float], dict[int, float]]:
    """Train a model; return it, the loss of each step, and the loss of `windows` at ten steps."""
    model = prepare(GPT(int(train.max()) + 1))
    validation = {}

    def validate(step: int) -> None:
        if windows is not None and step % math.ceil(steps / 10) == 0:
            validation[step] = held_out_loss(model, windows)

    losses = fitting.train(
        model.parameters(),
        lambda starts: next_token_loss(model, train[starts + torch.arange(seqlen + 1)]),
        torch.randint(len(train) - seqlen, (steps, batch, 1)),
        fitting.cosine(LEARNING_RATE, steps // 10 + 1, steps),
        title,
        weight_decay=0.1,
        after=validate,
    )
    return model, losses, validation


def main() -> None:
    with common.example("gpt", __doc__) as run:
        steps, compared, batch, seqlen, count = STEPS, 100, BATCH, SEQLEN, 500
        if run.smoke:
            steps, compared, batch, seqlen, count = 4, 2, 2, 80, 20
        train, test, characters = read_works()
        # Each character is predicted once, from the preceding characters of its window.
        windows = test.unfold(0, seqlen + 1, seqlen)[:: 100 if run.smoke else 1]
        model, losses, validation = fit(train, steps, batch, seqlen, "training", windows[::10])
        loss, unigram = held_out_loss(model, windows), unigram_loss(train, test)
        report_losses(run, loss, unigram)
        run.figures["parameters"] = sum(p.numel() for p in model.parameters())

        # At most as long as the training windows, because larger rotation angles were not learned.
        prompt = torch.tensor([[characters.index(c) for c in PROMPT]])
        sample = generate(model, prompt, count, temperature=0.8, seed=run.seed)
        run.figures["sample"] = "".join(characters[i] for i in sample[0])
        console.print(f"\nA sample, at temperature 0.8:\n\n{run.figures['sample']}")
        equal = all(
            generate(model, prompt, count, temperature=temperature, cached=False).equal(
                generate(model, prompt, count, temperature=temperature)
            )
            for temperature in (0.0, 1.0)  # greedy, and sampled
        )
        run.figures["same_with_and_without_cache"] = equal
        speeds = measure_speed(run, model, prompt)
        short = seqlen // 4
        pair = curves.compare(
            run, lambda prepare: fit(train, compared, batch, short, "comparing", prepare=prepare)[1]
        )
        plot(run, losses, validation, pair, speeds)
        run.require(
            loss <= MAX_LOSS,
            f"nats per character of works held out must be <= {MAX_LOSS} ({unigram:.2f} without "
            f"context), got {loss:.3f}: {loss / math.log(2):.2f} bits",
        )
        run.require(equal, f"{count} generated tokens must be the same with and without a cache")
        length, (fast, slow) = list(speeds.items())[-1]
        run.report(
            f"generating {length} tokens: {fast:.0f} tokens/s with a cache, {slow:.0f} without"
        )


def report_losses(run: Example, loss: float, unigram: float) -> None:
    """Report the loss on the held-out works in nats, bits and perplexity."""
    table(
        "Prediction of the next character in works held out",
        ["", "nats", "bits", "perplexity"],
        [
            [name, f"{nats:.3f}", f"{nats / math.log(2):.3f}", f"{math.exp(nats):.2f}"]
            for name, nats in (("without context", unigram), ("model", loss))
        ],
    )
    run.figures |= {
        "validation_loss": round(loss, 4),
        "bits_per_character": round(loss / math.log(2), 4),
        "perplexity": round(math.exp(loss), 4),
        "unigram_loss": round(unigram, 4),
    }


def measure_speed(run: Example, model: GPT, prompt: Tensor) -> dict[int, tuple[float, float]]:
    """Return tokens per second with and without a cache, by the length of the generated text."""
    speeds = {}
    for length in [8, 16] if run.smoke else LENGTHS:
        runs = [partial(generate, model, prompt, length, cached=c) for c in (True, False)]
        # Use the faster of two runs, because other load can only slow down a run.
        fast, slow = (length / min(timeit.repeat(r, number=1, repeat=2)) for r in runs)
        speeds[length] = (fast, slow)
    rows = []
    for length, (fast, slow) in speeds.items():
        kept = 0.5 + 0.5 * min(1, (WINDOW - 1) / length)  # half of the layers are windowed
        rows.append([length, f"{fast:.0f}", f"{slow:.0f}", f"{fast / slow:.1f}", f"{kept:.0%}"])
    title = "Tokens per second, and the share of keys that the cache keeps, thanks to windows"
    table(title, ["tokens", "with cache", "without", "times as fast", "kept"], rows)
    run.figures["tokens_per_second"] = {
        str(length): {"with_cache": round(fast), "without": round(slow)}
        for length, (fast, slow) in speeds.items()
    }
    return speeds


def plot(
    run: Example,
    losses: list[float],
    validation: dict[int, float],
    pair: dict[str, list[float]],
    speeds: dict[int, tuple[float, float]],
) -> None:
    """Plot the training loss, the losses on two backends, and the generation speed."""
    with run.figure("losses", 1, 2, size=(10, 4)) as (left, right):
        fitting.plot_curves(left, {"training": fitting.smoothed(losses)}, "Nats per character")
        left.plot(list(validation), list(validation.values()), "o-", label="held out")
        left.legend()
        fitting.plot_curves(right, pair, "Two backends")
    with run.figure("speed", size=(5, 4)) as axis:
        for name, values in zip(
            ("with", "without"), zip(*speeds.values(), strict=True), strict=True
        ):
            axis.plot(list(speeds), values, "o-", label=f"{name} cache")
        axis.set(title="Generation", xlabel="tokens", ylabel="tokens per second", ylim=0)
        axis.legend()


if __name__ == "__main__":
    main()
