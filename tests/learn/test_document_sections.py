"""Sections of the documents: each entry is in one, both languages have every text, formulas are set,
exercises are answered by runs, and the pages are complete without their script.
"""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headwise.learn import sliders
from headwise.learn.catalogue import MODULES, Document, Kind, Text, find_entries, load_documents
from headwise.learn.document_page import DocumentPages
from headwise.learn.document_sections import (
    FORMULA,
    Section,
    list_formulas,
    load_covers,
    load_formulas,
    load_mathml,
    load_sections,
)

ROOT = Path(__file__).resolve().parents[2]
HAN = re.compile("[\u4e00-\u9fff]")
DOCUMENTS = {document.id: document for document in load_documents()}
SECTIONS = {id: load_sections(id) for id in MODULES}
START_PARTS = ("guide", "words")  # of the start page, by their anchors
every_document = pytest.mark.parametrize("id", list(MODULES))


def texts_of(section: Section) -> list[Text]:
    texts = [section.title, section.text]
    for exercise in section.exercises:
        texts += [exercise.question, *([exercise.answer] if exercise.answer else [])]
    return texts


@every_document
def test_every_entry_is_in_one_section(id: str):
    counts = Counter(entry for section in SECTIONS[id] for entry in section.entries)
    entries = {entry.id for entry in DOCUMENTS[id].entries}
    missing = sorted(entries - counts.keys())
    assert missing == [], f"add to a section of learn/sections_{id}.toml: {missing}"
    assert sorted(counts.keys() - entries) == []
    assert set(counts.values()) == {1}


@every_document
def test_every_text_is_in_both_languages(id: str):
    cover = load_covers()[id]
    for text in [cover.title, cover.subject, cover.skill, *chain(*map(texts_of, SECTIONS[id]))]:
        assert not HAN.search(text.en), text.en
        assert HAN.search(text.zh), text.zh
        for name in (FORMULA, re.compile(r"\{\w+(?::[^{}]*)?\}")):
            assert {*name.findall(text.en)} == {*name.findall(text.zh)}, text.en
    for section in SECTIONS[id]:
        assert 1 <= section.text.en.count("\n\n") + 1 <= 4
        assert section.text.en.count("\n\n") == section.text.zh.count("\n\n")


def test_the_longest_sections_have_no_paragraph_of_a_source():
    """Prose refers to the statements; a quote of a source is not repeated in it."""
    for id, sections in SECTIONS.items():
        prose = "".join(section.text.zh for section in sections)
        for entry in DOCUMENTS[id].entries:
            quote = entry.quote_zh
            if len(HAN.findall(quote)) >= 12:
                assert quote not in prose, entry.id


@every_document
def test_formulas_belong_to_entries(id: str):
    entries = {entry.id: entry for entry in DOCUMENTS[id].entries}
    formulas = load_formulas(id)
    assert formulas.keys() <= entries.keys()
    assert {one for one in entries if entries[one].kind == Kind.FORMULA} <= formulas.keys()


def test_every_formula_is_stored_as_mathml():
    mathml = load_mathml()
    assert list(mathml) == list_formulas()
    assert len(mathml) > 50
    for latex, text in mathml.items():
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/1998/Math/MathML}math", latex
        words = "".join(root.itertext())
        assert "\\" not in words, f"{latex} is not converted: {words}"
        assert not HAN.search(words)


def test_stored_formulas_are_what_the_tool_writes():
    pytest.importorskip("latex2mathml")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import build_docs

        assert build_docs.stored_formulas() == build_docs.FORMULAS.read_text()
        sys.modules.pop("build_docs", None)


@every_document
def test_answers_of_exercises_are_checked_by_entries_of_their_section(id: str):
    for section in SECTIONS[id]:
        for exercise in section.exercises:
            assert exercise.entries
            assert {*exercise.entries} <= {*section.entries}
            if exercise.answer:
                assert "{" in exercise.answer.en, exercise.question.en


@every_document
def test_answers_are_filled_by_their_runs(id: str):
    entries = {entry.id: entry for entry in DOCUMENTS[id].entries}
    for section in SECTIONS[id]:
        for exercise in section.exercises:
            if exercise.answer:
                (only,) = exercise.entries
                numbers = entries[only].check().numbers
                for language in ("en", "zh"):
                    assert exercise.answer.fill(language, numbers) != exercise.answer.en


def test_the_questions_and_misconceptions_are_exercises():
    exercises = [exercise for section in SECTIONS["003"] for exercise in section.exercises]
    hidden = {id for exercise in exercises if exercise.answer is None for id in exercise.entries}
    named = [entry.id for entry in DOCUMENTS["003"].entries if entry.id[:5] in ("003-6", "003-7")]
    assert hidden == {*named}
    for id, sections in SECTIONS.items():
        assert [one.title.en for one in sections if not one.exercises] == [], id


def test_sections_that_texts_name_exist():
    """Such as 002 \u00a713, which pages make a link; the start page sends readers to them."""
    texts = [path.read_text("utf-8") for path in (ROOT / "src/headwise/learn").glob("*.toml")]
    named = {match for text in texts for match in re.findall(r"\b(00\d) \u00a7(\d+)", text)}
    assert ("002", "13") in named
    assert [one for one in named if int(one[1]) > len(SECTIONS[one[0]])] == []
    assert "What does this head do" in SECTIONS["002"][12].title.en
    assert "How many heads" in SECTIONS["002"][11].title.en
    assert "What several heads are for" in SECTIONS["001"][2].title.en
    assert SECTIONS["004"][2].entries[-1] == "004-2e"  # by hand
    assert "n^2" in SECTIONS["000"][1].text.en
    found = {entry.id for entry in find_entries("002 \u00a713")}
    assert found == {*SECTIONS["002"][12].entries}


