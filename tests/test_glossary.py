"""The glossaries: the English and the Chinese page have the same terms, code words and letters, in
the same order.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def rows(name: str) -> list[list[str]]:
    """The cells of all rows of the tables of a page, without headers."""
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return [row for row in cells if row[0] not in ("word", "letter", "---")]


def terms(name: str) -> list[str]:
    return [row[0] for row in rows(name)]


def test_both_pages_have_the_same_terms_in_the_same_order():
    assert len(terms("glossary.md")) > 60
    assert terms("glossary.zh.md") == terms("glossary.md")


def test_the_axes_have_the_same_letters():
    letters = [[row[0], row[3]] for row in rows("glossary.md") if len(row) == 5]
    assert len(letters) == 6
    assert [[row[0], row[3]] for row in rows("glossary.zh.md") if len(row) == 5] == letters


def test_every_term_has_a_chinese_word_and_meaning():
    han = re.compile("[\u4e00-\u9fff]")
    for row in rows("glossary.zh.md"):
        translated = (row[1], row[4]) if len(row) == 5 else row[1:3]
        assert len(translated) == 2
        assert all(han.search(cell) for cell in translated), row


def test_code_words_of_a_meaning_are_kept():
    chinese = {row[0]: row[2] for row in rows("glossary.zh.md") if len(row) == 3}
    for term, meaning in ((row[0], row[1]) for row in rows("glossary.md") if len(row) == 2):
        assert re.findall("`[^`]+`", chinese[term]) == re.findall("`[^`]+`", meaning), term
