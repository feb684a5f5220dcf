"""examples/transfer.py: plays, frozen parameters, embeddings and batches."""

import copy

import pytest
import torch
from example_runs import run_example  # adds examples/ to sys.path

# isort: split
import transfer
from bert_model import Bert, BertConfig, SentenceClassifier


@pytest.mark.thorough
def test_smoke(tmp_path):
    printed, figures = run_example("transfer", tmp_path)
    assert (tmp_path / "transfer_curves.png").read_bytes().startswith(b"\x89PNG")
    assert figures["curves"]["holds"]
    assert figures["frozen_bit_identical"] is True and figures["head_changed"] is True
    for name in ("majority", "frozen", "unfrozen", "from_scratch"):
        assert 0 <= figures[name] <= 1
    assert "frozen tensors unchanged, head changed" in printed


def test_plays_for_training_and_test_are_disjoint():
    training = [play for plays in transfer.TRAINING.values() for play in plays]
    test = [play for plays in transfer.TEST.values() for play in plays]
    assert list(transfer.TEST) == list(transfer.TRAINING)
    assert not set(training) & set(test)
    assert len({*training, *test}) == len(training) + len(test)
    assert {*training, *test} <= set(transfer.data.shakespeare())


def passages(count=6):
    torch.manual_seed(0)
    ids = [torch.randint(5, 50, (4 + i,)).tolist() for i in range(count)]
    return transfer.Passages(ids, torch.arange(count) % 3)


def new_model():
    torch.manual_seed(0)
    return SentenceClassifier(Bert(BertConfig(50, 32, 2, 2, 64, 24, 0.1)), 3, "mean")


def test_frozen_parameters_do_not_change():
    model = new_model()
    before = copy.deepcopy(model.state_dict())
    model.bert.requires_grad_(False)
    transfer.train(model, passages(), transfer.epochs_of(6, 3), 1e-2, "Head")
    model.bert.requires_grad_(True)
    after = model.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]) != name.startswith("head."), name
    batches = transfer.epochs_of(6, 2)
    transfer.train(model, passages(), batches, 1e-3, "All")
    unchanged = [n for n, v in before.items() if torch.equal(v, model.state_dict()[n])]
    # The pooler of [CLS] is not used.
    assert unchanged == ["bert.pooler.weight", "bert.pooler.bias"]


def test_embeddings_do_not_depend_on_the_batch():
    model, batch = new_model(), passages(20)
    single = [transfer.Passages([row], batch.labels[:1]) for row in batch.ids]
    expected = torch.cat([transfer.embed(model, passage) for passage in single])
    torch.testing.assert_close(transfer.embed(model, batch), expected, rtol=1e-4, atol=1e-6)


def test_epochs_have_each_passage_once():
    batches = transfer.epochs_of(40, 2)
    assert torch.equal(torch.cat(batches[:3]).sort().values, torch.arange(40))
    assert not torch.equal(torch.cat(batches[:3]), torch.cat(batches[3:]))
