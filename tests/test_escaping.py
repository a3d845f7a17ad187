"""Names and texts of models cannot hide, rearrange or inject anything on a terminal, a page, a
figure or a report.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import headwise as hw
from headwise import cli
from headwise.cli.arguments import print_page
from headwise.util import escaping
from headwise.util.escaping import (
    escape_html,
    escape_markdown,
    escape_page,
    escape_svg,
    escape_terminal,
    shorten_message,
)
from support.syntax_trees import syntax_nodes

SOURCE = Path(hw.__file__).parent
TARGETS = (escape_terminal, escape_html, escape_svg, escape_markdown, escape_page)
HOSTILE = {
    "clear screen": "\x1b[2J",
    "title": "\x1b]0;x\x07",
    "eight-bit control": "\x9b2J",
    "backspace": "\b",
    "null": "\0",
    "carriage return": "\r",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "zero width": "\u200b",
    "joiner": "\u200d",
    "byte order mark": "\ufeff",
    "soft hyphen": "\xad",
    "tag": "\U000e0041",
    "hangul filler": "\u3164",
    "variation selector": "\ufe0f",
    "line separator": "\u2028",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("escape", TARGETS)
@pytest.mark.parametrize("name", HOSTILE)
def test_invisible_characters_are_shown(name: str, escape: escaping.Escape):
    shown = escape(f"a{HOSTILE[name]}b")
    assert {unicodedata.category(char) for char in shown} & {
        "Cc",
        "Cf",
        "Cs",
        "Co",
        "Zl",
        "Zp",
    } == set()
    assert HOSTILE[name] not in shown
    assert shown.startswith("a")
    assert shown.endswith("b")


@pytest.mark.parametrize("escape", TARGETS)
def test_other_scripts_stay(escape: escaping.Escape):
    text = "日本 Ελλάδα שלום मन é 😀"
    assert escape(text) == text


MARKUP = "</title><script>alert(1)</script>\" onload='x' &amp; ]]> <!--"


class Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_markup_is_text():
    for escape in (escape_html, escape_svg):
        document = Collector()
        document.feed(f'<p title="{escape(MARKUP)}">{escape(MARKUP)}</p>')
        assert (document.tags, document.text) == ([("p", [("title", MARKUP)])], MARKUP)
        element = ElementTree.fromstring(
            f'<text title="{escape_svg(MARKUP)}">{escape_svg(MARKUP)}</text>'
        )
        assert (element.get("title"), element.text) == (MARKUP, MARKUP)
    shown = escape_markdown(f"`a` **b** [c](d) | e\nf {MARKUP}")
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[`*|\[\]]|<", shown)


def test_messages_have_at_most_300_characters_of_foreign_text(capsys: pytest.CaptureFixture[str]):
    quoted = (repr("x" * 5000), repr("y z" * 5000), '"' + "it's " * 999 + '"', "w" * 5000)
    listed = (
        [7] * 999,
        [[1, 2]] * 999,
        {"a": ["b c"] * 999},
        [{"a b": {"c d": list(range(999))}}, 5],
    )
    for foreign in (*quoted, *map(str, listed)):
        message = shorten_message(f"config.json has {foreign}, unlike the model; correct it")
        assert len(message) < 300 + 60
        assert message.endswith("correct it")
    assert (
        shorten_message(f"cannot write to {'x' * 999}: it is long")
        == f"cannot write to {'x' * 300}…: it is long"
    )
    assert cli.main(["why", "\x1b[2J\u202e" + "n" * 9000]) == 2
    err = capsys.readouterr().err
    assert len(err) < 700
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_pages_on_a_terminal(is_terminal, capsys, monkeypatch):
    """What a program reads from a pipe is unchanged."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    print_page("\x1b[1mbold\x1b[0m \x1b[2J\n\tb")
    bold = "\x1b[1mbold\x1b[0m "
    assert capsys.readouterr().out == bold + (
        "\\x1b[2J\n\tb\n" if is_terminal else "\x1b[2J\n\tb\n"
    )


# How often modules print what is not constant. Those of cli/arguments.py and exit_status.py escape,
# and so does what is printed elsewhere: a drawing of a mask, lines of progress, parts of a text,
# JSON, help texts, a script, and answers to a process.
PRINTS = {
    "cli/__init__.py": 5,
    "cli/arguments.py": 2,
    "cli/exit_status.py": 1,
    "cli/options.py": 2,
    "cli/run/answers.py": 1,
    "report/progress.py": 2,
    "training/loggers.py": 1,
    "viewer/view.py": 1,
}


def is_print(node: ast.AST) -> bool:
    """Whether a call prints, or writes to a stream, a text that is not constant."""
    if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Constant):
        return False
    function = ast.unparse(node.func)
    return (
        function == "print"
        or re.fullmatch(r"(sys\.|self\._)?(stream|stdout|stderr)\.write", function) is not None
    )


def test_commands_print_in_one_place():
    nodes = {path: syntax_nodes(path.read_text()) for path in SOURCE.rglob("*.py")}
    found = {
        path.relative_to(SOURCE).as_posix(): sum(map(is_print, one)) for path, one in nodes.items()
    }
    assert {path: count for path, count in found.items() if count} == PRINTS


def test_there_is_one_place():
    """No other module escapes by itself, except the frame of a notebook, whose content is a whole
    page.
    """
    own = re.compile(r"html\.escape|saxutils|isprintable|\"unicode_escape\"|from html import")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if own.search(path.read_text())
    }
    # plots.py looks for characters without a glyph, vocabulary.py makes the table of byte-level BPE
    assert found == {
        "util/escaping.py",
        "viewer/view.py",
        "report/plots.py",
        "models/vocabulary.py",
    }
