"""AttentionCall and NormCall: flat form, new fields, and new backends."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from fused_attn import _cpu
from fused_attn import functional as F
from fused_attn.backends import (
    AttentionProblem,
    Backend,
    available_backends,
    cpp,
    reference,
    registry,
    select,
)
from fused_attn.backends.fields import check_fields
from fused_attn.base.flat import flattens
from fused_attn.call.attention import AttentionCall, AttentionOptions, AttentionOutputs
from fused_attn.call.norm import NormCall, NormOptions
from fused_attn.masks.spec import MaskSpec


def some_call():
    q, k, v = (torch.randn(2, 4, n, 8) for n in (5, 7, 7))
    spec = MaskSpec(key_mask=torch.ones(2, 1, 1, 7, dtype=torch.bool), band_hi=3)
    options = AttentionOptions(0.5, dropout_p=0.1, seed=torch.tensor(3))
    return AttentionCall(q, k, v, spec, options)


@pytest.mark.parametrize(
    "call", [some_call(), NormCall(*torch.randn(2, 3, 4), None, None, NormOptions(1.0, True))]
)
def test_flat_and_back(call):
    flat = call.flat()
    again = type(call).of_flat(flat)
    assert len(flat) == len(call.NAMES) and all(map(operator.is_, flat, again.flat()))
    assert type(call).of_flat((*flat, "more")).flat() == flat  # ops have more arguments
    bare = call.with_tensors(())
    assert all(t is None for t in bare.tensors()) and len(call.tensors()) == len(call.TENSORS)
    back = bare.with_tensors(call.tensors())
    assert len(flat) == len(back.flat()) and all(map(operator.is_, flat, back.flat()))


@flattens
@dataclass(eq=False)
class OptionsWithSinks(AttentionOptions):
    sinks: Tensor | None = None


@flattens
@dataclass(eq=False)
class WithSinks(AttentionCall):
    options: OptionsWithSinks


def test_a_new_field_is_one_line():
    """A new tensor field appears in the schema, the flat form and the tensors of a call."""
    assert (*AttentionCall.NAMES, "sinks") == WithSinks.NAMES
    assert (*AttentionCall.TENSORS, "sinks") == WithSinks.TENSORS
    assert f"{AttentionCall.SCHEMA}, Tensor? sinks" == WithSinks.SCHEMA
    sinks = torch.zeros(4)
    call = WithSinks(*torch.randn(3, 1, 4, 5, 8), MaskSpec(), OptionsWithSinks(0.5, sinks=sinks))
    assert WithSinks.of_flat(call.flat()).options.sinks is sinks
    assert call.by_tensor(sinks=1)[-1] == 1
    with pytest.raises(AssertionError, match="no tensors sunk"):
        call.by_tensor(sunk=1)


def test_kernels_read_every_field():
    """The compiled CPU module reads every field of calls, masks and options."""
    check_fields(_cpu.FIELDS)
    nested = {"mask": MaskSpec, "options": AttentionOptions}
    every = [f for cls in (AttentionCall, *nested.values()) for f in fields(cls)]
    flat = {f.name for f in every if "host" not in f.metadata} - set(nested)
    assert flat == set(AttentionCall.NAMES)


class Toy(Backend):
    """Backend that computes eager attention for head_dim 3 only."""

    name = "toy"
    differentiable = True

    def unsupported(self, problem):
        return [] if getattr(problem, "head_dim", 0) == 3 else ["supports only head_dim 3"]

    def attention_fwd(self, call, for_backward, want_lse):
        Toy.calls += 1
        out, lse = reference.attention(call)
        nothing = lse.new_empty(0)
        return AttentionOutputs(out, lse, nothing, nothing)


def test_a_new_backend_is_one_entry(monkeypatch):
    """A registered backend is the default for calls that it supports; errors quote its reasons."""
    monkeypatch.setattr(registry, "BACKENDS", {"toy": Toy(), **registry.BACKENDS})
    monkeypatch.setattr(registry, "_first_on", lambda *_: registry.BACKENDS["toy"])
    monkeypatch.setattr(Toy, "calls", 0, raising=False)
    assert available_backends()[0] == "toy"
    x, wide = torch.randn(1, 2, 5, 3, requires_grad=True), torch.randn(1, 2, 5, 4)
    out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert Toy.calls == 1 and out.requires_grad
    F.scaled_dot_product_attention(wide, wide, wide)
    assert Toy.calls == 1
    with pytest.raises(NotImplementedError, match="toy: supports only head_dim 3"):
        F.scaled_dot_product_attention(wide, wide, wide, backend="toy")
    with pytest.raises(ValueError, match="backend must be one of toy, cpp"):
        registry.get_backend("toys")
    assert select(AttentionProblem(x.device, x.dtype, 3, 3)).name == "toy"
    with pytest.raises(NotImplementedError):
        Backend().attention_fwd(some_call(), False, False)


def test_without_the_c_functions_of_torch():
    """Without DLPack's C API, which torch < 2.10 lacks, results are bitwise identical."""
    tensors = [torch.randn(2, 3, 9, 16, dtype=t) for t in (torch.float32, torch.bfloat16)]
    mask = torch.rand(2, 1, 9, 9) > 0.3

    def run():
        results = [F.scaled_dot_product_attention(*[tensors[0]] * 3)]
        for x in tensors:
            leaf = x.clone().requires_grad_()
            out = F.scaled_dot_product_attention(leaf, leaf, leaf, mask)
            norm = F.layer_norm(out, 16)
            results += [out, norm, *torch.autograd.grad(norm.square().sum(), leaf)]
        return results

    want = run()
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    module = type(registry.get_backend("cpp")).__module__
    try:
        _cpu.set_torch(None, cpp._empty)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{module}._EXCHANGE_API", None)
            got = run()
    finally:
        _cpu.set_torch(api, cpp._empty)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
