"""swap_modules with torch's inference paths, wrappers, copies, training and TorchScript."""

import contextlib
import copy
import pickle
import subprocess
import sys

import pytest
import torch
from enable_helpers import functions_called
from helpers import saved_and_loaded
from nn_helpers import (
    assert_equal_in_float64,
    assert_within_contract,
    cast,
    perturb,
    run,
    swapped_copy,
)
from torch.nn.utils import parametrize

import fused_attn.nn as fnn
from fused_attn.swap import swap_modules

EMBED, HEADS, LENGTH = 12, 2, 5  # torch's inference path requires an even number of heads
PADDED = torch.tensor([[False] * LENGTH, [False] * 3 + [True] * 2])


@pytest.fixture
def kernel_calls():
    """Return a list to which each call of our attention or layer norm appends its name."""
    with functions_called("scaled_dot_product_attention", "layer_norm") as seen:
        yield seen


class MyLayer(torch.nn.TransformerEncoderLayer):
    """User-defined subclass of torch's layer that overrides nothing."""


class MyEncoder(torch.nn.TransformerEncoder):
    """User-defined subclass of torch's stack that overrides nothing."""


def layer(kind=torch.nn.TransformerEncoderLayer):
    return kind(EMBED, HEADS, 8, dropout=0.0, batch_first=True)


def classifier():
    """Return a model with an encoder layer, a norm and linear layers."""
    return perturb(
        torch.nn.Sequential(
            torch.nn.Linear(6, EMBED), layer(), torch.nn.LayerNorm(EMBED), torch.nn.Linear(EMBED, 3)
        )
    )


# ---- torch's inference paths ------------------------------------------------------------------

# Case -> (class of the layer, flags of the swap, functions of this package that inference calls).
KEPT_LAYERS = {
    "subclass": (MyLayer, {}, ["layer_norm", "layer_norm", "scaled_dot_product_attention"]),
    "norms only": (torch.nn.TransformerEncoderLayer, {"attention": False}, ["layer_norm"] * 2),
    "subclass, attention only": (MyLayer, {"norm": False}, ["scaled_dot_product_attention"]),
}


@contextlib.contextmanager
def no_inference_kernel(monkeypatch):
    """Assert that torch's fused kernel for encoder layers is not called within the block."""
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "_transformer_encoder_layer_fwd", lambda *args: pytest.fail("bypassed")
        )
        yield


@pytest.mark.parametrize("case", KEPT_LAYERS)
def test_layers_with_fused_parts_bypass_the_inference_path(case, kernel_calls, monkeypatch):
    kind, flags, expected_calls = KEPT_LAYERS[case]
    model = perturb(layer(kind)).eval()
    x = torch.randn(2, LENGTH, EMBED)
    with torch.no_grad():
        before = model(x, src_key_padding_mask=PADDED)
        report = swap_modules(model, **flags)
        assert not kernel_calls
        with no_inference_kernel(monkeypatch):
            after = model(x, src_key_padding_mask=PADDED)
        assert sorted(kernel_calls) == expected_calls
        torch.testing.assert_close(after[~PADDED], before[~PADDED])
        assert "inference fast path" in str(report)

        report.restore()
        kernel_calls.clear()
        assert torch.equal(model(x, src_key_padding_mask=PADDED), before)
    assert not kernel_calls


def test_layers_without_fused_parts_keep_the_inference_path():
    model = layer(MyLayer).eval()
    report = swap_modules(model, attention=False, norm=False)
    assert model.activation_relu_or_gelu
    assert not report.notes


ENCODER, LAYER = torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer
# Case -> (class of the stack, class of the layers, flags of the swap).
STACKS = {
    "stack and layers kept": (MyEncoder, MyLayer, {}),
    "stack kept": (MyEncoder, LAYER, {}),
    "layers kept": (ENCODER, MyLayer, {}),
    "norms only": (ENCODER, LAYER, {"attention": False}),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(EMBED), None], ids=["norm", ""])
