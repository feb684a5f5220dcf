"""Model types of transformers before and after the swap: a sample of `make models-check`."""

import json
import os

import check_models
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # so that downloads fail immediately

from hf_configs import small_config, transformers
from hf_results import WAYS
from hf_zoo import judge

from fused_attn import functional
from fused_attn.integrations.transformers import models
from fused_attn.integrations.transformers.models import unsupported

# One model type for each known difficulty; the other types resemble these.
SAMPLE = {
    "deepseek_v4": "agrees",  # appends keys to its mask
    "doge": "agrees",  # passes its mask to torch.where
    "glm_moe_dsa": "agrees",  # selects keys
    "hy_v4": "agrees",
    "ovis2": "agrees",  # passes arguments without effect
    "timesfm2_5": "agrees",
    "qwen2_vl_text": "agrees",  # divides rotary embeddings into sections
    "deepseek_v2": "agrees",
    "esm": "agrees",
    "detr": "agrees",
    "sam": "agrees",
    "videomae": "agrees",
    "xglm": "declined",  # eager runs only in float32
    "kosmos_2_5_vision_model": "declined",  # looks up implementations in the wrong place
    "diffusion_gemma": "agrees with sdpa",  # passes a window that its mask lacks
    "layoutxlm": "no model",
    "minimax_m3_vl": "declined",  # selects blocks of keys
    "sam_vision_model": "declined",  # selects classes by name
    "falcon": "declined",
    "convnext": "no attention",
}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "expected"), SAMPLE.items(), ids=SAMPLE)
def test_model_type(model_type, expected):
    verdict = judge(model_type)
    assert verdict.verdict == expected, str(verdict)


@pytest.mark.slow
def test_text_is_also_padded_on_the_left_and_generated():
    assert judge("llama").ways == tuple(WAYS)


@pytest.mark.slow
def test_wrong_results_and_errors_fail(monkeypatch):
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
def test_models_reported_as_fused_but_not_called_fail(monkeypatch):
    monkeypatch.setattr(models, "_attends", lambda model: True)
    monkeypatch.setattr(models, "set_implementation", lambda model, name: None)
    verdict = judge("bert")
    assert verdict.verdict == "FAILS"
    assert "reported as fused, and nothing in it called" in verdict.detail


def entry(verdict, detail=""):
    return {"verdict": verdict, "detail": detail, "ways": []}


def test_regressions_are_listed():
    before = {name: entry("agrees", "1e-15") for name in ("a", "b", "c", "d")}
    found = {
        "a": entry("agrees", "2e-15"),
        "b": entry("not run", "its config"),
        "c": entry("FAILS", "differs"),
        "new": entry("not run", "its config"),
    }
    lines = check_models.regressions(before, found)
    assert [line.split(":")[0] for line in lines] == [
        "b agreed before, now", "c agreed before, now"
    ]  # fmt: skip


def test_entries_of_other_versions_contain_those_versions():
    committed = json.loads(check_models.COMMITTED.read_text())
    old = {**committed, "versions": {"torch": "2.9"}}
    types = check_models.merged(old, {"bert": entry("agrees")})["types"]
    assert "versions" not in types["bert"]
    assert types["llama"]["versions"] == {"torch": "2.9"}


def test_page_and_counts_match_the_verdicts():
    committed = json.loads(check_models.COMMITTED.read_text())
    assert committed["counts"] == check_models.counts(committed["types"])
    assert "FAILS" not in committed["counts"]
    page = check_models.PAGE.read_text()
    assert check_models.with_summary(page, committed) == page


@pytest.mark.parametrize(
    ("lookup", "argument", "reason"),
    [
        ("getattr(ALL_ATTENTION_FUNCTIONS, ", "scaling", "Model always selects eager attention"),
        ("ALL_ATTENTION_FUNCTIONS.get_interface(", "scaling", None),
        (
            "ALL_ATTENTION_FUNCTIONS.get_interface(",
            "head_mask",
            "Model passes head_mask, which scales the weights of each head",
        ),
    ],
)
def test_models_without_source(lookup, argument, reason):
    """The bytecode of a model shows whether its attention is supported."""
    code = f"""class Model(PreTrainedModel):
        def forward(self, x):
            attend = {lookup}"fused_attn", None)
            return attend(self, x, x, x, None, {argument}=x)"""
    space = {"__name__": __name__, "PreTrainedModel": transformers.PreTrainedModel}
    exec(compile(code, "<no file>", "exec"), space)
    assert unsupported(space["Model"]) == reason


def test_small_configs_have_a_layer_of_each_kind():
    config = small_config(transformers.GptOssConfig)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 2
    assert config.vocab_size < 100
