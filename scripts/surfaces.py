"""Generator of the table of surfaces: where the package works, what is supported, and its tests.

`python scripts/surfaces.py` writes the table to docs/support.md. tests/repo/test_readme.py checks
that the page is up to date.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from hf_families import FAMILIES

from fused_attn.nn._from_torch import REPLACEMENTS, qualified_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- surfaces: begin -->", "<!-- surfaces: end -->"


def _names(*names: str) -> str:
    return ", ".join(names)


# REPLACEMENTS gains entries of other libraries at run time, for models with custom norm classes.
_REPLACED = [name for name in map(qualified_name, REPLACEMENTS) if name.startswith("torch.nn.")]

# Surface, what is supported, and the tests, as functions by file. An empty tuple means all tests.
SURFACES: list[tuple[str, str, dict[str, tuple[str, ...]]]] = [
    (
        "`fused_attn.nn`, `swap_modules` on torch.nn",
        _names(*(name.removeprefix("torch.nn.") for name in _REPLACED)),
        {
            "test_nn_attention": (),
            "test_nn_transformer": (),
            "test_nn_arguments": ("test_signatures_are_those_of_torch",),
            "test_swap": (),
        },
    ),
    (
        "`need_weights=True`",
        "all masks, averaged or per-head weights, dropout, gradients, second derivatives",
        {"test_nn_weights": ("test_module_against_torch", "test_memory")},
    ),
    (
        "padding removed end to end",
        "TransformerEncoder with a bool `src_key_padding_mask`, BERT and similar models; "
        "inference and training",
        {"test_nn_packing": (), "test_transformers_packing": ("test_results_are_those_of_eager",)},
    ),
    (
        "decoding with caches",
        "TransformerDecoder",
        {"test_nn_generation": ()},
    ),
    (
        "known defects of torch.nn",
        "fixed",
        {"test_torch_defects": ()},
    ),
    (
        "`fused_attn.enable()`",
        "F.scaled_dot_product_attention, also if imported under another name; unsupported calls "
        "fall back to torch",
        {"test_enable": (), "test_enable_switch": (), "test_enable_compile": ()},
    ),
    (
        'transformers, `attn_implementation="fused_attn"`, `swap_modules`',
        _names(*dict.fromkeys(family.name for family in FAMILIES)),
        {
            "test_transformers_families": ("test_family_equals_eager",),
            "test_swap_transformers": ("test_family", "test_restore"),
            "test_swap_norms": (),
            "test_transformers_generate": ("test_generate_equals_eager",),
            "test_transformers_masks": (),
        },
    ),
    (
        "transformers, models with custom attention",
        "not replaced, with a warning",
        {"test_transformers_families": ("test_models_with_their_own_attention_decline",)},
    ),
    (
        "transformers, every model type",
        "`make models-check`: matches eager, or is declined with a reason",
        {
            "test_transformers_types": ("test_model_type",),
            "test_transformers_families": ("test_models_that_use_their_masks",),
        },
    ),
    (
        "sentence-transformers",
        "MiniLM with `model_kwargs` or `swap_modules`, encoding and training",
        {"test_sentence_transformers": ()},
    ),
    (
        "timm",
        "ViT, DeiT, Swin: attention with `enable()`, LayerNorm swapped",
        {"test_timm": ("test_forward_and_backward",)},
    ),
    (
        "torchvision",
        "ViT: attention and LayerNorm; Swin: LayerNorm",
        {"test_torchvision": ()},
    ),
    (
        "diffusers",
        "UNet, DiT, SD3, Flux, VAE: attention with `enable()`, torch.nn norms swapped",
        {"test_diffusers": ()},
    ),
    (
        "peft",
        "LoRA adapters added before or after the swap, and merged",
        {"test_peft": ()},
    ),
    (
        "accelerate, Trainer, Lightning",
        "losses of 20 training steps match eager",
        {"test_trainers": ()},
    ),
    (
        "torchao",
        "int8 weights, quantized before or after the swap",
        {"test_torchao": ()},
    ),
    (
        "torch.compile, export, checkpointing, autocast",
        "functions, modules, models of transformers",
        {
            "test_ops": ("test_export", "test_checkpoint", "test_autocast"),
            "test_nn_compile": (),
            "test_transformers_families": ("test_family_compiles",),
        },
    ),
    (
        "hand-written attention",
        "`compile_pass()` under torch.compile, forward and backward, masks and biases",
        {"test_compile_pass": ("test_ways_to_write_it", "test_a_bias_has_its_gradient")},
    ),
    (
        "torch.onnx.export(dynamo=True)",
        "functions, modules, models of transformers; as standard ONNX ops",
        {"test_onnx": ("test_attention", "test_swapped_model_of_transformers")},
    ),
    (
        "torch.jit.trace",
        "functions, modules; saved without gradients",
        {"test_trace": ("test_trace", "test_trace_of_an_encoder_layer")},
    ),
    (
        "`fused-attn doctor`, `compare`, `bench`",
        "output as tables, JSON or PNG",
        {"test_cli": (), "test_bench": ()},
    ),
    (
        "`fused-attn verify`",
        "storing, reading, applying and deleting verdicts; rejecting wrong kernels",
        {"test_verify": (), "test_verdicts": ()},
    ),
]


def table() -> str:
    """Return the table as Markdown.

    Raises:
        ValueError: SURFACES names a test that does not exist.
    """
    rows = ["| API or library | supported | tests |", "|---|---|---|"]
    for surface, supported, tests in SURFACES:
        where = []
        for file, functions in tests.items():
            _check(file, functions)
            where.append(f"[{file}](../{_path(file)})")
        rows.append(f"| {surface} | {supported} | {', '.join(where)} |")
    return "\n".join(rows)


def _path(file: str) -> str:
    (path,) = (ROOT / "tests").rglob(f"{file}.py")
    return path.relative_to(ROOT).as_posix()


def _check(file: str, functions: tuple[str, ...]) -> None:
    tree = ast.parse((ROOT / _path(file)).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := set(functions) - there:
        raise ValueError(f"{_path(file)} has no {', '.join(sorted(missing))}")


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with the text between two markers replaced."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def with_table(page: str) -> str:
    """Return the page with the table replaced by a new one."""
    return between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
