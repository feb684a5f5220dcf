"""Models of PyPI libraries with random weights, small enough to run in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

Made = tuple[Module, tuple[Any, ...]]


@dataclass(frozen=True)
class Library:
    """Model of a library, and the way in which fused_attn is applied to it.

    Attributes:
        package: name on PyPI.
        model: description of the model.
        way: "enable" (swapped, under `enable()`), "compile" (compiled with the pass of
            `compile_pass()`), or "compile swapped" (swapped and under `enable()`, then compiled).
        make: returns the model and its arguments.
        torchvision: True if the library imports torchvision. PyPI has no build of torchvision for
            CPU-only torch, so a stub replaces it.
    """

    package: str
    model: str
    way: str
    make: Callable[[], Made]
    torchvision: bool = False

    @property
    def key(self) -> str:
        """Return the name that selects this model on the command line."""
        return f"{self.package}: {self.model}"


class _CausalAttention(Module):
    """Causal attention composed of torch operations, as in minimal GPT implementations."""

    def __init__(self, width: int, num_heads: int, seqlen: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.register_buffer("causal", torch.ones(seqlen, seqlen).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        scores = (query @ key.transpose(-2, -1)) * key.size(-1) ** -0.5
        scores = scores.masked_fill(~self.causal, float("-inf"))
        return self.out((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))


def _hand_written_gpt() -> Made:
    return _CausalAttention(512, 8, 256), (torch.randn(4, 256, 512),)


def _vit() -> Made:
    from vit_pytorch import ViT

    model = ViT(
        image_size=224, patch_size=16, num_classes=10, dim=384, depth=2, heads=6, mlp_dim=1536
    )
    return model, (torch.randn(2, 3, 224, 224),)


def _esm() -> Made:
    from esm.model.esm2 import ESM2

    tokens = torch.randint(4, 24, (4, 256))
    tokens[1:, 180:] = 1  # padding
    model = ESM2(num_layers=2, embed_dim=320, attention_heads=20, token_dropout=False)
    return model, (tokens,)


def _sam() -> Made:
    from segment_anything.modeling.image_encoder import ImageEncoderViT

    model = ImageEncoderViT(
        img_size=512, embed_dim=256, depth=2, num_heads=4, use_rel_pos=True, window_size=14,
        global_attn_indexes=(1,),
    )  # fmt: skip
    return model, (torch.randn(1, 3, 512, 512),)


def _two_way() -> Made:
    from segment_anything.modeling.transformer import TwoWayTransformer

    model = TwoWayTransformer(depth=2, embedding_dim=256, num_heads=8, mlp_dim=2048)
    image = torch.randn(1, 256, 32, 32)
    return model, (image, torch.randn_like(image), torch.randn(1, 7, 256))


def _swin() -> Made:
    from swin_transformer_pytorch import SwinTransformer

    model = SwinTransformer(
        hidden_dim=96, layers=(2, 2, 2, 2), heads=(3, 6, 12, 24), num_classes=10, window_size=7
    )
    return model, (torch.randn(2, 3, 224, 224),)


def _perceiver() -> Made:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=6, max_freq=10.0, depth=2, num_latents=256,
        latent_dim=512, latent_heads=8, num_classes=10,
    )  # fmt: skip
    return model, (torch.randn(2, 64, 64, 3),)


def _ft_transformer() -> Made:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=60, cat_cardinalities=[], d_out=1, n_blocks=2, d_block=192,
        attention_n_heads=8, attention_dropout=0.0, ffn_d_hidden=None, ffn_d_hidden_multiplier=2,
        ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    return model, (torch.randn(128, 60), None)


def _conformer() -> Made:
    from conformer import Conformer

    return Conformer(dim=256, depth=2, heads=4), (torch.randn(2, 256, 256),)


def _memory_efficient() -> Made:
    from memory_efficient_attention_pytorch import Attention

    return Attention(dim=512, heads=8, dim_head=64, causal=True), (torch.randn(2, 512, 512),)


def _gpt() -> Made:
    from litgpt import GPT, Config

    config = Config(
        block_size=256, vocab_size=1000, n_layer=2, n_head=8, n_embd=512, n_query_groups=2
    )
    return GPT(config), (torch.randint(1000, (2, 256)),)


def _x_transformers() -> Made:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=512, depth=2, heads=8, attn_flash=True)
    model = TransformerWrapper(num_tokens=1000, max_seq_len=256, attn_layers=layers)
    return model, (torch.randint(1000, (2, 256)),)


def _timm() -> Made:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    return model, (torch.randn(2, 3, 224, 224),)


def _cait() -> Made:
    import timm

    return timm.create_model("cait_xxs24_224", num_classes=10), (torch.randn(1, 3, 224, 224),)


def _diffusers() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, in_channels=4, num_layers=2, sample_size=32,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    model.register_forward_pre_hook(_dit_arguments, with_kwargs=True)
    return model, (torch.randn(2, 4, 32, 32),)


def _dit_arguments(model: Module, args: Any, kwargs: Any) -> Any:
    """Add the time steps and class labels, which a DiT accepts only as keyword arguments."""
    step, label = torch.tensor([10, 500]), torch.tensor([1, 2])
    return args, {"timestep": step, "class_labels": label, "return_dict": False}


def _clip() -> Made:
    from open_clip.transformer import VisionTransformer

    model = VisionTransformer(224, 16, 384, 2, 6, 4.0, output_dim=128)
    return model, (torch.randn(2, 3, 224, 224),)


def _demucs() -> Made:
    from demucs.transformer import CrossTransformerEncoder

    model = CrossTransformerEncoder(dim=384, num_layers=3, num_heads=8, emb="sin")
    return model, (torch.randn(1, 384, 8, 32), torch.randn(1, 384, 256))


LIBRARIES = [
    Library("torch", "causal attention as in nanoGPT, 256 tokens", "compile", _hand_written_gpt),
    Library("vit-pytorch", "ViT, 197 tokens", "compile", _vit, torchvision=True),
    Library("fair-esm", "ESM-2, 256 residues, padded", "compile", _esm),
    Library("segment-anything", "image encoder", "compile", _sam, torchvision=True),
    Library("segment-anything", "two-way Transformer", "enable", _two_way, torchvision=True),
    Library("swin-transformer-pytorch", "Swin-T, learned bias, shifted windows", "compile", _swin),
    Library("perceiver-pytorch", "Perceiver, 4,096 inputs", "compile", _perceiver),
    Library("rtdl_revisiting_models", "FT-Transformer, 61 tokens", "compile", _ft_transformer),
    Library("conformer", "Conformer, relative positions", "compile", _conformer),
    Library("memory-efficient-attention-pytorch", "causal attention", "compile", _memory_efficient),
    Library("litgpt", "GPT, grouped queries", "enable", _gpt),
    Library("x-transformers", "decoder with flash attention", "enable", _x_transformers),
    Library("timm", "ViT-Ti/16", "enable", _timm, torchvision=True),
    Library("timm", "ViT-Ti/16, compiled", "compile swapped", _timm, torchvision=True),
    Library("timm", "CaiT-XXS-24", "enable", _cait, torchvision=True),
    Library("diffusers", "DiT, 256 patches", "enable", _diffusers),
    Library("open_clip_torch", "CLIP's image tower", "enable", _clip, torchvision=True),
    Library("demucs", "cross-domain Transformer", "enable", _demucs),
]
