"""Small models, and their comparison on DEVICE with torch's modules on the CPU."""

from __future__ import annotations

import copy
import functools

import torch
from devices import DEVICE
from judging import require
from nn_helpers import perturb, run

import fused_attn as fa
from fused_attn.tools import contract
from fused_attn.tools.rounding import Expected

BATCH, LENGTH, WIDTH, HEADS = 4, 24, 48, 4
IGNORED = torch.arange(LENGTH) >= torch.tensor([[24], [17], [9], [3]])
OPTIONS = {"dropout": 0.0, "batch_first": True}


def moved(value, dtype=None, device=DEVICE):
    """Move a tensor to a device, and convert it to `dtype` if it is a float tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def results(module, args, kwargs, dtype, device):
    """Run a copy of a module on a device; return its outputs and gradients on the CPU."""
    copied = copy.deepcopy(module).to(device, dtype)
    args = tuple(moved(a, dtype, device) for a in args)
    kwargs = {k: moved(v, dtype, device) for k, v in kwargs.items()}
    return {name: tensor.cpu() for name, tensor in run(copied, args, kwargs).items()}


def findings_of(got, eager, truth, rerun=None):
    """Return contract findings, except for key biases, whose gradients are rounding errors."""
    expected = Expected(lambda _: rerun(), truth, torch.float32) if rerun else None
    return [
        contract.judge(
            name, got[name], truth[name], eager[name], gradient=name.startswith("grad"),
            expected=functools.partial(expected.error, name) if expected else contract.no_error,
        )
        for name in truth
        if not name.endswith(("key.bias", "k_proj.bias"))
    ]  # fmt: skip


def check(fused, theirs, args, kwargs):
    """Check a float32 module on DEVICE against torch's on the CPU, in float32 and float64."""
    single = functools.partial(results, theirs, args, kwargs, torch.float32, "cpu")
    truth = results(theirs, args, kwargs, torch.float64, "cpu")
    got = results(fused, args, kwargs, torch.float32, DEVICE)
    require(findings_of(got, single(), truth, single), "default")


def swapped(model, **options):
    """Return a copy of a model whose modules are swapped for those of this package."""
    fused = copy.deepcopy(model)
    assert fa.swap_modules(fused, **options).swapped
    return fused


class Real(torch.nn.Module):
    """Model that returns only the rows of real tokens; swapped stacks return 0 in padded rows."""

    def __init__(self, model, real):
        super().__init__()
        self.model, self.real = model, real

    def forward(self, *args, **kwargs):
        out = self.model(*args, **kwargs)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return out[self.real.to(out.device)]


def x(*shape):
    return torch.randn(*(shape or (BATCH, LENGTH, WIDTH)), requires_grad=True)


def encoder(dropout=0.0):
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 64, **{**OPTIONS, "dropout": dropout})
    return perturb(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
