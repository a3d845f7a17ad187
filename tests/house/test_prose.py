"""Plain English in the source and the documents: idioms that stand for a missing term stay rare."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_IDIOMS = 1.0  # per 1,000 words

# Each hides a subject or a term: tensors do not speak, and "the same, but ..." sends the reader back.
IDIOMS = [
    *("says?", "said", "saying", "tells?", "told", "speaks?", "spoken", "hears?", "heard"),
    *("whoever", "whomever", "somebody", "anybody", "nobody", "everybody", "whom", "of whom"),
    *("who reads?", "who may", "who takes?", "who has", "who have", "who runs?", "who is"),
    *("anew", "the same, ", "all that", "all of it", "so many", "as many as", "of which", "makes? of it"),
    *("lies where", "where they lie", "as they lie", "stands? in the place", "in the place of", "by itself is"),
    *("behind one another", "beside each other", "what is left", "the way back", "on the way there"),
]
IDIOM = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_of_code(source: str) -> list[str]:
    """Docstrings, comments, and strings of at least four words."""
    tree = ast.parse(source)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)}
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    texts = [text for text in strings if text in docstrings or text.count(" ") >= 3]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return texts + [token.string for token in tokens if token.type == tokenize.COMMENT]


def prose_of_page(text: str) -> list[str]:
    """A Markdown page without its code blocks."""
    return [re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)]


def count(texts: list[str]) -> tuple[int, Counter[str]]:
    """Number of words, and the idioms among them."""
    words = sum(len(text.split()) for text in texts)
    return words, Counter(match.lower() for text in texts for match in IDIOM.findall(text))


CORPORA = {
    "src": [text for path in sorted((ROOT / "src").rglob("*.py")) for text in prose_of_code(path.read_text())],
    "docs": [
        text
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for text in prose_of_page(path.read_text())
    ],
}


@pytest.mark.parametrize("corpus", CORPORA)
def test_idioms_are_rare(corpus: str):
    words, idioms = count(CORPORA[corpus])
    assert words > 10_000
    assert 1000 * idioms.total() / words <= MAX_IDIOMS, idioms.most_common()


def test_idioms_are_found():
    code = 'def f():\n    """What a head says."""\n    x = "nobody reads it at all"  # whoever is heard\n'
    assert count(prose_of_code(code))[1] == {"says": 1, "nobody": 1, "whoever": 1, "heard": 1}
    assert count(prose_of_page("It is drawn anew.\n\n```\nall that\n```\n"))[1] == {"anew": 1}
