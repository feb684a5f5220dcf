"""Fused rotary embeddings in swapped attention modules of Hugging Face transformers."""

from __future__ import annotations

import pickle

import pytest
import torch
from hf_families import Outputs, transformers
from nn_helpers import run, swapped_copy

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
# One model for each rotary function that swap_modules recognizes.
MODELS = ["Llama", "GPTNeoX", "Olmo", "ModernBert", "Cohere", "Phi3", "Gemma4Text"]
LLAMA = transformers.models.llama.modeling_llama


def small_model(name="Llama"):
    config = getattr(transformers, f"{name}Config")(**SMALL, bos_token_id=1, eos_token_id=2)
    kind = getattr(transformers, f"{name}Model")
    return kind._from_config(config, attn_implementation="sdpa").eval()


def tokens():
    return torch.randint(1, 100, (2, 11))


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
    model, ids = small_model(name).double(), {"input_ids": tokens()}
    fused = swapped_copy(model, norm=False, remove_padding=False)
    fused.set_attn_implementation("sdpa")  # so that only the rotary embeddings are fused
    before, after = (run(Outputs(m, ("last_hidden_state",)), (), ids) for m in (model, fused))
    assert rotations[-2][:3] == (2, 4, 11) and rotations[-1][2] == 11
    for key, expected in before.items():
        scale = expected.abs().max().item()  # some original functions compute in float32
        torch.testing.assert_close(after[key], expected, rtol=0, atol=1e-6 * scale)


def test_restore_pickle_and_compile(rotations):
    model, ids = small_model(), tokens()
    forward = type(model.layers[0].self_attn).forward
    with torch.no_grad():
        before = model(ids)[0]
        report = swap_modules(model)
        after = model(ids)[0]
        count = len(rotations)
        assert torch.equal(pickle.loads(pickle.dumps(model))(ids)[0], after)
        assert len(rotations) == 2 * count > 0
        # Graphs contain torch's operations instead of the kernel, because compilers fuse them.
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids)[0], after)
        assert len(rotations) == 2 * count
        report.restore()
        assert torch.equal(model(ids)[0], before) and len(rotations) == 2 * count
    assert type(model.layers[0].self_attn).forward is forward


def test_other_models_keep_their_functions(rotations):
    """A swap affects no other model of the class, and does not fuse GPT-J's rotary embedding."""
    swap_modules(small_model())
    small_model()(tokens())
    assert not rotations
    config = transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    gpt = transformers.GPTJModel(config)
    assert not any("Attention" in s.to_type for s in swap_modules(gpt).swapped)


@pytest.mark.parametrize(
    ("shape", "options", "fused"),
    [
        ((2, 5, 8), {}, True),
        ((2, 5, 8), {"unsqueeze_dim": 1}, True),
        ((2, 5, 8), {"unsqueeze_dim": 2}, True),
        ((1, 5, 8), {}, True),
        ((1, 1, 8), {}, False),  # the original broadcasts cos and sin
        ((2, 5, 4), {}, None),  # the original raises an error
    ],
)
# With float64 cos and sin, the original returns float64.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calls(shape, options, fused, dtype, rotations):
    """Calls that the rotary kernel does not support are passed to the original function."""
    original = LLAMA.apply_rotary_pos_emb
    function = rotary._fused(original, "apply_rotary_pos_emb", False)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8)
    if options.get("unsqueeze_dim") == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = torch.randn(2, *shape, dtype=dtype)
    if fused is None:
        with pytest.raises(RuntimeError, match="must match"):
            function(q, k, cos, sin)
        return
    expected = original(q, k, cos, sin, **options)
    torch.testing.assert_close(function(q, k, cos, sin, **options), expected)
    torch.testing.assert_close(function(q, k, cos=cos, sin=sin, **options), expected)
    assert len(rotations) == 2 * (fused and dtype == torch.float32)


def test_patches_of_the_function_are_called(monkeypatch, rotations):
    """A patch of the rotary function, before or after the swap, is called instead of the kernel."""
    seen, original = [], LLAMA.apply_rotary_pos_emb

    def patched(q, k, cos, sin, unsqueeze_dim=1):
        seen.append(q.shape)
        return original(q, k, cos, sin, unsqueeze_dim)

    before = swapped_copy(small_model())
    monkeypatch.setattr(LLAMA, "apply_rotary_pos_emb", patched)
    after = swapped_copy(small_model())
    before(tokens()), after(tokens())
    assert len(seen) == 2 and not rotations


def test_patches_of_a_class_are_called(monkeypatch):
    swap_modules(small_model()).restore()
    seen, original = [], LLAMA.LlamaAttention.forward

    def patched(self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LLAMA.LlamaAttention, "forward", patched)
    swapped_copy(small_model())(tokens())
    assert len(seen) == 1
    monkeypatch.undo()
    report = swap_modules(small_model())
    assert any("Attention" in s.from_type.split(".")[-1] for s in report.swapped)


def test_functions_with_other_defaults_are_unknown():
    code = rotary._code
    assert code(LLAMA.apply_rotary_pos_emb) in rotary._known()

    def other_default(q, k, cos, sin, unsqueeze_dim=2):
        """Stand-in for a rotary function whose default layout differs."""

    other_default.__code__ = LLAMA.apply_rotary_pos_emb.__code__
    assert code(other_default) not in rotary._known()
    assert code(torch.nn.Identity()) is code(lambda *args: code) is None


def test_backend_eager_runs_the_original(rotations):
    with use_backend("eager"):
        swapped_copy(small_model())(tokens())
    assert not rotations


def test_forward_with_an_unknown_decorator_is_not_fused():
    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return LLAMA.apply_rotary_pos_emb(q, k, cos, sin)

    def decorated(self, *args):
        return args

    decorated.__wrapped__ = LLAMA.LlamaAttention.forward
    Attention.forward = decorated
    assert rotary.fused_forward(Attention) is None
