"""Swapped Hugging Face encoders compute only the real tokens of a padded batch."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from graphs import Recorded
from helpers import saved_and_loaded
from hf_families import Outputs, integration, transformers
from nn_helpers import (
    assert_equal_in_float64,
    assert_within_contract,
    perturb,
    run,
    swapped_copy,
)
from padded_models import recorded_packings

import fused_attn

BATCH, LENGTH, VOCABULARY = 3, 11, 50
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 1}
BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 30,
}  # fmt: skip
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
ROTARY = BERT | {
    "type_vocab_size": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
STACKS = {
    "Albert": BERT | {"embedding_size": 16},
    "Bert": BERT,
    "Camembert": BERT,
    "DistilBert": DISTILBERT,
    "Electra": BERT | {"embedding_size": 16},
    "LayoutLM": BERT,  # its padding mask is a float tensor
    "Roberta": BERT,
    "XLMRoberta": BERT,
}
MODELS = {
    "EuroBert": ROTARY | {"num_key_value_heads": 2},
    "Gte": ROTARY,
    "JinaEmbeddingsV3": ROTARY,
    "ModernBert": BERT | {"local_attention": 6, "global_attn_every_n_layers": 2},
    "NomicBert": ROTARY,
}
FAMILIES = STACKS | MODELS
# Rotary embeddings round queries and keys to float32, as LayoutLM rounds its softmax.
ROUNDS_TO_FLOAT32 = {*MODELS, "LayoutLM"}
assert_close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
RIGHT = torch.arange(LENGTH) < torch.tensor([[4], [11], [2]])
LEFT = torch.arange(LENGTH) >= torch.tensor([[4], [0], [9]])


@pytest.fixture
def packings(monkeypatch):
    return recorded_packings(monkeypatch)


def model(name, dtype=torch.float64, **options):
    config = getattr(transformers, f"{name}Config")(**COMMON, **FAMILIES[name] | options)
    made = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")
    return perturb(made).to(dtype).eval()


def inputs(real):
    tokens = torch.randint(2, VOCABULARY, real.shape)
    return {"input_ids": tokens.masked_fill(~real, 1), "attention_mask": real.long()}


def results_of(model, call):
    """Return the hidden states of real tokens, and the gradients of all parameters."""
    return run(Outputs(model, ("last_hidden_state",)), (), call)


@pytest.mark.parametrize("real", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_results_are_those_of_eager(name, real, packings):
    eager, call = model(name), inputs(real)
    fused = copy.deepcopy(eager)
    report = fused_attn.swap_modules(fused)
    expected, actual = results_of(eager, call), results_of(fused, call)
    assert len(packings) == 1 and packings[0] is not None
    assert not fused(**call).last_hidden_state[~real].any()
    if name in ROUNDS_TO_FLOAT32:
        if name == "ModernBert":  # eager gradients are NaN where a window has only padding
            assert_close(actual["out0"], expected["out0"])
            expected = results_of(swapped_copy(eager, remove_padding=False), call)
        assert_close({n: actual[n] for n in expected}, expected)
        return
    assert_equal_in_float64(actual, expected)
    single, ours = copy.deepcopy(eager).float(), copy.deepcopy(fused).float()
    results = (results_of(m, call) for m in (ours, single, copy.deepcopy(single).double()))
    # A key bias shifts all scores of a row equally, so its gradient is 0 up to rounding.
    assert_within_contract(
        *({n: r for n, r in result.items() if "key.bias" not in n} for result in results)
    )
    report.restore()
    assert torch.equal(fused(**call).last_hidden_state, eager(**call).last_hidden_state)


SCALED = {
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}


@pytest.mark.parametrize("kind", SCALED)
def test_padding_that_scales_rotary_positions_stays(kind):
    """The padded length, not the longest sequence, determines the rotary frequencies."""
    rope = {"rope_type": kind, "rope_theta": 100.0, "original_max_position_embeddings": 30}
    eager = model("EuroBert", rope_parameters=rope | SCALED[kind])
    fused, real = swapped_copy(eager), torch.arange(40) < torch.tensor([[4], [11], [2]])
    call = inputs(real)
    assert_close(*(m(**call).last_hidden_state[real] for m in (fused, eager)))


def test_attention_dropout_in_training(packings):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}
    fused, call = swapped_copy(model("Bert", **dropout).train()), inputs(RIGHT)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(fused(**call).last_hidden_state)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert None not in packings and not outs[0][~RIGHT].any()


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_gradient_checkpointing(name, packings):
    fused, call = swapped_copy(model(name)), inputs(RIGHT)
    expected = results_of(fused, call)
    fused.train().gradient_checkpointing_enable()
    for part in fused.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    fused.config.attention_dropout = fused.config.attention_probs_dropout_prob = 0.0
    assert_close(results_of(fused, call), expected)
    assert len(packings) == 2 and None not in packings


@pytest.mark.parametrize("kind", ["Bert", "ModernBert"])
def test_hidden_states_are_those_of_padded_batches(kind):
    """Requested hidden states and attention weights have the shapes of the padded batch."""
    eager, call = model(kind), inputs(RIGHT)
    fused = swapped_copy(eager)
    states = [m(**call, output_hidden_states=True).hidden_states for m in (fused, eager)]
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours[RIGHT], theirs[RIGHT])
        assert ours.shape == theirs.shape
    fused.set_attn_implementation("eager")
    weights = fused(**call, output_attentions=True).attentions
    assert [w.shape for w in weights] == [(BATCH, 4, LENGTH, LENGTH)] * 2


def test_signature_of_forward_is_unchanged():
    """Trainer and torch.export read argument names; positional arguments may follow the mask."""
    eager, call = model("NomicBert"), inputs(RIGHT)
    fused = swapped_copy(eager)
    assert inspect.signature(fused.forward) == inspect.signature(eager.forward)
    types = torch.zeros_like(call["input_ids"])
    out = fused(*call.values(), types)[0]
    assert torch.equal(out, fused(**call, token_type_ids=types)[0])
    assert not out[~RIGHT].any()


def test_traces_of_padded_models_accept_other_lengths():
    fused, args = model("Bert").requires_grad_(False), inputs(RIGHT).values()
    fused_attn.swap_modules(fused, remove_padding=False)

    def function(ids, mask):
        return fused(ids, mask)[0]

    traced = torch.jit.trace(function, [t[:, :5] for t in args], check_trace=False)
    torch.testing.assert_close(traced(*args), function(*args))


def test_saved_configs_name_the_original_class(tmp_path):
    swapped_copy(model("ModernBert")).save_pretrained(tmp_path)
    assert '"ModernBertModel"' in (tmp_path / "config.json").read_text()


def test_layers_with_hooks_are_not_packed(packings):
    fused, seen = swapped_copy(model("Bert")), []
    fused.encoder.layer[1].register_forward_hook(lambda m, a, out: seen.append(out.shape))
    fused(**inputs(RIGHT))
    assert seen == [(BATCH, LENGTH, 32)]
    assert packings == [None]


@pytest.mark.parametrize(
    "change", ["own_layer", "own_method", "chunked", "no_padding", "masks", "decoder"]
)
def test_calls_that_are_not_packed(change, packings):
    eager, call, real = model("Bert"), inputs(RIGHT), RIGHT
    if change == "own_method":
        layer = eager.encoder.layer[1]
        layer.feed_forward_chunk = lambda x: x - x.mean(1, keepdim=True)
    if change == "chunked":
        for layer in eager.encoder.layer:
            layer.chunk_size_feed_forward = LENGTH
    if change == "own_layer":
        output = eager.encoder.layer[0].output
        output.dense = torch.nn.Sequential(output.dense)
    if change == "no_padding":
        real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        call = inputs(real)
    if change == "masks":
        visible = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.7
        visible[..., 0] = True
        call["attention_mask"] = torch.zeros(visible.shape).double().masked_fill(~visible, -1e9)
        real = ...
    if change == "decoder":
        eager = model("Bert", is_decoder=True)
    fused = swapped_copy(eager)
    out, expected = fused(**call).last_hidden_state, eager(**call).last_hidden_state
    torch.testing.assert_close(out[real], expected[real])
    assert all(packing is None for packing in packings)


def test_padded_rows_are_zero():
    """Padded rows are 0 in packed batches, and in batches with too little padding to pack.

    A call that requests hidden states does not change later calls.
    """
    fused = swapped_copy(model("Bert"))
    little = torch.ones(8, LENGTH, dtype=torch.bool)
    little[0, -1] = False
    for real in (RIGHT, little):
        call = inputs(real)
        first = fused(**call).last_hidden_state
        fused(**call, output_hidden_states=True)
        torch.testing.assert_close(fused(**call).last_hidden_state, first)
        assert not first[~real].any()


def test_outputs_of_layers_are_padded(packings):
    """Calls that request outputs of layers, or whose caller does, are not packed.

    transformers leaves its hooks on the layers; they do not prevent packing in later calls.
    """
    fused, call = swapped_copy(model("Bert")), inputs(RIGHT)
    fused(**call, output_router_logits=True)
    with_states = fused(**call, output_hidden_states=True)
    assert all(packing is None for packing in packings)
    assert all(states.shape == (BATCH, LENGTH, 32) for states in with_states.hidden_states)
    fused(**call)
    assert packings[-1] is not None
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    token = capturing._active_collector.set({"hidden_states": []})
    fused.encoder(torch.randn(BATCH, LENGTH, 32).double(), RIGHT[:, None, None])
    capturing._active_collector.reset(token)
    assert packings[-1] is None


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, -1e4])
def test_float_padding_masks(lowest, packings):
    """Float padding masks are packed like bool masks, unless they also bias real tokens."""
    eager = model("Bert")
    fused, hidden = swapped_copy(eager), torch.randn(*RIGHT.shape, 32).double()
    mask = torch.zeros(RIGHT.shape).double().masked_fill(~RIGHT, lowest)[:, None, None]
    for packed in (True, False):
        expected = eager.encoder(hidden, mask).last_hidden_state.masked_fill(~RIGHT[..., None], 0.0)
        torch.testing.assert_close(fused.encoder(hidden, mask).last_hidden_state, expected)
        assert (packings[-1] is not None) == packed
        mask[0, 0, 0, 0] = -1.0


def test_arguments_by_position():
    eager = model("Bert")
    fused = swapped_copy(eager)
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    for args in ((hidden, None, None, None, None, False), (hidden,)):
        torch.testing.assert_close(*(m.encoder(*args).last_hidden_state for m in (fused, eager)))


def test_implementations_may_be_set_before_and_after_the_swap(packings):
    call = inputs(torch.tensor([[True], [False], [True]]))
    fused = model("Bert")
    fused.set_attn_implementation("eager")
    integration.register()
    fused.set_attn_implementation("fused_attn")
    fused_attn.swap_modules(fused)
    fused(**call)
    assert packings and packings[-1] is not None
    fused.set_attn_implementation("sdpa")
    fused(**call)
    assert packings[-1] is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("swapped_first", [True, False])
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_linear_layers_of_mkldnn(name, swapped_first, packings):
    """`torch.utils.mkldnn.to_mkldnn`, before or after the swap, leaves packing in place."""
    from torch.utils.mkldnn import to_mkldnn

    net, batch = model(name, torch.float32), inputs(RIGHT)
    expected = net(**batch).last_hidden_state[RIGHT]
    steps = [fused_attn.swap_modules, to_mkldnn]
    for step in steps if swapped_first else reversed(steps):
        step(net)
    with torch.no_grad():
        torch.testing.assert_close(net(**batch).last_hidden_state[RIGHT], expected)
    assert packings[-1] is not None


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_copies_and_pickles(name):
    fused, call = swapped_copy(model(name)), inputs(RIGHT)
    expected = fused(**call).last_hidden_state
    for other in (saved_and_loaded(fused), copy.deepcopy(fused)):
        assert torch.equal(other(**call).last_hidden_state, expected)


# Whether a float mask only hides padding depends on its values, which a graph cannot read.
BOOL_MASKS = [name for name in STACKS if name != "LayoutLM"]


@pytest.mark.parametrize(
    ("name", "packed"),
    [("Bert", False), *(pytest.param(n, True, marks=pytest.mark.thorough) for n in BOOL_MASKS)],
)
def test_compiled_encoders(name, packed):
    """Compiled encoders pack batches only if graphs may have data-dependent sizes."""
    fused, call = swapped_copy(model(name)), inputs(RIGHT)
    expected, backend = results_of(fused, call), Recorded()
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=packed):
        fused.compile(fullgraph=True, backend=backend)
        results = results_of(fused, call)
    # A graph returns zeros as the gradient of unused parameters, such as those of a pooler.
    assert_equal_in_float64({name: results[name] for name in expected}, expected)
    assert backend.packs() == packed


def test_encoders_that_mix_tokens_are_not_packed(monkeypatch):
    """An encoder that mixes tokens stays padded, because packing would change its results."""
    stack = transformers.models.bert.modeling_bert.BertEncoder
    forward = stack.forward

    @functools.wraps(forward)
    def centered(self, hidden_states, *args, **kwargs):
        hidden_states = hidden_states - hidden_states[:, :1]
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(stack, "forward", centered)
    fused = model("Bert")
    report = fused_attn.swap_modules(fused)
    assert type(fused.encoder) is stack and not any("padded rows" in n for n in report.notes)
    assert any("encoder: keeps its padding, because packing changed" in n for n in report.notes)
    assert any("already fused" in note for note in fused_attn.swap_modules(fused).notes)


def test_meta_models_are_not_packed():
    """On the meta device, no trial batch can run, so encoders stay padded until a later swap."""
    with torch.device("meta"):
        fused = model("Bert")
    stack = type(fused.encoder)
    report = fused_attn.swap_modules(fused)
    assert type(fused.encoder) is stack
    assert any("encoder: keeps its padding" in n for n in report.notes)
    fused.load_state_dict(model("Bert").state_dict(), assign=True)
    report = fused_attn.swap_modules(fused)
    assert type(fused.encoder) is not stack and not any("its padding" in n for n in report.notes)


@pytest.mark.sampled("Gte covers these", name=["EuroBert", "JinaEmbeddingsV3", "NomicBert"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models(name, fullgraph, packings):
    """The graph breaks before a batch is packed; batches stay padded under fullgraph=True."""
    eager, call = model(name), inputs(RIGHT)
    fused = swapped_copy(eager)
    torch.compiler.reset()
    fused.compile(backend="eager", fullgraph=fullgraph)
    with torch.no_grad():
        out, expected = (m(**call).last_hidden_state for m in (fused, eager))
    assert [packing is not None for packing in packings] == [not fullgraph]
    assert_close(out[RIGHT], expected[RIGHT])
    assert not out[~RIGHT].any()


def test_arguments_of_models_with_rotary_embeddings(packings):
    """Gte packs a batch unless tuples or hidden states are requested or padding splits a row."""
    eager, call = model("Gte"), inputs(LEFT)
    fused, tokens = swapped_copy(eager), call.pop("input_ids")
    embeds = {"inputs_embeds": eager.get_input_embeddings()(tokens)}
    positions = (LEFT.cumsum(1) - 1).clamp(min=0)
    for arguments, packs in (
        ({"input_ids": tokens, "token_type_ids": tokens % 2, "position_ids": positions}, True),
        (embeds, True),
        ({"input_ids": tokens, "position_ids": positions[1:2]}, True),
        ({"input_ids": tokens, "return_dict": False}, False),
        ({"input_ids": tokens, "output_hidden_states": True}, False),
    ):
        packings.clear()
        out, expected = (m(**call, **arguments)[0] for m in (fused, eager))
        assert_close(out[LEFT], expected[LEFT])
        assert not out[~LEFT].any()
        assert [packing is not None for packing in packings] == [True] * packs
    call["attention_mask"] = torch.tensor([[1, 0, 1]]).repeat(3, 1)  # padding between real tokens
    out, expected = (m(tokens[:, :3], **call)[0] for m in (fused, eager))
    assert_close(out[:, ::2], expected[:, ::2])
    assert packings[-1] is None
