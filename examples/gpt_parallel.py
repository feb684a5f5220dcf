"""Train the GPT of gpt_model.py on long rows whose tokens are distributed over processes.

    python examples/gpt_parallel.py
    torchrun --nproc-per-node 4 examples/gpt_parallel.py

The first command starts two processes itself. Each row consists of complete scenes of Shakespeare,
and attention is causal within a scene. The same training in one process must give the same losses.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

import common
import curves
import data
import fitting
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Example
from gpt_model import GPT, HEAD_DIM, NUM_HEADS_KV, NUM_LAYERS
from terminal import IS_FIRST, console, progress
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_attn import masks
from fused_attn.distributed import Sharding, context_parallel
from fused_attn.distributed.plan import plan_of
from fused_attn.distributed.visible_keys import VisibleKeys
from fused_attn.masks.spec import spec_of_mask

SEQLEN, STEPS, STEPS_FLOAT64, LEARNING_RATE = 8192, 30, 5, 4e-3
IGNORED = -100  # label of the last token of a scene, which has no next token
# Largest relative deviation of a loss from that of one process: the order of sums differs, and
# training amplifies the rounding errors. Measured over 40 steps on an AMD Zen 5: 1.6e-7 in float32.
# In gpt.py, two correct float32 trainings deviate from each other by up to 1.5e-6.
MAX_DEVIATION = {torch.float32: 1e-5, torch.float64: 1e-12}


class Row(NamedTuple):
    """Documents that are packed into one row; all tensors are int64 (1, seqlen).

    Attributes:
        tokens: token ids.
        labels: the next token in the same document, or IGNORED.
        positions: the position of each token in its document.
        documents: the index of the document of each token.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor


def read_scenes(longest: int) -> list[Tensor]:
    """Return the token ids of all scenes of at most `longest` characters."""
    works = data.shakespeare()
    tokens = {c: i for i, c in enumerate(sorted(set("".join(works.values()))))}
    start = re.compile(r"^ *(?=scene [ivx\d]+\b)", re.IGNORECASE | re.MULTILINE)
    scenes = [scene.strip() for text in works.values() for scene in start.split(text)[1:]]
    kept = [scene for scene in scenes if len(scene) <= longest]
    console.print(
        f"{len(kept)} of {len(scenes)} scenes have at most {longest:,} characters, of which "
        f"{len(tokens)} are different"
    )
    return [torch.tensor([tokens[c] for c in scene]) for scene in kept]


def pack(scenes: Sequence[Tensor], seqlen: int) -> Row:
    """Return a row of randomly chosen scenes, of which the last is cut."""
    chosen: list[Tensor] = []
    while sum(map(len, chosen)) < seqlen:
        chosen.append(scenes[int(torch.randint(len(scenes), ()))])
    parts = (
        torch.cat(chosen),
        torch.cat([F.pad(scene[1:], (0, 1), value=IGNORED) for scene in chosen]),
        torch.cat([torch.arange(len(scene)) for scene in chosen]),
        torch.cat([torch.full_like(scene, i) for i, scene in enumerate(chosen)]),
    )
    return Row(*(part[None, :seqlen].clone() for part in parts))


