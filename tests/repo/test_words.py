"""scripts/words.py reports planted violations, and none of its exceptions is obsolete."""

import pytest
import words


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Return a function that checks one file with the given text."""

    def check(name, text):
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(words, "ROOT", tmp_path)
        monkeypatch.setattr(
            words, "tracked", lambda *places, suffixes: [path] if name.endswith(suffixes) else []
        )
        return [*words.openings(), *words.retired(), *words.british(), *words.long_sentences()]

    return check


def test_a_docstring_without_a_full_first_sentence(found):
    assert found("a.py", 'def f():\n    """What f computes."""\n')
    assert found("a.py", '"""The same for packed sequences."""\n')
    assert not found("a.py", 'def f():\n    """Return the mask."""\n')
    assert not found("a.py", 'class C:\n    @property\n    def p(self):\n        """True if."""\n')


@pytest.mark.parametrize("word", ["panel", "out_low", "chosen by itself", "dropout_origin"])
def test_a_retired_word(found, word):
    assert found("a.h", f"// the {word} of a call\n")
    assert found("a.md", f"The {word} of a call.\n")
    assert not found("a.h", f"// x{word}elled\n")


@pytest.mark.parametrize("word", ["normalised", "neighbouring", "labelled", "centre", "licence"])
def test_a_british_spelling(found, word):
    assert found("a.py", f"x = 1  # {word}\n")
    assert found("a.h", f"float y;  // {word}\n")
    assert not found("a.h", f"float {word};  // read\n")


def test_american_words_are_no_british_spellings(found):
    assert not found("a.py", "# raised, promised, otherwise, analysis, centered, cancel, precise\n")


def test_a_long_sentence(found):
    assert found("a.md", "A " + "word " * words.MAX_WORDS + ".\n")
    assert not found("a.md", "A " + "word " * 20 + ". A " + "word " * 20 + ".\n")
    assert not found("a.md", "| " + "word " * 100 + "|\n")
    assert not found("a.md", "    " + "word " * 100 + "\n")


def test_exceptions_still_apply():
    """Each exception names a file that contains its text."""
    for _, name, text in words.EXCEPTIONS:
        content = (words.ROOT / name).read_text("utf-8")
        assert text == "*" or text in content
