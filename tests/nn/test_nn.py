"""fused_attn.nn: constructors, state_dicts, conversion of torch.nn modules, and norms."""

import copy
import inspect
import pickle

import pytest
import torch
from helpers import saved_and_loaded
from nn_helpers import (
    BATCH,
    EMBED,
    HEADS,
    LEN_Q,
    assert_equal_in_float64,
    assert_within_contract,
    cast,
    check_against_torch,
    perturb,
    randn,
    run,
)

import fused_attn.nn as fnn

PAIRS = [
    ("MultiheadAttention", {"embed_dim": EMBED, "num_heads": HEADS}),
    ("MultiheadAttention", {"embed_dim": EMBED, "num_heads": HEADS, "bias": False}),
    (
        "MultiheadAttention",
        {"embed_dim": EMBED, "num_heads": HEADS, "kdim": 10, "vdim": 11, "add_bias_kv": True},
    ),
    (
        "MultiheadAttention",
        {"embed_dim": EMBED, "num_heads": HEADS, "kdim": 7, "dropout": 0.3, "dtype": torch.float64},
    ),
    ("LayerNorm", {"normalized_shape": (3, 4)}),
    ("LayerNorm", {"normalized_shape": 4, "bias": False}),
    ("RMSNorm", {"normalized_shape": 4}),
    ("TransformerEncoderLayer", {"d_model": EMBED, "nhead": HEADS, "dim_feedforward": 16}),
    ("TransformerDecoderLayer", {"d_model": EMBED, "nhead": HEADS, "bias": False}),
    (
        "Transformer",
        {"d_model": EMBED, "nhead": HEADS, "num_encoder_layers": 2, "num_decoder_layers": 1},
    ),
]


# ---- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kwargs"), PAIRS)
def test_same_seed_gives_bit_identical_parameters(name, kwargs):
    torch.manual_seed(3)
    expected = getattr(torch.nn, name)(**kwargs)
    torch.manual_seed(3)
    actual = getattr(fnn, name)(**kwargs)
    assert list(actual.state_dict()) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[key], value), key
        assert actual.state_dict()[key].dtype == value.dtype, key
    # Both constructors leave the generator in the same state.
    after = torch.rand(3)
    torch.manual_seed(3)
    getattr(torch.nn, name)(**kwargs)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(("name", "kwargs"), PAIRS)
def test_checkpoints_load_both_ways(name, kwargs):
    theirs, ours = getattr(torch.nn, name)(**kwargs), getattr(fnn, name)(**kwargs)
    ours.load_state_dict(perturb(theirs).state_dict(), strict=True)
    theirs.load_state_dict(perturb(ours).state_dict(), strict=True)
    for key, value in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], value), key


@pytest.mark.parametrize("name", sorted({name for name, _ in PAIRS}))
def test_constructor_signature_is_that_of_torch(name):
    expected = inspect.signature(getattr(torch.nn, name))
    assert inspect.signature(getattr(fnn, name)) == expected
    assert issubclass(getattr(fnn, name), getattr(torch.nn, name))


def test_children_are_fused_modules():
    model = fnn.Transformer(EMBED, HEADS, 1, 1, 16)
    for module in model.modules():
        counterpart = getattr(fnn, type(module).__name__, None)
        assert counterpart is None or type(module) is counterpart
    assert type(model.encoder.layers[0].self_attn) is fnn.MultiheadAttention
    assert type(model.decoder.norm) is fnn.LayerNorm


def test_stack_converts_torch_layers_that_it_is_given():
    layer = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16)
    stack = fnn.TransformerEncoder(layer, 2, norm=torch.nn.LayerNorm(EMBED))
    assert all(type(m) is fnn.TransformerEncoderLayer for m in stack.layers)
    assert type(stack.norm) is fnn.LayerNorm
    assert type(layer) is torch.nn.TransformerEncoderLayer
    assert type(layer.self_attn) is torch.nn.MultiheadAttention