def train(
    seed: int, vocabulary: int, rows: Sequence[Row], dtype: torch.dtype, mesh: DeviceMesh | None
) -> list[float]:
    """Train a model with one step per row; return the losses.

    Args:
        seed: seed of the initial weights.
        mesh: processes over which the tokens are distributed, or None for one process.
    """
    torch.manual_seed(seed)
    model = GPT(vocabulary).to(dtype)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.1)
    rate = fitting.cosine(LEARNING_RATE, len(rows) // 10 + 1, len(rows))
    losses: list[float] = []
    title = f"{'one process' if mesh is None else f'{mesh.size()} processes'}, {name_of(dtype)}"
    for step, row in enumerate(progress(rows, title, lambda: losses[-1:]), 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        losses.append(backward(model, row, mesh))
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def backward(model: GPT, row: Row, mesh: DeviceMesh | None) -> float:
    """Compute the gradients of the mean loss of a row; return the loss."""
    mask = masks.causal() & masks.documents(row.documents)
    model.masks = [mask, mask]
    count = (row.labels != IGNORED).sum()  # of the complete row, before it is cut
    with distributed(row, mask, mesh):
        logits = model(row.tokens, positions=row.positions).flatten(0, 1)
        labels = row.labels.flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
    total = loss.detach()
    if mesh is not None:
        for tensor in (total, *(weight.grad for weight in model.parameters())):
            dist.all_reduce(tensor)
    return total.item()


def distributed(
    row: Row, mask: masks.Mask, mesh: DeviceMesh | None
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which this process has only its part of the row."""
    if mesh is None:
        return contextlib.nullcontext()
    # A scene is shorter than the part of a process, so that consecutive parts are balanced.
    return context_parallel(
        mesh,
        buffers=[row.tokens, row.labels, row.positions],
        buffer_seq_dims=[1, 1, 1],
        mask=mask,
        method="ring",
        load_balancer="contiguous",
    )


def sent_per_step(rows: Sequence[Row], ranks: int) -> tuple[float, float]:
    """Return the MB that all processes send for attention in a step, and those of a full ring.

    Keys and values are sent in the forward and in the backward, and their gradients are returned.
    """
    seqlen = rows[0].tokens.shape[1]
    sharding = Sharding.contiguous(seqlen, ranks)
    sent = 0
    for row in rows:
        mask = masks.causal() & masks.documents(row.documents)
        spec = spec_of_mask(mask, 1, 1, seqlen, seqlen, row.tokens.device)
        visible = VisibleKeys(spec, (1, 1, seqlen, seqlen))
        plans = [plan_of(sharding, sharding, rank, visible) for rank in range(ranks)]
        sent += sum(len(run) for plan in plans for step in plan.steps[1:] for run in step.sent)
    size = 3 * NUM_LAYERS * NUM_HEADS_KV * 2 * HEAD_DIM * 4 / 1e6  # of a key and value, float32
    return sent / len(rows) * size, (ranks - 1) * seqlen * size


def start_processes() -> None:
    """Replace this process by torchrun with two processes of one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*command, "--nproc-per-node", "2", *sys.argv])


def main() -> None:
    with common.example("gpt_parallel", __doc__) as run:
        if "RANK" not in os.environ:
            start_processes()
        steps, seqlen = (3, 2048) if run.smoke else (STEPS, SEQLEN)
        scenes = read_scenes(seqlen // 2)
        rows = [pack(scenes, seqlen) for _ in range(steps)]
        steps_of = {torch.float32: steps, torch.float64: min(steps, STEPS_FLOAT64)}
        vocabulary = 1 + max(int(scene.max()) for scene in scenes)

        def train_all(mesh: DeviceMesh | None) -> dict[torch.dtype, list[float]]:
            return {
                dtype: train(run.seed, vocabulary, rows[:count], dtype, mesh)
                for dtype, count in steps_of.items()
            }

        dist.init_process_group("gloo")
        ranks = dist.get_world_size()
        parallel = train_all(dist.init_device_mesh("cpu", (ranks,)))
        dist.destroy_process_group()
        if IS_FIRST:
            report(run, train_all(None), parallel, sent_per_step(rows, ranks), ranks)


def report(
    run: Example,
    single: dict[torch.dtype, list[float]],
    parallel: dict[torch.dtype, list[float]],
    sent: tuple[float, float],
    ranks: int,
) -> None:
    """Check, plot and record the losses of one and of several processes, and the MB sent."""
    run.figures |= {"processes": ranks, "sent_mb": sent[0], "sent_mb_full_ring": sent[1]}
    for dtype, losses in single.items():
        found = curves.deviation(parallel[dtype], losses).max
        name = name_of(dtype)
        run.figures[f"deviation_{name}"] = found
        run.require(
            found <= MAX_DEVIATION[dtype],
            f"losses of {len(losses)} steps in {name} must be those of one process within "
            f"{MAX_DEVIATION[dtype]:g} (relative), got {found:.1e}",
        )
    one, several = single[torch.float32], parallel[torch.float32]
    run.figures |= {"losses": several, "losses_of_one_process": one}
    run.require(
        several[-1] < several[0], f"the loss must fall, got {several[0]:.2f} to {several[-1]:.2f}"
    )
    run.require(
        sent[0] < sent[1],
        f"MB that {ranks} processes send for attention in a step must be less than in a full ring "
        f"({sent[1]:.1f}), got {sent[0]:.1f}",
    )
    with run.figure("losses", size=(5, 4)) as axis:
        fitting.plot_curves(axis, {f"{ranks} processes": several, "one": one}, "Nats per character")


if __name__ == "__main__":
    main()
