"""Problems of the benchmarks with their sources, and performance targets (aims)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn.masks import Mask
from fused_attn.tools.cases import Shape, make_mask, packed_rows, tensors_of

Device = str | torch.device
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Tile of queries and keys in which visible scores are counted for "share of unmasked". It is the
# tile size of the kernels for head_dim 128.
TILE_M, TILE_N = 128, 64


@dataclass(frozen=True)
class Attention:
    """Attention problem of a benchmark.

    Attributes:
        mask: name of the mask in `fused-attn bench` (fused_attn/tools/cases.py).
        bias: add a learned bias to the scores; a backward then computes its gradient.
        layout: layout of query, key and value; see `Shape.operands`.
        quick: include the problem in `make bench-quick`.
    """

    name: str
    size: Shape
    source: str
    mask: str = "none"
    dropout_p: float = 0.0
    softcap: float | None = None
    bias: bool = False
    layout: str = "transposed"
    quick: bool = False

    @property
    def masked(self) -> bool:
        """Return True if the problem has a mask or a bias."""
        return self.mask != "none" or self.bias

    def own_mask(self, device: Device = "cpu") -> Mask | None:
        """Return the mask as a Mask of this package; None if there is none."""
        mask = make_mask(self.mask, self.size)
        return None if mask is None else mask.to(device)

    def tensors(
        self, device: Device = "cpu", dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask as tensors for the peers: visible keys and score bias."""
        return tensors_of(self.own_mask(device), self.size, device, dtype)

    def operands(self, dtype: torch.dtype, device: Device = "cpu", seed: int = 0) -> list[Tensor]:
        """Return random query, key, value and, if learned, bias. Equal seeds give equal tensors."""
        operands = [*self.size.operands(dtype, device, seed, self.layout).values()]
        if self.bias:
            generator = torch.Generator(device).manual_seed(seed)
            size = (self.size.num_heads, self.size.seqlen_q, self.size.seqlen_k)
            operands.append(torch.randn(size, generator=generator, dtype=dtype, device=device))
        return operands

    def checked(self) -> Shape:
        """Return the shape to which the problem is reduced for the check by eager attention."""
        if self.bias:  # the bias gradient is a sum over the full batch, so keep all sequences
            return self.size.reduced(batch=self.size.batch)
        # The dropout counter is batch_index * num_heads + head, so that only sequence 0 has the
        # same mask after num_heads is reduced.
        return self.size.reduced(batch=1 if self.dropout_p else None)

    def lengths(self) -> Tensor:
        """Return the key lengths of a padded batch: 25 to 100 % of seqlen_k, 62 % on average."""
        mask = self.own_mask()
        assert mask is not None
        return mask.paddings[0].key_lengths

    def packed(
        self, dtype: torch.dtype, device: Device = "cpu", seed: int = 0
    ) -> tuple[list[Tensor], Tensor]:
        """Return the rows of real tokens, (rows, heads, head_dim) each, and their cu_seqlens.

        Queries and keys have the same lengths, as in self-attention.
        """
        rows = [packed_rows(t) for t in self.operands(dtype, device, seed)]
        return rows, torch.tensor([0, *self.lengths().tolist()]).cumsum(0).to(device)

    def flops(self) -> float:
        """Return the FLOPs of a forward without masking."""
        return 2.0 * self.size.score_flops()

    def visible_pairs(self, device: Device = "cpu") -> float:
        """Return the fraction of query-key pairs that are visible."""
        visible, _ = self.tensors(device, F32)
        return 1.0 if visible is None else visible.float().mean().item()

    def visible_tiles(self, device: Device = "cpu") -> float:
        """Return the fraction of TILE_M x TILE_N tiles with at least one visible pair."""
        visible, _ = self.tensors(device, F32)
        if visible is None:
            return 1.0
        visible = visible.expand(-1, -1, self.size.seqlen_q, self.size.seqlen_k)
        tiles = [  # one sequence at a time, to limit memory
            F.max_pool2d(v.half(), (TILE_M, TILE_N), ceil_mode=True) for v in visible
        ]
        return torch.stack(tiles).float().mean().item()


