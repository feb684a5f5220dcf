"""examples/bert.py, its data and its model."""

from types import SimpleNamespace

import pytest
import torch
from example_runs import run_example  # adds examples/ to sys.path

# isort: split
import bert_data
import bert_labels
import bert_model
import bert_tasks
from bert_data import CLS, MASK, PAD, SEP, SPECIAL
from bert_labels import IGNORED
from bert_model import Bert, BertConfig, PretrainingHeads, SentenceClassifier, TokenClassifier

VOCAB = 1000


def test_smoke(tmp_path):
    printed, figures = run_example("bert", tmp_path)
    assert (tmp_path / "bert_curves.png").read_bytes().startswith(b"\x89PNG")
    assert figures["curves"]["holds"]
    assert 3 < figures["unigram_entropy"] < 7 and 3 < figures["mlm_loss"] < 8
    assert 0 <= figures["nsp_accuracy"] <= 1
    for head in bert_tasks.HEADS:
        for task in (head, f"{head}_random"):
            found, is_marks = figures[task], head == "marks"
            assert len(found["accuracies"]) == 2
            assert 0 <= found["accuracy"] <= 1 and 0 <= found["macro_f1"] <= 1
            assert 0.5 < found["majority"] < 1 if is_marks else found["majority"] == 0.5
        assert {"gain", "gain_standard_error"} <= figures[head].keys()
    assert "Held-out plays" in printed


def test_works_for_validation_are_not_the_held_out_ones():
    texts, held_out = bert_data.works()
    fewer, validation = bert_data.works(validation=True)
    assert len(texts) == 38 and len(fewer) == 35 and len(held_out) == len(validation) == 3
    assert set(validation) < set(texts) and not set(held_out) & {*fewer, *validation}


@pytest.mark.parametrize("words", [1, 20])
def test_gain_and_its_standard_error(words):
    torch.manual_seed(0)

    def scores(accuracy):
        """Draw scores of 3 seeds for 400 texts with 1 to `words` labels."""
        labels = torch.arange(400) % words + 1.0
        rights = [torch.binomial(labels, torch.full((400,), accuracy)) for _ in range(3)]
        return [bert_tasks.Score(right, labels, 0.0) for right in rights]

    found = [bert_tasks.gain(scores(0.8), scores(0.7)) for _ in range(300)]
    gains, errors = torch.tensor(found).T
    assert gains.mean().item() == pytest.approx(0.1, abs=0.005)
    # The estimate adds the variance over seeds and the variance over texts. Here, both measure the
    # same randomness, so the estimate is an upper bound.
    assert 1.0 < errors.square().mean().sqrt() / gains.std() < 1.7
    equal = scores(0.8)
    assert bert_tasks.gain(equal, equal) == (0.0, 0.0)


def test_masking_proportions():
    torch.manual_seed(0)
    ids = torch.randint(len(SPECIAL), VOCAB, (1000, 64))
    masked, chosen = bert_data.mask_tokens(ids, VOCAB)
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.005)
    assert torch.equal(masked[~chosen], ids[~chosen])
    replaced = (masked == MASK)[chosen].float().mean().item()
    unchanged = (masked == ids)[chosen].float().mean().item()
    assert (replaced, unchanged) == pytest.approx((0.8, 0.1), abs=0.015)
    assert 1 - replaced - unchanged == pytest.approx(0.1, abs=0.015)
    drawn = masked[(masked != MASK) & (masked != ids)]
    assert drawn.min() >= len(SPECIAL) and len(drawn.unique()) > VOCAB / 3


def test_segments_and_padding():
    batch = bert_data.make_batch([[10, 11], [12]], [[20], [21, 22, 23]])
    assert batch.ids.tolist() == [
        [CLS, 10, 11, SEP, 20, SEP, PAD],
        [CLS, 12, SEP, 21, 22, 23, SEP],
    ]
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]]
    assert torch.equal(batch.padding, batch.ids == PAD)
    single = bert_data.make_batch([[10, 11], [12]])
    assert single.ids.tolist() == [[CLS, 10, 11, SEP], [CLS, 12, SEP, PAD]]
    assert not single.segments.any()


class Numbers:
    """Tokenizer for lines of numbers, in which each number is a token ID."""

    def get_vocab_size(self):
        return VOCAB

    def encode_batch(self, lines, add_special_tokens):
        return [SimpleNamespace(ids=[int(number) for number in line.split()]) for line in lines]


def test_pairs_of_passages_and_their_labels():
    # Line i of work w consists of 300 w + 3 i + 5 and the next two numbers.
    texts = [
        "\n".join(" ".join(str(300 * w + 3 * i + 5 + j) for j in range(3)) for i in range(90))
        for w in range(3)
    ]
    pairs = bert_data.Pairs(texts, Numbers(), max_seqlen=20)
    torch.manual_seed(0)
    drawn = [pairs.draw() for _ in range(400)]
    assert 150 < sum(is_next for *_, is_next in drawn) < 250
    assert len({len(first) + len(second) for first, second, _ in drawn}) > 3
    for first, second, is_next in drawn:
        assert first and second and len(first) + len(second) + 3 <= 20
        for passage in (first, second):
            assert passage == list(range(passage[0], passage[-1] + 1))
        follows = second[0] == first[-1] + 1
        same_work = (first[0] - 5) // 300 == (second[0] - 5) // 300
        assert follows == same_work == bool(is_next)
        # The first passage ends at the end of a line, and the second starts at the start of one.
        assert (first[-1] - 5) % 3 == 2 and (second[0] - 5) % 3 == 0


