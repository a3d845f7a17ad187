"""The catalogue: every row of the sources has an entry, all texts are in both languages, and topics
are found.
"""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from headwise.learn import catalogue
from headwise.learn.catalogue import Text, Verdict
from headwise.learn.entry_text import (
    MARKS,
    Words,
    align_table,
    format_overview,
    plain_formula,
    wrap_page,
)
from headwise.learn.language import localise, use_language
from headwise.report.text import text_width

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = catalogue.load_entries()


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def texts() -> list[tuple[str, Text]]:
    named = [
        (f"{e.id} {kind}", text)
        for e in ENTRIES
        for kind, text in (("line", e.line), ("reason", e.reason_text))
    ]
    words = {"documents": catalogue.read_toml("words")["documents"]}
    return named + [
        (f"{table} {name}", Text(**text))
        for table, rows in words.items()
        for name, text in rows.items()
    ]


@pytest.mark.parametrize(("name", "text"), texts(), ids=[name for name, _ in texts()])
def test_both_languages(name: str, text: Text):
    assert text.en
    assert text.zh
    assert placeholders(text.en) == placeholders(text.zh)
    assert not re.search(r"[\u4e00-\u9fff，。；：（）]", text.en)
    if name.split()[0] not in ("kinds", "documents"):
        assert text.en.isupper() or text.en != text.zh


def test_ids_are_unique_and_in_the_order_of_their_document():
    ids = [entry.id for entry in ENTRIES]
    assert len(set(ids)) == len(ids)
    assert all(entry.id.startswith(f"{entry.document}-") for entry in ENTRIES)


def test_every_row_of_the_sources_has_an_entry():
    table = catalogue.read_toml("source_rows")
    named = {row for entry in ENTRIES for row in entry.rows}
    assert named == set(table["errata"]) | set(table["demands"]) | set(table["experiments"])
    assert {name: len(rows) for name, rows in table.items()} == {
        "errata": 64,
        "demands": 19,
        "experiments": 25,
    }


def test_every_experiment_has_something_to_run():
    for row in catalogue.read_toml("source_rows")["experiments"]:
        assert any(entry.run or entry.study for entry in catalogue.find_entries(row)), row


def test_rows_belong_to_their_document():
    for entry in ENTRIES:
        for row in entry.rows:
            assert not row.startswith("C") or row[1] == entry.document[2] or len(row) > 1


def test_quotes_are_short_and_chinese_or_formulas():
    assert [entry.id for entry in ENTRIES if not 2 <= len(entry.quote_zh) <= 160] == []


def test_facts_have_a_reference():
    assert [entry.id for entry in ENTRIES if entry.run is None and not entry.reference] == []
    assert sum(entry.run is None for entry in ENTRIES) <= len(ENTRIES) / 8


@pytest.mark.parametrize(
    "name", ["003", "003-7", "003-7.1", "softmax-scale", "C3.1", "c3.1", "B17", "D1a"]
)
def test_topics_are_found(name: str):
    found = catalogue.find_entries(name)
    assert found
    assert all(
        name in (entry.document, entry.topic)
        or entry.id.startswith(name)
        or name.lower() in map(str.lower, entry.rows)
        for entry in found
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("softmax-scael", "did you mean 'softmax-scale'?"),
        ("nothing", "headwise learn --list names all"),
    ],
)
def test_unknown_topics_name_the_nearest(name: str, hint: str):
    with pytest.raises(catalogue.UnknownTopic, match=re.escape(hint)):
        catalogue.find_entries(name)


def test_a_section_is_not_a_prefix_of_another():
    assert {entry.id for entry in catalogue.find_entries("003-7.5")} == {"003-7.5"}
    assert "003-2.2" not in {entry.id for entry in catalogue.find_entries("003-2.2b")}


# --- texts ----------------------------------------------------------------------------------------


def test_lines_fit_the_terminal():
    for text in (ENTRIES[0].line.zh * 3, ENTRIES[0].line.en * 3):
        lines = wrap_page(text, indent="    ")
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert max(map(text_width, lines)) <= 82  # closing marks may stand beyond the margin


