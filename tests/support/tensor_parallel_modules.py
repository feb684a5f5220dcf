"""Functions that the ranks of tests/distributed/test_tensor_parallel.py run on modules.

As in tensor_parallel.py, each function returns results of the shards and of one process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from tensor_parallel import DROPOUT_P, Pairs, error_of, full, mesh_of, pairs, results
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fused_attn
from fused_attn.distributed import parallelize_plan

normal = functools.partial(torch.randn, dtype=torch.float64)
MODULE = {"batch_first": True, "dtype": torch.float64}
IGNORED = torch.arange(7) >= torch.tensor([[7], [4], [5]])


def encoder_layer(dropout: float = 0.0, **options: Any) -> torch.nn.Module:
    return fused_attn.nn.TransformerEncoderLayer(16, 4, 32, dropout, **MODULE, **options)


def step(model: torch.nn.Module, call: Callable[[Any], Any]) -> list[Tensor]:
    """Return the outputs of call(model) and the gradients of all trainable parameters."""
    torch.manual_seed(3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return results(call(model), parameters)


def parallel(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the model, split over two ranks, with the same state_dict."""
    split = copy.deepcopy(model)
    parallelize_module(split, mesh_of(2), parallelize_plan(split))
    before, after = model.state_dict(), split.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(full(after[name]), before[name]) for name in before)
    return split


def compared(name: str, model: torch.nn.Module, call: Callable[[Any], Any]) -> Pairs:
    return pairs(name, step(parallel(model), call), step(model, call))


def attention_modules() -> Pairs:
    """Return results of MultiheadAttention with several parameters, masks and outputs."""
    found: Pairs = {}
    torch.manual_seed(0)
    x, y = normal(3, 7, 16), normal(3, 5, 16)
    ignored = torch.arange(7) >= torch.tensor([[7], [4], [0]])
    per_head = normal(3 * 4, 7, 7)
    options: list[dict[str, Any]] = [
        {}, {"dropout": DROPOUT_P}, {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True, "dropout": DROPOUT_P},
    ]  # fmt: skip
    for given in options:
        model = fused_attn.nn.MultiheadAttention(16, 4, **given, **MODULE)
        calls: dict[str, Callable[[Any], Any]] = {
            "self": lambda m: m(
                x, x, x, key_padding_mask=ignored, attn_mask=per_head, need_weights=False
            ),
            "cross": lambda m: m(x, y, y, need_weights=False),
            "three": lambda m: m(x, y, y + 1),
            "weights": lambda m: m(x, y, y, average_attn_weights=False),
        }
        for name, call in calls.items():
            found |= compared(f"{given}, {name}", model, call)
    model = fused_attn.nn.MultiheadAttention(16, 4, kdim=6, vdim=10, **MODULE)
    key, value = normal(3, 5, 6), normal(3, 5, 10)
    return found | compared("kdim", model, lambda m: m(x, key, value, is_causal=True))


def without_hidden_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Disable dropout between linear1 and linear2, whose features are on different ranks."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer):
            module.dropout.p = 0.0
    return model


def layers() -> Pairs:
    found: Pairs = {}
    torch.manual_seed(0)
    x, y = normal(3, 7, 16), normal(3, 5, 16)
    padded = {"src_key_padding_mask": IGNORED}
    for norm_first in (False, True):
        options = {"activation": torch.nn.functional.gelu, "norm_first": norm_first}
        encoder = without_hidden_dropout(encoder_layer(DROPOUT_P, **options))
        found |= compared(f"encoder, {norm_first}", encoder, lambda m: m(x, **padded))
        decoder = fused_attn.nn.TransformerDecoderLayer(16, 4, 32, DROPOUT_P, **options, **MODULE)
        decoder = without_hidden_dropout(decoder)
        found |= compared(f"decoder, {norm_first}", decoder, lambda m: m(x, y, tgt_is_causal=True))
    model = fused_attn.nn.Transformer(16, 4, 1, 1, 32, DROPOUT_P, **MODULE)
    return found | compared("model", without_hidden_dropout(model), lambda m: m(x, y, **padded))


