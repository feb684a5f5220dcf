"""Model types of transformers before and after the swap: a sample of `make models-check`."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config that wants to download fails at once

from hf_zoo import judge, small_config, transformers

from fused_attn.integrations.transformers.models import unsupported

# One of each kind of trouble that models have been; what else is in the library is much like these.
SAMPLE = {
    "deepseek_v4": "agrees",  # appends keys to its mask
    "doge": "agrees",  # puts its mask into a where
    "glm_moe_dsa": "agrees",  # chooses keys
    "ovis2": "agrees",  # hands over arguments that change nothing
    "timesfm2_5": "agrees",
    "minimax_m3_vl": "declined",  # chooses blocks of keys
    "sam_vision_model": "declined",  # picks classes by name
    "falcon": "declined",
    "convnext": "no attention",
}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "expected"), SAMPLE.items(), ids=SAMPLE)
def test_model_type(model_type, expected):
    verdict = judge(model_type)
    assert verdict.verdict == expected, str(verdict)


@pytest.mark.slow
def test_what_differs_fails(monkeypatch):
    from fused_attn import functional

    attend = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *a, **kw: attend(*a, **kw) * 1.01
    )
    assert judge("bert").verdict == "FAILS"
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **kw: 1 // 0)
    verdict = judge("bert")
    assert verdict.verdict == "FAILS"
    assert "ZeroDivisionError" in verdict.detail


@pytest.mark.slow
def test_what_is_reported_and_not_called_fails(monkeypatch):
    from fused_attn.integrations.transformers import models

    monkeypatch.setattr(models, "_attends", lambda model: True)
    monkeypatch.setattr(models, "set_implementation", lambda model, name: None)
    verdict = judge("bert")
    assert verdict.verdict == "FAILS"
    assert "reported as fused, and nothing in it called" in verdict.detail


def test_small_configs_have_a_layer_of_each_kind():
    config = small_config(transformers.GptOssConfig)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 2
    assert config.vocab_size < 100


@pytest.mark.parametrize("argument", ["head_mask", "scaling"])
def test_models_without_source_decline_for_what_their_code_says(argument):
    code = f"""class Model(PreTrainedModel):
        def forward(self, x):
            attend = ALL_ATTENTION_FUNCTIONS.get_interface("fused_attn", None)
            return attend(self, x, x, x, None, {argument}=x)"""
    space = {"__name__": __name__, "PreTrainedModel": transformers.PreTrainedModel}
    exec(compile(code, "<no file>", "exec"), space)
    reason = unsupported(space["Model"])
    if argument == "scaling":
        assert reason is None
    else:
        assert reason == "Model hands over head_mask, which scales the weights of each head"
