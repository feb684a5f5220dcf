"""The problems that are measured, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.masks import Mask

_MAX_SCORES = 2**22
Device = str | torch.device


@dataclass(frozen=True)
class Attention:
    """One attention problem: sizes as in `fused_attn.scaled_dot_product_attention`."""

    name: str
    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    source: str
    num_heads_kv: int = 0  # 0: num_heads
    mask: str = "none"
    dropout_p: float = 0.0
    quick: bool = False
    span: int = 256  # of a window, a block; of a document on average

    def reduced(self) -> Attention:
        """One batch element, and as many heads as eager attention can hold the scores of."""
        group = self.num_heads // self.kv_heads
        groups = max(1, _MAX_SCORES // (self.seqlen_q * self.seqlen_k * group))
        kv_heads = min(self.kv_heads, groups)
        return replace(self, batch=1, num_heads=kv_heads * group, num_heads_kv=kv_heads)

    @property
    def kv_heads(self) -> int:
        return self.num_heads_kv or self.num_heads

    def operands(
        self, dtype: torch.dtype, device: Device = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value, the same every time."""
        generator = torch.Generator(device).manual_seed(seed)
        # On a GPU a float32 copy of a long cache would take as much again, twice.
        own = {"dtype": dtype if generator.device.type == "cuda" else None, "device": device}
        sizes = (
            (self.num_heads, self.seqlen_q),
            (self.kv_heads, self.seqlen_k),
            (self.kv_heads, self.seqlen_k),
        )
        query, key, value = (
            torch.randn(self.batch, heads, seqlen, self.head_dim, generator=generator, **own).to(
                dtype
            )
            for heads, seqlen in sizes
        )
        return query, key, value

    def bias_size(self) -> tuple[int, int, int]:
        return self.num_heads, self.seqlen_q, self.seqlen_k

    def visible(self, device: Device = "cpu") -> int:
        """Pairs of a query and a key that it sees, over batch and heads."""
        dense = self.bool_mask(device)
        pairs = self.batch * self.seqlen_q * self.seqlen_k
        if dense is not None:
            shape = (self.batch, 1, self.seqlen_q, self.seqlen_k)
            pairs = int(dense.expand(shape).sum())
        return self.num_heads * pairs

    def packed(
        self, dtype: torch.dtype, device: Device = "cpu", seed: int = 0
    ) -> tuple[list[Tensor], Tensor]:
        """The real rows of operands, (rows, heads, head_dim), and cu_seqlens; self-attention."""
        lengths = self.lengths().tolist()
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
        rows = [
            torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(t, lengths, strict=True)])
            for t in self.operands(dtype, device, seed)
        ]
        return rows, cu_seqlens

    def lengths(self, device: Device = "cpu") -> Tensor:
        """Key lengths of a padded batch: from a quarter to all, 62 % on average."""
        steps = torch.linspace(0.25, 1.0, self.batch)
        return (self.seqlen_k * steps).round().long().to(device)

    def document_ids(self, device: Device = "cpu") -> Tensor:
        """(seqlen_k,): documents of random lengths, the same every time."""
        generator = torch.Generator().manual_seed(0)
        starts = torch.randperm(self.seqlen_k, generator=generator)[: self.seqlen_k // self.span]
        ids = torch.zeros(self.seqlen_k, dtype=torch.long)
        ids[starts] = 1
        return ids.cumsum(0).to(device)

    def slopes(self, device: Device = "cpu") -> Tensor:
        """ALiBi's, a head."""
        return 2.0 ** -(torch.arange(self.num_heads, device=device) + 1.0)

    def bool_mask(self, device: Device = "cpu") -> Tensor | None:
        """The visible pairs, which SDPA has no other name for."""
        i = torch.arange(self.seqlen_q, device=device)[:, None]
        j = torch.arange(self.seqlen_k, device=device)[None, :]
        span = self.span

        def documents() -> Tensor:
            ids = self.document_ids(device)
            return ids[:, None] == ids

        def random() -> Tensor:
            generator = torch.Generator(device).manual_seed(0)
            size = (self.seqlen_q, self.seqlen_k)
            return torch.rand(*size, generator=generator, device=device) < 0.5

        kinds = {
            "none": lambda: None,
            "causal": lambda: j <= i,
            "window": lambda: (j <= i) & (j > i - span),
            "padding": lambda: (j < self.lengths(device)[:, None, None])[:, None],
            "blocks": lambda: i // span == j // span,
            "ragged_blocks": lambda: (i + 37) // span == (j + 37) // span,
            "prefix": lambda: (j <= i) | (j < self.seqlen_k // 4),
            "bias": lambda: None,
            "alibi": lambda: j <= i,
            "softcap": lambda: j <= i,
            "documents": documents,
            "random": random,
        }
        return kinds[self.mask]()

    def torch_mask(self, dtype: torch.dtype, device: Device = "cpu") -> Tensor | None:
        """What SDPA is given: what ALiBi adds is a float mask of every score to it."""
        dense = self.bool_mask(device)
        if self.mask != "alibi" or dense is None:
            return dense
        i = torch.arange(self.seqlen_q, device=device)[:, None]
        j = torch.arange(self.seqlen_k, device=device)[None, :]
        bias = -self.slopes(device)[:, None, None] * (i - j).abs()
        return bias.masked_fill(~dense, float("-inf")).to(dtype)

    def own_mask(self, device: Device = "cpu") -> Mask | None:
        """The same as a user of this package says it."""

        def dense() -> Mask:
            mask = self.bool_mask(device)
            assert mask is not None
            return masks.dense(mask)

        prefix = torch.full((self.batch,), self.seqlen_k // 4, device=device)
        kinds = {
            "none": lambda: None,
            "causal": masks.causal,
            "window": lambda: masks.sliding_window(self.span - 1),
            "padding": lambda: masks.padding(self.lengths(device)),
            "blocks": dense,
            "ragged_blocks": dense,
            "prefix": lambda: masks.prefix_lm(prefix),
            "bias": lambda: None,
            "alibi": lambda: masks.causal() & masks.alibi(self.slopes(device)),
            "softcap": masks.causal,
            "documents": lambda: masks.documents(self.document_ids(device)),
            "random": dense,
        }
        return kinds[self.mask]()


_BERT = "BERT-base layer (Devlin et al. 2019): 12 heads of 64"
_GPT2 = "GPT-2 layer (Radford et al. 2019): 12 heads of 64, context 1024"
_SWEEP = "length sweep at 16 heads of 64"
_MASKS = "GPT-2-like layer, 8 heads of 64, under each mask"

ATTENTION = [
    Attention("long", 2, 8, 2048, 2048, 64, _SWEEP, quick=True),
    Attention("long128", 2, 8, 2048, 2048, 128, "Llama-like heads of 128 (Touvron et al. 2023)"),
    Attention("causal", 2, 8, 2048, 2048, 64, _GPT2, mask="causal", quick=True),
    Attention("bert", 8, 12, 512, 512, 64, _BERT),
    Attention("minilm", 32, 12, 128, 128, 32, "MiniLM-L6 layer on 32 sentences", quick=True),
    Attention("vit", 8, 12, 197, 197, 64, "ViT-B/16 at 224 pixels (Dosovitskiy et al. 2021)"),
    Attention("whisper", 1, 8, 1500, 1500, 64, "Whisper-base encoder (Radford et al. 2022)"),
    Attention("llama_gqa", 1, 32, 1024, 1024, 128, "Llama-3-8B: 8 of 32 heads", 8, mask="causal"),
    Attention("one_head", 1, 1, 4096, 4096, 64, "few heads: fewer than threads"),
    Attention("small", 1, 8, 32, 32, 64, "call overhead", quick=True),
    *(Attention(f"length{n}", max(1, 4096 // n), 16, n, n, 64, _SWEEP) for n in (128, 512, 4096)),
]

MASKED = [
    Attention("padding", 8, 8, 1024, 1024, 64, _MASKS, mask="padding", quick=True),
    Attention("blocks", 1, 8, 2048, 2048, 64, _MASKS, mask="blocks", quick=True),
    Attention("ragged_blocks", 1, 8, 2048, 2048, 64, _MASKS, mask="ragged_blocks"),
    Attention("window", 1, 8, 2048, 2048, 64, _MASKS, mask="window"),
    Attention("prefix", 2, 8, 1024, 1024, 64, "prefix LM (Raffel et al. 2020, T5)", mask="prefix"),
    Attention("alibi", 2, 8, 1024, 1024, 64, "ALiBi (Press et al. 2022)", mask="alibi"),
    Attention("softcap", 2, 8, 1024, 1024, 64, "Gemma 2 (2024): softcap 50", mask="softcap"),
]

# Tokens of a padded batch with the padding removed; torch gets the padded batch and its mask.
PACKED = [
    Attention("packed", 8, 8, 1024, 1024, 64, _MASKS, mask="padding", quick=True),
    Attention("packed_bert", 32, 12, 256, 256, 64, _BERT, mask="padding"),
]

TRAINING = [
    Attention("dropout", 4, 8, 512, 512, 64, _BERT, dropout_p=0.1, quick=True),
    Attention("bias", 4, 8, 512, 512, 64, "T5's relative position bias, learnt", mask="bias"),
]

DECODE = [
    Attention("decode", 8, 12, 1, 2048, 64, f"{_GPT2}, one step", quick=True),
    Attention("decode_gqa", 4, 32, 1, 2048, 128, "Llama-3-8B, one step", 8),
    Attention("decode4", 8, 12, 4, 2048, 64, "four speculative tokens"),
]


@dataclass(frozen=True)
class Norm:
    """One norm problem: rows x columns."""

    name: str
    rows: int
    columns: int
    source: str
    dropout_p: float = 0.0
    residual: bool = False
    quick: bool = False
    kind: str = "layer_norm"


NORMS = [
    Norm("bert", 4096, 768, _BERT, quick=True),
    Norm("llama", 2048, 4096, "Llama-3-8B: 4096 features"),
    Norm("wide", 64, 65536, "the widest rows"),
    Norm("narrow", 65536, 64, "norms of heads (QK norm)"),
    Norm("bert_residual", 4096, 768, f"{_BERT}: dropout + residual + norm", 0.1, True, quick=True),
]
