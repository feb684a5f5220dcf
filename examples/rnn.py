"""Translation before the Transformer: a recurrent network with attention.

    python examples/rnn.py

A bidirectional GRU encodes the English message, and another GRU decodes the Korean message. Each
decoder state attends to all encoder states: "global" attention with the dot score (Luong, Pham and
Manning 2015, section 3.1), an idea of Bahdanau, Cho and Bengio 2015. Data, batches and scores are
those of translate.py. If results of translate.py exist, they are compared.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import common
import fitting
import torch
import translation
from terminal import console, table
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from translation import BINS, BOS, EOS, LONGER_BY, PAD

from fused_attn import masks
from fused_attn.functional import scaled_dot_product_attention
from fused_attn.tools import doctor

EPOCHS = 16
SCHEDULE = fitting.inverse_sqrt(3e-3, 300)
COLORS = {"Transformer": "tab:blue", "GRU": "tab:orange"}


class Recurrent(torch.nn.Module):
    """Encoder and decoder of one GRU layer each, with attention from decoder to encoder states.

    Args:
        vocabulary: number of tokens, shared by both languages.
        hidden: size of decoder and encoder states. Each encoder direction has half this size.
    """

    def __init__(
        self, vocabulary: int, *, embed_dim: int = 128, hidden: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.source = torch.nn.Embedding(vocabulary, embed_dim)
        self.target = torch.nn.Embedding(vocabulary, embed_dim)
        self.encoder = torch.nn.GRU(embed_dim, hidden // 2, batch_first=True, bidirectional=True)
        self.decoder = torch.nn.GRU(embed_dim, hidden, batch_first=True)
        self.first = torch.nn.Linear(hidden, hidden)
        self.combine = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.project = torch.nn.Linear(hidden, vocabulary)
        self.dropout = torch.nn.Dropout(dropout)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, masks.Mask]:
        """Encode source tokens (N, S).

        Returns:
            Encoder states (N, S, hidden), the initial decoder state (1, N, hidden), and the padding
            mask of the source.
        """
        lengths = (source != PAD).sum(1)
        x = self.dropout(self.source(source))
        # Pack, because the backward direction would otherwise start in the padding.
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(states, batch_first=True)
        begin = torch.tanh(self.first(torch.cat([last[0], last[1]], dim=-1)))
        return memory, begin[None], masks.padding(lengths)

    def decode(
        self, target: Tensor, state: Tensor, memory: Tensor, mask: masks.Mask
    ) -> tuple[Tensor, Tensor]:
        """Return logits (N, T, vocabulary) of the next tokens, and the state after the last token.

        The target has shape (N, T), the state (1, N, hidden). Attention does not feed back into the
        states (Luong et al. without input feeding, section 3.3), so that one call computes all
        positions.
        """
        states, state = self.decoder(self.dropout(self.target(target)), state)  # (N, T, hidden)
        context = attend(states, memory, mask)  # (N, T, hidden)
        attentional = torch.tanh(self.combine(torch.cat([context, states], dim=-1)))  # equation 5
        return self.project(self.dropout(attentional)), state

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (N, T, vocabulary) of the next tokens with teacher forcing."""
        memory, state, mask = self.encode(source)
        return self.decode(target, state, memory, mask)[0]

    @torch.no_grad()
    def search(self, source: Tensor) -> Tensor:
        """Translate source (N, S) greedily; return tokens (N, T).

        Only the RNN state carries over between steps.
        """
        memory, state, mask = self.encode(source)
        last = torch.full((source.shape[0], 1), BOS)
        ended = torch.zeros_like(last, dtype=torch.bool)
        said: list[Tensor] = []
        while not ended.all() and len(said) < source.shape[1] + LONGER_BY:
            logits, state = self.decode(last, state, memory, mask)
            last = logits.argmax(-1).masked_fill(ended, EOS)
            ended |= last == EOS
            said.append(last)
        return torch.cat(said, dim=1)


