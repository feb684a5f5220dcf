"""Random cases of norms, activations and modules, and OPS, the table of all kinds of cases."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import nn_helpers
import torch
from fuzz_cases import (
    LAYOUTS,
    VALUES,
    Case,
    attention_cases,
    check_attention,
    check_decode,
    judge,
    laid_out,
    scaled,
)
from fuzz_engines import check_engine, engine_cases
from fuzz_plans import check_plan, plan_cases
from helpers import device_of
from hypothesis import strategies as st
from norm_cases import norm, tensors_of
from torch import Tensor

import fused_attn
from fused_attn.backends import reference
from fused_attn.backends.base import ACTIVATIONS
from fused_attn.base import philox
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.ops.activation import activation_pass


def check_rows(case: Case, backend: str) -> None:
    """Check a norm or an activation on rows in the memory layouts of a case."""
    kind, seed = case["kind"], torch.tensor(case["seed"])
    drawn_tensors = tensors_of(kind, case["shape"], case["residual"], case["affine"])
    tensors = {n: scaled(t, case["sizes"].get(n, "1"), case) for n, t in drawn_tensors.items()}
    if case["op"] == "activation" and case["affine"]:
        tensors["shift"] = tensors.pop("weight")

    def call(backend: str, input: Tensor, **given: Any) -> tuple[Tensor, ...]:
        p, out, shift = case["dropout_p"], None, given.get("shift")
        if backend != "eager":
            input = laid_out(input, case["layouts"]["input"])
            if "residual" in given:
                given["residual"] = laid_out(given["residual"], case["layouts"]["residual"])
        if case["op"] == "norm":
            return norm(kind, dropout_p=p, seed=case["seed"])(backend)(input, **given)
        if backend != "eager":
            with mock.patch.object(philox, "new_seed", seed.to):
                out = activation_pass(input, shift, kind, p)
        if out is None:  # the fused pass does not support some layouts
            wide = input.to(statistics_dtype(input.dtype))
            wide = wide if shift is None else wide + shift.to(wide.dtype)
            out = reference.activation(wide, None, kind, p, seed).to(input.dtype)
        return (out,)

    judge(case, 0, functools.partial(call), tensors, backend, case["grads"])


@st.composite
def rows_cases(draw: st.DrawFn, op: str, backend: str, dtype: str) -> Case:
    """Draw a case of "norm" or "activation"."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    if op == "activation" and dtype == "float64":  # numpy has no erf in long double
        dtype = "float32"
    names = "input", "residual"
    case = {
        "op": op, "seed": draw(st.integers(0, 1 << 40)), "dtype": dtype,
        "kind": pick(*(ACTIVATIONS if op == "activation" else ["layer_norm", "rms_norm"])),
        "shape": [pick(1, 2, 5, 33), pick(16, 1, 2, 7, 33, 64, 100, 257, 768, 3000)],
        "affine": pick(False, True), "residual": op == "norm" and pick(False, True),
        "sizes": {n: pick(*VALUES) for n in names}, "layouts": {n: pick(*LAYOUTS) for n in names},
        "dropout_p": pick(0.0, 0.0, 0.3), "grads": pick(False, True),
    }  # fmt: skip
    if case["kind"] == "layer_norm" and case["shape"][1] == 1:
        # The gradient of the normalized input is x - x, which is 0 only without a fused product.
        case["affine"] = False
    return case


def check_module(case: Case, backend: str) -> None:
    """Check a swapped module of torch.nn against the original in float64."""
    torch.manual_seed(case["seed"])
    embed, heads, batch, seqlen = case["shape"]
    options = {"batch_first": case["batch_first"], "dropout": 0.0}
    kwargs: dict[str, Any] = {}
    if case["kind"] == "attention":
        theirs: Any = torch.nn.MultiheadAttention(embed, heads, **options)
        names, kwargs["need_weights"] = ("attn_mask", "key_padding_mask"), case["norm_first"]
    else:
        options |= {n: case[n] for n in ("norm_first", "activation")}
        theirs = torch.nn.TransformerEncoderLayer(embed, heads, 16, **options)
        names = "src_mask", "src_key_padding_mask"
    if case["kind"] == "stack":
        theirs = torch.nn.TransformerEncoder(theirs, 2, enable_nested_tensor=False)
        names = "mask", "src_key_padding_mask"
    place = device_of(backend)
    nn_helpers.perturb(theirs).train(case["train"]).to(place)
    sizes = (batch, seqlen, embed) if case["batch_first"] else (seqlen, batch, embed)
    x = torch.randn(sizes).to(place).requires_grad_()
    shapes = (seqlen, seqlen), (batch, seqlen)
    for name, kind, shape in zip(names, case["masks"], shapes, strict=True):
        if kind is not None:
            kwargs[name] = nn_helpers.random_mask(kind, *shape).to(place)
    if case["masks"] == ["learned", "bool"]:  # torch requires masks of equal dtype
        ignored = kwargs[names[1]]
        kwargs[names[1]] = torch.zeros(shapes[1], device=place).masked_fill(ignored, float("-inf"))
    holder = torch.nn.Sequential(copy.deepcopy(theirs))
    fused_attn.swap_modules(holder, remove_padding=False)

    def run(module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        args = (x, x, x) if case["kind"] == "attention" else (x,)
        given = nn_helpers.cast(nn_helpers.cast(args, torch.float32), dtype)
        more = nn_helpers.cast(nn_helpers.cast(kwargs, torch.float32), dtype)
        return nn_helpers.run(copy.deepcopy(module).to(dtype), given, more)

    def eager() -> dict[str, Tensor]:
        return run(theirs, torch.float32)

    with fused_attn.use_backend(backend):
        got = run(holder[0], torch.float32)
    nn_helpers.assert_within_contract(got, eager(), run(theirs, torch.float64), eager)


@st.composite
def module_cases(draw: st.DrawFn, op: str, backend: str, dtype: str) -> Case:
    """Draw a case of a module."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    heads = pick(1, 2, 3)
    return {
        "op": op, "seed": draw(st.integers(0, 999)), "dtype": "float32",
        "kind": pick("attention", "layer", "stack"),
        "shape": [heads * pick(2, 4, 8, 33), heads, pick(1, 2, 5), pick(1, 2, 5, 17, 40)],
        "batch_first": pick(False, True), "norm_first": pick(False, True),
        "activation": pick("relu", "gelu"), "train": pick(True, False),
        "masks": [pick(None, "bool", "learned"), pick(None, "bool")],
    }  # fmt: skip


class Op(NamedTuple):
    """Functions that draw and check a kind of case; `only_cpp` limits it to backend "cpp"."""

    cases: Callable[[str, str, str], st.SearchStrategy[Case]]
    check: Callable[[Case, str], None]
    only_cpp: bool = False


OPS = {
    "attention": Op(attention_cases, check_attention),
    "varlen": Op(attention_cases, check_attention),
    "decode": Op(attention_cases, check_decode),
    "norm": Op(rows_cases, check_rows),
    "activation": Op(rows_cases, check_rows, only_cpp=True),
    "module": Op(module_cases, check_module),
    "engine": Op(engine_cases, check_engine, only_cpp=True),
    "plan": Op(plan_cases, check_plan, only_cpp=True),
}
if find_spec("transformers"):
    from fuzz_models import check_swap, swap_cases

    OPS["swap"] = Op(swap_cases, check_swap, only_cpp=True)
