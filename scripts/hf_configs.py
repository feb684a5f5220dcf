"""Small configs and model classes for the model types of transformers."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_overrides import CLASSES, CONFIGS
from torchvision_stand_in import import_timm

TIMM = importlib.util.find_spec("timm") is not None
if TIMM:
    import_timm()  # before transformers looks for timm, so that timm's backbones can be imported
transformers = pytest.importorskip("transformers", minversion="5.0")


def _find_timm() -> None:
    """Make transformers detect timm even without torchvision, which newer versions require."""
    utils = transformers.utils
    utils.is_timm_available = utils.import_utils.is_timm_available = lambda: TIMM
    backends = utils.import_utils.BACKENDS_MAPPING
    backends["timm"] = (utils.is_timm_available, backends["timm"][1])


_find_timm()

VOCABULARY, IMAGE = 99, 32

# Reduced values by patterns of field names; the first match applies. None leaves a value unchanged.
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


class NotRunError(Exception):
    """Raised if no small model and inputs could be built that run with eager attention."""


# ---- classes ------------------------------------------------------------------------------------


def model_class(kind: type) -> type | None:
    """Return the model class of a config class: the base model, or another model if it has none."""
    base = None
    if kind in transformers.MODEL_MAPPING and kind.model_type not in CLASSES:
        with contextlib.suppress(ValueError):  # the mapping names a class that does not exist
            found = transformers.MODEL_MAPPING[kind]
            base = found[0] if isinstance(found, tuple) else found
    if base is not None and base.forward is not torch.nn.Module.forward:
        return base
    name = CLASSES.get(kind.model_type) or kind.__name__.removesuffix("Config") + "Model"
    classes = list(_classes(kind))
    for cls in classes:
        if cls.__name__ == name:
            return cls
    # Later classes in a file are built from earlier ones. Task heads ("For") add no attention.
    bases = [cls for cls in classes if "For" not in cls.__name__]
    return bases[-1] if bases else next(iter(classes), None)


def parents(kind: type) -> list[str]:
    """Return the model types whose configs contain a config of the given class."""
    return [
        parent.model_type
        for parent in vars(sys.modules[kind.__module__]).values()
        if isinstance(parent, type) and kind in getattr(parent, "sub_configs", {}).values()
    ]


def _classes(kind: type) -> Iterator[type]:
    """Yield the model classes in the config's folder of transformers that use this config class."""
    package = importlib.import_module(kind.__module__.rpartition(".")[0])
    for file in sorted(Path(package.__path__[0]).glob("modeling_*.py")):
        library = importlib.import_module(f"{package.__name__}.{file.stem}")
        for cls in vars(library).values():
            if (
                isinstance(cls, type)
                and issubclass(cls, transformers.PreTrainedModel)
                and cls.__module__ == library.__name__
                and cls.config_class is kind
                and cls.forward is not torch.nn.Module.forward
            ):
                yield cls


# ---- sizes --------------------------------------------------------------------------------------


def small_config(kind: type, everything: bool = True) -> Any:
    """Return a config with few small layers, including at least one of each kind.

    Args:
        kind: config class.
        everything: also reduce widths. If False, only the number of layers and the vocabulary are
            reduced.
    """
    try:
        config = kind()
    except Exception:  # some config classes have required arguments
        if not overrides(kind.model_type):
            raise
        return kind(**copy.deepcopy(overrides(kind.model_type)))
    return kind(**_small(config, everything))


def overrides(model_type: str) -> dict[str, Any]:
    """Return the config values in `CONFIGS` for a model type. Later entries take precedence."""
    values: dict[str, Any] = {}
    for patterns, entries in CONFIGS.items():
        if any(fnmatchcase(model_type, pattern) for pattern in patterns.split()):
            values |= entries
    return values


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
        if "qk_rope_head_dim" not in values and values.get("head_dim", 0) is None:
            small["head_dim"] = small.get("hidden_size", 32) // 4
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
    return _merged(small, copy.deepcopy(overrides(config.model_type))) if everything else small


def _merged(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return `values` updated with `others`, recursively for nested configs."""
    merged = values | others
    for key, value in others.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merged[key] = _merged(values[key], value)
    return merged


def _rotary(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return sizes of heads and rotary sections that fit each other; empty if nothing changes."""
    if "head_dim" in small and "qk_rope_head_dim" in small:
        return {"head_dim": small["qk_rope_head_dim"]}
    rope = values.get("rope_parameters")
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not sections:
        return {}
    rotated = int(16 * rope.get("partial_rotary_factor", 1.0))  # half of head_dim 32
    scaled = [size * rotated // sum(sections) for size in sections]
    scaled[0] += rotated - sum(scaled)
    sizes = {"rope_parameters": {**rope, "mrope_section": scaled}}
    return {**sizes, "hidden_size": 128, **({"head_dim": 32} if "head_dim" in values else {})}


def _hashable(by_layer: dict[str, list[Any]]) -> bool:
    return all(isinstance(entry, (str, int, float)) for v in by_layer.values() for entry in v)
