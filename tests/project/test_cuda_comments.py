"""Comments of the CUDA sources: they name things, or begin with a verb."""

import re

import pytest

from tests.paths import ROOT
from tests.project.test_docstrings import QUESTION_WORDS

SOURCES = sorted(path for path in (ROOT / "plugins").rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".h"))

COMMENT = re.compile(r"(?<!\S)// (?P<first>\w+)")


def first_words(text):
    """Return the first word of each comment, or paragraph of one."""
    words, in_comment = [], False
    for line in text.splitlines():
        found = COMMENT.search(line)
        is_whole_line = line.lstrip().startswith("// ")
        if found and not (is_whole_line and in_comment):
            words.append(found["first"])
        in_comment = is_whole_line
    return words


def test_first_words_of_comments_and_their_paragraphs():
    assert first_words("// One\n// two\n//\n// Three\nint a;  // four\n// Five\n") == ["One", "Three", "four", "Five"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "plugins").as_posix())
def test_no_comment_begins_with_a_question_word(path):
    words = first_words(path.read_text(encoding="utf-8"))
    assert words
    assert not set(words) & set(QUESTION_WORDS)