@pytest.mark.parametrize("case", STACKS)
def test_stacks_that_pack_padding_in_inference(case, norm, kernel_calls, monkeypatch):
    """In inference, a swap changes no output of stacks that pack padding, not even padded rows."""
    stack, kind, flags = STACKS[case]
    model = perturb(stack(layer(kind), 2)).eval()
    model.norm = copy.deepcopy(norm)  # its bias is 0, so torch returns 0 in padded rows
    x = torch.randn(2, LENGTH, EMBED)
    with torch.no_grad():
        before = model(x, src_key_padding_mask=PADDED)
        swap_modules(model, **flags)
        with no_inference_kernel(monkeypatch):
            after = model(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(after, before)
    assert kernel_calls.count("scaled_dot_product_attention") == (2 if not flags else 0)
    assert kernel_calls.count("layer_norm") >= 4 + (norm is not None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_norms_of_nested_tensors(layout):
    rows = [torch.randn(3, EMBED), torch.randn(LENGTH, EMBED)]
    norm = perturb(torch.nn.LayerNorm(EMBED))
    expected = [norm(row) for row in rows]
    swap_modules(norm)
    x = torch.nested.nested_tensor(rows, layout=layout)
    # The sum fails unless the output has the nested shape of x.
    torch.testing.assert_close([*(x + norm(x) - x).unbind()], expected)
    with pytest.raises(TypeError, match="dense"):
        norm(x, residual=x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_attention_must_be_self_attention():
    attention = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    x, other = (torch.nested.nested_tensor([torch.randn(3, EMBED)]) for _ in range(2))
    for args, kwargs in (
        ((x, other, other), {"need_weights": False}),
        ((x, x, x), {}),
        ((x, x, x), {"need_weights": False, "key_padding_mask": PADDED}),
    ):
        with pytest.raises(ValueError, match="nested"):
            attention(*args, **kwargs)


# ---- parametrizations, DistributedDataParallel, fully_shard --------------------------------------


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2.0 * x


def test_parametrizations_before_the_swap():
    """A parametrized in_proj_weight prevents the swap; parametrized out_proj and linear1 do not."""
    model = perturb(torch.nn.ModuleList([layer() for _ in range(3)])).double()
    parametrize.register_parametrization(model[0].self_attn, "in_proj_weight", Doubled())
    parametrize.register_parametrization(model[1].self_attn.out_proj, "weight", Doubled())
    parametrize.register_parametrization(model[2].linear1, "weight", Doubled())
    x = torch.randn(2, LENGTH, EMBED, dtype=torch.float64, requires_grad=True)
    model = torch.nn.Sequential(*model)
    expected = run(model, (x,))
    report = swap_modules(model)
    assert [s.name for s in report.skipped] == ["0.self_attn"]
    assert "register the parametrization" in report.skipped[0].reason
    assert_equal_in_float64(run(model, (x,)), expected)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations_after_the_swap(name):
    model = torch.nn.Sequential(perturb(layer())).double()
    original = copy.deepcopy(model)
    report = swap_modules(model)
    for made in (model, original):
        torch.manual_seed(1)
        getattr(torch.nn.utils.parametrizations, name)(made[0].self_attn, "in_proj_weight")
        made.eval()
    x = torch.randn(2, LENGTH, EMBED, dtype=torch.float64, requires_grad=True)
    assert_equal_in_float64(run(model, (x,)), run(original, (x,)))
    with pytest.raises(RuntimeError, match="first undo whatever changed its class"):
        report.restore()
    parametrize.remove_parametrizations(model[0].self_attn, "in_proj_weight")
    report.restore()
    assert type(model[0].self_attn) is torch.nn.MultiheadAttention


@pytest.mark.parametrize("order", ["swap, wrap", "wrap, swap"])
def test_distributed_data_parallel(order, one_process):
    model, x = classifier().double(), torch.randn(2, LENGTH, 6, dtype=torch.float64)
    expected = run(copy.deepcopy(model), (x,))
    if order == "swap, wrap":
        swap_modules(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if order == "wrap, swap":
        assert swap_modules(wrapped).swapped[-1].name == "module.2"
    actual = run(wrapped, (x,))
    assert type(model[2]) is fnn.LayerNorm
    assert_equal_in_float64({k.replace("module.", ""): v for k, v in actual.items()}, expected)


def test_fully_shard(one_process):
    """fully_shard may wrap fused modules; modules that it wrapped before a swap are skipped."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sharded, x = classifier(), torch.randn(2, LENGTH, 6)
    expected = sharded(x).detach()
    swapped = swapped_copy(sharded)
    for made in (swapped, sharded):
        fully_shard(made[1], mesh=mesh)
        fully_shard(made[2], mesh=mesh)
        fully_shard(made, mesh=mesh)
    report = swap_modules(sharded)
    reasons = {s.name: s.reason for s in report.skipped}
    assert reasons.keys() == {"1", "2"}
    assert all("fully_shard" in reason for reason in reasons.values())
    assert isinstance(swapped[1], fnn.TransformerEncoderLayer)
    assert type(sharded[1].self_attn) is fnn.MultiheadAttention
    for made in (swapped, sharded):
        out = made(x)
        torch.testing.assert_close(out.detach(), expected)
        out.sum().backward()
        assert all(p.grad is not None for p in made.parameters())


# ---- types, training, copies --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_requires_grad_and_training_flag_stay(dtype):
    truth = classifier().to(dtype).double()
    model = copy.deepcopy(truth).to(dtype).eval()
    for made in (model, truth):
        made[2].weight.requires_grad_(False)
    model[1].self_attn.train()
    eager = copy.deepcopy(model)
    swap_modules(model)
    for before, after in zip(eager.parameters(), model.parameters(), strict=True):
        assert (after.dtype, after.device) == (before.dtype, before.device)
        assert after.requires_grad == before.requires_grad
    assert [m.training for m in model.modules()] == [m.training for m in eager.modules()]
    x = cast(torch.randn(4, LENGTH, 6, requires_grad=True), dtype)
    results = run(model, (x,)), run(eager, (x,)), run(truth, (cast(x, torch.float64),))
    assert "grad 2.weight" not in results[0]
    assert_within_contract(*results)


def test_training_continues_with_the_same_optimizer():
    """Training with momentum gives the same weights if modules are swapped and restored midway."""
    x, target = torch.randn(4, LENGTH, 6).double(), torch.randn(4, LENGTH, 3).double()
    weights = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = classifier().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(6):
            if swap and step == 2:
                report = swap_modules(model)
            if swap and step == 4:
                report.restore()
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
        weights.append({name: p.detach() for name, p in model.named_parameters()})
    assert_equal_in_float64(weights[1], weights[0])


def test_copies_stay_swapped():
    model = torch.nn.Sequential(classifier(), torch.nn.LayerNorm(3))
    model.append(model[1])
    report = swap_modules(model)
    x = torch.randn(2, LENGTH, 6)
    expected = model(x)
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    report.restore()
    for copied in made:
        assert type(copied[0][1].self_attn) is fnn.MultiheadAttention
        assert copied[1] is copied[2]
        assert torch.equal(copied(x), expected)


SCRIPT = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
torch.save(model(torch.load(sys.argv[2])), sys.argv[3])
"""


def test_loaded_in_a_process_that_does_not_import_the_package(tmp_path):
    model, x = swapped_copy(classifier()), torch.randn(2, LENGTH, 6)
    paths = [str(tmp_path / name) for name in ("model.pt", "x.pt", "out.pt")]
    torch.save(model, paths[0])
    torch.save(x, paths[1])
    subprocess.run([sys.executable, "-c", SCRIPT, *paths], check=True)
    torch.testing.assert_close(torch.load(paths[2]), model(x))


def test_state_dict_is_that_of_the_original():
    model = classifier()
    report = swap_modules(model)
    weights = saved_and_loaded(model.state_dict(), weights_only=True)
    report.restore()
    model.load_state_dict(weights)


def test_compile_after_the_swap():
    model, x = classifier(), torch.randn(2, LENGTH, 6, requires_grad=True)
    expected = run(model, (x,))
    swap_modules(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(model, (x,)), expected)


# ---- TorchScript --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "MultiheadAttention", "model"])
def test_torch_jit_script_names_alternatives(name):
    """torch.jit.script of a swapped model raises an error that names torch.export and restore()."""
    heads = [HEADS] * (name == "MultiheadAttention")
    model = classifier() if name == "model" else getattr(torch.nn, name)(EMBED, *heads)
    report = swap_modules(model)
    swapped = [type(module) for module in model.modules()]
    with pytest.raises(NotImplementedError, match=r"fused_attn\.nn\..*torch\.export.*restore\(\)"):
        torch.jit.script(model)
    assert [type(module) for module in model.modules()] == swapped
    report.restore()
    torch.jit.script(model)