def test_targets_are_the_masked_tokens():
    texts = ["\n".join(str(5 + i % 900) for i in range(200)) for _ in range(2)]
    pairs = bert_data.Pairs(texts, Numbers(), max_seqlen=20)
    torch.manual_seed(0)
    batch = pairs.batch(50)
    # The numbers are consecutive, so a masked one follows from its left neighbor.
    ids = batch.inputs.ids
    assert batch.targets.shape == (int(batch.chosen.sum()),)
    assert not batch.chosen[batch.inputs.padding | (ids == CLS) | (ids == SEP)].any()
    assert (batch.targets >= len(SPECIAL)).all()
    rows, columns = batch.chosen.nonzero().T
    for row, column, target in zip(rows, columns, batch.targets, strict=True):
        left = ids[row, column - 1]
        if column > 1 and left >= len(SPECIAL) and not batch.chosen[row, column - 1]:
            assert target == 5 + (left - 5 + 1) % 900


def new_bert(dropout=0.0):
    torch.manual_seed(0)
    return Bert(BertConfig(VOCAB, 32, 2, 2, 64, 24, dropout))


def test_decoder_is_tied():
    model = PretrainingHeads(new_bert())
    names = [name for name, p in model.named_parameters() if p.shape[0] == VOCAB]
    assert names == ["decoder_bias", "bert.tokens.weight"]


@pytest.mark.parametrize("kind", ["cls", "mean", "token"])
def test_padding_does_not_change_logits(kind):
    bert = new_bert().eval()
    model = TokenClassifier(bert, 3) if kind == "token" else SentenceClassifier(bert, 3, kind)
    model.eval()
    texts = [list(range(10, 22)), [40, 41, 42]]
    together = model(*bert_data.make_batch(texts))
    for row, text in zip(together, texts, strict=True):
        alone = model(*bert_data.make_batch([text]))[0]
        row = row[: len(text) + 2] if kind == "token" else row
        torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-6)


def test_layers_are_initialized_differently():
    layers = new_bert().encoder.layers
    assert not torch.equal(layers[0].linear1.weight, layers[1].linear1.weight)
    assert not torch.equal(layers[0].self_attn.in_proj_weight, layers[1].self_attn.in_proj_weight)


def test_minilm_equals_transformers():
    transformers = pytest.importorskip("transformers")
    bert, tokenizer = bert_model.load_minilm()
    bert.eval()
    folder = bert_model.data.minilm()
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    pairs = [("Hello there, world.", "How are you?"), ("To be or not to be", "no"), ("a", "b")]
    encoded = tokenizer.encode_batch(pairs)
    ids, padding = bert_data.pad_batch([text.ids for text in encoded])
    segments, _ = bert_data.pad_batch([text.type_ids for text in encoded])
    assert segments.any() and padding.any()
    with torch.no_grad():
        hidden = bert(ids, segments, padding)
        expected = theirs(ids, attention_mask=(~padding).long(), token_type_ids=segments)
    error = (hidden - expected.last_hidden_state)[~padding].abs().max()
    assert error < 1e-5
    assert (bert.pool_first(hidden) - expected.pooler_output).abs().max() < 1e-5


def test_speeches_in_prose_and_verse():
    text = """SCENE I.

[Enter HAMLET.]

HAMLET.
To be, or not [aside] to be, that
is the question: whether 'tis
nobler in the mind.

Hor.
'Tis Here,
And there
(And gone).

KING.
One line."""
    prose, verse = bert_labels.speeches([text])
    assert prose[0] == "To be, or not  to be, that"
    assert bert_labels.FORMS[bert_labels.form_of(prose)] == "prose"
    assert bert_labels.FORMS[bert_labels.form_of(verse)] == "verse"
    assert bert_labels.form_of(["A", "B", "C", "d", "E"]) is None


def test_marks():
    words, marks = bert_labels.marks_of(["O, what a noble mind!", "Call'd: 'tis done. Go"])
    assert words == ["o", "what", "a", "noble", "mind", "call'd", "'tis", "done", "go"]
    named = [bert_labels.MARKS[mark] for mark in marks]
    assert named == [",", "none", "none", "none", "?!", ";:", "none", ".", "none"]


def test_the_last_token_of_a_word_has_its_mark():
    tokenizer = bert_data.train_tokenizer(["to be or not to be " * 3], 40)
    (row,), (labels,) = bert_labels.mark_examples([["To be, or not.", "X"]], tokenizer, 64)
    assert len(labels) == len(row) + 2
    assert labels[0] == labels[-1] == IGNORED
    assert [bert_labels.MARKS[label] for label in labels if label != IGNORED] == [
        "none", ",", "none", ".",
    ]  # fmt: skip