def attend(states: Tensor, memory: Tensor, mask: masks.Mask) -> Tensor:
    """Return single-head attention with the dot score: softmax(states @ memory^T) @ memory.

    The scores are not scaled (Luong et al. 2015, equation 8).

    Args:
        states: queries (N, T, hidden), which are the decoder states.
        memory: keys and values (N, S, hidden), which are the encoder states.
        mask: mask of the padding in memory.
    """
    query, key = states[:, None], memory[:, None]  # (N, 1, T or S, hidden)
    return scaled_dot_product_attention(query, key, key, mask, scale=1.0)[:, 0]


def transformer(run: common.Example) -> dict[str, Any] | None:
    """Return the figures of translate.py from a run with equal settings; None if there is none."""
    path = run.output / "translate.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    own = {"seed": run.seed, "backend": run.backend, "machine": doctor.machine()}
    alike = all(found.get(name) == value for name, value in own.items())
    if alike and found["figures"].get("settings") == run.figures["settings"]:
        return found["figures"]
    console.print(
        f"\nNot compared with the Transformer: {path} has no figures of such a run. "
        "For a comparison, run `python examples/translate.py` first, with the same arguments",
        soft_wrap=True,
    )
    return None


def compare(run: common.Example, both: dict[str, dict[str, Any]]) -> None:
    """Print and plot the scores of all systems, by length of the source."""
    rows = [
        (
            name,
            f"{figures['parameters']:,}",
            figures["epochs"],
            figures["seconds_per_epoch"],
            *(figures["loss"].values()),
            f"{figures['train']['all']['exact']:.1%}",
            figures["held_out"]["all"]["chrf"],
        )
        for name, figures in both.items()
    ]
    header = ("", "parameters", "epochs", "s per epoch", "loss", "held-out", "exact", "chrF")
    table("Loss, training pairs right to the letter, chrF of held-out pairs", header, rows)
    for name, figures in both.items():
        learned, held_out = figures["train"]["all"]["exact"], figures["held_out"]["all"]["chrf"]
        run.report(
            f"{name}: {figures['epochs']} epochs of {figures['seconds_per_epoch']} s, loss "
            f"{figures['loss']['held_out']} on held-out pairs, {learned:.1%} of the training pairs "
            f"right to the letter, chrF {held_out} on held-out pairs"
        )

    panels = [("train", "exact", "Training pairs right to the letter")]
    panels += [("held_out", "chrf", "chrF of held-out pairs")]
    with run.figure("lengths", 1, 2, size=(10, 4)) as axes:
        for axis, (part, score, title) in zip(axes, panels, strict=True):
            bins = [key for key in BINS if run.figures[part][key]["pairs"]]
            counts = [run.figures[part][key]["pairs"] for key in bins]
            values = {name: [f[part][key][score] for key in bins] for name, f in both.items()}
            lines = zip(bins, counts, *values.values(), strict=True)
            table(f"{title}, by tokens of the source", ("tokens", "pairs", *both), lines)
            for name, column in values.items():
                axis.plot(bins, column, "o-", label=name, color=COLORS[name])
            axis.set(title=title, xlabel="tokens of the source", ylim=(0, None))
            axis.legend()


def main() -> None:
    with common.example("rnn", __doc__) as run:
        corpus = translation.load(run.smoke)
        console.print(f"{len(corpus.train)} pairs to learn, {len(corpus.held_out)} held out")
        build = partial(Recurrent, corpus.tokenizer.get_vocab_size())
        translation.compare(run, corpus, partial(build, dropout=0.0), SCHEDULE)

        model = build()
        translation.fit(run, model, corpus, 2 if run.smoke else EPOCHS, SCHEDULE)
        model.eval()
        translation.evaluate(run, corpus, model.search)
        both = {"GRU": run.figures}
        if other := transformer(run):
            both = {"Transformer": other, **both}
        compare(run, both)


if __name__ == "__main__":
    main()