@dataclass(frozen=True)
class Norm:
    """Norm problem of a benchmark, over a matrix of rows x columns.

    Attributes:
        returns_sum: also return the sum with the residual, which a pre-norm block needs.
    """

    name: str
    rows: int
    columns: int
    source: str
    dropout_p: float = 0.0
    residual: bool = False
    returns_sum: bool = False
    quick: bool = False
    kind: str = "layer_norm"

    def streams(self, backward: bool) -> int:
        """Return the minimum number of (rows, columns) tensors that a call reads or writes."""
        if not backward:
            return 2 + self.residual + self.returns_sum
        # A backward accesses the gradients of input and out, and the normalized tensor. With
        # dropout, input and residual have separate gradients.
        return 3 + self.returns_sum + (self.residual and self.dropout_p > 0.0)


def _attention(name: str, size: str, source: str, **options: Any) -> Attention:
    """Return a problem whose size has the form of `fused-attn bench --shape`."""
    return Attention(name, Shape.parse(size), source, **options)


def _both_layouts(problems: list[Attention]) -> list[Attention]:
    """Return each problem, followed by its copy with contiguous operands, which is not quick."""
    return [
        p for given in problems for p in (given, replace(given, layout="contiguous", quick=False))
    ]


# ---- on the CPU ---------------------------------------------------------------------------------

_BERT = "BERT-base layer (Devlin et al. 2019): 12 heads of 64"
_GPT2 = "GPT-2 layer (Radford et al. 2019): 12 heads of 64, context 1024"
_LENGTHS = "length sweep at 16 heads of 64"
_MASKS = "GPT-2-like layer, 8 heads of 64, under each mask"
_VIT = "ViT-B/16 at 224 pixels (Dosovitskiy et al. 2021)"
_PREFILL = "the last tokens of a prompt, whose others are in a cache"
_GEMMA = "Gemma 2 (2024): softcap 50"

_ATTENTION = [
    _attention("long", "2,8,2048,2048,64", _LENGTHS, quick=True),
    _attention("long128", "2,8,2048,2048,128", "Llama-like heads of 128 (Touvron et al. 2023)"),
    _attention("causal", "2,8,2048,2048,64", _GPT2, mask="causal", quick=True),
    _attention("bert", "8,12,512,512,64", _BERT),
    _attention("minilm", "32,12,128,128,32", "MiniLM-L6 layer on 32 sentences", quick=True),
    _attention("vit", "8,12,197,197,64", _VIT),
    _attention("whisper", "1,8,1500,1500,64", "Whisper-base encoder (Radford et al. 2022)"),
    _attention("llama_gqa", "1,32/8,1024,1024,128", "Llama-3-8B: 8 of 32 heads", mask="causal"),
    _attention("one_head", "1,1,4096,4096,64", "few heads: fewer than threads"),
    _attention("small", "1,8,32,32,64", "call overhead", quick=True),
    _attention("length128", "32,16,128,128,64", _LENGTHS),
    _attention("length512", "8,16,512,512,64", _LENGTHS),
    _attention("length4096", "1,16,4096,4096,64", _LENGTHS),
    _attention("padding", "8,8,1024,1024,64", _MASKS, mask="padding", quick=True),
    _attention("blocks", "1,8,2048,2048,64", _MASKS, mask="blocks", quick=True),
    _attention("blocks_alone", "8,8,256,256,64", "what `blocks` shows, as sequences"),
    _attention("ragged_blocks", "1,8,2048,2048,64", _MASKS, mask="ragged_blocks"),
    _attention("window", "1,8,2048,2048,64", _MASKS, mask="window"),
    _attention("prefix", "2,8,1024,1024,64", "prefix LM (Raffel et al. 2020, T5)", mask="prefix"),
    _attention("alibi", "2,8,1024,1024,64", "ALiBi (Press et al. 2022)", mask="causal+alibi"),
    _attention("softcap", "2,8,1024,1024,64", _GEMMA, mask="causal", softcap=50.0),
]
_TRAINING = [
    _attention("dropout", "4,8,512,512,64", _BERT, dropout_p=0.1, quick=True),
    _attention("bias", "4,8,512,512,64", "T5's relative position bias, learnt", bias=True),
]
# Padded batches whose padding fused_attn removes. torch receives the padded batch and its mask.
_PACKED = [
    _attention("packed", "8,8,1024,1024,64", _MASKS, mask="padding", quick=True),
    _attention("packed_bert", "32,12,256,256,64", _BERT, mask="padding"),
]
DECODE_STEPS = [
    _attention("decode", "8,12,1,2048,64", f"{_GPT2}, one step", quick=True),
    _attention("decode_gqa", "4,32/8,1,2048,128", "Llama-3-8B, one step"),
    _attention("decode4", "8,12,4,2048,64", "four speculative tokens"),
    _attention("prefill16", "8,12,16,2048,64", _PREFILL, mask="causal_bottom_right"),
    _attention("prefill128", "8,12,128,2048,64", _PREFILL, mask="causal_bottom_right"),
]
_NORMS = [
    Norm("bert", 4096, 768, _BERT, quick=True),
    Norm("llama", 2048, 4096, "Llama-3-8B: 4096 features"),
    Norm("wide", 64, 65536, "the widest rows"),
    Norm("narrow", 65536, 64, "norms of heads (QK norm)"),
    Norm("bert_residual", 4096, 768, f"{_BERT}: dropout + residual + norm", 0.1, True, quick=True),
]

