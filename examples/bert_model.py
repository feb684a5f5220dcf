"""BERT built from fused_attn.nn, with its heads and a loader of Hugging Face checkpoints.

`python examples/bert.py` and `python examples/transfer.py` use this module.

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import data
import torch
import torch.nn.functional as F
from positions import LearnedPositionalEmbedding
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from fused_attn import nn as fused

EPS = 1e-12  # eps of all LayerNorms in BERT


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT. `dropout` is that of embeddings, attention weights, sublayers and heads."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    dim_feedforward: int
    max_seqlen: int
    dropout: float = 0.1
    num_segments: int = 2


class Bert(nn.Module):
    """BERT encoder with embeddings, and the pooler on [CLS].

    The input is the sum of token, segment and position embeddings. The encoder is that of Vaswani
    et al. 2017 with GELU. Attention is bidirectional, not causal. See section 3 and appendix A.2 of
    Devlin et al.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        self.tokens = nn.Embedding(config.vocab_size, d_model)
        self.segments = nn.Embedding(config.num_segments, d_model)
        self.positions = LearnedPositionalEmbedding(d_model, config.max_seqlen)
        self.norm = fused.LayerNorm(d_model, eps=EPS)
        self.dropout = nn.Dropout(config.dropout)
        sizes = (d_model, config.num_heads, config.dim_feedforward, config.dropout)
        layer = fused.TransformerEncoderLayer(
            *sizes, activation="gelu", layer_norm_eps=EPS, batch_first=True
        )
        self.encoder = fused.TransformerEncoder(layer, config.num_layers)
        self.pooler = nn.Linear(d_model, d_model)
        self.apply(_initialize)

    def forward(self, ids: Tensor, segments: Tensor, padding: Tensor) -> Tensor:
        """Return the hidden states of the last layer.

        Args:
            ids: (batch, seqlen) int64.
            segments: (batch, seqlen) int64, 0 in the first text, 1 in the second.
            padding: (batch, seqlen) bool, True where there is no token. The encoder packs the
                batch, so that its layers compute only real tokens.

        Returns:
            Hidden states (batch, seqlen, d_model), which are 0 at padding.
        """
        embedded = self.positions(self.tokens(ids) + self.segments(segments))
        x = self.dropout(self.norm(embedded))
        return self.encoder(x, src_key_padding_mask=padding)

    def pool_first(self, hidden: Tensor) -> Tensor:
        """Apply a tanh layer to [CLS], from (batch, seqlen, d_model) to (batch, d_model)."""
        return torch.tanh(self.pooler(hidden[:, 0]))


def pool_mean(hidden: Tensor, padding: Tensor) -> Tensor:
    """Return the mean over real tokens: (batch, seqlen, d_model) to (batch, d_model)."""
    real = (~padding).unsqueeze(2).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1)


