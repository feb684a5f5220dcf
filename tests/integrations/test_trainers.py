"""With accelerate, Trainer and Lightning, a swap changes no loss of 20 training steps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from enable_helpers import attention_calls
from small_bert import labels_of, small_bert, tokens
from torch.utils.data import DataLoader

import fused_attn

pytest.importorskip("transformers", minversion="5.0", reason="reason: needs transformers")

STEPS, LAYERS, LEARNING_RATE = 20, 2, 1e-2


@pytest.fixture
def examples() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    batch = tokens(4 * STEPS)
    batch["labels"] = labels_of(batch)
    return [{name: rows[i] for name, rows in batch.items()} for i in range(4 * STEPS)]


def check(train: Callable[[torch.nn.Module], list[float]]) -> None:
    """Assert that a model has the same losses in training with and without the swap.

    The dtype is float64, because AdamW amplifies float32 rounding to 4e-5 of a loss in 20 steps.
    """
    plain = small_bert().double()
    fused = copy.deepcopy(plain)
    assert fused_attn.swap_modules(fused).swapped
    expected = train(plain)
    with attention_calls() as calls:
        actual = train(fused)
    assert len(calls) == STEPS * LAYERS
    assert len(actual) == STEPS and min(actual[-5:]) < actual[0]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_accelerate(examples):
    accelerate = pytest.importorskip("accelerate", reason="reason: needs accelerate")

    def train(model: torch.nn.Module) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        loader = DataLoader(examples, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    check(train)


def test_trainer_of_transformers(examples, tmp_path):
    pytest.importorskip("accelerate", reason="reason: needs accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    def train(model: torch.nn.Module) -> list[float]:
        losses: list[float] = []

        class Losses(TrainerCallback):
            def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
                losses.extend([logs["loss"]] if "loss" in logs else [])

        arguments = TrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1,
            learning_rate=LEARNING_RATE, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=examples, callbacks=[Losses()]).train()
        return losses

    check(train)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning suggests more data workers
def test_lightning(examples):
    lightning = pytest.importorskip("lightning", reason="reason: needs lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(lightning.LightningModule):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), LEARNING_RATE)

    def train(model: torch.nn.Module) -> list[float]:
        classifier = Classifier(model.train())
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(classifier, DataLoader(examples, batch_size=4))
        return classifier.losses

    check(train)