# ---- on a GPU -----------------------------------------------------------------------------------

_SWEEP = "hidden size 2048, 32768 tokens: as in FlashAttention-2 (Dao 2023), figures 4 to 6"
_GPU_MASKS = "16 heads of 128, 32768 tokens, under each mask"
_LLAMA = "Llama-3-8B: 8 of 32 heads of 128, one token"
_WIDTH = "hidden sizes of current models"


def _sweep(head_dim: int, seqlen: int, name: str = "full", **options: Any) -> Attention:
    """Return a problem of 32768 tokens; its name states mask, head_dim and length."""
    heads = 2048 // head_dim
    size = Shape(32768 // seqlen, heads, heads, seqlen, seqlen, head_dim)
    source = _GPU_MASKS if options.keys() & {"mask", "bias"} else _SWEEP
    name = f"{name}-D{head_dim}-{seqlen // 1024}k"
    return Attention(name, size, source, layout="contiguous", **options)


_UNMASKED = [
    _sweep(128, 16384, quick=True),
    *(_sweep(128, n) for n in (1024, 4096)),
    *(_sweep(64, n) for n in (1024, 4096, 16384)),
]
GPU_MASKED = [
    _sweep(128, 8192, "causal", mask="causal", quick=True),
    _sweep(128, 8192, "dense_blocks", mask="ragged_blocks:1024", quick=True),
    _sweep(128, 8192, "dense_random", mask="random"),
    _sweep(128, 8192, "padding", mask="padding"),
    _sweep(128, 8192, "window", mask="window:1024"),
    _sweep(128, 8192, "documents", mask="ragged_documents:1024"),
    _sweep(128, 8192, "alibi", mask="causal+alibi"),
    _sweep(128, 4096, "bias", bias=True),
    _sweep(64, 8192, "causal", mask="causal"),
]
_GPU_PACKED = _attention(
    "packed-D128", "16,16,4096,4096,128", "62 % of 65536 tokens", mask="padding"
)
_GPU_DECODE_STEPS = [
    _attention(
        f"decode-B{batch}-{length}k", f"{batch},32/8,1,{length * 1024},128", _LLAMA,
        layout="contiguous", quick=(batch, length) == (64, 8),
    )
    for batch, length in ((64, 8), (1, 8), (1, 64), (8, 8), (8, 64), (64, 32))
]  # fmt: skip
_GPU_NORMS = [
    Norm("layer_norm-4096", 16384, 4096, _WIDTH, quick=True),
    Norm("layer_norm-1024", 65536, 1024, _WIDTH),
    Norm("layer_norm-16384", 8192, 16384, _WIDTH),
    Norm("rms_norm-4096", 16384, 4096, _WIDTH, kind="rms_norm"),
    Norm("rms_norm-16384", 8192, 16384, _WIDTH, kind="rms_norm"),
    Norm("layer_norm-residual", 16384, 4096, _WIDTH, 0.1, True, True, quick=True),
    Norm("rms_norm-residual", 16384, 8192, _WIDTH, 0.0, True, True, kind="rms_norm"),
]

# ---- by test ------------------------------------------------------------------------------------

Problems = dict[str, list[tuple[Any, ...]]]  # "cpu" or "gpu" -> (shape, dtype[, group]) tuples

FORWARD: Problems = {
    "cpu": [*product(_both_layouts([*_ATTENTION, *DECODE_STEPS]), (F32, BF16, F16))],
    "gpu": [
        *product([*_UNMASKED, *GPU_MASKED], [BF16]), (_sweep(128, 4096), F16),
        (_sweep(64, 4096), F32),
    ],
}  # fmt: skip
BACKWARD: Problems = {
    "cpu": [*product(_both_layouts(_ATTENTION), (F32, BF16, F16))],
    "gpu": [
        *product([*_UNMASKED[:2], _UNMASKED[4], *GPU_MASKED], [BF16]),
        (_sweep(128, 4096, "dropout", dropout_p=0.1), BF16), (_sweep(128, 4096), F16),
    ],
}  # fmt: skip
TRAINING: Problems = {"cpu": [*product(_both_layouts(_TRAINING), (F32, BF16, F16))]}
DECODE: Problems = {"gpu": [*product(_GPU_DECODE_STEPS, [BF16])]}
_CALL = _attention("call", "1,8,32,32,64", "call overhead", layout="contiguous", quick=True)
CALL: Problems = {"gpu": [(_CALL, BF16)]}
PACKED: Problems = {
    "cpu": [*product(_PACKED, (F32, BF16, F16), ["packed"])],
    "gpu": [
        *product(
            [_GPU_PACKED], [BF16], ["packed forward", "packed backward"],
        )
    ],
}  # fmt: skip
NORMS: Problems = {
    "cpu": [*product(_NORMS, (F32, BF16), ["norm forward", "norm backward"])],
    "gpu": [*product(_GPU_NORMS, [BF16], ["norm forward", "norm backward"])],
}


def cases(problems: Problems) -> list[Any]:
    """Return one `pytest.param` per problem. Those of GPU problems have the mark `gpu`."""
    return [
        pytest.param(*problem, id=_id(problem), marks=[pytest.mark.gpu] if on == "gpu" else [])
        for on, listed in problems.items()
        for problem in listed
    ]


def _id(problem: tuple[Any, ...]) -> str:
    shape, dtype, *rest = problem
    if getattr(shape, "layout", "") == "contiguous":
        rest.append(shape.layout)
    return "-".join([shape.name, str(dtype).removeprefix("torch."), *rest]).replace(" ", "_")


def aims(group: str, shape: Any) -> dict[str, float]:
    """Return targets for values in a record: rates on an H200, fractions on any GPU."""
    if isinstance(shape, Norm) or group == "decode":
        return {"share_of_copy": 0.85}
    if group not in ("forward", "backward"):
        return {}
    wanted = {}
    if shape.masked:
        wanted["share_of_unmasked"] = 0.85
    if shape.mask.startswith(("ragged_blocks", "random")) and group == "forward":
        wanted["times_sdpa"] = 4.0
    if not shape.masked and shape.size.head_dim == 128 and shape.size.seqlen_k == 16384:
        wanted["gflops"] = {"forward": 480e3, "backward": 400e3}[group]
    return wanted