def test_constructors_do_not_warn_of_nested_tensors(recwarn):
    fnn.TransformerEncoder(fnn.TransformerEncoderLayer(EMBED, HEADS, 16), 1)
    fnn.Transformer(EMBED, HEADS, 1, 1, 16)
    assert not recwarn.list


def test_modules_survive_pickle_and_deepcopy():
    model = fnn.TransformerEncoderLayer(EMBED, HEADS, 16).double().eval()
    x = randn(LEN_Q, BATCH, EMBED)
    for other in (
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        saved_and_loaded(model),
    ):
        assert type(other.norm1) is fnn.LayerNorm
        assert torch.equal(other(x), model(x))


# ---- from_torch ----------------------------------------------------------------------------------


def test_from_torch_shares_parameters_and_leaves_the_original():
    theirs = torch.nn.TransformerDecoderLayer(EMBED, HEADS, 16).eval()
    ours = fnn.TransformerDecoderLayer.from_torch(theirs)
    assert type(ours) is fnn.TransformerDecoderLayer
    assert not ours.training
    expected = dict(theirs.named_parameters())
    assert {k: id(v) for k, v in ours.named_parameters()} == {k: id(v) for k, v in expected.items()}
    assert type(theirs.self_attn) is torch.nn.MultiheadAttention
    ours.extra = torch.nn.Linear(1, 1)
    assert "extra" not in dict(theirs.named_children())


def test_from_torch_draws_no_random_numbers():
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS)
    state = torch.random.get_rng_state()
    fnn.MultiheadAttention.from_torch(theirs)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_from_torch_keeps_hooks():
    theirs = torch.nn.LayerNorm(4)
    seen = []
    theirs.register_forward_hook(lambda *_: seen.append("hook"))
    fnn.LayerNorm.from_torch(theirs)(torch.randn(2, 4))
    assert seen == ["hook"]


def test_from_torch_refuses_what_it_does_not_know():
    class Mine(torch.nn.LayerNorm):
        pass

    with pytest.raises(TypeError, match=r"torch\.nn\.LayerNorm, got .*Mine"):
        fnn.LayerNorm.from_torch(Mine(4))
    with pytest.raises(TypeError, match=r"LayerNorm, got torch\.nn\.RMSNorm"):
        fnn.LayerNorm.from_torch(torch.nn.RMSNorm(4))
    patched = torch.nn.LayerNorm(4)
    patched.forward = lambda input: input
    with pytest.raises(ValueError, match="forward was replaced"):
        fnn.LayerNorm.from_torch(patched)


# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"elementwise_affine": False}, {"eps": 0.1}, {"bias": False}],
    ids=["plain", "no-affine", "eps", "no-bias"],
)
@pytest.mark.parametrize("shape", [4, (3, 4)], ids=["1d", "2d"])
def test_norm(name, kwargs, shape):
    if name == "RMSNorm" and "bias" in kwargs:
        pytest.skip("reason: RMSNorm has no bias")
    theirs = perturb(getattr(torch.nn, name)(shape, **kwargs).double())
    x = randn(5, 3, 4)
    if not kwargs.get("elementwise_affine", True):
        ours = getattr(fnn, name).from_torch(theirs)
        assert_equal_in_float64(run(ours, (x,)), run(theirs, (x,)))
        return
    check_against_torch(theirs, getattr(fnn, name), (x,))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_half_precision(name, dtype):
    """Norms in float16 and bfloat16 match torch: RMSNorm's default eps is float32's epsilon.

    The inputs are small enough for eps to affect the result.
    """
    theirs = perturb(getattr(torch.nn, name)(64)).to(dtype)
    x = (randn(9, 64, grad=False) * 0.01).to(dtype).requires_grad_()
    eps = torch.finfo(torch.float32).eps if theirs.eps is None else theirs.eps
    double = getattr(torch.nn, name)(64, eps=eps).double()
    double.load_state_dict(theirs.state_dict())
    truth = run(double, cast((x,), torch.float64))
    ours = getattr(fnn, name).from_torch(copy.deepcopy(theirs))
    assert_within_contract(run(ours, (x,)), run(theirs, (x,)), truth)
