"""Candidate inputs for small transformers models, derived from the signature of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from hf_configs import IMAGE
from hf_overrides import INPUTS
from hf_results import REAL
from torch import Tensor

BATCH, LENGTH = 2, 10
_GRID = 4  # patches per side of an image, for models with a grid argument


def candidates(model: Any, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield candidate inputs of a model, the most likely first."""
    signature = inspect.signature(model.forward).parameters
    tensors = _Tensors(dtype)
    given = {
        name: tensors.made(value)
        for patterns, entries in INPUTS.items()
        if any(fnmatchcase(model.config.model_type, pattern) for pattern in patterns.split())
        for name, value in entries.items()
    }
    text = tensors.text(signature)
    if given:
        yield {**{k: v for k, v in text.items() if k in signature}, **given}
        yield given
        return
    needed = {
        name: tensors.made(_NEEDED[name])
        for name, parameter in signature.items()
        if name in _NEEDED and (parameter.default is parameter.empty or name in _WANTED)
    }
    for candidate in _guessed(model, signature, tensors, text):
        candidate = {k: v for k, v in candidate.items() if k in signature or "kwargs" in signature}
        yield {**needed, **candidate} if needed else candidate


# Arguments that some models require and that no guess below contains, as entries of `INPUTS`.
_NEEDED: dict[str, Any] = {
    "bbox": ("ids", 1, BATCH, LENGTH, 4),
    "freq": ("zeros", BATCH, 1),
    "input_features_mask": ("ones", BATCH, 64),
    "pixel_values": ("floats", BATCH, 3, IMAGE, IMAGE),
    "qformer_input_ids": ("ids", 80, BATCH, LENGTH),
    "task_inputs": ("ids", 80, BATCH, LENGTH),
}
_WANTED = {"bbox"}  # passed even if the argument has a default


class _Tensors:
    """Factory of input tensors, which share one random generator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def ids(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator)

    def made(self, value: Any) -> Any:
        """Return the tensor or container that an entry of `INPUTS` describes."""
        if isinstance(value, dict):
            return {key: self.made(entry) for key, entry in value.items()}
        if isinstance(value, list) and isinstance(value[0], tuple):
            return [self.made(entry) for entry in value]
        if not isinstance(value, tuple):
            return torch.tensor(value) if isinstance(value, list) else value
        kind, *shape = value
        if kind == "counts":
            return self.ids(*shape).to(self.dtype)
        if kind == "no":
            return torch.zeros(shape, dtype=torch.bool)
        if kind in ("zeros", "ones"):
            return torch.full(shape, int(kind == "ones"), dtype=torch.long)
        return getattr(self, kind)(*shape)

    def text(self, parameters: Any) -> dict[str, Any]:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, REAL:] = 0
        tokens = torch.randint(4, 80, (BATCH, LENGTH), generator=self.generator)
        text: dict[str, Any] = {"input_ids": tokens}
        if "attention_mask" in parameters or "kwargs" in parameters:
            text["attention_mask"] = mask
        if "decoder_input_ids" in parameters:
            text |= {"decoder_input_ids": tokens[:, :7], "decoder_attention_mask": mask[:, :7]}
        return text


def _guessed(
    model: Any, parameters: Any, tensors: _Tensors, text: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    floats = tensors.floats
    decoder = {k: v for k, v in text.items() if k == "decoder_input_ids"}
    image = {"pixel_values": floats(BATCH, 3, IMAGE, IMAGE)}
    if "input_ids" in parameters:
        yield from (text, {k: v for k, v in text.items() if "mask" not in k})
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in parameters), None)
    if grid is not None and "input_ids" not in parameters:
        yield from _patches(model, parameters, grid, tensors)
    if "pixel_values" in parameters:
        yield image
        yield {**image, "pixel_values": floats(BATCH, 3, 64, 64)}
        yield {**image, "pixel_values": floats(BATCH, 4, 3, IMAGE, IMAGE)}  # a video
        yield {**image, "pixel_values": floats(BATCH, 1, IMAGE, IMAGE)}
        if "input_ids" in parameters:
            yield {**text, **image}
    if "pixel_values_videos" in parameters:
        videos = {"pixel_values_videos": floats(BATCH, 4, 3, IMAGE, IMAGE)}
        yield from (videos, {**text, **videos})
    for name in ("input_values", "input_features"):
        if name in parameters:
            for shape in ((2000,), (1, 2000), (80, 64), (64, 80), (80, 128), (128, 64), (128, 128)):
                yield {name: floats(BATCH, *shape), **decoder}
    if "inputs_embeds" in parameters and "input_ids" not in parameters:
        yield {"inputs_embeds": floats(BATCH, LENGTH, 32)}
    if "past_values" in parameters:
        for length in (16, 32, 64, 512):
            yield {"past_values": floats(BATCH, length, 1)}
            yield {"past_values": floats(BATCH, length)}
    if "hidden_states" in parameters:
        width = getattr(model.config, "hidden_size", 32)
        yield {"hidden_states": floats(BATCH, LENGTH, width)}
        yield {"hidden_states": image["pixel_values"]}


def _patches(model: Any, parameters: Any, grid: str, tensors: _Tensors) -> Iterator[dict[str, Any]]:
    """Yield alternative inputs of a model that takes an image as a sequence of patches.

    Each input has all patches of one image and the size of its patch grid. The alternatives differ
    in the shapes of both tensors, which depend on the model.

    Args:
        grid: name of the parameter for the grid.
    """
    config = model.config
    name = next(iter(parameters))
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    patch = getattr(config, "patch_size", 8)
    for frames in (getattr(config, "temporal_patch_size", 1), 1):
        for shape in (((channels * frames * patch * patch,),), ((channels, patch, patch),)):
            patches = tensors.floats(_GRID * _GRID, *shape[0])
            for given in (torch.tensor([[1, _GRID, _GRID]]), torch.tensor([[_GRID, _GRID]])):
                yield {name: patches, grid: given}
