"""The HTML export: one file, no address, checksums in its policy, and hostile tokens that stay
text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headwise.util.errors import SpecError
from headwise.viewer.export_files import PageAssets, load_assets, pack_json, render_html
from viewer.page_browser import unpack_json

ASSETS = PageAssets('console.log("a < b");', "body{color:red}")
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u2028\u2029",
    "\u202egnp.exe\u202c",
    "\u200b\ufeff",
    "&lt;b&gt;",
    "]]>",
    "\ud800",
    "'\"><img src=x onerror=alert(1)>",
]


class Elements(HTMLParser):
    """The elements of a page, and the text in each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.mark.parametrize("token", HOSTILE)
def test_hostile_tokens_stay_data(token: str):
    data = {"words": [token], token: 1}
    page = render_html(data, token, ASSETS)
    found = Elements(page)
    assert (found.count("script"), found.count("style"), found.count("img")) == (2, 1, 0)
    assert unpack_json(found.texts["script"][0]) == data
    assert found.texts["script"][1] == ASSETS.script
    page.encode("utf-8")


@pytest.mark.parametrize("token", HOSTILE)
def test_packed_json_is_ascii_and_means_the_same(token: str):
    text = pack_json([token])
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert unpack_json(text) == [token]


def test_the_policy_allows_these_scripts_and_no_request():
    found = Elements(render_html({}, "a", ASSETS))
    policy = next(
        attrs["content"]
        for tag, attrs in found.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(" ", 1) for rule in (policy or "").split("; "))
    for name, text in (("script-src", ASSETS.script), ("style-src", ASSETS.style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "connect-src" not in rules
    assert not {"unsafe-inline", "unsafe-eval", "http:", "https:"} & set(
        re.split(r"[ ;']+", policy or "")
    )
    assert not [
        attrs for _, attrs in found.tags if {"src", "href", "onclick", "onload"} & set(attrs)
    ]


def test_a_script_cannot_end_its_element(tmp_path: Path):
    (tmp_path / "report.js").write_text('x("</script><!--</SCRIPT>")')
    (tmp_path / "app.css").write_text("a{}")
    assets = load_assets(tmp_path)
    assert assets.script == r'x("\x3c/script>\x3c!--\x3c/SCRIPT>")'
    assert Elements(render_html({}, "a", assets)).texts["script"][1] == assets.script
    (tmp_path / "app.css").write_text("a{content:'</STYLE>'}")
    with pytest.raises(SpecError, match="build the page again"):
        load_assets(tmp_path)


def test_a_page_that_is_not_built_names_the_command(tmp_path: Path):
    with pytest.raises(SpecError, match="run: make web"):
        load_assets(tmp_path)


def test_not_a_number_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        pack_json({"value": float("nan")})
