"""Training steps of small models whose sequences are distributed over ranks."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ring_cases import mesh_of
from tensor_parallel import full
from tensor_parallel_modules import encoder_layer
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fused_attn
from fused_attn import distributed

VOCABULARY, WIDTH, HEADS = 23, 32, 4
CAUSAL = fused_attn.masks.causal()


class Attention(nn.Module):
    """Causal self-attention with torch's function, or with this package's module if `fused`."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.own = fused_attn.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.own(x, x, x, need_weights=False, is_causal=True, attn_mask=CAUSAL)[0]
        qkv = F.linear(x, self.own.in_proj_weight, self.own.in_proj_bias)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.own.out_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Language model with two layers of causal attention."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(256, WIDTH)
        self.attention = nn.ModuleList([Attention(fused) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            x = x + attention(norm(x))
        return x @ self.tokens.weight.T


def model_of(fused: bool) -> Model:
    torch.manual_seed(0)
    return Model(fused).double()


def loss_of(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return this rank's part of the mean loss over `count` labels."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def batch_of(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token IDs, labels and position IDs, each of shape (2, length)."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 2, length), generator=generator)
    return tokens.clone(), labels.clone(), torch.arange(length).expand(2, -1).clone()


def step_of_rank(
    fused: bool, length: int, mesh: tuple, mask, method: str, balancer, mode: str = ""
) -> dict:
    """Run a training step; return logits and the sums of loss and gradients over all ranks.

    Args:
        mode: "checkpoint", "compile", or "".
    """
    model = model_of(fused)
    run = {
        "checkpoint": functools.partial(checkpoint, model, use_reentrant=False),
        "compile": torch.compile(model, backend="aot_eager"),
        "": model,
    }[mode]
    tokens, labels, positions = buffers = batch_of(length)
    before = [b.clone() for b in buffers]
    with distributed.context_parallel(
        mesh_of(mesh), buffers=buffers, buffer_seq_dims=[1] * 3, mask=mask, method=method,
        load_balancer=balancer,
    ) as sharding:  # fmt: skip
        assert tokens.shape[1] == sharding.rows(dist.get_rank())
        logits = run(tokens, positions)
        loss = loss_of(logits, labels, before[0].numel())
        loss.backward()
    assert all(map(torch.equal, buffers, before))
    (whole,) = distributed.context_parallel_unshard(mesh_of(mesh), [logits], [1], sharding)
    return {"logits": whole.detach(), **summed(model, loss)}


def summed(model: nn.Module, loss: Tensor) -> dict:
    """Return the loss and the gradients, summed over all ranks."""
    results = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name.replace(".module", "")] = parameter.grad
    for tensor in results.values():
        dist.all_reduce(tensor)
    return results


class Checkpointed(nn.Module):
    """Wrapper that runs a module with activation checkpointing."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def step_of_style(length: int, mask, checkpointing: str) -> dict:
    """Run the training step of `step_of_rank`, with ContextParallel on the attention modules.

    Args:
        checkpointing: "reentrant" or "not reentrant", inside these modules; "" for none.
    """
    model = model_of(False)
    if checkpointing:
        inner = [Checkpointed(module, checkpointing == "reentrant") for module in model.attention]
        model.attention = nn.ModuleList(inner)
    mesh = mesh_of((dist.get_world_size(),))
    sharding = distributed.Sharding.zigzag(length, dist.get_world_size())
    style = distributed.ContextParallel(sharding, mask)
    parallelize_module(model, mesh, {"attention.0": style, "attention.1": style})
    buffers = batch_of(length)
    tokens, labels, positions = distributed.context_parallel_shard(mesh, buffers, [1] * 3)
    logits = model(tokens, positions)
    loss = loss_of(logits, labels, buffers[0].numel())
    loss.backward()
    (whole,) = distributed.context_parallel_unshard(mesh, [logits], [1])
    return {"logits": whole.detach(), **summed(model, loss)}


def unshard_gradient(length: int, mesh: tuple) -> Tensor:
    """Shard and unshard a tensor, and compute the same loss on each rank; return its gradient.

    The gradient is summed over the ranks.
    """
    whole = torch.arange(length * 3.0).view(1, length, 3).requires_grad_()
    sharding = distributed.Sharding.of_lengths([length - 5, 0, 2, 3])
    args = [1], sharding
    (rows,) = distributed.context_parallel_shard(mesh_of(mesh), [whole], *args)
    (again,) = distributed.context_parallel_unshard(mesh_of(mesh), [rows], *args)
    assert torch.equal(again, whole)
    (again**2).sum().backward()
    dist.all_reduce(whole.grad)
    return whole.grad


def message_of(case: str) -> str:
    """Return the message of the error that an invalid use of `context_parallel` raises."""
    tokens, ids = torch.zeros(1, 16, 8), torch.zeros(1, 16).long()
    special = {
        "view": {"buffers": [tokens[:, 1:]]},
        "mask of a buffer": {"buffers": [ids], "mask": fused_attn.masks.documents(ids)},
        "lengths": {"buffers": [tokens, torch.zeros(9)], "buffer_seq_dims": [1, 0]},
        "balancer": {"load_balancer": distributed.Sharding.contiguous(9, 4)},
    }
    options = {"buffers": [tokens], "buffer_seq_dims": [1], **special.get(case, {})}
    query, layer = torch.randn(1, 4, 4, 8), fused_attn.nn.MultiheadAttention(8, 2, batch_first=True)
    try:
        with distributed.context_parallel(mesh_of((4,)), **options):
            if case == "mask of one rank" and dist.get_rank() != 2:
                F.scaled_dot_product_attention(query, query, query)
            if case in ("mask", "mask of one rank"):
                F.scaled_dot_product_attention(query, query, query, torch.ones(4, 4).bool())
            if case == "rows":
                F.scaled_dot_product_attention(query, query[:, :, :3], query[:, :, :3])
            if case == "weights":
                layer(*[torch.randn(1, 4, 8)] * 3)
    except (ValueError, NotImplementedError) as error:
        assert F.scaled_dot_product_attention is torch.nn.functional.scaled_dot_product_attention
        assert tokens.shape == (1, 16, 8)
        return str(error)
    return ""


def transformer() -> nn.Module:
    """Return two float64 encoder layers with the same parameters on all ranks."""
    torch.manual_seed(0)
    model = fused_attn.nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def squares(model: nn.Module, x: Tensor, mask) -> Tensor:
    """Return the sum of squares of the model's output."""
    return model(x, mask=mask, is_causal=False).square().sum()


def step_of_three(mask, mode: str, dropout: bool) -> dict:
    """Train one step with context, tensor and data parallelism, on 2 x 2 ranks.

    FSDP2 shards the parameters over the ranks that share a sequence. It averages gradients over
    these ranks, so the loss is multiplied by their number.

    Args:
        mode: "compile" or "".
        dropout: if True, train with attention dropout.

    Returns:
        The new parameters as complete tensors.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = transformer().train(dropout)
    for layer in model.layers:
        layer.self_attn.dropout = 0.5 if dropout else 0.0
    plan = distributed.parallelize_plan(model)
    parallelize_module(model, mesh["tp"], plan)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["cp"], shard_placement_fn=distributed.shard_placement)
    run = torch.compile(model, backend="aot_eager", dynamic=False) if mode == "compile" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2, 13, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(11)  # rank 0 draws the dropout seeds for all ranks
    with distributed.context_parallel(
        mesh["cp"], buffers=[x], buffer_seq_dims=[1], mask=mask, method="ring"
    ):
        (2 * squares(run, x, None)).backward()
    optimizer.step()
    return {name: full(parameter).detach() for name, parameter in model.state_dict().items()}
