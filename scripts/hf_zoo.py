"""Check of `swap_modules` on a small model of a transformers model type.

`judge` compares the model with eager attention before and after `swap_modules`, forward and
backward, with and without padding.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hf_configs import NotRunError, model_class, parents, small_config, transformers
from hf_inputs import candidates
from hf_results import WAYS, Results, further_ways, results, worst
from nn_helpers import perturb

from fused_attn.integrations import transformers as integration
from fused_attn.integrations.transformers import models
from fused_attn.swap import SwapReport, swap_modules

MAX_PARAMETERS = 30_000_000
# Limit on errors relative to the largest value of a tensor, in float64. transformers computes in
# float32 in places. Wrong masks cause errors above 1e-2.
TOLERANCE = 1e-4
# (small widths, dtype) in the order of attempts; False selects the widths of the config. Models
# that mix float32 with other dtypes run only in float32.
_ATTEMPTS = [(True, torch.float64), (True, torch.float32), (False, torch.float64)]


@dataclass(frozen=True)
class Verdict:
    """Verdict on the swap of one model type.

    Attributes:
        verdict: "agrees", "agrees with sdpa" (but not with eager), "declined", "no attention",
            "no model" (only a component of other types), "eager NaN", "not run" or "FAILS".
        detail: the reason, or for "agrees" the largest relative error of outputs and gradients.
        ways: for "agrees", the names in `hf_results.WAYS` that were compared.
    """

    verdict: str
    detail: str = ""
    ways: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.verdict}: {self.detail}" if self.detail else self.verdict


def judge(model_type: str) -> Verdict:
    """Compare the smallest model of a type before and after the swap; return the verdict."""
    warnings.simplefilter("ignore")
    kind = transformers.CONFIG_MAPPING[model_type]
    try:
        if model_class(kind) is None:
            wholes = ", ".join(parents(kind))
            reason = f"its config is a part of that of {wholes}" if wholes else "it has no forward"
            return Verdict("no model", reason)
        eager, fused, inputs, expected = _running(kind)
    except (NotRunError, ImportError) as error:
        return Verdict("not run", _line(error))
    dtype = next(eager.parameters()).dtype
    reference = {"given": expected} | further_ways(eager, inputs)
    ran = _ran(fused)
    with _calls() as callers:
        try:
            report = swap_modules(fused)
            actual = _in_ways(fused, inputs, reference)
        except Exception as error:
            return Verdict("FAILS", f"{type(error).__name__}: {_line(error)}")
    claim = _false_claim(report, fused, ran, callers)
    if claim is not None:
        return Verdict("FAILS", claim)
    if not all(t.isfinite().all() for t in expected.values()):
        return Verdict("eager NaN")
    error, name = _worst(actual, reference)
    if not error <= TOLERANCE:
        if worst(results(eager, inputs), expected)[0] > TOLERANCE:
            return Verdict("not run", "eager does not repeat itself")
        report.restore()
        integration.set_implementation(fused, "sdpa")
        if _worst(actual, _in_ways(fused, inputs, reference))[0] <= TOLERANCE:
            return Verdict("agrees with sdpa", f"eager's {name} differs by {error:.1e}")
        noise = _noise(eager, inputs, reference) if dtype == torch.float32 else 0.0
        if noise > TOLERANCE:
            return Verdict("not run", f"float32 alone runs, where rounding moves it by {noise:.0e}")
        return Verdict("FAILS", f"{name} differs by {error:.1e} of its largest number")
    if callers:
        return Verdict("agrees", f"{error:.0e}", tuple(reference))
    # In a report, type names of models have no module prefix, but those of layers do.
    reasons = [s.reason for s in report.skipped if "." not in s.type]
    own = [reason for reason in reasons if not reason.startswith("nothing in it calls")]
    if own:
        return Verdict("declined", own[0])
    if reasons:
        return Verdict("no attention")
    return Verdict("not run", "its attention is not reached")


def _noise(eager: Any, inputs: dict[str, Any], reference: dict[str, Results]) -> float:
    """Return the largest error after random relative changes of about 1e-7 in all parameters."""
    kept = copy.deepcopy(eager.state_dict())
    for parameter in eager.parameters():
        parameter.data *= 1 + 1e-7 * torch.randn_like(parameter)
    noise = _worst(_in_ways(eager, inputs, reference), reference)[0]
    eager.load_state_dict(kept)
    return noise


def _in_ways(model: Any, inputs: dict[str, Any], wanted: Iterable[str]) -> dict[str, Results]:
    return {way: WAYS[way](model, inputs) for way in wanted}


def _worst(actual: dict[str, Results], expected: dict[str, Results]) -> tuple[float, str]:
    """Return the largest error over all ways of calling the model, and the name of its tensor."""
    errors = [(*worst(actual[way], expected[way]), way) for way in expected]
    error, name, way = max(errors, key=lambda e: float("inf") if e[0] != e[0] else e[0])
    return error, f"{name} ({way})"


def _ran(model: Any) -> set[int]:
    """Return a set to which each module that uses ALL_ATTENTION_FUNCTIONS adds its id when it runs.

    Models that do not support the fused attention are excluded.
    """
    ran: set[int] = set()

    def watch(module: Any) -> None:
        if models._INTERFACE in models.names_in(type(module)):
            module.register_forward_pre_hook(lambda module, _: ran.add(id(module)))
        for child in module.children():
            if not isinstance(child, transformers.PreTrainedModel) or not unsupported(child):
                watch(child)

    unsupported = integration.unsupported
    if not unsupported(model):
        watch(model)
    return ran


def _false_claim(report: SwapReport, model: Any, ran: set[int], callers: list[Any]) -> str | None:
    """Return a message if a module reported as fused ran without a fused kernel, else None."""
    names = dict(model.named_modules())
    called = set(map(id, callers))
    for swapped in report.swapped:
        if swapped.to_type == "fused_attn attention":
            part = model if swapped.name == "(the model)" else names[swapped.name]
            inside = set(map(id, part.modules()))
            if inside & ran and not inside & called:
                return f"{swapped.name} is reported as fused, and nothing in it called the kernels"
    return None


@contextlib.contextmanager
def _calls() -> Iterator[list[Any]]:
    """Record each module that calls the fused attention."""
    real, seen = integration.attention_forward, []

    def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return real(module, *args, **kwargs)

    integration.register()
    transformers.AttentionInterface.register(integration.NAME, spy)
    try:
        yield seen
    finally:
        transformers.AttentionInterface.register(integration.NAME, real)


# ---- models that run ----------------------------------------------------------------------------


def _running(kind: type) -> tuple[Any, Any, dict[str, Any], Results]:
    """Return a model with eager attention, an unused copy of it, inputs, and its results."""
    reason = ""
    for everything, dtype in _ATTEMPTS:
        try:
            model = _small_model(kind, everything).to(dtype)
            copied = copy.deepcopy(model)  # before the first run, after which some cannot be copied
        except NotRunError as error:
            reason = reason or str(error)
            break
        except Exception as error:
            reason = reason or f"its config: {type(error).__name__}: {_line(error)}"
            continue
        for inputs in candidates(model, dtype):
            try:
                expected = results(model, inputs)
            except Exception as error:
                reason = reason or f"eager: {type(error).__name__}: {_line(error)}"
                continue
            if expected:
                return model, copied, inputs, expected
            reason = reason or "it has no float outputs"
        reason = reason or "no inputs are known"
    raise NotRunError(reason)


def _small_model(kind: type, everything: bool) -> Any:
    """Return a small model of a config class, with eager attention and random parameters."""
    config = small_config(kind, everything)
    make: Any = model_class(kind)
    if not everything:
        with torch.device("meta"):
            whole = make._from_config(copy.deepcopy(config))
        size = sum(parameter.numel() for parameter in whole.parameters())
        if size > MAX_PARAMETERS:
            raise NotRunError(f"{size} parameters are too many")
    torch.manual_seed(0)
    # The other implementations of experts in transformers do not support float64.
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return perturb(make._from_config(config, **ways)).eval()


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""
