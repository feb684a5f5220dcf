"""Any model type of transformers, made small from its config, and what the swap does to it.

`judge` says of a type what happens: the model on eager attention against the same model after
`swap_modules`, forward and backward, with padding and without.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nn_helpers import perturb
from torch import Tensor

from fused_attn.integrations import transformers as integration
from fused_attn.integrations.transformers import models
from fused_attn.swap import SwapReport, swap_modules

transformers = pytest.importorskip("transformers", minversion="5.0")

BATCH, LENGTH, VOCABULARY, IMAGE = 2, 10, 99, 32
REAL = 6  # tokens of the second sequence, the rest is padding
MAX_PARAMETERS = 30_000_000
# Of the largest number, in float64, where the library goes through float32 at places. Errors of
# masks are above 1e-2.
TOLERANCE = 1e-4

# What sizes become, by patterns of names; the first that matches. None leaves them.
_SIZES: list[tuple[str, int | None]] = [
    (r"vocab_size", VOCABULARY),
    (r"type_vocab|num_labels|num_channels|kernel|stride|chunk_size_feed|_rate|num_mel", None),
    (r"buckets", None),
    (r"max_.*position|n_positions|context_length|max_seq|n_ctx|max_source|max_target", 64),
    (r"sliding_window$|attention_chunk_size|attention_window|local_attention$|window_size", 4),
    (r"linear_num_.*heads|mamba_n_heads|mamba_num_heads", 4),
    (r"mamba_(d_head|head_dim)", 16),
    (r"heads?$|num_attention_heads", 4),
    (r"qk_head_dim", 12),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"head_dim|d_kv|mamba_d_head|head_size", 8),
    (r"lora_rank|q_rank|kv_rank|o_groups", 16),
    (r"index_topk|index_n_heads|index_local", 2),
    (r"n_group|topk_group|num_group", 1),
    (r"experts_per_tok|moe_topk|moe_k|top_k|topk", 2),
    (r"num_.*experts|n_routed_experts|moe_num_experts|n_experts", 4),
    (r"n_shared_experts|num_shared|moe_num_shared", 1),
    (r"image_embedding_size", IMAGE // 8),
    (r"image_size", IMAGE),
    (r"patch_size", 8),
    (r"temporal_patch|spatial_merge|num_frames", None),
    (r"intermediate|ffn_dim|d_ff$|mlp_dim|ffn_hidden|inner_dim|n_inner", 48),
    (r"hidden_size|d_model|n_embd|embed_dim|^dim$|embedding_size|^width$|hidden_dim|emb_dim"
     r"|out_hidden|projection_dim|text_embed|d_embed|output_channels", 32),
]  # fmt: skip
_GROUPED = re.compile(r"num_(key_value|kv)_heads|n_kv_heads|multi_query_group_num|num_kv_head")
_LAYERS = re.compile(r"(^|_)(num_)?(n_)?(hidden_|encoder_|decoder_)*(layers?|blocks|depth)$")
_TOKEN = re.compile(r"_token_(id|index)$|_index$|token_ids$")
_COMMON_TOKENS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "sep": 2, "cls": 1, "unk": 3}


@dataclass(frozen=True)
class Verdict:
    """What the swap does to a model type.

    Attributes:
        verdict: "agrees", "agrees with sdpa" (where eager does not), "declined", "no attention",
            "eager NaN", "not run" or "FAILS".
        detail: why; the largest relative error of outputs and gradients where it agrees.
    """

    verdict: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.detail}" if self.detail else self.verdict


class NotRunError(Exception):
    """No small model, or no inputs, that run on eager attention could be made."""


def judge(model_type: str) -> Verdict:
    """Compare the smallest model of a type before and after the swap."""
    warnings.simplefilter("ignore")
    try:
        eager, fused, inputs, expected = _running(model_type)
    except NotRunError as error:
        return Verdict("not run", str(error))
    ran = _ran(fused)
    with _calls() as callers:
        try:
            report = swap_modules(fused)
            actual = _results(fused, inputs)
            padded = {k: v for k, v in inputs.items() if "attention_mask" not in k}
            if len(padded) < len(inputs):
                expected |= {f"unpadded {k}": v for k, v in _results(eager, padded).items()}
                actual |= {f"unpadded {k}": v for k, v in _results(fused, padded).items()}
        except Exception as error:
            return Verdict("FAILS", f"{type(error).__name__}: {_line(error)}")
    claim = _false_claim(report, fused, ran, callers)
    if claim is not None:
        return Verdict("FAILS", claim)
    if not all(t.isfinite().all() for t in expected.values()):
        return Verdict("eager NaN")
    error, name = _worst(actual, expected)
    if not error <= TOLERANCE:
        again = _results(eager, inputs)
        if _worst(again, {key: expected[key] for key in again})[0] > TOLERANCE:
            return Verdict("not run", "eager does not repeat itself")
        if _is_that_of_sdpa(fused, report, inputs, actual):
            return Verdict("agrees with sdpa", f"eager's {name} differs by {error:.1e}")
        return Verdict("FAILS", f"{name} differs by {error:.1e} of its largest number")
    if callers:
        return Verdict("agrees", f"{error:.0e}")
    # Models have no module in front of their name in a report; layers do.
    reasons = [s.reason for s in report.skipped if "." not in s.type]
    own = [reason for reason in reasons if not reason.startswith("nothing in it calls")]
    if own:
        return Verdict("declined", own[0])
    if reasons:
        return Verdict("no attention")
    return Verdict("not run", "its attention is not reached")


def _is_that_of_sdpa(
    model: Any, report: SwapReport, inputs: dict[str, Any], actual: dict[str, Tensor]
) -> bool:
    """True if what is not eager's is what the library's own sdpa attention gives."""
    report.restore()
    integration.set_implementation(model, "sdpa")
    results = _results(model, inputs)
    padded = {k: v for k, v in inputs.items() if "attention_mask" not in k}
    if len(padded) < len(inputs):
        results |= {f"unpadded {k}": v for k, v in _results(model, padded).items()}
    return _worst(actual, results)[0] <= TOLERANCE


def _ran(model: Any) -> set[int]:
    """Ids of modules that have the interface in their code, but for models that decline, as they
    run."""
    ran: set[int] = set()

    def watch(module: Any) -> None:
        if models._INTERFACE in models._names(type(module)):
            module.register_forward_pre_hook(lambda module, _: ran.add(id(module)))
        for child in module.children():
            if not isinstance(child, transformers.PreTrainedModel) or not unsupported(child):
                watch(child)

    unsupported = integration.unsupported
    if not unsupported(model):
        watch(model)
    return ran


def _false_claim(report: SwapReport, model: Any, ran: set[int], callers: list[Any]) -> str | None:
    """What the report calls fused though it ran something else; None if all is true."""
    names = dict(model.named_modules())
    called = set(map(id, callers))
    for swapped in report.swapped:
        if swapped.to_type == "fused_attn attention":
            part = model if swapped.name == "(the model)" else names[swapped.name]
            inside = set(map(id, part.modules()))
            if inside & ran and not inside & called:
                return f"{swapped.name} is reported as fused, and nothing in it called the kernels"
    return None


class _calls:  # noqa: N801
    """The modules that call the fused attention, in the length of a block."""

    def __enter__(self) -> list[Any]:
        self.seen: list[Any] = []
        self.real = integration.attention_forward
        real, seen = self.real, self.seen

        def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(module)
            return real(module, *args, **kwargs)

        integration.register()
        transformers.AttentionInterface.register(integration.NAME, spy)
        return self.seen

    def __exit__(self, *_: object) -> None:
        transformers.AttentionInterface.register(integration.NAME, self.real)


# ---- small models -------------------------------------------------------------------------------


def _running(model_type: str) -> tuple[Any, Any, dict[str, Any], dict[str, Tensor]]:
    """A model on eager attention, a copy of it, inputs, and its results."""
    reason = ""
    for everything in (True, False):
        try:
            model = _small_model(model_type, everything)
            copied = copy.deepcopy(model)  # some cannot be copied after they ran
        except NotRunError as error:
            reason = reason or str(error)
            break
        except Exception as error:
            reason = reason or f"its config: {type(error).__name__}: {_line(error)}"
            continue
        for inputs in _inputs(model):
            try:
                expected = _results(model, inputs)
            except Exception as error:
                reason = reason or f"eager: {type(error).__name__}: {_line(error)}"
                continue
            if expected:
                return model, copied, inputs, expected
            reason = reason or "it has no float outputs"
    raise NotRunError(reason)


def _small_model(model_type: str, everything: bool) -> Any:
    config = small_config(transformers.CONFIG_MAPPING[model_type], everything)
    if type(config) not in transformers.MODEL_MAPPING:
        raise NotRunError("it has no base model")
    if not everything:
        with torch.device("meta"):
            whole = transformers.AutoModel.from_config(copy.deepcopy(config))
        size = sum(parameter.numel() for parameter in whole.parameters())
        if size > MAX_PARAMETERS:
            raise NotRunError(f"{size} parameters are too many")
    torch.manual_seed(0)
    # The library's other ways to run experts do not take float64.
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModel.from_config(config, **ways)
    return perturb(model.double()).eval()


def small_config(kind: type, everything: bool = True) -> Any:
    """A config with few and small layers, but one of each kind.

    Args:
        kind: its class.
        everything: widths too; otherwise the number of layers only.
    """
    return kind(**_small(kind(), everything))


def _small(config: Any, everything: bool) -> dict[str, Any]:
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    small: dict[str, Any] = {}
    for key in config.sub_configs:
        part = values.pop(key, None)
        if isinstance(part, transformers.PreTrainedConfig):
            small[key] = {**_small(part, everything), "model_type": part.model_type}
    token = VOCABULARY - 1
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if _TOKEN.search(key):
            common = _COMMON_TOKENS.get(key.rpartition("_token_")[0])
            if common is None:
                token, common = token - 1, token
            small[key] = common
        elif _LAYERS.search(key) and value > 2 and "feat_extract" not in key:
            small[key] = 2
        elif everything and _GROUPED.search(key):
            whole = next(
                (values[k] for k in ("num_attention_heads", "num_heads") if k in values), 0
            )
            small[key] = 4 if value == whole else min(value, 2)
        elif everything:
            size = next((size for pattern, size in _SIZES if re.search(pattern, key)), None)
            if size is not None and value > size:
                small[key] = size
        elif "vocab_size" in key and "type" not in key:
            small[key] = min(value, 2000)
    if everything:
        small |= _rotary(values, small)
    layers = next((k for k in ("num_hidden_layers", "num_layers", "n_layer") if k in values), None)
    if layers is not None:
        by_layer = {
            k: v for k, v in values.items() if isinstance(v, list) and len(v) == values[layers] > 2
        }
        rows = (
            list(dict.fromkeys(zip(*by_layer.values(), strict=True))) if _hashable(by_layer) else []
        )
        if rows:
            rows = (rows * 2)[: max(2, min(len(rows), 4))]
            columns = zip(by_layer, zip(*rows, strict=True), strict=True)
            small |= {key: list(column) for key, column in columns}
            small[layers] = len(rows)
    return small


def _rotary(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Head sizes that rotary embeddings fit to."""
    if "head_dim" in small and "qk_rope_head_dim" in small:
        return {"head_dim": small["qk_rope_head_dim"]}
    rope = values.get("rope_parameters")
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not sections:
        return {}
    rotated = int(16 * rope.get("partial_rotary_factor", 1.0))  # half of a head of 32
    scaled = [size * rotated // sum(sections) for size in sections]
    scaled[0] += rotated - sum(scaled)
    sizes = {"rope_parameters": {**rope, "mrope_section": scaled}}
    return {**sizes, "hidden_size": 128, **({"head_dim": 32} if "head_dim" in values else {})}


def _hashable(by_layer: dict[str, list[Any]]) -> bool:
    return all(isinstance(entry, (str, int, float)) for v in by_layer.values() for entry in v)


# ---- inputs -------------------------------------------------------------------------------------


def _inputs(model: Any) -> Iterator[dict[str, Any]]:
    """What the model may be called with, the likeliest first."""
    parameters = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, REAL:] = 0
    tokens = torch.randint(4, 80, (BATCH, LENGTH), generator=generator)
    text: dict[str, Any] = {"input_ids": tokens}
    if "attention_mask" in parameters or "kwargs" in parameters:
        text["attention_mask"] = mask
    if "decoder_input_ids" in parameters:
        text |= {"decoder_input_ids": tokens[:, :7], "decoder_attention_mask": mask[:, :7]}
    decoder = {k: v for k, v in text.items() if k == "decoder_input_ids"}
    image = {"pixel_values": floats(BATCH, 3, IMAGE, IMAGE)}
    video = {"pixel_values": floats(BATCH, 4, 3, IMAGE, IMAGE)}
    candidates: list[dict[str, Any]] = []
    if "input_ids" in parameters:
        candidates += [text, {k: v for k, v in text.items() if "mask" not in k}]
    if "pixel_values" in parameters:
        candidates += [image, {**image, "pixel_values": floats(BATCH, 3, 64, 64)}, video]
        candidates.append({**image, "pixel_values": floats(BATCH, 1, IMAGE, IMAGE)})
        if "input_ids" in parameters:
            candidates += [{**text, **image}]
    if "pixel_values_videos" in parameters:
        videos = {"pixel_values_videos": floats(BATCH, 4, 3, IMAGE, IMAGE)}
        candidates += [videos, {**text, **videos}]
    for name in ("input_values", "input_features"):
        if name in parameters:
            for shape in ((2000,), (1, 2000), (80, 64), (64, 80), (80, 128), (128, 64), (128, 128)):
                candidates.append({name: floats(BATCH, *shape), **decoder})
    if "inputs_embeds" in parameters and "input_ids" not in parameters:
        candidates.append({"inputs_embeds": floats(BATCH, LENGTH, 32)})
    if "past_values" in parameters:
        for length in (16, 32, 64, 512):
            candidates.append({"past_values": floats(BATCH, length, 1)})
            candidates.append({"past_values": floats(BATCH, length)})
    for candidate in candidates:
        yield {k: v for k, v in candidate.items() if k in parameters or "kwargs" in parameters}


