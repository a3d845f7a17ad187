"""`headwise learn`: documents, topics, both languages, JSON, pages, and errors in one line."""

from __future__ import annotations

import html
import html.parser
import json
import re
from pathlib import Path

import pytest

from headwise import cli
from headwise.learn import entry_text, sliders
from headwise.learn.catalogue import load_documents, load_entries
from headwise.learn.document_page import DocumentPages
from headwise.learn.language import use_language
from headwise.learn.sliders import read_script
from headwise.report import plots
from headwise.report.render import to_json

WITH_FIGURES = {
    "000-1.2.3",
    "002-2.3c",
    "002-2.4",
    "002-2.6h",
    "002-2.6l",
    "002-3.2",
    "002-4.1",
    "003-2.2",
    "003-4.3d",
} | {"003-1.2b", "003-6.1"}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["learn", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "en_US.UTF-8")


def test_overview_names_documents_and_topics(capsys: pytest.CaptureFixture[str]):
    text = run(capsys)
    for document in load_documents():
        assert f"  {document.id}  {document.title.en}" in text
        assert f"{len(document.entries)} entries" in text
    assert "softmax-scale" in text


def test_list_names_every_entry_with_its_state(capsys: pytest.CaptureFixture[str]):
    lines = run(capsys, "--list").splitlines()
    for entry in load_entries():
        line = next(line for line in lines if line.split()[:1] == [entry.id])
        assert f" {entry.verdict.value} " in line
        assert entry.line_en in line


def test_an_entry_has_quote_verdict_and_reason(capsys: pytest.CaptureFixture[str]):
    text = run(capsys, "003-2.3b")
    assert text.startswith("[+] 003-2.3b  claim  holds")
    assert "「通常设置 d_k = d_v = d_model/h，保持计算复杂度不变」" in text
    assert "1,048,576 parameters" in " ".join(text.replace("    > ", "").split())


def test_a_document_begins_with_its_title(capsys: pytest.CaptureFixture[str]):
    lines = run(capsys, "004").splitlines()
    assert lines[0] == "004  What attention is: weighted look-up"
    assert lines[2].startswith("[+] 004-1  claim  holds")


def test_chinese_by_option_and_by_locale(capsys, monkeypatch):
    text = run(capsys, "003-2.3b", "--lang", "zh")
    assert "论断  成立" in text
    assert "个参数" in text
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert run(capsys, "003-2.3b") == text
    assert run(capsys, "003-2.3b", "--lang", "en") != text


