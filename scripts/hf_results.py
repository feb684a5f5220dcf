"""Results of a small transformers model in several kinds of calls, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

REAL = 6  # number of real tokens in the second sequence, before its padding

Results = dict[str, Tensor]


def results(model: Any, inputs: dict[str, Any]) -> Results:
    """Return float outputs without padded rows, and the gradients of a weighted sum of them."""
    masks = [inputs[k] for k in ("attention_mask", "decoder_attention_mask") if k in inputs]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with _exact_softmax():
        output = model(**inputs)
        found = dict(_floats(output, "", masks))
        generator = torch.Generator().manual_seed(1)
        loss: Any = sum(
            (t * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)).sum()
            for t in found.values()
            if t.requires_grad
        )
        if isinstance(loss, Tensor):
            loss.backward()
    found = {name: t.detach() for name, t in found.items()}
    grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    if grads:
        found["gradients"] = torch.cat(grads)
    return found


def unpadded(model: Any, inputs: dict[str, Any]) -> Results:
    """Return the results without padding masks; empty if the inputs contain none."""
    others = {k: v for k, v in inputs.items() if "attention_mask" not in k}
    return results(model, others) if len(others) < len(inputs) else {}


@torch.no_grad()
def left_padded(model: Any, inputs: dict[str, Any]) -> Results:
    """Return per-token outputs with left padding, as in generation; empty for inputs without text.

    Other outputs are excluded, because some models derive them from the first token, which is
    padding here.
    """
    if "input_ids" not in inputs or "attention_mask" not in inputs:
        return {}
    changed = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
    torch.manual_seed(0)
    masks = [changed[k] for k in ("attention_mask", "decoder_attention_mask") if k in changed]
    with _exact_softmax():
        output = model(**changed)
    sizes = [int(mask.sum()) for mask in masks]
    return {k: v for k, v in _floats(output, "", masks) if v.shape[0] in sizes}


@torch.no_grad()
def cached(model: Any, inputs: dict[str, Any]) -> Results:
    """Return per-token outputs of one token that is decoded with a KV cache and left padding.

    The result is empty if the model has no cache.
    """
    if "input_ids" not in inputs or "attention_mask" not in inputs:
        return {}
    torch.manual_seed(0)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    tokens, mask = inputs[name], inputs["attention_mask"].flip(1)
    once = {k: v for k, v in inputs.items() if k != "decoder_attention_mask"}
    cut = mask if name.startswith("decoder") else mask[:, :-1]
    with _exact_softmax():
        before = model(**{**once, name: tokens[:, :-1], "attention_mask": cut}, use_cache=True)
        # Older versions of transformers name the cache past_key_values.
        caches = {key: getattr(before, key, None) for key in ("cache", "past_key_values")}
        known = next((key for key, cache in caches.items() if cache is not None), None)
        if known is None:
            return {}
        more = {name: tokens[:, -1:], "attention_mask": mask, known: caches[known]}
        if name.startswith("decoder"):
            more["encoder_outputs"] = (before.encoder_last_hidden_state,)
        after = model(**more, use_cache=True)
    return {k: v for k, v in _floats(after, "", []) if v.shape[:2] == (len(tokens), 1)}


WAYS: dict[str, Callable[[Any, dict[str, Any]], Results]] = {
    "given": results,
    "unpadded": unpadded,
    "left-padded": left_padded,
    "cached": cached,
}


def further_ways(model: Any, inputs: dict[str, Any]) -> dict[str, Results]:
    """Return the results of all `WAYS` except the first, for a model with eager attention.

    Ways that raise an exception or return non-finite results are excluded.
    """
    found = {}
    for name, way in list(WAYS.items())[1:]:
        try:
            tensors = way(model, inputs)
        except Exception:
            continue
        if tensors and all(t.isfinite().all() for t in tensors.values()):
            found[name] = tensors
    return found


def worst(actual: Results, expected: Results) -> tuple[float, str]:
    """Return the largest error relative to its tensor's maximum, and the name of that tensor."""
    if actual.keys() != expected.keys():
        return float("inf"), f"{sorted(actual.keys() ^ expected.keys())[0]} is missing or new and"
    largest = (0.0, "")
    for name, reference in expected.items():
        if actual[name].shape != reference.shape:
            return float("inf"), name
        scale = max(reference.abs().max().item(), 1e-6)
        error = (actual[name] - reference).abs().max().item() / scale
        if not error <= largest[0]:
            largest = (error, name)
    return largest


def _exact_softmax() -> AbstractContextManager[Any]:
    """Return a context in which softmax ignores `dtype`: transformers requests float32."""
    softmax = torch.nn.functional.softmax

    def exact(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return softmax(input, dim)

    return mock.patch.object(torch.nn.functional, "softmax", exact)


def _floats(value: Any, name: str, masks: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            real = [mask.bool() for mask in masks if mask.shape == value.shape[:2]]
            yield name, value[real[0]] if real else value
    elif isinstance(value, dict):
        for key, entry in value.items():
            if not str(key).endswith("attentions"):  # attention weights, which only eager returns
                yield from _floats(entry, f"{name}.{key}".lstrip("."), masks)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _floats(entry, f"{name}[{index}]", masks)
