"""The test files and source lines named in scripts/sanitize.py exist."""

import pytest
import sanitize
from commands import ROOT


@pytest.mark.parametrize("mistake", sanitize.PLANTED, ids=lambda mistake: mistake.name)
def test_planted_mistakes_replace_one_line(mistake):
    text = (ROOT / "csrc" / sanitize.PLANTED_IN).read_text()
    assert text.count(mistake.right) == 1
    assert mistake.wrong not in text


def test_sanitized_tests_exist():
    for path in sanitize.TESTS + sanitize.THREADED + sanitize.EMULATED:
        assert (ROOT / path).exists(), path


def test_the_last_instruction_set_is_not_amx():
    chain = sanitize.instruction_sets()
    assert len(set(chain)) == len(chain)
    assert not chain[-1].startswith("amx")
