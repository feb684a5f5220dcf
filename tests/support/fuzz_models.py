"""Random cases of small Hugging Face models, before and after `swap_modules`."""

from __future__ import annotations

import copy
from typing import Any

import hf_zoo
import nn_helpers
import torch
from fuzz_cases import Case
from hf_families import FAMILIES, text, transformers, translation
from hf_results import _exact_softmax, worst
from hypothesis import strategies as st
from torch import Tensor

import fused_attn

transformers.logging.set_verbosity_error()  # suppress advice on padding
VOCABULARY, NEW = 50, 3
FAMILIES_OF_TEXT = {own.name: own for own in FAMILIES if own.inputs in (text, translation)}
EAGER_ONLY = "Gemma2", "GptOss"  # transformers' sdpa supports neither softcap nor sinks


def model_of(case: Case) -> Any:
    """Return a model with the sizes of a case, without dropout."""
    family = FAMILIES_OF_TEXT[case["kind"]]
    heads, heads_kv, head_dim, layers = case["shape"]
    sizes = {"vocab_size": VOCABULARY, "head_dim": head_dim, "d_kv": head_dim}
    sizes |= dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), heads * head_dim)
    names = "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"
    sizes |= dict.fromkeys((*names, "decoder_attention_heads"), heads)
    names = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"
    sizes |= dict.fromkeys((*names, "decoder_layers"), layers) | {"num_key_value_heads": heads_kv}
    config = getattr(transformers, f"{family.name}Config")(
        **{name: sizes.get(name, value) for name, value in family.config().items()}
    )
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    kind = getattr(transformers, family.name + family.head)
    torch.manual_seed(case["seed"])
    made = kind._from_config(config, attn_implementation=case["implementation"])
    return nn_helpers.perturb(made).double()


def padding_mask(kind: str, batch: int, length: int) -> Tensor:
    """Draw an attention_mask with at least one real token in each sequence."""
    lengths = torch.randint(1, length + 1, (batch, 1))
    position = torch.arange(length)
    mask = {
        "right": position < lengths,
        "left": position >= length - lengths,
        "none": position >= lengths * 0,
        "holes": (torch.rand(batch, length) < 0.6) | (position == length - lengths),
    }[kind]
    return mask.long()


def check_swap(case: Case, backend: str) -> None:
    """Check a swapped model against the original: outputs, gradients, and generated tokens."""
    family, (batch, length) = FAMILIES_OF_TEXT[case["kind"]], case["batch"]
    model = model_of(case).train(case["way"] == "train")
    swapped = copy.deepcopy(model)
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, VOCABULARY, (batch, length))}
    if case["padding"] is not None:
        inputs["attention_mask"] = padding_mask(case["padding"], batch, length)
        if case["way"] == "generate":  # the first new token is computed from the last position
            inputs["attention_mask"][:, -1] = 1
    real = inputs.get("attention_mask")
    if family.inputs is translation and case["way"] != "generate":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, 4))
    report = fused_attn.swap_modules(swapped, norm=case["norm"], remove_padding=case["packs"])
    assert any(own.to_type == "fused_attn attention" for own in report.swapped)

    def of_real(tensor: Tensor) -> Tensor:
        fits = real is not None and tensor.shape[:2] == real.shape
        return tensor[real.bool()] if fits else tensor  # type: ignore[union-attr]

    class Outputs(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> tuple[Tensor, ...]:
            outputs = self.model(**inputs)
            return tuple(of_real(outputs[name]) for name in family.outputs)

    def run(model: Any) -> dict[str, Tensor]:
        with _exact_softmax():
            if case["way"] == "generate":
                options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
                options |= {"cache_implementation": case["cache"], "output_logits": True}
                out = model.generate(**inputs, **options, return_dict_in_generate=True)
                return {"tokens": out.sequences, "logits": torch.stack(out.logits)}
            if case["way"] == "inference":
                with torch.no_grad():
                    return dict(zip(family.outputs, Outputs(model)(**inputs), strict=True))
            return nn_helpers.run(Outputs(model), (), inputs)

    expected = run(model)
    with fused_attn.use_backend(backend):
        got = run(swapped)
    if not case["norm"]:
        nn_helpers.assert_equal_in_float64(got, expected)
    error, name = worst(got, expected)  # transformers computes its norms in float32
    assert error <= hf_zoo.TOLERANCE, f"{name} differs by {error:.1e} of its largest number"


@st.composite
def swap_cases(draw: st.DrawFn, op: str, backend: str, dtype: str) -> Case:
    """Draw a case of a Hugging Face model."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    kind, heads_kv = pick(*FAMILIES_OF_TEXT), pick(1, 2)
    family = FAMILIES_OF_TEXT[kind]
    eager = kind in EAGER_ONLY
    return {
        "op": op, "seed": draw(st.integers(0, 999)), "dtype": "float64", "kind": kind,
        "implementation": "eager" if eager else pick("eager", "sdpa"),
        "shape": [heads_kv * pick(1, 2), heads_kv, pick(8, 4, 16), pick(1, 2)],
        "batch": [pick(1, 2, 3), pick(9, 1, 2, 5)],
        "padding": pick(None, "right", "left", "none", "holes"),
        "way": pick("train", "eval", "inference", *["generate"] * family.generates),
        "cache": pick("dynamic", "static"), "norm": pick(True, False), "packs": pick(True, False),
    }  # fmt: skip