def hugging_face() -> Pairs:
    """Return results of Llama with grouped heads, and of BERT, with dropout and padding."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 16,
    }  # fmt: skip
    llama = LlamaModel(LlamaConfig(num_key_value_heads=2, attention_dropout=DROPOUT_P, **sizes))
    bert = BertModel(
        BertConfig(attention_probs_dropout_prob=DROPOUT_P, hidden_dropout_prob=0.0, **sizes),
        add_pooling_layer=False,
    )
    ids = torch.randint(0, 50, (3, 9))
    real = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
    found: Pairs = {}
    for name, model in (("llama", llama), ("bert", bert)):
        fused_attn.swap_modules(model.double().train())
        found |= compared(name, model, lambda m: m(ids, attention_mask=real).last_hidden_state)
    return found


def decoded() -> Pairs:
    """Return results of decoding with a KV cache, where each rank caches its heads."""
    torch.manual_seed(0)
    layer = fused_attn.nn.TransformerDecoderLayer(16, 4, 32, 0.0, **MODULE)
    model = fused_attn.nn.TransformerDecoder(layer, 2).eval()
    memory, x = normal(2, 5, 16), normal(2, 3, 16)

    def steps(model: Any) -> Tensor:
        cache = model.prepare(memory)
        return torch.cat([model.step(x[:, i : i + 1], cache) for i in range(3)], dim=1)

    with torch.no_grad():
        return {"steps": (steps(parallel(model)), steps(model))}


def gpt2_error() -> str:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4, n_positions=32)
    return error_of(lambda: parallelize_plan(GPT2Model(config)))


def sequence_parallel() -> Pairs:
    """Return results of norms under SequenceParallel, and of HeadwiseParallel on sharded input."""
    from torch.distributed.tensor.parallel import SequenceParallel

    from fused_attn.distributed import HeadwiseParallel

    torch.manual_seed(0)
    x = normal(3, 6, 16)
    shard = distribute_tensor(x, mesh_of(2), [Shard(1)])
    found: Pairs = {}
    for norm in (fused_attn.nn.LayerNorm, fused_attn.nn.RMSNorm):
        attention = fused_attn.nn.MultiheadAttention(16, 4, **MODULE)
        model = torch.nn.ModuleDict({"norm": norm(16, dtype=x.dtype), "attention": attention})
        torch.nn.init.normal_(model["norm"].weight)

        def call(model: Any, x: Any) -> Any:
            y = model["norm"](x)
            return model["attention"](y, y, y, need_weights=False, is_causal=True)[0] + x

        split = copy.deepcopy(model)
        plan = {
            "norm": SequenceParallel(),
            "attention": HeadwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(1), use_local_output=False
            ),
        }
        parallelize_module(split, mesh_of(2), plan)
        found |= pairs(
            norm.__name__, step(split, lambda m: call(m, shard)), step(model, lambda m: call(m, x))
        )
    return found


def of_type(dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Return tuples (name, sharded result, float64 result, eager result)."""
    torch.manual_seed(0)
    x = torch.randn(3, 33, 32)
    model = fused_attn.nn.MultiheadAttention(32, 4, batch_first=True)

    def call(model: Any) -> Any:
        given = x.to(model.out_proj.weight.dtype)
        return model(given, given, given, need_weights=False, is_causal=True)[0]

    exact, typed = copy.deepcopy(model).double(), copy.deepcopy(model).to(dtype)
    got, truth = step(parallel(typed), call), step(exact, call)
    with fused_attn.use_backend("eager"):
        eager = step(typed, call)
    names = ["out", *(f"grad_{name}" for name, _ in model.named_parameters())]
    return list(zip(names, got, truth, eager, strict=True))


def checkpointed() -> Pairs:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer, x = without_hidden_dropout(encoder_layer(DROPOUT_P)), normal(3, 7, 16)
    return compared("checkpoint", layer, lambda m: checkpoint(m, x, use_reentrant=False))


def compiled() -> Pairs:
    """Return results of a layer that is compiled into one graph."""
    torch.manual_seed(0)
    layer, x = encoder_layer(), normal(3, 7, 16)
    layer.self_attn.dropout = DROPOUT_P

    def call(model: Any) -> Any:
        return model(x, src_key_padding_mask=IGNORED)

    torch._dynamo.reset()
    graph = torch.compile(parallel(layer), backend="aot_eager", fullgraph=True)
    return pairs("compiled", step(graph, call), step(layer, call))


def fsdp(shard_columns: bool) -> tuple[Pairs, str]:
    """Return results of a training step on 2 x 2 ranks, and the error of state_dict (or "")."""
    from torch.distributed.fsdp import fully_shard

    from fused_attn.distributed import shard_placement

    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = fused_attn.nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    x = normal(4, 7, 16)
    ignored = torch.arange(7) >= torch.tensor([[7], [4], [5], [6]])

    def train(model: Any, x: Tensor, ignored: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x, src_key_padding_mask=ignored).square().mean().backward()
        optimizer.step()

    split = copy.deepcopy(model)
    parallelize_module(split, mesh["tp"], parallelize_plan(split))
    placement = shard_placement if shard_columns else None
    for part in (*split.layers, split):
        fully_shard(part, mesh=mesh["dp"], shard_placement_fn=placement)
    rank = mesh.get_local_rank("dp")
    train(model, x, ignored)
    train(split, x.chunk(2)[rank], ignored.chunk(2)[rank])
    try:
        state = split.state_dict()
    except ValueError as error:
        return {}, str(error)
    want = model.state_dict()
    return {name: (full(state[name]).detach(), want[name]) for name in want}, ""
