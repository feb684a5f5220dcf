"""The test files and source lines named in scripts/sanitize.py exist."""

from pathlib import Path

import pytest
import sanitize

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mistake", sanitize.PLANTED, ids=lambda mistake: mistake.name)
def test_planted_mistakes_replace_one_line(mistake):
    text = (ROOT / "csrc" / sanitize.PLANTED_IN).read_text()
    assert text.count(mistake.right) == 1
    assert mistake.wrong not in text


def test_sanitized_tests_exist():
    for path in sanitize.TESTS + sanitize.THREADED + sanitize.EMULATED:
        assert (ROOT / path).exists(), path


def test_instruction_sets_end_at_their_own_base():
    chain = sanitize.instruction_sets()
    assert len(set(chain)) == len(chain)
    assert not chain[-1].startswith("amx")
