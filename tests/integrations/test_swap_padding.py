"""After a swap, padded rows are 0 and the report says so, unless remove_padding=False."""

import copy

import pytest
import torch
from helpers import saved_and_loaded
from nn_helpers import assert_within_contract, cast, run, swapped_copy
from padded_models import (
    BATCH,
    IGNORED,
    LENGTH,
    OPTION,
    STACKS,
    WIDTH,
    Pooled,
    made,
    recorded_packings,
)

from fused_attn.swap import padding_removers, swap_modules

NAMES = pytest.mark.parametrize("name", STACKS)


@NAMES
def test_outputs_without_removal_are_those_of_the_original(name, monkeypatch):
    packings = recorded_packings(monkeypatch)
    model, args, kwargs = made(name)
    swapped, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    report = swap_modules(swapped, remove_padding=False)
    assert not any("padded rows" in note for note in report.notes)
    results = [run(m, args, kwargs) for m in (swapped, model)]
    results.append(run(truth, cast(args, torch.float64), kwargs))
    # The exact gradient of a key bias is 0, so the computed one is rounding error.
    assert_within_contract(
        *({n: t for n, t in result.items() if "key.bias" not in n} for result in results)
    )
    assert not packings


@NAMES
def test_the_option_is_copied_pickled_and_restored(name):
    model, args, kwargs = made(name)
    attributes = {n: set(m.__dict__) for n, m in model.named_modules()}
    expected = model(*args, **kwargs)
    report = swap_modules(model, remove_padding=False)
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        torch.testing.assert_close(other(*args, **kwargs), expected)
        assert not padding_removers(other)
    report.restore()
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == attributes
    assert torch.equal(model(*args, **kwargs), expected)
    swap_modules(model)
    assert [stack for stack, _, _ in padding_removers(model)] == [STACKS[name]]


@NAMES
def test_the_report_names_the_stacks_that_return_zeros(name):
    model, args, kwargs = made(name)
    expected = model(*args, **kwargs)
    (note,) = [note for note in swap_modules(model).notes if "padded rows" in note]
    assert STACKS[name] in note and OPTION in note
    assert (model(*args, **kwargs) - expected).abs().max() > 0.01


@NAMES
def test_a_second_swap_disables_the_removal(name):
    model, args, kwargs = made(name)
    expected = model(*args, **kwargs)
    swap_modules(model)
    again = swap_modules(model, remove_padding=False)
    torch.testing.assert_close(model(*args, **kwargs), expected)
    again.restore()
    assert [stack for stack, _, _ in padding_removers(model)] == [STACKS[name]]


def test_stacks_that_do_not_remove_padding_are_not_noted():
    model = Pooled()
    model.encoder.enable_nested_tensor = False
    assert not swap_modules(model).notes


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"batch_first": False}], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_padded_rows_in_inference_are_those_of_the_original(options, norm, padding):
    """With remove_padding=False, padded rows equal those of the original model.

    With right padding, torch's inference path sets these rows to 0 before the last norm.
    """
    ignored = IGNORED if padding == "right" else IGNORED.flip(1)
    model = Pooled(norm=norm, **options).encoder.eval()
    swapped = swapped_copy(model, remove_padding=False)
    batch_first = options.get("batch_first", True)
    src = torch.randn(*((BATCH, LENGTH) if batch_first else (LENGTH, BATCH)), WIDTH)
    for grad, fast_path in ((False, True), (False, False), (True, True)):
        torch.backends.mha.set_fastpath_enabled(fast_path)
        try:
            with torch.set_grad_enabled(grad):
                outs = [m(src, src_key_padding_mask=ignored) for m in (swapped, model)]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(*outs)
