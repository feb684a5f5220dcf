"""`generate_batch` of transformers returns the same tokens as `generate` with eager attention."""

import pytest
import torch
from hf_families import BY_NAME, VOCABULARY, transformers

from fused_attn import stats, swap_modules
from fused_attn.integrations import transformers as integration

integration.register()
NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0}


def prompts():
    """Return prompts, some of which are longer than a window (4) or a batch (16)."""
    torch.manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (1, 3, 12, 25)]


def in_batches(model, **options):
    """Return tokens of continuous batching, with prompts split across small pages and batches."""
    sizes = {"page_size": 8, "num_blocks": 32, "max_batch_tokens": 16, **options}
    results = model.generate_batch(
        prompts(),
        generation_config=transformers.GenerationConfig(**GREEDY),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
    )
    assert [result.error for result in results.values()] == [None] * len(prompts())
    return [result.generated_tokens for result in results.values()]


def one_by_one(model):
    """Return the tokens generated from each prompt alone, with eager attention."""
    integration.set_implementation(model, "eager")
    config = transformers.GenerationConfig(**GREEDY)
    generated = (model.generate(torch.tensor([ids]), generation_config=config) for ids in prompts())
    return [new[0, -NEW:].tolist() for new in generated]


@pytest.mark.sampled("Qwen3 covers models without a window", name=["Llama", "GPT2"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "GPT2", "Gemma2", "GptOss"])
def test_generate_batch_equals_generate(name):
    """Models with windows, softcap (Gemma2) or sinks (GptOss) generate the tokens of eager."""
    model = BY_NAME[name].model("fused_attn")
    with stats() as counts:
        tokens = in_batches(model)
    assert counts.fused and not counts.left_to_torch
    assert model.config._attn_implementation == "fused_attn"
    assert tokens == one_by_one(model)


def test_generate_batch_of_a_swapped_model():
    model = BY_NAME["Qwen3"].model()
    report = swap_modules(model)
    tokens = in_batches(model)
    report.restore()
    assert tokens == one_by_one(model)


def test_other_implementations_are_not_fused():
    model = BY_NAME["Llama"].model("sdpa")
    with stats() as counts:
        tokens = in_batches(model, auto_switch_to_flash=False)
    assert not counts.fused
    assert tokens == one_by_one(model)


def test_models_that_need_masks_raise(monkeypatch):
    model = BY_NAME["Llama"].model("fused_attn")
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    with pytest.raises(NotImplementedError, match="does not support LlamaForCausalLM in cont"):
        in_batches(model)


def attend(**arguments):
    """Return attention over a batch of two requests, each with one new and two cached tokens."""
    ends = torch.tensor([0, 1, 2], dtype=torch.int32)
    batch = {
        "write_index": [], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends * 3, "max_length_q": 1,
        "max_length_k": 3, "attention_mask": None, **arguments,
    }  # fmt: skip
    module, query, key = torch.nn.Module(), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 6, 8)
    return integration.attention_forward(module, query, key, key, **batch)[0]


@pytest.mark.parametrize("name", ["block_table", "attention_mask", "position_bias", "indices"])
def test_arguments_that_batches_do_not_support_raise(name):
    assert attend().shape == (1, 2, 2, 8)
    with pytest.raises(NotImplementedError, match=f"{name} in continuous batching"):
        attend(**{name: torch.zeros(1, 1, 2, 6)})


def test_batches_must_be_causal():
    with pytest.raises(NotImplementedError, match="is_causal=False in continuous batching"):
        attend(is_causal=False)
