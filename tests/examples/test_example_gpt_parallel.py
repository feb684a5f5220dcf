"""examples/gpt_parallel.py: losses on two processes, packed rows, and the traffic between ranks."""

import json
import os
import sys

import pytest
import torch
from commands import output_of
from example_runs import EXAMPLES, NO_NETWORK
from torch.testing import assert_close

# isort: split
import gpt_model
import gpt_parallel

from fused_attn import masks

SCENES = [torch.randint(50, (length,)) for length in (3, 17, 40, 9)]


@pytest.mark.thorough
def test_two_processes_give_the_losses_of_one(tmp_path):
    """Two processes give the losses of a single process, and only one of them prints results."""
    printed = output_of(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2,
        EXAMPLES / "gpt_parallel.py", "--smoke", "--output", tmp_path,
        encoding="utf-8", timeout=120, env=os.environ | NO_NETWORK | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    figures = json.loads((tmp_path / "gpt_parallel.json").read_text("utf-8"))["figures"]
    assert figures["processes"] == 2
    assert figures["deviation_float64"] <= gpt_parallel.MAX_DEVIATION[torch.float64]
    assert figures["deviation_float32"] <= gpt_parallel.MAX_DEVIATION[torch.float32]
    assert figures["losses"][-1] < figures["losses"][0]
    assert 0 < figures["sent_mb"] < figures["sent_mb_full_ring"]
    assert printed.count("2 processes, float32: step 3 of 3") == 1
    assert printed.count("one process, float64: step 3 of 3") == 1


def test_rows_consist_of_documents():
    row = gpt_parallel.pack(SCENES, 100)
    assert all(part.shape == (1, 100) for part in row)
    documents = row.documents[0]
    for document in documents.unique():
        tokens, labels, positions = (part[0, documents == document] for part in row[:3])
        assert positions.tolist() == list(range(len(tokens)))
        assert labels[:-1].equal(tokens[1:])
        if document < documents.max():
            assert any(tokens.equal(scene) for scene in SCENES)
            assert labels[-1] == gpt_parallel.IGNORED


def test_loss_of_a_row_equals_that_of_separate_documents():
    """The loss of a packed row is the mean over the labels of its separately computed documents."""
    torch.manual_seed(0)
    model = gpt_model.GPT(50).double()
    row = gpt_parallel.pack(SCENES, 100)
    loss = gpt_parallel.backward(model, row, None)
    model.masks = [masks.causal()] * 2
    total = count = 0.0
    for document in row.documents.unique():
        inside = row.documents[0] == document
        logits, labels = model(row.tokens[:, inside])[0], row.labels[0, inside]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += (labels != gpt_parallel.IGNORED).sum().item()
    assert loss == pytest.approx(total / count, rel=1e-6)


def test_sent_bytes():
    """Only keys and values that the causal mask needs on another rank are sent."""
    size = 3 * gpt_model.NUM_LAYERS * gpt_model.NUM_HEADS_KV * 2 * gpt_model.HEAD_DIM * 4 / 1e6
    for documents, rows in (([8], 4), ([4, 4], 0), ([3, 3, 2], 1)):
        ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
        row = gpt_parallel.Row(ids, ids, ids, ids)
        sent, full_ring = gpt_parallel.sent_per_step([row], 2)
        assert_close(sent, rows * size)
        assert_close(full_ring, 8 * size)
