"""fused_attn.nn: constructors, state_dicts, conversion of torch.nn modules, and norms."""

import copy
import inspect
import itertools
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

MODULES = {
    "attention": lambda nn: nn.MultiheadAttention(EMBED, HEADS),
    "attention-no-bias": lambda nn: nn.MultiheadAttention(EMBED, HEADS, bias=False),
    "attention-bias_kv": lambda nn: nn.MultiheadAttention(
        EMBED, HEADS, kdim=10, vdim=11, add_bias_kv=True
    ),
    "attention-float64": lambda nn: nn.MultiheadAttention(
        EMBED, HEADS, kdim=7, dropout=0.3, dtype=torch.float64
    ),
    "layer_norm": lambda nn: nn.LayerNorm((3, 4)),
    "layer_norm-no-bias": lambda nn: nn.LayerNorm(4, bias=False),
    "rms_norm": lambda nn: nn.RMSNorm(4),
    "encoder_layer": lambda nn: nn.TransformerEncoderLayer(EMBED, HEADS, 16),
    "decoder_layer": lambda nn: nn.TransformerDecoderLayer(EMBED, HEADS, bias=False),
    "encoder": lambda nn: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(EMBED, HEADS, 16), 2, norm=nn.LayerNorm(EMBED)
    ),
    "decoder": lambda nn: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(EMBED, HEADS, 16), 2, norm=nn.LayerNorm(EMBED)
    ),
    "transformer": lambda nn: nn.Transformer(EMBED, HEADS, 2, 1),
}
CLASSES = [
    "MultiheadAttention",
    "LayerNorm",
    "RMSNorm",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerDecoder",
    "Transformer",
]


# ---- construction --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_same_seed_gives_bit_identical_parameters(make):
    """Parameters and the final state of the random generator are those of torch's constructor."""
    states, next_draws = [], []
    for namespace in (torch.nn, fnn):
        torch.manual_seed(3)
        states.append(make(namespace).state_dict())
        next_draws.append(torch.rand(3))
    assert list(states[0]) == list(states[1])
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value), key
        assert states[1][key].dtype == value.dtype, key
    assert torch.equal(*next_draws)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_checkpoints_load_both_ways(make):
    theirs, ours = make(torch.nn), make(fnn)
    ours.load_state_dict(perturb(theirs).state_dict(), strict=True)
    theirs.load_state_dict(perturb(ours).state_dict(), strict=True)
    for key, value in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], value), key


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_are_those_of_torch(name):
    theirs, ours = getattr(torch.nn, name), getattr(fnn, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert issubclass(ours, theirs)
    if name not in ("LayerNorm", "RMSNorm"):  # our norms also accept a residual
        calls = [inspect.signature(c.forward).parameters.values() for c in (ours, theirs)]
        calls = [[(p.name, p.kind, p.default) for p in parameters] for parameters in calls]
        assert calls[0] == calls[1]


def test_children_are_fused_modules():
    model = fnn.Transformer(EMBED, HEADS, 1, 1, 16)
    for module in model.modules():
        counterpart = getattr(fnn, type(module).__name__, None)
        assert counterpart is None or type(module) is counterpart
    assert type(model.encoder.layers[0].self_attn) is fnn.MultiheadAttention
    assert type(model.decoder.norm) is fnn.LayerNorm


def test_stack_converts_torch_layers():
    layer = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16)
    stack = fnn.TransformerEncoder(layer, 2, norm=torch.nn.LayerNorm(EMBED))
    assert all(type(m) is fnn.TransformerEncoderLayer for m in stack.layers)
    assert type(stack.norm) is fnn.LayerNorm
    assert type(layer) is torch.nn.TransformerEncoderLayer
    assert type(layer.self_attn) is torch.nn.MultiheadAttention


def test_constructors_do_not_warn_about_nested_tensors(recwarn):
    fnn.TransformerEncoder(fnn.TransformerEncoderLayer(EMBED, HEADS, 16), 1)
    fnn.Transformer(EMBED, HEADS, 1, 1, 16)
    assert not recwarn.list


def test_modules_survive_pickle_and_deepcopy():
    model = fnn.TransformerEncoderLayer(EMBED, HEADS, 16).double().eval()
    x = randn(LEN_Q, BATCH, EMBED)
    copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model), saved_and_loaded(model)
    for other in copies:
        assert type(other.norm1) is fnn.LayerNorm
        assert torch.equal(other(x), model(x))


# ---- from_torch ----------------------------------------------------------------------------------


def test_from_torch_shares_parameters_and_does_not_change_the_original():
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


def test_from_torch_preserves_hooks():
    theirs = torch.nn.LayerNorm(4)
    seen = []
    theirs.register_forward_hook(lambda *_: seen.append("hook"))
    fnn.LayerNorm.from_torch(theirs)(torch.randn(2, 4))
    assert seen == ["hook"]


def test_from_torch_rejects_unsupported_modules():
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


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *itertools.product(
            ["LayerNorm", "RMSNorm"], [{}, {"elementwise_affine": False}, {"eps": 0.1}]
        ),
        ("LayerNorm", {"bias": False}),
    ],
)
@pytest.mark.parametrize("shape", [4, (3, 4)], ids=["1d", "2d"])
def test_norm(name, kwargs, shape):
    theirs = perturb(getattr(torch.nn, name)(shape, **kwargs).double())
    fused_class, x = getattr(fnn, name), randn(5, 3, 4)
    if "elementwise_affine" in kwargs:  # check_against_torch needs a parameter
        assert_equal_in_float64(run(fused_class.from_torch(theirs), (x,)), run(theirs, (x,)))
    else:
        check_against_torch(theirs, fused_class, (x,))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_half_precision(name, dtype):
    """Norms match torch in 16-bit dtypes, where RMSNorm's default eps is float32's epsilon."""
    theirs = perturb(getattr(torch.nn, name)(64)).to(dtype)
    x = (randn(9, 64, grad=False) * 0.01).to(dtype).requires_grad_()  # so small that eps matters
    eps = torch.finfo(torch.float32).eps if theirs.eps is None else theirs.eps
    double = getattr(torch.nn, name)(64, eps=eps).double()
    double.load_state_dict(theirs.state_dict())
    truth = run(double, cast((x,), torch.float64))
    ours = getattr(fnn, name).from_torch(copy.deepcopy(theirs))
    assert_within_contract(run(ours, (x,)), run(theirs, (x,)), truth)
