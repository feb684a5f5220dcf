"""A small Hugging Face Llama on packed documents, in one process and over several ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState, PartialState
from context_cases import summed
from torch import Tensor
from torch.utils.data import DataLoader

import fused_attn
from fused_attn import masks
from fused_attn.distributed import context_parallel

VOCABULARY, STEPS, LEARNING_RATE = 50, 2, 0.5
LENGTHS = [[20, 13, 12], [5, 36, 4]]  # lengths of the documents in each step's row
IGNORED = -100
# With this fully visible mask, transformers builds no masks. Without it, only the ranks with the
# start of a document would build masks, and they would repeat the KV heads for sdpa.
IGNORED_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


def llama(swap: bool, **options: Any) -> transformers.LlamaForCausalLM:
    """Return a float64 model with the same parameters in every process."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="sdpa", **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    if swap:
        assert fused_attn.swap_modules(model).swapped
    return model


def row_of(step: int) -> dict[str, Tensor]:
    """Return token IDs, labels and position IDs, each of shape (1, length).

    Labels equal the tokens, because transformers' models shift them. The first label of each
    document is ignored.
    """
    generator = torch.Generator().manual_seed(step)
    positions = torch.cat([torch.arange(length) for length in LENGTHS[step]])[None]
    tokens = torch.randint(VOCABULARY, positions.shape, generator=generator)
    labels = torch.where(positions == 0, IGNORED, tokens)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions.clone()}


def next_labels(labels: Tensor) -> Tensor:
    """Return the label of the next token at each position."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def mask_of(positions: Tensor) -> masks.Mask:
    """Return the mask of a row: causal within each document."""
    return masks.causal() & masks.documents((positions == 0).cumsum(1))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of losses in float64; the loss of transformers is float32."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def steps_of_rank(swap: bool, checkpoint: bool, method: str) -> list[dict[str, Tensor]]:
    """Train with rows distributed over all ranks; return each step's loss and gradients."""
    model = llama(swap)
    if checkpoint:
        model.train().gradient_checkpointing_enable()
    results = []
    for step in range(STEPS):
        tokens, labels, positions = row_of(step).values()
        labels = next_labels(labels)
        count = (labels != IGNORED).sum()
        with context_parallel(
            None, buffers=[tokens, labels, positions], buffer_seq_dims=[1] * 3,
            mask=mask_of(positions), method=method,
        ):  # fmt: skip
            logits = model(tokens, None if swap else IGNORED_MASK, positions).logits
            loss = summed_loss(logits, labels) / count
            loss.backward()
        results.append({name: t.clone() for name, t in summed(model, loss).items()})
        descend(model)
    return results


def steps_of_one(swap: bool) -> list[dict[str, Tensor]]:
    """Train in one process, document by document; return each step's loss and gradients."""
    model = llama(swap)
    results = []
    for step in range(STEPS):
        row = row_of(step)
        labels = next_labels(row["labels"])
        documents = [t.split(LENGTHS[step], 1) for t in (row["input_ids"], labels)]
        losses = [summed_loss(model(t).logits, own) for t, own in zip(*documents, strict=True)]
        loss = torch.stack(losses).sum() / (labels != IGNORED).sum()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
        descend(model)
    return results


@torch.no_grad()
def descend(model: torch.nn.Module) -> None:
    """Do one step of gradient descent, and clear the gradients."""
    for p in model.parameters():
        p -= LEARNING_RATE * p.grad
        p.grad = None


class ContextParallelTrainer(transformers.Trainer):
    """Trainer that distributes each row over all ranks.

    Attributes:
        swapped: True if the model's attention was replaced by `swap_modules`.
    """

    swapped = False

    def get_train_dataloader(self) -> DataLoader:
        """Return the same batches on all ranks."""
        return DataLoader(self.train_dataset, 1, collate_fn=self.data_collator)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Compute the gradients of a batch that is distributed over all ranks."""
        mask = mask_of(inputs["position_ids"].to(self.args.device))
        inputs["shift_labels"] = next_labels(inputs["labels"])
        buffers = list(inputs.values())
        if not self.swapped:
            inputs["attention_mask"] = IGNORED_MASK
        count = num_items_in_batch / dist.get_world_size()  # all ranks counted the complete rows
        with context_parallel(None, buffers=buffers, buffer_seq_dims=[1] * len(buffers), mask=mask):
            return super().training_step(model, inputs, count)


def trained(folder: str, swap: bool, parallel: bool, accumulated: int) -> dict[str, Any]:
    """Train with a Trainer; return the logged losses and the final weights."""
    losses: list[float] = []

    class Losses(transformers.TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    arguments = transformers.TrainingArguments(
        folder, max_steps=STEPS // accumulated, gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=1, logging_steps=1, optim="sgd", learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    kind = ContextParallelTrainer if parallel else transformers.Trainer
    rows = [{name: part[0] for name, part in row_of(i).items()} for i in range(STEPS)]
    model = llama(swap)
    trainer = kind(model, arguments, train_dataset=rows, callbacks=[Losses()])
    trainer.swapped = swap
    trainer.train()
    return {"losses": losses, "weights": {n: p.detach() for n, p in model.named_parameters()}}


@contextlib.contextmanager
def as_torchrun() -> Iterator[None]:
    """Set the environment variables of torchrun within the block, which Trainer reads."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    try:
        with mock.patch.dict(os.environ, own):
            yield
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()


def trained_by_ranks(folder: str, swap: bool, accumulated: int) -> dict[str, Any]:
    """Train with a ContextParallelTrainer; return the logged losses and the final weights."""
    with as_torchrun():
        return trained(folder, swap, True, accumulated)
