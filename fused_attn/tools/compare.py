"""Layer-by-layer comparison of a model's numerics with the fused kernels and eager attention.

The model runs forward and backward on the same inputs three times: in float64 with eager attention
(the truth), in the model's dtype with eager attention, and in the model's dtype with the fused
modules, optionally under `enable()`. The errors of the last two runs are measured against the
truth. A fourth, eager run checks that the outputs repeat. Eager outputs that do not repeat, or that
are far from float64, set no valid limit.

A model whose fused modules remove padding runs twice. The run with padding is compared by layer,
because shapes would otherwise differ. The run without padding, as users run the model, is compared
by outputs and gradients of the model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_attn.base.torch_state import dtype_name, is_compiling
from fused_attn.call.call_counts import CallCounts
from fused_attn.integrations.attention_in_code import BY_HAND, CALLS_SDPA, EITHER
from fused_attn.integrations.enable import enabled
from fused_attn.nn import TransformerEncoder
from fused_attn.swap import (
    SwapReport,
    contains_fused_modules,
    padding_removers,
    shown_name,
    swap_modules,
    transformers_models,
)
from fused_attn.tools import contract
from fused_attn.tools.comparison import ComparisonReport, ComparisonRow, module_of
from fused_attn.tools.recording import Recorder, Tensors, copied, device_of
from fused_attn.tools.rounding import Expected
from fused_attn.tools.terminal import progress

RUNS = 16  # runs for the expected eager error; each takes 20 times as long as eager

_PADDING_NOTE = (
    "above the limit only because padded rows are 0 in the output of {}, and the model reads or "
    "returns them: swap_modules(model, remove_padding=False) keeps the original values there"
)


def compare(
    model: Module,
    *args: Any,
    backward: bool = True,
    remove_padding: bool = True,
    enable: bool = False,
    **kwargs: Any,
) -> ComparisonReport:
    """Compare the numerics of fused modules with those of eager attention on a given model.

    The model is copied and never modified. It runs in evaluation mode, without dropout. Outputs and
    gradients are those of the model that `swap_modules` returns, whose encoder stacks return 0 in
    padded rows. If the model reads or returns padded rows, the report is therefore not ok, and a
    note says why. Layers are recorded in a separate run without packing.

    Args:
        model: a model in float32, float16 or bfloat16 that has not been swapped.
        *args, **kwargs: arguments of the model. Gradients of float tensors that require grad are
            compared too.
        backward: also compare gradients, namely those of a fixed random projection of all outputs.
        remove_padding: as in `swap_modules`; not passed to the model. False compares the model that
            `swap_modules(model, remove_padding=False)` makes, including padded rows.
        enable: run the swapped model under `enable()`, to compare attention that the model computes
            by torch.nn.functional.scaled_dot_product_attention. The report counts these calls. The
            model then does not need a module that can be swapped.

    Returns:
        A report of the errors of outputs, layer outputs and gradients, and of whether the contract
        holds. Measured against float64, the error of an output is at most 2 times, and that of a
        gradient at most 3 times, the measured or expected error of eager attention, plus one
        rounding of the largest value. For a gradient, the largest value is taken over its module,
        because the gradient of a key bias is 0 up to rounding of the values that cancel in it.

    Raises:
        ValueError: the model is already swapped, is float64, or contains nothing that is fused; or
            its outputs with eager attention set no valid limit, because they do not repeat or are
            far from those in float64.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> report = fused_attn.compare(model, torch.randn(2, 10, 64))
        >>> report.ok
        True
    """
    dtype = _check(model)
    fused_model = copy.deepcopy(model)
    swap = swap_modules(fused_model, remove_padding=remove_padding)
    stacks = _keep_padding(fused_model)
    if not (swap.swapped or enable):
        hint = any(entry.reason != BY_HAND for entry in swap.unfused)
        raise ValueError(
            f"model must have modules that can be swapped, got none: {swap}"
            + ("\ncompare(model, ..., enable=True) compares it under enable()" if hint else "")
        )
    kernels: Callable[[], AbstractContextManager[CallCounts | None]] = (
        enabled if enable else contextlib.nullcontext
    )
    runs = 4 if stacks else 3
    with progress("comparing", 2 * runs + 1 if backward else runs + 1) as advance:
        recorder = Recorder(_watched(model, swap), backward, dtype, advance)

        def run(own: Module, in_dtype: torch.dtype | None = None, **options: bool) -> Tensors:
            return recorder.run(own, copied(args, in_dtype), copied(kwargs, in_dtype), **options)

        def run_eager(in_dtype: torch.dtype, **options: bool) -> Tensors:
            own, other = copy.deepcopy(model), None if in_dtype == dtype else in_dtype
            if other is not None:  # None preserves mixed precision
                own = own.double() if other == torch.float64 else own.float()
            with _eager_kernels():
                return run(_eager(own), other, **options)

        def run_swapped(layers: bool) -> Tensors:
            own = copy.deepcopy(model)
            swap_modules(own)
            with kernels():
                return run(own, layers=layers)

        with torch.autocast(device_of(model).type, enabled=False):
            truth = run_eager(torch.float64)
        eager, again = run_eager(dtype), run_eager(dtype, again=True)
        _check_repeats(eager, again, dtype, device_of(model))
        _check_plausible(eager, truth, dtype)
        with kernels() as calls:
            if calls is not None:
                _report_branches(fused_model, swap, calls)
            fused = run(fused_model)
        del fused_model
        if not swap.swapped and (calls is None or not calls.fused):
            raise ValueError(
                "model must have modules to swap or calls that enable() fuses, got neither: "
                f"{calls}"
            )
        judged = fused
        if stacks:
            layers = ("layer output", "input grad")
            of_layers = {key: t for key, t in fused.items() if key[1] in layers}
            judged = of_layers | run_swapped(layers=False)
        recorder.advance = lambda: None  # optional runs are not part of the progress
        expected = Expected(run_eager, truth, dtype, most=RUNS)
        report = _report(truth, eager, judged, expected, swap)
        if stacks and not report.ok:
            padded = _report(truth, eager, fused, expected, swap)
            # With layers recorded, stacks zero padded rows but do not pack the batch.
            if padded.ok:
                zeroed = _report(truth, eager, run_swapped(layers=True), expected, swap)
                if not zeroed.ok:
                    report.notes = [*padded.notes, _PADDING_NOTE.format(", ".join(stacks))]
    report.calls = calls
    return report


def _keep_padding(model: Module) -> list[str]:
    """Disable the removal of padding; return the names of the stacks for which it was enabled."""
    stacks = padding_removers(model)
    for _, module, attribute in stacks:
        setattr(module, attribute, False)
    for module in model.modules():
        if isinstance(module, TransformerEncoder):
            # The eager run disables torch's fast path, which returns 0 in padded rows.
            module.use_nested_tensor = False
    return [name for name, _, _ in stacks]


def _check(model: Module) -> torch.dtype:
    if contains_fused_modules(model):
        raise ValueError(
            "model must be the original one, got one with fused modules; compare() swaps a copy "
            "(SwapReport.restore() undoes a swap)"
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes:
        raise ValueError("model must have float parameters, got none")
    if torch.float64 in dtypes:
        raise ValueError(
            "model must be float32, float16 or bfloat16, got float64, the dtype of the reference"
        )
    # For a model in mixed precision, return the dtype with the largest eps.
    return max(dtypes, key=lambda d: torch.finfo(d).eps)


def _watched(model: Module, swap: SwapReport) -> set[str]:
    """Return the names of all attention and norm modules, swapped or not, and their ancestors."""
    inner = {entry.name for entry in swap.swapped}
    inner |= {entry.name for entry in (*swap.skipped, *swap.unfused)}
    names = set()
    for name, module in model.named_modules():
        if shown_name(name) in inner or "attention" in type(module).__name__.lower():
            parts = name.split(".")
            names |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return names


def _report_branches(model: Module, swap: SwapReport, calls: CallCounts) -> None:
    """Report in `swap`, during runs of `model`, which branch modules with the reason EITHER use.

    Their forward is wrapped. If `calls` increase during a forward, it used torch's function.
    """

    def watch(module: Module, index: int) -> None:
        forward, entry, reasons = module.forward, swap.unfused[index], set()

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            before = calls.fused + calls.left_to_torch
            result = forward(*args, **kwargs)
            if not is_compiling():  # calls in compiled graphs are not counted
                more = calls.fused + calls.left_to_torch > before
                reasons.add(CALLS_SDPA if more else BY_HAND)
                reason = EITHER if len(reasons) > 1 else next(iter(reasons))
                swap.unfused[index] = dataclasses.replace(entry, reason=reason)
            return result

        module.forward = watched_forward

    modules = {shown_name(name): module for name, module in model.named_modules()}
    for index, entry in enumerate(swap.unfused):
        if entry.reason == EITHER:
            watch(modules[entry.name], index)


def _eager(model: Module) -> Module:
    for _, hf_model in transformers_models(model):
        from fused_attn.integrations import transformers as integration

        integration.set_implementation(hf_model, "eager")
    return model


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Disable torch's fused attention kernels and fused encoder layers within the block."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# Allowed difference between two runs, in units of eps times the largest element. On a CPU only the
# alignment of tensors can change the summation order; on a GPU it changes from run to run.
REPEAT_ROUNDINGS = {"cpu": 2, "gpu": 16}


def _check_repeats(
    first: Tensors, second: Tensors, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError if an output differs between the two runs by more than REPEAT_ROUNDINGS."""
    roundings = REPEAT_ROUNDINGS["cpu" if device.type == "cpu" else "gpu"]
    apart = {}
    for (name, kind), reference in first.items():
        if (name, kind) in second:
            distance = contract.errors(second[name, kind], reference)[0]
            allowed = roundings * torch.finfo(dtype).eps * contract.largest(reference)
            if distance > allowed:
                apart[name, kind] = distance
    outputs = [key for key in apart if key[1] == "output"]
    if not outputs:
        return
    layer = next((name for name, kind in apart if kind == "layer output"), None)
    raise ValueError(
        "model must return the same outputs in every run, got a difference of "
        f"{apart[outputs[0]]:.2e} in {outputs[0][0]} between two runs with eager attention"
        f"{f' (first layer that differs: {layer})' if layer else ''}: if the model draws random "
        "numbers, pass them as inputs, or compare a part of the model"
    )


