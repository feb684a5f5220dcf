"""scripts/mutants.py: generated mutants, and the child processes that run tests on them."""

import ast
import ctypes
import itertools
import os
import signal
import time

import mutant_runs
import mutant_sources
import mutant_tests
import pytest
from commands import output_of

from fused_attn import masks
from fused_attn.masks import band

HELPERS = """
static long min64(long a, long b) { return a < b ? a : b; }
static long max64(long a, long b) { return a > b ? a : b; }
"""
FUNCTION = """
extern "C" long value(long i, long n, const long* strides) {
  long at = 0;
  for (long j = i; j <= n; ++j)
    at += 7 * j + strides[1] - n;
  if (i == 2 && n >= 5 || at == 30) at = min64(n, at);
  return at;
}
"""
KINDS = ["bound", "comparison", "factor", "guard", "logic", "min or max"]
KINDS += ["statement", "stride", "term"]


@pytest.mark.parametrize("source", mutant_sources.SOURCES)
def test_a_seed_generates_the_same_mutants(source):
    mutants = mutant_sources.sample(source, seed=3, count=40)
    assert mutants == mutant_sources.sample(source, seed=3, count=60)[:40]
    assert mutants != mutant_sources.sample(source, seed=4, count=40)
    assert len({(mutant.path, mutant.line) for mutant in mutants}) == 40


@pytest.mark.parametrize("source", ["triton", "masks"])
def test_python_mutants_are_different_programs(source):
    for mutant in mutant_sources.sample(source, seed=0, count=20):
        text = (mutant_sources.ROOT / mutant.path).read_text()
        lines = text.splitlines()
        lines[mutant.line - 1] = mutant.apply(lines[mutant.line - 1])
        assert ast.dump(ast.parse("\n".join(lines))) != ast.dump(ast.parse(text))


def test_cpp_mutants_change_results_only_if_turned_on(tmp_path):
    mutants = dict(enumerate(mutant_sources.cpp_mutants("value.cpp", FUNCTION), 1))
    assert sorted({mutant.kind for mutant in mutants.values()}) == KINDS
    texts = [mutant_runs.HEADER, mutant_runs.DEFINITIONS, HELPERS, FUNCTION]
    for number, mutant in mutants.items():
        text = mutant_sources.with_switches(FUNCTION, {number: mutant})
        texts.append(text.replace(" value(", f" value_{number}("))
    (tmp_path / "value.cpp").write_text("\n".join(texts))
    module = tmp_path / "value.so"
    compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-w"]
    output_of(*compiler, tmp_path / "value.cpp", "-o", module)
    library = ctypes.CDLL(str(module))
    switch = mutant_tests.Compiled(str(module))
    strides = (ctypes.c_long * 4)(3, 5, 7, 11)

    def values(function):
        return [function(i, n, strides) for i, n in itertools.product(range(4), range(-1, 9))]

    right = values(library.value)
    for number, mutant in mutants.items():
        function = library[f"value_{number}"]
        switch.turn_on(0)
        assert values(function) == right, mutant
        assert switch.reached() == [number]
        switch.turn_on(number)
        assert values(function) != right, mutant
        switch.reached()  # clear the record


def test_python_mutants_replace_the_code_of_functions():
    path = "fused_attn/masks/band.py"
    text = (mutant_sources.ROOT / path).read_text()
    every = mutant_sources.python_mutants(path, text)
    mutant = next(m for m in every if m.text == "(max(right, band.right))")

    def work(send):
        switch = mutant_tests.Interpreted({5: mutant})
        switch.record()
        send([band.band_with_lengths(masks.causal(), 4, 4).hi, switch.reached()])
        switch.turn_on(5)
        send([band.band_with_lengths(masks.causal(), 4, 4).hi, switch.reached()])

    messages = mutant_tests.in_child(work, lambda name: 60.0)
    assert messages == [[0, [5]], [band.UNLIMITED, []]]


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_process_that_hangs_or_dies_is_reported(how):
    def work(send):
        send({"begins": "a test"})
        if how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    messages = mutant_tests.in_child(work, lambda name: 0.5 if name else 60.0)
    assert messages[-1] == {"died": how, "of": "a test"}