# ---- results ------------------------------------------------------------------------------------


def _results(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Float outputs, without rows of padding, and the gradients of a sum of them."""
    masks = [inputs[k] for k in ("attention_mask", "decoder_attention_mask") if k in inputs]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    softmax = torch.nn.functional.softmax

    def exact(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return softmax(input, dim)

    torch.nn.functional.softmax = exact  # type: ignore[assignment]
    try:
        output = model(**inputs)
        results = dict(_floats(output, "", masks))
        generator = torch.Generator().manual_seed(1)
        loss: Any = sum(
            (t * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)).sum()
            for t in results.values()
            if t.requires_grad
        )
        if isinstance(loss, Tensor):
            loss.backward()
    finally:
        torch.nn.functional.softmax = softmax
    results = {name: t.detach() for name, t in results.items()}
    grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    if grads:
        results["gradients"] = torch.cat(grads)
    return results


def _floats(value: Any, name: str, masks: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            real = [mask.bool() for mask in masks if mask.shape == value.shape[:2]]
            yield name, value[real[0]] if real else value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _floats(entry, f"{name}.{key}".lstrip("."), masks)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _floats(entry, f"{name}[{index}]", masks)


def _worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of a tensor, of its largest number, and the tensor's name."""
    if actual.keys() != expected.keys():
        return float("inf"), f"{sorted(actual.keys() ^ expected.keys())[0]} is missing or new and"
    worst = (0.0, "")
    for name, reference in expected.items():
        if actual[name].shape != reference.shape:
            return float("inf"), name
        scale = max(reference.abs().max().item(), 1e-6)
        error = (actual[name] - reference).abs().max().item() / scale
        if not error <= worst[0]:
            worst = (error, name)
    return worst


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""