# Limit on rms error / rms of an output, in units of sqrt(eps): 0.0014 in float32, 0.35 in bfloat16.
# Encoders of 24 and 48 layers had 3e-7 in float32 and 0.011 in bfloat16. Discrete choices, as in
# routing, cause larger errors.
IMPLAUSIBLE = 4.0


def _check_plausible(eager: Tensors, truth: Tensors, dtype: torch.dtype) -> None:
    """Raise ValueError if an output differs from float64 by more than rounding can explain.

    A multiple of such an error would not be a valid limit.
    """
    most = IMPLAUSIBLE * math.sqrt(torch.finfo(dtype).eps)
    outputs = {key: t for key, t in truth.items() if key[1] == "output" and key in eager}
    if outputs and not any(t.isfinite().any() for t in outputs.values()):
        raise ValueError("model must return finite values, got none with eager attention")
    # Relative to the largest output, because an output may be 0 up to rounding.
    sizes = [contract.errors(torch.zeros_like(t), t)[1] for t in outputs.values()]
    size = max(sizes, default=0.0)
    for (name, kind), reference in outputs.items():
        error = contract.errors(eager[name, kind], reference)[1]
        if error > most * size > 0.0:
            raise ValueError(
                f"model must return about the same outputs in float64 and {dtype_name(dtype)}, got "
                f"an rms error of {error:.2e} in {name} with eager attention (rms of the largest "
                f"output: {size:.2e}): if the model draws random numbers or chooses between "
                "nearly equal values, compare a part of it"
            )