# --- Pages ----------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Ids, tags, attributes and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.addresses.append(value or "")


def render(id: str, language: str) -> Page:
    """A page of a course."""
    pages = DocumentPages(list(DOCUMENTS.values()), language, "en")
    text = pages.render_document(DOCUMENTS[id], in_course=True)
    assert "default-src 'none'" in text
    return Page(text)


@pytest.fixture(params=["", "run();"], ids=["without script", "with script"])
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The built script of the pages; "" if it is not built."""
    path = tmp_path / "learn.js"
    if request.param:
        path.write_text(request.param)
    monkeypatch.setattr(sliders, "SCRIPT", path)
    return request.param


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("id", ["001", "004"])
def test_pages_are_complete(id: str, language: str, script: str):
    page = render(id, language)
    assert page.tags & {"script", "img", "iframe", "link"} == ({"script"} if script else set())
    assert not any(name.startswith("on") for name in page.attributes)
    assert {entry.id for entry in DOCUMENTS[id].entries} <= set(page.ids)
    assert {f"section-{n + 1}" for n in range(len(SECTIONS[id]))} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    own, other = (".html", ".zh.html") if language == "en" else (".zh.html", ".html")
    known = {f"{one}{own}" for one in DOCUMENTS} | {f"index{own}", f"{id}{other}"}
    known |= {f"index{own}#{part}" for part in START_PARTS}
    known |= {f"#{one}" for one in page.ids}
    known |= {f"{one.id}{own}#{entry.id}" for one in DOCUMENTS.values() for entry in one.entries}
    assert f"{id}{other}" in page.addresses
    others = {address for address in page.addresses if address not in known}
    cited = " ".join(entry.reference for entry in DOCUMENTS[id].entries)
    papers = {f"https://arxiv.org/abs/{one}" for one in re.findall(r"\b\d{4}\.\d{4,5}\b", cited)}
    assert papers <= others
    assert all(re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{4,5}", one) for one in others)
    assert {"math", "details", "nav", "section"} <= page.tags


def test_a_page_shows_the_source_of_its_runs_and_its_neighbours():
    order = list(load_covers())
    assert sorted(order) == list(MODULES)
    pages = DocumentPages(list(DOCUMENTS.values()), "en")
    document = DOCUMENTS["004"]
    text = pages.render_document(Document("004", document.title, document.entries[:1]), True)
    assert "def between_neighbours(" in text
    assert '<a class="next" href="000.html">' in text
    assert "index.html" in text
    assert "index.html" not in pages.render_document(document)


def test_texts_are_set_as_html():
    pages = DocumentPages([DOCUMENTS["004"]], "en")
    assert pages.set_text("a < b, *so*, `x * y`") == ("a &lt; b, <em>so</em>, <code>x * y</code>")
    assert pages.set_text("W_K^T, P_ij d_model^2 at 2^(-h)") == (
        "W<sub>K</sub><sup>T</sup>, P<sub>ij</sub> d<sub>model</sub><sup>2</sup> at 2<sup>-h</sup>"
    )
    assert pages.set_text("hw.fold_bias, seq_len, q_BTHK") == "hw.fold_bias, seq_len, q_BTHK"
    assert pages.set_text("see 004-2b.") == 'see <a href="004.html#004-2b">004-2b</a>.'
    assert pages.set_text("see 003-7.2, 2 * 3 * 4") == "see 003-7.2, 2 * 3 * 4"
    latex = "Q = XW_Q,\\quad K = XW_K,\\quad V = XW_V"
    assert 'display="block"' in pages.set_text(f"$${latex}$$")
    assert 'display="inline"' in pages.set_text("one input $X$")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_start_page_has_a_cover_for_every_document(language: str):
    text = DocumentPages(list(DOCUMENTS.values()), language).render_start()
    page = Page(text)
    assert page.addresses[0] == f"index.{'en' if language == 'zh' else 'zh'}.html"
    assert page.addresses[1:3] == [f"#{part}" for part in START_PARTS]
    assert {*START_PARTS} <= {*page.ids}
    covers = list(load_covers())
    assert page.addresses[3:8] == [f"{id}.html" for id in covers]
    assert covers[0] == "004"
    assert "004.html#section-3" in page.addresses[8:]
    for id, cover in load_covers().items():
        assert (cover.skill.zh if language == "zh" else cover.skill.en) in text, id
        assert f"{len(DOCUMENTS[id].entries)} " in text
    assert len(SECTIONS) == text.count("data-progress=")


def test_the_policy_allows_the_script_of_the_page_alone(script: str):
    text = DocumentPages([DOCUMENTS["004"]], "en").render_start()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f" script-src 'sha256-{digest}';" if script else ""
    rest = "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert policy == f"default-src 'none';{allowed} {rest}"
    assert text.count("<script>") == text.count(f"<script>{script}</script>") == bool(script)


def test_a_page_says_why_its_sliders_do_not_move(script: str):
    document = DOCUMENTS["004"]
    shown = [entry for entry in document.entries if entry.id == "004-2b"]
    for language, note in (("en", "run make web"), ("zh", "运行 make web")):
        pages = DocumentPages([document], language)
        text = pages.render_document(Document("004", document.title, tuple(shown)))
        assert (note in text) == (not script)
        assert text.count("data-slider=") == 1
        assert "45.4</dd>" in text  # the estimate at the start