@pytest.mark.parametrize(
    ("quote", "text"),
    [
        (r"\text{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right)V", "softmax(QK^T / √d_k)V"),
        (r"\sum_{j=1}^n (|q - k_j|)", "Σ_(j=1)^n (|q - k_j|)"),
        (
            r"PE_{(pos, 2i)} = \sin(pos/10000^{2i/d_{\text{model}}})",
            "PE_(pos, 2i) = sin(pos/10000^(2i/d_model))",
        ),
    ],
)
def test_formulas_are_plain_text(quote: str, text: str):
    assert plain_formula(quote) == text


def test_no_quote_keeps_a_command_of_latex():
    assert [
        entry.id for entry in ENTRIES if re.search(r"[\\{}]", plain_formula(entry.quote_zh))
    ] == []


def test_tables_are_aligned_by_width():
    lines = align_table("长度 | 1\na | 22").splitlines()
    assert [text_width(line.split("|")[0]) for line in lines] == [5, 5]


def test_every_topic_and_count_has_a_chinese_name():
    with use_language("zh"):
        for name in [
            *catalogue.list_topics(ENTRIES),
            *(f"2 {verdict.value}" for verdict in Verdict),
        ]:
            assert re.search("[\u4e00-\u9fff]", localise(name)), name


def test_a_chinese_word_finds_the_entries_that_have_it():
    found = {entry.id for entry in catalogue.find_entries("软寻址")}
    assert found == {entry.id for entry in ENTRIES if "软寻址" in entry.quote_zh + entry.line_zh}
    assert "003-6.1" in found
    assert len(found) < 3


def test_the_overview_repeats_the_language_in_its_commands():
    documents = catalogue.load_documents(["003"])
    commands = {
        language: re.findall("  headwise learn .*", format_overview(documents, language))
        for language in ("en", "zh")
    }
    assert len(commands["en"]) == 4
    assert commands["zh"] == [f"{command} --lang zh" for command in commands["en"]]
    lines = format_overview(documents, "zh").splitlines()
    assert [line for line in lines if text_width(line) > 80] == []


def test_rounding_errors_are_a_phrase_in_chinese():
    text = Text("apart by {a:.0e} ({b:.0e})", "相差 {a:.0e}（误差 {b:.0e}）")
    assert text.fill("zh", {"a": 1e-15, "b": 0.0}) == "相差不到 1e-12（误差不到 1e-12）"
    assert text.fill("zh", {"a": 1e-3, "b": 0.0}) == "相差 1e-03（误差不到 1e-12）"
    assert text.fill("en", {"a": 1e-15, "b": 2.0}) == "apart by <1e-12 (2e+00)"


def test_every_verdict_has_a_mark_and_a_word():
    assert set(MARKS) == set(Verdict)
    assert all(Words(language).verdict(verdict) for language in ("en", "zh") for verdict in Verdict)


@pytest.mark.parametrize("page", ["concepts", "questions"])
def test_chinese_pages_print_the_verdicts_of_the_command(page: str):
    text = (ROOT / "docs" / f"{page}.zh.md").read_text(encoding="utf-8")
    printed = re.findall(r"^- \*\*.*?\*\* \*(.*?)\*。.*`headwise learn", text, re.MULTILINE)
    assert printed
    assert set(printed) <= {Words("zh").verdict(verdict) for verdict in Verdict}


def test_chinese_entries_separate_items_as_chinese_does():
    assert [entry.id for entry in ENTRIES if ", " in Words("zh").reference(entry)] == []
    assert [entry.id for entry in ENTRIES if Words("en").reference(entry) != entry.reference] == []
    result = next(entry for entry in ENTRIES if "C3.13" in entry.rows).check()
    assert "1、7、13 个词元" in result.reason_zh
    assert "1, 7, 13 tokens" in result.reason_en


def test_an_unexpected_verdict_is_reported_with_its_numbers():
    from dataclasses import replace

    entry = next(entry for entry in ENTRIES if entry.id == "001-2")
    changed = replace(entry, run=lambda: entry.run(matrices=3))
    result = changed.check()
    assert result.verdict == "holds"
    assert "another verdict" in result.reason_en
    assert "wrong" in result.reason_en
    assert "one = " in result.reason_zh
