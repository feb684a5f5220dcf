"""Translate English into Korean with the Transformer of "Attention Is All You Need".

    python examples/translate.py

The model is a small version of Vaswani et al. 2017: an encoder, a decoder with cross-attention,
sinusoidal positions, label smoothing, warm-up, and greedy and beam search with a key/value cache.
It memorizes 1,996 messages of JupyterLab and is then tested on 217 held-out messages.
"""

from __future__ import annotations

import math
import unicodedata
from functools import partial
from typing import Any

import common
import fitting
import torch
import translation
from decoding import generate
from positions import SinusoidalPositionalEmbedding
from terminal import console, table
from torch import Tensor
from translation import BOS, EOS, LONGER_BY, PAD, Corpus

from fused_attn import nn

EPOCHS = 40
# Half of all steps are warm-up. If the learning rate instead reaches 1e-3 within 200 steps, a
# relative change of 1e-7 in one weight matrix changes the loss by 1e-2, even on the reference.
SCHEDULE = fitting.inverse_sqrt(1.5e-3, 2000)
# Section 6.1 also uses 4 beams, but a weaker penalty: ((5 + length) / 6) ** 0.6 of Wu et al. 2016.
BEAMS, LENGTH_PENALTY = 4, 0.6


class Translator(torch.nn.Module):
    """Transformer of Vaswani et al. 2017, section 3.

    Norms follow the residual additions. No norm follows the encoder or decoder stack.

    Args:
        vocabulary: number of tokens, shared by both languages.
        shared: share one matrix between source embedding, target embedding and output projection
            (section 3.4).
    """

    def __init__(
        self,
        vocabulary: int,
        shared: bool,
        *,
        dropout: float = 0.05,
        d_model: int = 128,
        num_heads: int = 4,
        num_layers: int = 3,
        dim_feedforward: int = 512,
    ) -> None:
        super().__init__()
        options = {"dropout": dropout, "batch_first": True}
        sizes = (d_model, num_heads, dim_feedforward)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, **options), num_layers
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, **options), num_layers
        )
        # A stack copies one layer, so redraw the weights to make its layers start different.
        for weight in self.parameters():
            if weight.dim() > 1:
                torch.nn.init.xavier_uniform_(weight)
        self.source = torch.nn.Embedding(vocabulary, d_model)
        self.target = self.source if shared else torch.nn.Embedding(vocabulary, d_model)
        self.project = torch.nn.Linear(d_model, vocabulary, bias=False)
        if shared:
            self.project.weight = self.source.weight
        # With this std, scaled embeddings have the size of the positional encodings (section 3.4).
        for matrix in (self.source.weight, self.target.weight, self.project.weight):
            torch.nn.init.normal_(matrix, std=d_model**-0.5)
        self.scale = math.sqrt(d_model)
        self.positions = SinusoidalPositionalEmbedding(d_model)
        self.dropout = torch.nn.Dropout(dropout)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encode source (N, S); return memory (N, S, d_model) and padding (N, S), True = ignore."""
        padding = source == PAD
        x = self.dropout(self.positions(self.source(source) * self.scale))
        return self.encoder(x, src_key_padding_mask=padding), padding

    def embed(self, target: Tensor, position: int | None = None) -> Tensor:
        """Embed target (N, T) to (N, T, d_model); `position`, if given, applies to all tokens."""
        positions = None if position is None else torch.full_like(target, position)
        return self.dropout(self.positions(self.target(target) * self.scale, positions))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (N, T, vocabulary) of the token after each position of target (N, T)."""
        memory, padding = self.encode(source)
        hidden = self.decoder(
            self.embed(target),
            memory,
            tgt_is_causal=True,  # combined with the padding mask
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=padding,
        )
        return self.project(hidden)

    @torch.no_grad()
    def search(self, source: Tensor, num_beams: int = 1) -> Tensor:
        """Return translations (N, T) of source tokens (N, S), computed with a key/value cache."""
        memory, padding = self.encode(source)
        return generate(
            self.decoder,
            memory,
            self.embed,
            self.project,
            bos=BOS,
            eos=EOS,
            max_length=source.shape[1] + LONGER_BY,
            num_beams=num_beams,
            length_penalty=LENGTH_PENALTY,
            memory_key_padding_mask=padding,
        ).tokens

    @torch.no_grad()
    def search_uncached(self, source: Tensor) -> Tensor:
        """Return greedy translations (N, T) without a cache, recomputing all positions per step."""
        target = torch.full((source.shape[0], 1), BOS)
        ended = torch.zeros(source.shape[0], dtype=torch.bool)
        while not ended.all() and target.shape[1] <= source.shape[1] + LONGER_BY:
            best = self(source, target)[:, -1].argmax(-1).masked_fill(ended, EOS)
            target = torch.cat([target, best[:, None]], dim=1)
            ended |= best == EOS
        return target[:, 1:]

    @torch.no_grad()
    def cross_attention(self, source: Tensor, target: Tensor) -> Tensor:
        """Return cross-attention weights (T, S), averaged over heads and layers."""
        weights = []

        def look(attention: Any, args: Any, kwargs: Any, output: Any) -> None:
            weights.append(attention.forward(*args, **kwargs | {"need_weights": True})[1])

        attentions = [layer.multihead_attn for layer in self.decoder.layers]
        hooks = [a.register_forward_hook(look, with_kwargs=True) for a in attentions]
        self(source[None], target[None])
        for hook in hooks:
            hook.remove()
        return torch.stack(weights).mean(0)[0]