def _report(
    truth: Tensors, eager: Tensors, fused: Tensors, expected: Expected, swap: SwapReport
) -> ComparisonReport:
    report = ComparisonReport([], expected.dtype, swap)
    largest = _largest_by_module(truth)
    undefined = vacuous = 0
    for (name, kind), reference in truth.items():
        if (name, kind) not in eager or reference.numel() == 0:
            continue
        eager_max, eager_rms = contract.errors(eager[name, kind], reference)
        fused_max, fused_rms = contract.errors(fused.get((name, kind)), reference)
        finite = bool(reference.isfinite().any())
        vacuous += kind != "layer output" and not finite
        binding = kind != "layer output" and finite
        limit, _ = contract.allowed(
            fused_max,
            eager_max,
            contract.factor_of(kind.endswith("grad")),
            largest[module_of(name, kind), kind],
            eager[name, kind].dtype,
            functools.partial(expected.error, (name, kind)) if binding else contract.no_error,
        )
        errors = (eager_max, eager_rms, fused_max, fused_rms)
        report.rows.append(ComparisonRow(name, kind, *errors, limit, fused_max <= limit, binding))
        if kind == "output":
            undefined += int((~reference.isfinite()).sum())
    if any(row.kind == "output" and not row.ok for row in report.rows):
        report.notes.append(
            "the errors of an output accumulate over all layers, and the largest may occur in a "
            "single value, even at a padded position: check whether the rms errors agree, or "
            "compare a result that is computed from the output"
        )
    if vacuous:
        report.notes.append(
            f"{vacuous} outputs or gradients have no finite value with eager attention in float64 "
            "and do not affect the verdict"
        )
    if undefined:
        report.notes.append(
            f"{undefined} values of the output are not finite with eager attention in float64 "
            "(fully masked rows?) and are not compared"
        )
    return report


def _largest_by_module(truth: Tensors) -> dict[tuple[str, str], float]:
    largest: dict[tuple[str, str], float] = {}
    for (name, kind), reference in truth.items():
        key = module_of(name, kind), kind
        largest[key] = max(largest.get(key, 0.0), contract.largest(reference))
    return largest
