"""Tiny random models of Hugging Face transformers; FAMILIES has one entry per model family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nn_helpers import perturb
from torch import Tensor

from fused_attn.integrations import transformers as integration
from fused_attn.masks import Mask

transformers = pytest.importorskip("transformers", minversion="5.0")

BATCH, LENGTH, VOCABULARY = 3, 9, 99
WINDOW = 4
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TEXT = {
    **IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
}
GQA = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
SEQ2SEQ = {
    **IDS,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 40,
}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Family:
    """Model family of transformers, with a tiny config and inputs.

    Attributes:
        name: prefix of the class names; the config class is {name}Config.
        head: suffix of the model class, which is {name}{head}.
        config: returns the config's arguments.
        inputs: returns the model's inputs.
        outputs: names of the outputs that are compared.
        attentions: number of attention calls in a forward pass.
        generates: True if the model has a decoder and thus a `generate` method.
    """

    name: str
    head: str
    config: Callable[[], dict[str, Any]]
    inputs: Callable[[], dict[str, Any]]
    outputs: tuple[str, ...]
    attentions: int = 2
    generates: bool = False

    def __str__(self) -> str:
        return self.name

    def model(self, implementation: str | None = None, **config: Any) -> Any:
        """Return a new model with random parameters, in evaluation mode.

        Args:
            implementation: attn_implementation of the model; None for the default of transformers.
            config: additional arguments of the config.
        """
        made = getattr(transformers, f"{self.name}Config")(**self.config(), **config)
        kind = getattr(transformers, self.name + self.head)
        return perturb(kind._from_config(made, attn_implementation=implementation)).eval()


def tokens(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def text() -> dict[str, Tensor]:
    """Return three sequences: one without padding, one padded on the right, and one on the left."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, :3] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def translation() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {**text(), "decoder_input_ids": tokens(6), "decoder_attention_mask": mask}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 40), "decoder_input_ids": tokens(6)}


def image(size: int = 8) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def padded_image() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, 64, 64, dtype=torch.long)
    mask[1, 32:] = 0
    mask[2, :, 32:] = 0
    return {**image(64), "pixel_mask": mask}


def encoder(name: str, config: dict[str, Any] = TEXT) -> Family:
    return Family(name, "Model", lambda: config, text, ("last_hidden_state",))


def decoder(name: str, head: str = "ForCausalLM", **config: Any) -> Family:
    return Family(name, head, lambda: config or GQA, text, ("logits",), generates=True)


def seq2seq(name: str, config: dict[str, Any], head: str = "ForConditionalGeneration") -> Family:
    inputs = speech if name == "Whisper" else translation
    outputs = ("logits", "encoder_last_hidden_state")
    return Family(name, head, lambda: config, inputs, outputs, attentions=6, generates=True)


def clip() -> dict[str, Any]:
    return {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}


def detr() -> dict[str, Any]:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = {key: value for key, value in SEQ2SEQ.items() if key not in ("vocab_size", *IDS)}
    return {**config, "num_queries": 5, "backbone_config": backbone}


DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 40, "num_layers": 2}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}
# The other implementations of experts in transformers do not support float64.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
WORDS = {**IDS, "vocab_size": VOCABULARY}

FAMILIES = [
    encoder("Bert"),
    encoder("DistilBert", {**WORDS, **DISTILBERT}),
    encoder("Roberta"),
    decoder("GPT2", "LMHeadModel", **WORDS, **GPT2),
    decoder("Llama"),
    decoder("Qwen3"),
    decoder("Mistral", **GQA, sliding_window=WINDOW),
    decoder("Gemma2", **GQA, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    decoder("GptOss", **GQA, **EXPERTS, **ROPE, sliding_window=WINDOW),
    seq2seq("T5", {**WORDS, **T5}),
    seq2seq("Bart", SEQ2SEQ),
    seq2seq("Marian", SEQ2SEQ, head="MTModel"),
    seq2seq("Whisper", {**SEQ2SEQ, **WHISPER}),
    Family("ViT", "Model", lambda: IMAGE, image, ("last_hidden_state",)),
    Family(
        "CLIP", "Model", clip, lambda: {**text(), **image()}, ("text_embeds", "image_embeds"),
        attentions=4,
    ),
    Family(
        "Detr", "ForObjectDetection", detr, padded_image, ("logits", "pred_boxes"), attentions=6
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


class Outputs(torch.nn.Module):
    """Wrapper for `run` that returns the outputs to compare, without padded tokens.

    Left padding of causal models is fully masked: eager attention returns the mean of V there, and
    fused_attn returns 0. Real tokens do not attend to padding.
    """

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, **kwargs: Any) -> tuple[Tensor, ...]:
        out = self.model(**kwargs)
        padding = kwargs.get("decoder_attention_mask", kwargs.get("attention_mask"))
        return tuple(
            out[name][padding.bool()]
            if padding is not None and padding.shape == out[name].shape[:2]
            else out[name]
            for name in self.names
        )


def is_structured(mask: Any) -> bool:
    """Return True if a mask contains no tensor with a row for each query."""
    tensors = mask.dense_masks if isinstance(mask, Mask) else [mask]
    return mask is None or all(tensor.shape[2] == 1 for tensor in tensors)


def on_eager(model: Any) -> Any:
    """Return a copy of a model with eager attention."""
    eager = copy.deepcopy(model)
    integration.set_implementation(eager, "eager")
    return eager
