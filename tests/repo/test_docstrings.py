"""Public docstrings describe all arguments, and their examples run."""

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fused_attn

OF_MODULES = {"": fused_attn, "nn.": fused_attn.nn, "masks.": fused_attn.masks}
PUBLIC: dict[str, Any] = {
    prefix + name: getattr(module, name)
    for prefix, module in OF_MODULES.items()
    for name in module.__all__
    if callable(getattr(module, name))
}
# Users do not create objects of these classes, so their docstrings need no example.
MADE_HERE = {"ComparisonReport", "Mask", "SwapReport", "masks.Mask", "nn.DecoderCache"}
# Names that occur in the example of their module or of a related function.
WITHOUT_EXAMPLE = {"available_backends", "disable", "masks.as_mask", "masks.bias", "masks.causal"}
WITHOUT_EXAMPLE |= {"masks.dense", "masks.prefix_lm", "masks.sliding_window"}


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(name):
    torch.manual_seed(0)
    found = doctest.DocTestFinder().find(
        PUBLIC[name], name, globs={"torch": torch, "fused_attn": fused_attn}
    )
    shown = {test.name for test in found if test.examples}
    assert name in shown | WITHOUT_EXAMPLE | MADE_HERE
    runner, said = doctest.DocTestRunner(), []
    for test in found:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - MADE_HERE))
def test_arguments(name):
    assert parameters(PUBLIC[name]) <= described(PUBLIC[name].__doc__)


def parameters(thing: Callable[..., Any]) -> set[str]:
    """Return a callable's parameter names; a class with *args has those of its torch.nn base."""
    found = inspect.signature(thing).parameters
    if "args" in found and isinstance(thing, type):
        base = next(c for c in thing.__mro__ if c.__module__.startswith("torch.nn"))
        found = inspect.signature(base).parameters
    return set(found) - {"args", "kwargs"}


def described(text: str) -> set[str]:
    """Return the argument names in the Args section of a docstring."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    heads = re.findall(r"^ {4}(\S[^:\n]*):", section[1] if section else "", re.MULTILINE)
    return {name for head in heads for name in re.findall(r"\w+", head)}


def test_undescribed_arguments_are_detected():
    text = """Words.

    Args:
        one, two, three: of which one is
            not: four.
    """
    assert described(text) == {"one", "two", "three"}
    assert described("Words: one.") == set()
