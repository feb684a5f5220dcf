"""fused_attn.enable(), disable() and enabled(): switching on and off, and dispatch on CUDA."""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from enable_helpers import OP, counting, taken_over, torch_as_it_was  # noqa: F401

import fused_attn
from fused_attn.backends import Backend, registry
from fused_attn.integrations import enable as enable_module


def attend(query):
    return F.scaled_dot_product_attention(query, query, query)


def intercepted():
    with counting() as computed:
        attend(torch.randn(2, 4, 5, 8))
    return len(computed) == 1


def state():
    return torch._C._dispatch_dump_table(OP), torch.compiler.config.cache_key_tag


def test_enable_and_disable():
    before = state()
    fused_attn.disable()  # changes nothing
    fused_attn.enable()
    fused_attn.enable()
    assert intercepted()
    fused_attn.disable()
    assert not intercepted()
    assert state() == before
    fused_attn.enable()
    assert intercepted()


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"),
    reason="reason: needs the implementation registry of torch 2.11",
)
def test_activation_by_torch():
    before = state()
    assert "fused_attn" in torch.nn.attention.list_flash_attention_impls()
    assert not intercepted(), "the import has activated fused_attn"
    for _ in range(2):  # the second activation undoes the first
        torch.nn.attention.activate_flash_attention_impl("fused_attn")
        assert torch.nn.attention.current_flash_attention_impl() == "fused_attn"
        assert intercepted()
    torch.nn.attention.restore_flash_attention_impl()
    assert not intercepted()
    assert state() == before


def test_registration_is_skipped(monkeypatch):
    """Nothing is registered if another copy of the package is, or if torch has no registry."""
    registered = []
    register = "torch.nn.attention.register_flash_attention_impl"
    monkeypatch.setattr(register, lambda name, **_: registered.append(name), raising=False)
    listed = "torch.nn.attention.list_flash_attention_impls"
    monkeypatch.setattr(listed, lambda: ["FA4", "fused_attn"], raising=False)
    enable_module.register_with_torch()
    monkeypatch.delattr(listed)
    enable_module.register_with_torch()
    assert not registered


def test_blocks():
    before = state()
    with fused_attn.enabled():
        with pytest.raises(KeyError), fused_attn.enabled():
            raise KeyError
        assert intercepted()
        fused_attn.disable()
        assert intercepted(), "disable() has ended the block"
        assert torch.compiler.config.cache_key_tag != before[1]
    assert not intercepted()
    assert state() == before
    fused_attn.enable()
    with fused_attn.enabled():
        pass
    assert intercepted(), "the block has undone the earlier enable()"
    with fused_attn.enabled():
        fused_attn.disable()
    assert state() == before
    with fused_attn.enabled():
        fused_attn.enable()
    assert intercepted() and torch.compiler.config.cache_key_tag != before[1]


def test_blocks_of_threads_overlap():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with fused_attn.enabled():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with fused_attn.enabled():
        thread.start()
        assert entered.wait(10)
    assert intercepted()
    leave.set()
    thread.join()
    assert not intercepted()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernels_of_other_libraries_are_restored():
    theirs = torch.library.Library("aten", "IMPL")
    try:
        theirs.impl("scaled_dot_product_attention", lambda *args: args[1], "CPU")
        query, key, value = torch.randn(3, 2, 4, 5, 8)
        with torch.inference_mode():
            assert F.scaled_dot_product_attention(query, key, value) is key
            try:
                with taken_over() as computed:
                    F.scaled_dot_product_attention(query, key, value)
                assert len(computed) == 1
            except RuntimeError as error:  # torch 2.9 allows one kernel per dispatch key
                if "already a kernel registered" not in str(error):
                    raise
            assert F.scaled_dot_product_attention(query, key, value) is key
    finally:
        theirs._destroy()
    with taken_over():
        pass


# ---- dispatch on CUDA ---------------------------------------------------------------------------


class Kernels(Backend):
    """Stand-in for a CUDA backend, which would need a GPU."""

    name = "triton"

    def __init__(self, is_default):
        self.default = is_default

    def unsupported(self, problem):
        return [] if problem.device.type == "cuda" and problem.head_dim <= 64 else ["no"]

    def opt_in_reasons(self, problem):
        return [] if self.default else ["has not run on a GPU yet"]


@pytest.mark.parametrize(
    ("is_default", "name", "head_dim", "fused"),
    [
        (True, None, 64, True),
        (False, None, 64, False),
        (False, "triton", 64, True),
        (True, None, 65, False),
        (True, "cpp", 64, False),
    ],
)
def test_choice_on_cuda(is_default, name, head_dim, fused):
    """CUDA calls run on a default or requested backend that supports them, otherwise on torch."""
    requested = contextlib.nullcontext() if name is None else fused_attn.use_backend(name)
    with (
        mock.patch.dict(registry.BACKENDS, triton=Kernels(is_default)),
        torch._subclasses.FakeTensorMode(),
        requested,
        fused_attn.enabled(),
        counting() as computed,
    ):
        attend(torch.empty(1, 2, 3, head_dim, device="cuda"))
    assert bool(computed) is fused
    registry._first_for.cache_clear()  # drop choices among the patched backends
