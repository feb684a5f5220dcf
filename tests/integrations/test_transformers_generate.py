"""transformers' `generate` returns the same tokens with fused_attn as with eager attention."""

import pytest
import torch
from hf_families import BATCH, BY_NAME, FAMILIES, LENGTH, on_eager, tokens, transformers

from fused_attn.integrations import transformers as integration

integration.register()
PROMPT, NEW = 7, 6  # the prompt exceeds the window of 4


def prompt(family):
    """Return inputs that are padded on the side that the model expects."""
    inputs = family.inputs()
    if "input_features" in inputs:
        return {"input_features": inputs["input_features"]}
    mask = torch.ones(BATCH, PROMPT, dtype=torch.long)
    if "decoder_input_ids" in inputs:
        mask[1, 4:] = 0
    else:
        mask[1, :3] = 0
        mask[2, :5] = 0
    return {"input_ids": tokens(PROMPT), "attention_mask": mask}


def generate(model, inputs, **options):
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**inputs, **options)


@pytest.mark.parametrize(("beams", "cache"), [(1, "static"), (2, "dynamic")])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.generates], ids=str)
def test_generate_equals_eager(family, beams, cache):
    model = family.model("fused_attn")
    inputs = prompt(family)
    options = {"num_beams": beams, "cache_implementation": cache}
    expected = generate(on_eager(model), inputs, **options)
    assert torch.equal(generate(model, inputs, **options), expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_chunked_prefill(name):
    model, ids = BY_NAME[name].model("fused_attn"), tokens()
    expected = on_eager(model)(ids, use_cache=False).logits
    for cache in (
        transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 3),
        transformers.DynamicCache(config=model.config),  # stores only a window
        transformers.DynamicCache(),  # stores all tokens
    ):
        chunks = ids.split([3, 2, 3, 1], 1)
        with torch.no_grad():
            parts = [model(chunk, past_key_values=cache).logits for chunk in chunks]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.sampled("one model is enough for make test", name=["Gemma2"])
@pytest.mark.slow
@pytest.mark.parametrize(("name", "graphs"), [("Llama", 1), ("Gemma2", 2)])
def test_compiled_decoding(name, graphs):
    """Compiled decoding returns the tokens of eager attention, without recompiling for each token.

    Gemma2 has one more graph, because its static window cache moves keys.
    """
    model = BY_NAME[name].model("fused_attn")
    inputs = prompt(BY_NAME[name])
    expected = generate(on_eager(model), inputs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    actual = generate(model, inputs, cache_implementation="static", compile_config=config)
    assert torch.equal(actual, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
