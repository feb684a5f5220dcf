"""Time small calls, which are dominated by host overhead: `python benchmarks/calls.py`.

Each call alternates with its equivalent in torch, and a small encoder with the same encoder before
the swap. With `--backend sdpa`, the difference is the overhead of fused_attn when it falls back to
torch, as on a GPU without verified kernels. `--trees A B` times the packages of two source trees,
each with its built module, in alternating processes. It reports the ratio of their medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# A round is shorter than a time slice of the scheduler, so that few rounds are preempted.
ROUNDS, SECONDS_OF_A_ROUND, TURNS = 75, 0.002, 5

Ways = dict[str, Callable[[], Any]]


def cases() -> dict[str, Ways]:
    """Return the calls of fused_attn and of torch for each case, by name."""
    import torch
    import torch.nn.functional as F

    import fused_attn as fa

    def both(own: Callable[..., Any], theirs: Callable[..., Any], *tensors: Any) -> Ways:
        return {"fused_attn": lambda: own(*tensors), "torch": lambda: theirs(*tensors)}

    def without_grad(ways: Ways) -> Ways:
        return {name: torch.no_grad()(way) for name, way in ways.items()}

    def step(way: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            out = way(*tensors)
            return torch.autograd.grad(out, tensors, gradients[out.shape])

        return run

    ours, sdpa = fa.scaled_dot_product_attention, F.scaled_dot_product_attention
    tiny = torch.randn(3, 1, 1, 1, 64).unbind()
    small = torch.randn(3, 1, 8, 32, 64).unbind()
    leaves = [t.clone().requires_grad_() for t in small]
    visible = torch.rand(1, 1, 32, 32) > 0.3
    causal, ragged = fa.masks.causal(), fa.masks.causal() & fa.masks.padding([20])
    x, weight, bias = torch.randn(32, 256), torch.randn(256), torch.randn(256)
    leaf = x.clone().requires_grad_()
    gradients = {t.shape: torch.randn(t.shape) for t in (small[0], x)}

    def norm(module: Any) -> Callable[..., Any]:
        return lambda x: module.layer_norm(x, (256,), weight, bias)

    plain = {
        "1x1x1x64": both(ours, sdpa, *tiny),
        "8x32x64": both(ours, sdpa, *small),
        "8x32x64 causal": both(
            lambda *t: ours(*t, is_causal=True), lambda *t: sdpa(*t, is_causal=True), *small
        ),
        "8x32x64 Mask": both(lambda *t: ours(*t, ragged), lambda *t: sdpa(*t, visible), *small),
        "8x32x64 bool": both(lambda *t: ours(*t, visible), lambda *t: sdpa(*t, visible), *small),
        "8x32x64 dropout": both(
            lambda *t: ours(*t, None, 0.1), lambda *t: sdpa(*t, None, 0.1), *small
        ),
        "norm 32x256": both(norm(fa), norm(F), x),
        "norm 32x256, residual": both(
            lambda x: fa.layer_norm(x, (256,), weight, bias, residual=x),
            lambda x: F.layer_norm(x + x, (256,), weight, bias),
            x,
        ),
    }

    def encoder(training: bool) -> Any:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 4).train(training)

    def swapped(model: Any) -> Any:
        fa.swap_modules(model)
        return model

    tokens, ignored = torch.randn(4, 32, 256), torch.arange(32) >= torch.tensor([[32]] * 3 + [[20]])
    half, additive = [t.bfloat16() for t in small], torch.randn(32, 32)
    models = {on: (swapped(encoder(on)), encoder(on)) for on in (False, True)}
    plain |= {
        "8x32x64 bool of 2-D": both(
            lambda *t: ours(*t, visible[0, 0]), lambda *t: sdpa(*t, visible[0, 0]), *small
        ),
        "8x32x64 float": both(lambda *t: ours(*t, additive), lambda *t: sdpa(*t, additive), *small),
        "8x32x64 bfloat16": both(ours, sdpa, *half),
        "encoder": both(*models[False], tokens),
        "encoder, padded": both(
            *(lambda x, m=m: m(x, src_key_padding_mask=ignored) for m in models[False]), tokens
        ),
    }
    return (
        small_cases()
        | {name: without_grad(ways) for name, ways in plain.items()}
        | {
            "encoder, step": both(
                *(
                    lambda x, m=m: m(x, src_key_padding_mask=ignored).sum().backward()
                    for m in models[True]
                ),
                tokens,
            ),
            "8x32x64, step": both(step(ours), step(sdpa), *leaves),
            "8x32x64 Mask, step": both(
                step(lambda *t: ours(*t, causal)),
                step(lambda *t: sdpa(*t, is_causal=True)),
                *leaves,
            ),
            "norm 32x256, step": both(step(norm(fa)), step(norm(F)), leaf),
        }
    )


class UnderEnable:
    """Call that is timed while `fused_attn.enable()` is in effect."""

    def __init__(self, way: Callable[[], Any]) -> None:
        self.way = way

    def __call__(self) -> Any:
        return self.way()


def small_cases() -> dict[str, Ways]:
    """Return calls of small models: norms, norms of views, encoders, masks under `enable()`."""
    import torch
    import torch.nn.functional as F

    import fused_attn as fa

    def step(way: Callable[..., Any], *leaves: Any) -> Callable[[], Any]:
        grad = torch.randn_like(way(*leaves))
        return lambda: torch.autograd.grad(way(*leaves), leaves, grad)

    def encoder() -> Any:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2)

    made: dict[str, Ways] = {}
    rows = torch.randn(64, 64).requires_grad_()
    weight, bias = (torch.randn(64).requires_grad_() for _ in range(2))
    for name, x in (("norm 64x64", rows), ("norm of a view", torch.randn(2, 64, 14, 14))):
        view = x.requires_grad_() if x.dim() == 2 else x.requires_grad_().permute(0, 2, 3, 1)
        kept = view.detach()
        for way, norm in (("fused_attn", fa.layer_norm), ("torch", F.layer_norm)):
            made.setdefault(name, {})[way] = torch.no_grad()(
                lambda norm=norm, x=kept: norm(x, (64,), weight, bias)
            )
            made.setdefault(f"{name}, step", {})[way] = step(
                lambda x, w, b, norm=norm: norm(
                    x if x.dim() == 2 else x.permute(0, 2, 3, 1), (64,), w, b
                ),
                x, weight, bias,
            )  # fmt: skip
    for shape, masked in (((3, 4, 12, 16), True), ((2, 4, 64, 32), True), ((1, 4, 1, 16), False)):
        batch, _, seqlen, _ = shape
        ends = torch.tensor([[seqlen]] * (batch - 1) + [[seqlen // 2]])
        padding = (torch.arange(seqlen) < ends)[:, None, None].expand(-1, 1, seqlen, -1)
        qkv = [torch.randn(shape).requires_grad_() for _ in range(3)]
        attend = partial(F.scaled_dot_product_attention, attn_mask=padding if masked else None)
        name = f"enable() {'x'.join(map(str, shape))}{', padded' if masked else ''}"
        forward = torch.no_grad()(lambda f=attend, t=qkv: f(*t))
        train = step(attend, *qkv)
        made[name] = {"fused_attn": UnderEnable(forward), "torch": forward}
        made[f"{name}, step"] = {"fused_attn": UnderEnable(train), "torch": train}
    own, theirs, x = encoder(), encoder(), torch.randn(4, 32, 64)
    fa.swap_modules(own)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(32)
    ignored = torch.arange(32) >= torch.tensor([[32]] * 3 + [[20]])
    for name, options in (
        ("plain", {}),
        ("padded", {"src_key_padding_mask": ignored}),
        ("causal", {"mask": causal, "is_causal": True}),
    ):
        made[f"encoder d64, {name}, step"] = {
            way: lambda m=model, o=options: m(x, **o).sum().backward()
            for way, model in (("fused_attn", own), ("torch", theirs))
        }
    return made


def microseconds() -> dict[str, dict[str, float]]:
    """Return the median microseconds per call, by case and implementation."""
    import fused_attn

    def switch(call: Callable[[], Any]) -> None:
        fused_attn.enable() if isinstance(call, UnderEnable) else fused_attn.disable()

    results = {}
    for name, ways in cases().items():
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():
            call()
        start = time.perf_counter()
        for call in ways.values():
            call()
        calls = max(1, int(SECONDS_OF_A_ROUND * len(ways) / (time.perf_counter() - start)))
        for _ in range(ROUNDS):
            for way, call in ways.items():
                switch(call)
                call()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                taken[way].append((time.perf_counter() - start) / calls * 1e6)
        fused_attn.disable()
        results[name] = {way: round(statistics.median(t), 2) for way, t in taken.items()}
    return results


def of_trees(trees: list[Path]) -> dict[str, dict[str, float]]:
    """Return, by case, medians of two source trees ("before", "after") and their ratios."""
    runs: dict[str, list[Any]] = {name: [] for name in ("before", "after")}
    for _ in range(TURNS):
        for name, tree in zip(runs, trees, strict=True):
            env = {**os.environ, "PYTHONPATH": str(tree.resolve())}
            command = [sys.executable, str(Path(__file__).resolve()), "--json", "-"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            runs[name].append(json.loads(done.stdout)["microseconds"])
    results = {}
    for case in runs["after"][0]:
        medians = {
            n: statistics.median(r[case]["fused_attn"] for r in of) for n, of in runs.items()
        }
        torch = statistics.median(r[case]["torch"] for of in runs.values() for r in of)
        ratios = {"after / before": medians["after"] / medians["before"]}
        ratios["after / torch"] = medians["after"] / torch
        rounded = {name: round(value, 2) for name, value in {**medians, **ratios}.items()}
        results[case] = {**rounded, "torch": round(torch, 2)}
    return results


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text()
    return next((line.partition(": ")[2] for line in text.splitlines() if "model name" in line), "")


def main() -> None:
    """Print one line per case, or write JSON that also describes the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--backend", help="of ours; without it, the automatic choice")
    parser.add_argument("--json", metavar="FILE", help="- for stdout")
    options = parser.parse_args()
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with contextlib.ExitStack() as stack:
        if options.backend:
            import fused_attn

            stack.enter_context(fused_attn.use_backend(options.backend))
        results = of_trees(options.trees) if options.trees else microseconds()
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if options.backend:
        machine["backend"] = options.backend
    if options.json is None:
        for name, figures in results.items():
            print(f"{name:24}", *(f"{key} {value:8.2f}" for key, value in figures.items()))
        return
    text = json.dumps({"machine": machine, "microseconds": results}, indent=2) + "\n"
    sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