class PretrainingHeads(nn.Module):
    """Heads for masked language modeling and next-sentence prediction (section 3.1).

    The decoder shares the matrix of the token embedding. Only its bias is a new parameter.
    """

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        d_model = bert.config.d_model
        self.bert = bert
        self.transform = nn.Linear(d_model, d_model)
        self.norm = fused.LayerNorm(d_model, eps=EPS)
        self.decoder_bias = nn.Parameter(torch.zeros(bert.config.vocab_size))
        self.next_sentence = nn.Linear(d_model, 2)
        _initialize(self.transform)
        _initialize(self.next_sentence)

    def forward(
        self, ids: Tensor, segments: Tensor, padding: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits of the tokens at chosen positions, and of next-sentence prediction.

        Args:
            ids, segments, padding: see `Bert.forward`.
            chosen: (batch, seqlen) bool. Only these positions have a loss. Other positions skip
                the matmul with the large vocabulary.

        Returns:
            Logits of tokens (number of chosen positions, vocab_size), and logits (batch, 2) whose
            column 1 is "is next".
        """
        hidden = self.bert(ids, segments, padding)
        x = self.norm(F.gelu(self.transform(hidden[chosen])))
        tokens = F.linear(x, self.bert.tokens.weight, self.decoder_bias)
        return tokens, self.next_sentence(self.bert.pool_first(hidden))


class SentenceClassifier(nn.Module):
    """Classifier of texts, from [CLS] or from the mean over the tokens (section 4.1)."""

    def __init__(self, bert: Bert, num_classes: int, pooling: str) -> None:
        super().__init__()
        if pooling not in ("cls", "mean"):
            raise ValueError(f"pooling must be 'cls' or 'mean', got {pooling!r}")
        self.bert = bert
        self.pooling = pooling
        self.dropout = nn.Dropout(bert.config.dropout)
        self.head = nn.Linear(bert.config.d_model, num_classes)
        _initialize(self.head)

    def pooled(self, ids: Tensor, segments: Tensor, padding: Tensor) -> Tensor:
        """Return one vector per text, (batch, d_model)."""
        hidden = self.bert(ids, segments, padding)
        return self.bert.pool_first(hidden) if self.pooling == "cls" else pool_mean(hidden, padding)

    def forward(self, ids: Tensor, segments: Tensor, padding: Tensor) -> Tensor:
        """Return logits of the classes, (batch, num_classes)."""
        return self.head(self.dropout(self.pooled(ids, segments, padding)))


class TokenClassifier(nn.Module):
    """Classifier of tokens (section 5.3)."""

    def __init__(self, bert: Bert, num_classes: int) -> None:
        super().__init__()
        self.bert = bert
        self.dropout = nn.Dropout(bert.config.dropout)
        self.head = nn.Linear(bert.config.d_model, num_classes)
        _initialize(self.head)

    def forward(self, ids: Tensor, segments: Tensor, padding: Tensor) -> Tensor:
        """Return logits of the classes, (batch, seqlen, num_classes)."""
        return self.head(self.dropout(self.bert(ids, segments, padding)))


def from_checkpoint(folder: Path, dropout: float | None = None) -> Bert:
    """Return a Bert with the weights of a transformers.BertModel.

    Args:
        folder: folder that contains config.json and model.safetensors.
        dropout: dropout probability; None for that of the checkpoint.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes += ("intermediate_size", "max_position_embeddings")
    dropout = config["hidden_dropout_prob"] if dropout is None else dropout
    own = BertConfig(*(config[name] for name in sizes), dropout, config["type_vocab_size"])
    bert = Bert(own)
    bert.load_state_dict(convert_weights(load_file(folder / "model.safetensors")))
    return bert


def convert_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a transformers.BertModel under the names that `Bert` uses.

    The query, key and value matrices are concatenated to one matrix, in this order.
    """
    renamed = {
        "embeddings.word_embeddings": "tokens",
        "embeddings.token_type_embeddings": "segments",
        "embeddings.position_embeddings": "positions",
        "embeddings.LayerNorm": "norm",
        "pooler.dense": "pooler",
        "encoder.layer.": "encoder.layers.",
        "attention.self.": "self_attn.",
        "attention.output.dense": "self_attn.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "linear1",
        "output.dense": "linear2",
        "output.LayerNorm": "norm2",
    }
    converted = {}
    for name, weight in weights.items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        converted[name] = weight
    for name in [name for name in converted if ".query." in name]:
        parts = [converted.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        converted[name.replace("query.", "in_proj_")] = torch.cat(parts)
    converted.pop("embeddings.position_ids", None)  # the indices 0, 1, 2, ..., not a weight
    return converted


def load_minilm(dropout: float | None = None) -> tuple[Bert, Tokenizer]:
    """Return all-MiniLM-L6-v2, a sentence encoder of 6 layers and d_model 384, and its tokenizer.

    Source: Wang et al. 2020, "MiniLM". The publishers of this checkpoint trained it further on
    English sentence pairs.
    """
    folder = data.minilm()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return from_checkpoint(folder, dropout), tokenizer


def _initialize(module: nn.Module) -> None:
    """Initialize a module's weights from normal distributions and its biases with 0.

    The function is an argument of `Module.apply`. BERT uses a standard deviation of 0.02, for 768
    inputs. Matrices here use 0.55 / sqrt(inputs), which is equal for 768 inputs and keeps the scale
    of outputs in smaller models.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.55 * module.in_features**-0.5)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.MultiheadAttention):  # in_proj_weight is not part of a Linear
        nn.init.normal_(module.in_proj_weight, std=0.55 * module.embed_dim**-0.5)
