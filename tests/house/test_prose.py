"""Plain English in the source and the documents: idioms that stand for a missing term stay rare."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.syntax_trees import syntax_nodes

ROOT = Path(__file__).resolve().parents[2]
MAX_IDIOMS = 1.0  # per 1,000 words

# Each hides a subject or a term: tensors do not speak, and "the same, but ..." sends the reader
# back.
IDIOMS = [
    *("says?", "said", "saying", "tells?", "told", "speaks?", "spoken", "hears?", "heard"),
    *("whoever", "whomever", "somebody", "anybody", "nobody", "everybody", "whom", "of whom"),
    *("who reads?", "who may", "who takes?", "who has", "who have", "who runs?", "who is"),
    *(
        "anew",
        "the same, ",
        "all that",
        "all of it",
        "so many",
        "as many as",
        "of which",
        "makes? of it",
    ),
    *(
        "lies where",
        "where they lie",
        "as they lie",
        "stands? in the place",
        "in the place of",
        "by itself is",
    ),
    *(
        "behind one another",
        "beside each other",
        "what is left",
        "the way back",
        "on the way there",
    ),
]
IDIOM = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b", re.IGNORECASE)
# A docstring starts with what is returned or done, not with a clause that refers to something else.
RIDDLE = re.compile(r"(What|Who|The same|Same|Those|It)\b")
# Participles and adverbs as names of things.
OPAQUE_VARIABLE = re.compile(
    r"_*(told|said|heard|held|made|given|kept|known|found|drawn|taken|gone|seen|wanted|here|there)"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_of_code(source: str) -> list[str]:
    """Docstrings and strings of at least four words, and comments."""
    strings = [
        node.value
        for node in syntax_nodes(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts = [text for text in strings if text.count(" ") >= 3]
    return texts + re.findall(r"(?:^|\s)# .*", source)


def summaries(source: str) -> list[str]:
    """The first line of each docstring."""
    documented = [node for node in syntax_nodes(source) if isinstance(node, DOCUMENTED)]
    return [
        docstring.splitlines()[0] for node in documented if (docstring := ast.get_docstring(node))
    ]


def bound_names(source: str) -> list[str]:
    """Names that are assigned, of arguments, and of functions and classes."""
    names: list[str] = []
    for node in syntax_nodes(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return names


def prose_of_page(text: str) -> list[str]:
    """A Markdown page without its code blocks."""
    return [re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)]


def count(texts: list[str]) -> tuple[int, Counter[str]]:
    """Number of words, and the idioms among them."""
    words = sum(len(text.split()) for text in texts)
    return words, Counter(match.lower() for text in texts for match in IDIOM.findall(text))


SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    ("paths", "prose"), [(SOURCES, prose_of_code), (PAGES, prose_of_page)], ids=["src", "docs"]
)
def test_idioms_are_rare(paths: list[Path], prose: Callable[[str], list[str]]):
    words, idioms = count([text for path in paths for text in prose(path.read_text())])
    assert words > 10_000
    assert 1000 * idioms.total() / words <= MAX_IDIOMS, idioms.most_common()


def test_idioms_are_found():
    code = (
        'def f():\n    """What a head says."""\n    x = "nobody reads it at all"  # whoever is '
        "heard\n"
    )
    assert count(prose_of_code(code))[1] == {"says": 1, "nobody": 1, "whoever": 1, "heard": 1}
    assert count(prose_of_page("It is drawn anew.\n\n```\nall that\n```\n"))[1] == {"anew": 1}


def test_docstrings_start_with_their_subject():
    texts = {path: summaries(path.read_text()) for path in SOURCES}
    riddles = [
        f"{path}: {text}" for path, lines in texts.items() for text in lines if RIDDLE.match(text)
    ]
    assert sum(map(len, texts.values())) > 1000
    assert riddles == []


def test_names_are_nouns_and_verbs():
    names = {
        path: [name for name in bound_names(path.read_text()) if OPAQUE_VARIABLE.fullmatch(name)]
        for path in SOURCES
    }
    assert {str(path): found for path, found in names.items() if found} == {}


def test_opaque_names_and_riddles_are_detected():
    code = (
        'def told(given):\n    """What is told."""\n    for seen in given:\n        '
        "found_keys, _held = seen\n"
    )
    assert [name for name in bound_names(code) if OPAQUE_VARIABLE.fullmatch(name)] == [
        *("told", "given", "seen", "_held"),
    ]
    assert [
        bool(RIDDLE.match(text))
        for text in (*summaries(code), "Whatever", "Itself", "The same, done")
    ] == [
        *(True, False, False, True),
    ]
