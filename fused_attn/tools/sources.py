"""Loading of the model and inputs that `fused-attn compare` runs on."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fused_attn.tools.recording import copied

DEFAULT_BATCH, DEFAULT_SEQLEN = 2, 32
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass
class Source:
    """Model, its arguments, and notes on them that the report prints."""

    model: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def load(source: str, batch: int | None = None, seqlen: int | None = None, seed: int = 0) -> Source:
    """Load the model and inputs that `source` names.

    Args:
        source: a folder with a Hugging Face config.json and optionally weights, which are random
            otherwise; or "module:function", where the function takes no arguments and returns
            (model, args) or (model, args, kwargs).
        batch: number of sequences for the model of a folder. None selects `DEFAULT_BATCH`.
        seqlen: number of tokens per sequence for the model of a folder. None selects the smaller of
            `DEFAULT_SEQLEN` and the model's maximum.
        seed: seed of random inputs, of random weights and of the function.

    Raises:
        ValueError: `source` names neither a usable folder nor a function, or names a function
            although batch or seqlen is given.
        TypeError: the function's return value has another form.
    """
    torch.manual_seed(seed)
    folder = Path(source)
    if folder.is_dir():
        return _from_folder(folder, DEFAULT_BATCH if batch is None else batch, seqlen)
    module, colon, function = source.partition(":")
    if not (module and colon and function) or "/" in source:
        raise ValueError(f"SOURCE must be an existing folder or module:function, got {source!r}")
    if (batch, seqlen) != (None, None):
        raise ValueError(
            f"--batch and --seqlen apply only to a folder, but {source} returns its inputs"
        )
    return _from_function(module, function)


def _from_function(module: str, name: str) -> Source:
    if "" not in sys.path:
        sys.path.insert(0, "")  # search the current directory, as `python -m` does
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"SOURCE must name a function of {module}, got {name!r}")
    returned = function()
    parts = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    model, args, kwargs = (*parts, {})[:3] if len(parts) in (2, 3) else (None, None, None)
    sound = isinstance(model, Module) and isinstance(args, (tuple, list))
    if not (sound and isinstance(kwargs, Mapping)):
        got = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(
            f"{module}:{name} must return (model, args tuple) or (model, args tuple, kwargs dict), "
            f"got ({got})"
        )
    return Source(model, tuple(args), dict(kwargs))


def _from_folder(folder: Path, batch: int, seqlen: int | None) -> Source:
    if not (folder / "config.json").is_file():
        raise ValueError(f"SOURCE must contain config.json, got the folder {str(folder)!r}")
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "a folder as SOURCE requires transformers: pip install 'fused-attn[hf]', or pass "
            "module:function"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model_class, notes = transformers.AutoModel, []
    only_data = {"local_files_only": True, "trust_remote_code": False}  # otherwise it would prompt
    if any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        model = model_class.from_pretrained(folder, **only_data)
    else:
        notes.append(f"{folder} contains no weights: random weights are used")
        config = transformers.AutoConfig.from_pretrained(folder, **only_data)
        model = model_class.from_config(config)
    model.config.use_cache = False  # a returned cache would be compared as an output
    inputs = copied(hugging_face_inputs(model, batch, seqlen), model.dtype)
    return Source(model, (), inputs, notes)


def hugging_face_inputs(model: Any, batch: int, seqlen: int | None) -> dict[str, Tensor]:
    """Return random inputs that fit the config of a transformers model. Text is padded.

    Args:
        batch: number of sequences. The first has no padding, and about half of the last is padding.
        seqlen: number of tokens per sequence. None selects the smaller of `DEFAULT_SEQLEN` and the
            model's maximum.

    Raises:
        ValueError: the model needs inputs other than text, pixels or audio features.
    """
    accepted = inspect.signature(model.forward).parameters
    wanted = {model.main_input_name}
    if hasattr(model, "get_text_features") and hasattr(model, "get_image_features"):
        wanted |= {"input_ids", "pixel_values"}  # CLIP and similar two-tower models
    if model.config.is_encoder_decoder:
        wanted.add("decoder_input_ids")
    makers = {
        "input_ids": lambda: _tokens(model.config, batch, seqlen),
        "decoder_input_ids": lambda: _tokens(model.config, batch, seqlen),
        "pixel_values": lambda: _pixels(model.config, batch),
        "input_features": lambda: _features(model.config, batch),
    }
    inputs = {name: makers[name]() for name in makers if name in wanted}
    if wanted - inputs.keys():
        unknown = ", ".join(sorted(wanted - inputs.keys()))
        raise ValueError(
            f"cannot create the inputs {unknown} of {type(model).__name__}: pass "
            "module:function as SOURCE, with a function that returns the model and its inputs"
        )
    for prefix in ("", "decoder_"):
        tokens, mask_name = inputs.get(f"{prefix}input_ids"), f"{prefix}attention_mask"
        if tokens is not None and mask_name in accepted:
            inputs[mask_name] = _padding_mask(tokens)
            tokens.masked_fill_(inputs[mask_name] == 0, _pad_token(model.config))
    return inputs


def _tokens(config: Any, batch: int, seqlen: int | None) -> Tensor:
    text = config.get_text_config()
    if seqlen is None:
        seqlen = min(DEFAULT_SEQLEN, getattr(text, "max_position_embeddings", DEFAULT_SEQLEN))
    tokens = torch.randint(text.vocab_size, (batch, seqlen))
    # A random padding token inside the text would shift positions in RoBERTa.
    return torch.where(tokens == _pad_token(config), (tokens + 1) % text.vocab_size, tokens)


def _pad_token(config: Any) -> int:
    text = config.get_text_config()
    token = getattr(text, "pad_token_id", None)
    return token if token is not None and 0 <= token < text.vocab_size else 0


def _padding_mask(tokens: Tensor) -> Tensor:
    """Return a mask with 1 for real tokens: all of the first sequence, half of the last one."""
    batch, seqlen = tokens.shape
    padded = seqlen // 2 * torch.arange(batch) // max(batch - 1, 1)
    return (torch.arange(seqlen) < (seqlen - padded)[:, None]).long()


def _pixels(config: Any, batch: int) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.randn(batch, getattr(vision, "num_channels", 3), height, width)


def _features(config: Any, batch: int) -> Tensor:
    """Return audio features of the length that Whisper expects; its encoder halves the length."""
    return torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
