"""Hugging Face models with attn_implementation="fused_attn" match eager attention, or decline."""

import copy
import warnings

import pytest
import torch
from enable_helpers import spy_on_masks
from hf_configs import small_config
from hf_families import (
    BY_NAME,
    LENGTH,
    TEXT,
    VOCABULARY,
    Outputs,
    is_structured,
    on_eager,
    text,
    transformers,
)
from hf_results import _exact_softmax
from nn_helpers import assert_equal_in_float64, perturb, run

from fused_attn.integrations import transformers as integration
from fused_attn.swap import swap_modules

integration.register()
OWN_ATTENTION = {
    "MPNetModel": transformers.MPNetConfig(**TEXT),
    "DebertaV2Model": transformers.DebertaV2Config(**TEXT),
    "BloomModel": transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_head=4),
    "GPTJModel": transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
    ),
}
# Which models use transformers' AttentionInterface depends on the version of transformers.
DECLINING = [
    name for name in OWN_ATTENTION if not getattr(transformers, name)._can_set_attn_implementation()
]


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which each call of the fused attention appends its mask."""
    return spy_on_masks(monkeypatch)


@_exact_softmax()
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_packed_sequences_are_documents(name, calls):
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1]).expand(3, LENGTH)
    inputs = {"input_ids": text()["input_ids"], "position_ids": positions}
    model = BY_NAME[name].model("fused_attn", use_cache=False).double()
    expected = run(Outputs(on_eager(model), ("logits",)), (), inputs)
    assert not calls
    assert_equal_in_float64(run(Outputs(model, ("logits",)), (), inputs), expected)
    assert len(calls) == 2
    assert all(is_structured(mask) and len(mask.document_pairs) == 1 for mask in calls)


def test_from_pretrained_and_set_attn_implementation(tmp_path, calls):
    made = BY_NAME["Llama"].model()
    assert made.config._attn_implementation == "sdpa"
    made.save_pretrained(tmp_path)
    kwargs = text()
    expected = made(**kwargs).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="fused_attn"
    )
    made.set_attn_implementation("fused_attn")
    real = kwargs["attention_mask"].bool()
    for model in (made, loaded):
        calls.clear()
        torch.testing.assert_close(model(**kwargs).logits[real], expected[real])
        assert len(calls) == 2


@pytest.mark.sampled("one model is enough for make test", name=["T5"])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "T5"])
def test_family_compiles(name):
    family = BY_NAME[name]
    model, kwargs = family.model("fused_attn"), {**family.inputs(), "use_cache": False}
    with torch.no_grad():
        expected = model(**kwargs).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**kwargs).logits, expected)


# ---- models with unusual masks or arguments ------------------------------------------------------


def small_model(kind, implementation="fused_attn"):
    """Return a small float64 model of a class that is not in FAMILIES."""
    options = {"attn_implementation": implementation, "experts_implementation": "eager"}
    return perturb(kind._from_config(small_config(kind.config_class), **options)).double().eval()


def test_decoding_with_compressed_keys():
    model, ids = small_model(transformers.DeepseekV4ForCausalLM), text()["input_ids"]
    expected = on_eager(model)(ids, use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(1, 1)]
    # Parts of the float64 model compute in float32.
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_arguments_without_effect_are_ignored(calls):
    model, inputs = BY_NAME["Llama"].model("fused_attn").model, text()
    expected = model(**inputs).last_hidden_state
    actual = model(**inputs, foo=1, logits_to_keep=2, seq_idx=torch.ones(1)).last_hidden_state
    assert torch.equal(actual, expected)
    assert calls


def test_packed_calls_with_position_ids_and_cu_seq_lens():
    """Packed calls may pass cu_seq_lens_q and _k along with position_ids, as data collators do.

    Without position_ids, cu_seq_lens raise an error.
    """
    model = BY_NAME["Llama"].model("fused_attn")
    ids = text()["input_ids"][:1]
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "use_cache": False}
    bounds = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4, 9]))
    lengths = {"max_length_q": 5, "max_length_k": 5}
    expected = model(ids, **packed).logits
    assert torch.equal(model(ids, **packed, **bounds, **lengths).logits, expected)
    with pytest.raises(NotImplementedError, match="position_ids"):
        model(ids, **bounds)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_training_without_padding(name):
    """Packed sequences have the same logits and gradients as the padded batch."""
    model = BY_NAME[name].model("fused_attn")
    ids, positions = text()["input_ids"][:1], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    rows = torch.nn.utils.rnn.pad_sequence(ids[0].split([4, 5]), batch_first=True)
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    padded = model(rows, attention_mask=real, use_cache=False).logits[real.bool()]
    packed = model(ids, position_ids=positions, use_cache=False).logits[0]
    weights = torch.randn_like(packed)
    results = [
        [logits, *torch.autograd.grad((logits * weights).sum(), [*model.parameters()])]
        for logits in (packed, padded)
    ]
    torch.testing.assert_close(*results)


# ---- models with custom attention ----------------------------------------------------------------


@pytest.mark.parametrize("name", DECLINING)
def test_models_with_custom_attention_decline(name, calls):
    kind, config = getattr(transformers, name), OWN_ATTENTION[name]
    with pytest.warns(UserWarning, match=f"{name} computes its attention without"):
        model = kind._from_config(copy.deepcopy(config), attn_implementation="fused_attn").eval()
    assert model.config._attn_implementation == "eager"
    original = kind(copy.deepcopy(config)).eval()
    original.load_state_dict(model.state_dict())
    kwargs = text()
    expected = original(**kwargs).last_hidden_state
    torch.testing.assert_close(model(**kwargs).last_hidden_state, expected)
    report = swap_modules(original, norm=False)
    assert "AttentionInterface" in report.skipped[0].reason
    torch.testing.assert_close(original(**kwargs).last_hidden_state, expected)
    assert not calls


def test_submodels_without_attention_cause_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        BY_NAME["Detr"].model("fused_attn")  # contains a ResNet, which has no attention


def test_models_for_eager_attention_alone_decline():
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, num_heads=4, d_ff=40, num_layers=2
    )
    with pytest.warns(UserWarning, match="supports only eager attention"):
        transformers.SwitchTransformersModel._from_config(config, attn_implementation="fused_attn")


@pytest.mark.parametrize("name", ["Sam", "SamHQ"])
def test_submodels_that_select_attention_classes_by_name_decline(name, calls):
    with pytest.warns(UserWarning, match=r"selects its attention class among eager, sdpa"):
        model = small_model(getattr(transformers, f"{name}Model"))
    encoder = model.vision_encoder
    assert type(encoder.layers[0].attn).__name__.endswith("SdpaAttention")
    assert encoder.config._attn_implementation == "sdpa"
    assert model.config.mask_decoder_config._attn_implementation == "fused_attn"

    model = small_model(getattr(transformers, f"{name}VisionModel"), "sdpa")
    report = swap_modules(model, norm=False)
    assert not report.swapped
    assert [s.name for s in report.skipped] == ["(the model)", "vision_encoder"]
    assert "nothing in it calls" in report.skipped[0].reason
    assert "selects its attention class among" in report.skipped[1].reason
    model(torch.randn(1, 3, 32, 32, dtype=torch.float64))
    assert not calls


def test_models_without_attention_are_not_reported_as_fused():
    model = small_model(transformers.ResNetModel, "eager")
    report = swap_modules(model)
    assert not report.swapped
    assert report.skipped[0].reason == "nothing in it calls transformers' AttentionInterface"


def test_models_that_decline_keep_their_implementation():
    model = small_model(transformers.SamVisionModel, "eager")
    integration.set_implementation(model, "fused_attn")
    assert model.vision_encoder.config._attn_implementation == "eager"