def test_json_has_numbers(capsys: pytest.CaptureFixture[str]):
    (entry,) = json.loads(run(capsys, "C3.1", "--json"))
    assert entry["numbers"]["uniform"] == 0.25
    assert entry["state"] == "wrong"
    listed = json.loads(run(capsys, "--list", "--json"))
    assert [row["id"] for row in listed] == [entry.id for entry in load_entries()]
    assert all("numbers" not in row for row in listed)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("softmaxscale", "did you mean 'softmax-scale'?"),
        ("qqq", "headwise learn --list names all entries and topics"),
    ],
)
def test_unknown_topic_is_one_line(word: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["learn", word]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error


class Page(html.parser.HTMLParser):
    """Ids of articles and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.articles, self.addresses = [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.articles += [named["id"]] if tag == "article" else []
        self.addresses += [value for name, value in attrs if name in ("href", "src")]


def test_pages_are_complete_and_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = run(capsys, "004-5", "--html", str(tmp_path), "--lang", "zh")
    names = ("004.html", "004.en.html")
    assert text.split() == [word for name in names for word in ("已写出", str(tmp_path / name))]
    text = (tmp_path / "004.html").read_text()
    page = Page()
    page.feed(text)
    assert sorted(page.articles) == sorted(one.id for one in load_documents(["004"])[0].entries)
    assert {f"#{id}" for id in page.articles} < set(page.addresses)
    for address in page.addresses:
        assert address.startswith(("#", "004.html#")) or address == "004.en.html"
    assert text.count("<script") == bool(read_script())
    other = (tmp_path / "004.en.html").read_text()
    assert '<html lang="en">' in other
    assert 'href="004.html"' in other


def test_all_documents_come_with_a_start_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DocumentPages, "render_document", lambda *_: "")
    names = [
        Path(line.split()[1]).name for line in run(capsys, "--html", str(tmp_path)).splitlines()
    ]
    order = ("004", "000", "001", "003", "002", "index")
    assert names == [f"{name}{suffix}.html" for name in order for suffix in ("", ".zh")]
    page = Page()
    page.feed((tmp_path / "index.html").read_text())
    pages = [address for address in page.addresses if not address.startswith("#")]
    assert pages[:6] == ["index.zh.html", *names[:-2:2]]
    assert {one.partition("#")[0] for one in pages[6:]} < {*names}
    assert run(capsys, "--html", str(tmp_path), "--overwrite").count("\n") == 12
    assert run(capsys, "--html", str(tmp_path), "--overwrite", "--lang", "zh").count("\n") == 12
    assert (tmp_path / "index.en.html").is_file()
    assert not (tmp_path / "index.zh.html").exists()


def test_a_page_replaces_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The page of one document is written again; a course, which would lose pages, is refused."""
    monkeypatch.setattr(DocumentPages, "render_document", lambda *_: "new")
    page = tmp_path / "004.html"
    page.write_text("old")
    assert run(capsys, "004", "--html", str(tmp_path), "--overwrite").count("\n") == 2
    assert page.read_text() == "new"
    for name in ("000.html", "index.html"):
        other = tmp_path / name
        other.write_text("old")
        assert cli.main(["learn", "004", "--html", str(tmp_path), "--overwrite"]) == 2
        assert f"it contains {name}, which is not part of" in capsys.readouterr().err
        assert other.read_text() == "old"
        other.unlink()


@pytest.mark.parametrize("fonts", [(), ("DejaVu Sans Mono",)])
def test_a_missing_chinese_font_is_named_in_both_languages(fonts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "FALLBACK_FONTS", fonts)  # none of them has Chinese characters
    assert cli.main(["learn", "004", "--html", str(tmp_path)]) == 0
    page = (tmp_path / "004.html").read_text()
    for note in (
        "Install one, as the package fonts-noto-cjk",
        "请安装一种中文字体（例如软件包 fonts-noto-cjk）",
    ):
        assert page.count(note) == 1
    assert page.index("fonts-noto-cjk") < page.index("<article")
    assert "headwise: No font with Chinese characters is installed" in capsys.readouterr().err


def test_with_a_chinese_font_there_is_no_note(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(entry_text, "find_undrawable", lambda text: [])
    script = tmp_path / "learn.js"
    script.write_text("run();")
    monkeypatch.setattr(sliders, "SCRIPT", script)
    assert cli.main(["learn", "004", "--html", str(tmp_path / "pages")]) == 0
    assert "fonts-noto-cjk" not in (tmp_path / "pages" / "004.html").read_text()
    assert capsys.readouterr().err == ""


def test_a_missing_script_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sliders, "SCRIPT", tmp_path / "learn.js")
    monkeypatch.setattr(DocumentPages, "render_document", lambda *_: "")
    assert cli.main(["learn", "004", "--html", str(tmp_path / "pages")]) == 0
    assert "run make web and write the pages again" in capsys.readouterr().err


def test_every_figure_is_chinese():
    with use_language("zh"):
        entries = [
            entry for entry in load_entries() if entry.run is not None and entry.id in WITH_FIGURES
        ]
        figures = {entry.id: entry.check().figure for entry in entries}
    assert all(figures.values())
    for id, figure in figures.items():
        labels = re.findall(r'"((?:[^"\\]|\\.)*)"', to_json(figure))
        words = [
            text
            for text in labels
            if re.search("[a-z]{3,} [a-z]{3,}", text) or text in ("query", "key", "class")
        ]
        assert words == [], id
