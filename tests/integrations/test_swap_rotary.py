"""Fused rotary embeddings in swapped attention modules of Hugging Face transformers."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers
from nn_helpers import run

from fused_attn import use_backend
from fused_attn.integrations.transformers import rotary
from fused_attn.swap import swap_modules

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 96,
    "vocab_size": 100,
    "pad_token_id": 0,
    "head_dim": 16,
}
# One model for each rotary function that swap_modules knows.
MODELS = ["Llama", "GPTNeoX", "Olmo", "ModernBert", "Cohere", "Phi3", "Gemma4Text"]


def small_model(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**SMALL, bos_token_id=1, eos_token_id=2)
    kind = getattr(transformers, f"{name}Model")
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation="sdpa").to(dtype).eval()


class LastHiddenState(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).last_hidden_state


@pytest.fixture
def rotations(monkeypatch):
    """Return a list to which each fused rotation appends the shape of its tensor."""
    seen, rotate = [], rotary.rotate_by_kernel

    def recorded(x, rotation):
        rotated = rotate(x, rotation)
        seen.extend([] if rotated is None else [x.shape])
        return rotated

    monkeypatch.setattr(rotary, "rotate_by_kernel", recorded)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_models(name, rotations):
    """Fused rotary embeddings change outputs and gradients only by rounding."""
    model = small_model(name, torch.float64)
    ids = torch.randint(1, 100, (2, 11))

    def results():
        return run(LastHiddenState(model), (ids,))

    before = results()
    swap_modules(model, norm=False, remove_padding=False)
    model.set_attn_implementation("sdpa")  # so that only the rotary embeddings are fused
    after = results()
    assert rotations[-2][:3] == (2, 4, 11) and rotations[-1][2] == 11
    for key, expected in before.items():
        scale = expected.abs().max().item()  # some original functions compute in float32
        torch.testing.assert_close(after[key], expected, rtol=0, atol=1e-6 * scale)


def test_restore_pickle_and_compile(rotations):
    model = small_model("Llama")
    ids = torch.randint(1, 100, (1, 7))
    forward = type(model.layers[0].self_attn).forward
    with torch.no_grad():
        before = model(ids)[0]
        report = swap_modules(model)
        after = model(ids)[0]
        count = len(rotations)
        assert torch.equal(pickle.loads(pickle.dumps(model))(ids)[0], after)
        assert len(rotations) == 2 * count > 0
        # Graphs contain torch's operations, which compilers fuse, instead of our kernel.
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids)[0], after)
        assert len(rotations) == 2 * count
        report.restore()
        assert torch.equal(model(ids)[0], before) and len(rotations) == 2 * count
    assert type(model.layers[0].self_attn).forward is forward


def test_other_models_keep_their_functions(rotations):
    """A swap affects no other model of the class, and does not fuse GPT-J's rotary embedding."""
    swapped, other = small_model("Llama"), small_model("Llama")
    swap_modules(swapped)
    other(torch.randint(1, 100, (1, 7)))
    assert not rotations
    config = transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    gpt = transformers.GPTJModel(config)
    assert not any("Attention" in s.to_type for s in swap_modules(gpt).swapped)


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        ({}, True),
        ({"unsqueeze_dim": 1}, True),
        ({"unsqueeze_dim": 2}, True),
        ({"cos": torch.ones(1, 5, 8)}, True),
        ({"cos": torch.ones(2, 5, 8, dtype=torch.float64)}, False),  # the original returns float64
        ({"cos": torch.ones(1, 5, 4)}, False),  # the original raises an error
        ({"cos": torch.ones(1, 1, 8)}, False),  # the original broadcasts cos
    ],
)
def test_calls(change, fused, rotations):
    """Calls that the rotary kernel does not support are passed to the original function."""
    module = transformers.models.llama.modeling_llama
    function = rotary._fused(module.apply_rotary_pos_emb, "apply_rotary_pos_emb", False)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8)
    if change.get("unsqueeze_dim") == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    cos = change.pop("cos", cos)
    if cos.shape[2] < 8:
        with pytest.raises(RuntimeError, match="must match"):
            function(q, k, cos, cos)
        return
    sin = sin[: cos.shape[0], : cos.shape[1]].to(cos)
    expected = module.apply_rotary_pos_emb(q, k, cos, sin, **change)
    torch.testing.assert_close(function(q, k, cos, sin, **change), expected)
    torch.testing.assert_close(function(q, k, cos=cos, sin=sin, **change), expected)
    assert len(rotations) == 2 * fused


LLAMA = transformers.models.llama.modeling_llama


def test_patches_of_the_function_are_called(monkeypatch, rotations):
    """A patch of the rotary function, before or after the swap, is called instead of the kernel."""
    seen, original = [], LLAMA.apply_rotary_pos_emb

    def patched(q, k, cos, sin, unsqueeze_dim=1):
        seen.append(q.shape)
        return original(q, k, cos, sin, unsqueeze_dim)

    before, after = small_model("Llama"), small_model("Llama")
    ids = torch.randint(1, 100, (1, 7))
    swap_modules(before)
    monkeypatch.setattr(LLAMA, "apply_rotary_pos_emb", patched)
    swap_modules(after)
    before(ids), after(ids)
    assert len(seen) == 2 and not rotations


def test_patches_of_a_class_are_called(monkeypatch):
    swap_modules(small_model("Llama")).restore()
    seen, original = [], LLAMA.LlamaAttention.forward

    def patched(self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LLAMA.LlamaAttention, "forward", patched)
    model = small_model("Llama")
    swap_modules(model)
    model(torch.randint(1, 100, (1, 7)))
    assert len(seen) == 1
    monkeypatch.undo()
    model = small_model("Llama")
    assert any("Attention" in s.from_type.split(".")[-1] for s in swap_modules(model).swapped)


def test_functions_of_other_code_are_not_known():
    code = rotary._code
    assert code(LLAMA.apply_rotary_pos_emb) in rotary._known()

    def other_default(q, k, cos, sin, unsqueeze_dim=2):
        """Stand-in for a rotary function whose default layout differs."""

    other_default.__code__ = LLAMA.apply_rotary_pos_emb.__code__
    assert code(other_default) not in rotary._known()
    assert code(torch.nn.Identity()) is code(lambda *args: code) is None


def test_without_a_kernel_the_original_runs(rotations):
    model = small_model("Llama")
    swap_modules(model)
    with use_backend("eager"):
        model(torch.randint(1, 100, (1, 7)))
    assert not rotations


def test_unknown_decorators_are_left_alone():
    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return LLAMA.apply_rotary_pos_emb(q, k, cos, sin)

    def decorated(self, *args):
        return args

    decorated.__wrapped__ = LLAMA.LlamaAttention.forward
    Attention.forward = decorated
    assert rotary.fused_forward(Attention) is None
