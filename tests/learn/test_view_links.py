"""Links of entries to screens of `headwise view`: each names a screen, head and token that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from headwise import cli
from headwise.learn.catalogue import load_entries
from headwise.learn.entry_text import Words
from headwise.observe.bundled_sample import TEXTS, load_sample_trace
from headwise.viewer import view

LINKS = list(filter(None, (entry.view for entry in load_entries())))
STATE = Path(view.__file__).parent / "web" / "src" / "state.ts"


@cache
def count_words(source: str, text: str) -> dict[str, int]:
    """The tokens of each stream of the bundled translator over a pair of texts."""
    trace = view.open_target(view.Target(None, text, source)).get_trace()
    return {name: len(rows[0].words) for name, rows in trace.streams.items()}


def test_at_least_forty_entries_of_all_documents_have_a_link():
    assert len(LINKS) >= 40
    assert {link.entry[:3] for link in LINKS} == {"000", "001", "002", "003", "004"}


def test_every_address_names_a_screen_a_head_and_a_token_that_exist():
    source = STATE.read_text(encoding="utf-8")
    screens = re.findall(r'"(\w+)"', source.partition("SCREENS = ")[2].partition("\n")[0])
    keys = set(re.findall(r'(?:urlSignal(?:<.*>)?|keepInUrl)\(\s*"(\w+)"', source))
    layers = load_sample_trace().layers
    for link in LINKS:
        screen, _, query = link.address(layers).removeprefix("/").partition("?")
        values = {name: text for name, (text,) in parse_qs(query).items()}
        assert screen in screens, link.entry
        assert set(values) <= keys, link.entry
        layer = layers[int(values["site"])]
        letter = "X" if layer.kind == "cross" else layer.stack[0].upper()
        assert link.head == f"{letter}{layer.layer}H{values['head']}"
        assert int(values["head"]) < layer.heads
        assert values.get("off", f"{values['site']}.{values['head']}").endswith(values["head"])
        text, source_text = link.text, link.source
        if source_text:
            assert f"{source_text}\t{text}" in TEXTS
            assert (values["text"], values["source"]) == (text, source_text)
        else:
            source_text, text = TEXTS[0].split("\t")
        stream = "source" if layer.stack == "encoder" else "text"
        assert 0 <= int(values["position"]) < count_words(source_text, text)[stream], link.entry


def test_the_entry_says_how_to_start_the_page_in_both_languages():
    (link,) = (link for link in LINKS if link.entry == "003-2.2")
    command = "`headwise view --learn 003-2.2`"
    place = "head E0H0, token 3, screen steps"
    shown = f"In the bundled translator, on the page of `headwise view`: {place}: {command}"
    assert Words("en").describe_view(link) == shown
    chinese = Words("zh").describe_view(link)
    assert chinese.endswith(command)
    for part in ("内置翻译模型", "“步骤”页", "头 E0H0", "词元 3"):
        assert part in chinese


def test_the_command_opens_the_page_with_the_screen_and_texts(monkeypatch):
    served = []
    monkeypatch.setattr(
        view, "serve_page", lambda opened, **kwargs: served.append((opened, kwargs))
    )
    assert cli.main(["view", "--learn", "002-2.2c", "--no-browser"]) == 0
    ((opened, options),) = served
    assert options["screen"].startswith("/head?site=8&head=1&position=4&text=")
    assert options["screen"].endswith("&learn=002-2.2c")
    assert "".join(opened.get_trace().streams["source"][0].words) == "<zh>1983-01-12"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["003-1.2b"], "--learn 003-1.2b is not an entry with a screen; headwise learn names"),
        (["003-2.2", "--text", "a"], "--text"),
    ],
)
def test_other_entries_and_texts_are_refused(arguments, message, capsys):
    assert cli.main(["view", "--learn", *arguments]) == 2
    assert message in capsys.readouterr().err