def show_translations(corpus: Corpus, ours: list[str]) -> None:
    """Print ten held-out pairs, evenly spaced by length, and the model's translations."""
    order = sorted(range(len(ours)), key=lambda i: len(corpus.held_out[i][0]))
    chosen = [order[(2 * i + 1) * len(order) // 20] for i in range(10)]
    rows = [(*corpus.held_out[i], ours[i]) for i in chosen]
    table("Held-out pairs", ("source", "reference", "ours"), rows)


def romanized(token: str) -> str:
    """Romanize a token by the Unicode names of its syllables, for fonts without Hangul."""
    names = [unicodedata.name(c, "") for c in token]
    sounds = [n.partition("SYLLABLE ")[2].lower() or c for n, c in zip(names, token, strict=True)]
    return "".join(sounds).replace("▁", "_")


def plot_attention(run: common.Example, model: Translator, corpus: Corpus) -> None:
    """Plot cross-attention for a training pair of seven words, with teacher forcing."""
    pair = next(p for p in corpus.train if len(p[0].split()) == 7)
    (batch,) = corpus.batches([pair])
    read, said = batch.shifted()
    weights = model.cross_attention(batch.source[0], read[0])
    with run.figure("attention", size=(7, 5)) as axis:
        axis.imshow(weights, cmap="Blues", vmin=0.0)
        columns, lines = (
            [romanized(corpus.tokenizer.id_to_token(token)) for token in tokens[0].tolist()]
            for tokens in (batch.source, said)
        )
        axis.set_xticks(range(len(columns)), columns, rotation=90)
        axis.set_yticks(range(len(lines)), lines)
        axis.set(
            title="Cross-attention, mean of all heads and layers",
            xlabel="key: source token",
            ylabel="query: says the target token",
        )
    console.print(f"It shows: {pair[0]} | {pair[1]}")


def main() -> None:
    with common.example("translate", __doc__, shared_embedding=True) as run:
        corpus = translation.load(run.smoke)
        console.print(f"{len(corpus.train)} pairs to learn, {len(corpus.held_out)} held out")
        vocabulary, shared = corpus.tokenizer.get_vocab_size(), run.flags["shared_embedding"]
        build = partial(Translator, vocabulary, shared)
        translation.compare(run, corpus, partial(build, dropout=0.0), SCHEDULE)

        model = build()
        translation.fit(run, model, corpus, 2 if run.smoke else EPOCHS, SCHEDULE)
        model.eval()
        ours = translation.evaluate(run, corpus, model.search)
        show_translations(corpus, ours)
        english, korean = zip(*corpus.held_out, strict=True)
        beams = corpus.translate(english, partial(model.search, num_beams=BEAMS))
        found = {
            "greedy": run.figures["held_out"]["all"],
            f"{BEAMS} beams": translation.scores(beams, korean),
        }
        rows = [(name, f"{f['chrf']:.1f}", f"{f['exact']:.1%}") for name, f in found.items()]
        table(f"{len(korean)} held-out pairs", ("search", "chrF", "exact"), rows)
        told = ", ".join(f"{f['chrf']:.1f} ({name})" for name, f in found.items())
        run.report(f"chrF on {len(korean)} held-out pairs: {told}")
        plot_attention(run, model, corpus)

        # The cache must not change the translations.
        source = corpus.batches(corpus.held_out)[0].source
        same = torch.equal(model.search(source), model.search_uncached(source))
        exact = run.figures["train"]["all"]["exact"]
        run.figures |= {"held_out_beams": found[f"{BEAMS} beams"], "cache_changes_nothing": same}
        run.require(same, "search with a cache must find what it finds without")
        run.require(exact >= 0.9, f"training pairs reproduced must be >= 90 %, got {exact:.1%}")


if __name__ == "__main__":
    main()
