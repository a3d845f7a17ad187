"""Chinese texts have one word for one idea: the words of the last table of docs/glossary.zh.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.zh.md"
SOURCES = [
    ROOT / "README.zh-CN.md",
    *sorted((ROOT / "docs").rglob("*.zh.md")),
    *sorted((ROOT / "src/headwise/learn").glob("*.toml")),
    ROOT / "src/headwise/learn/sample_tour.py",
    *sorted((ROOT / "src/headwise/viewer/web/src/i18n").glob("*.ts")),
    *sorted((ROOT / "tools").glob("*.py")),
]
HAN = re.compile("[\u4e00-\u9fff]")
CODE = re.compile(r"^```[^`]*^```$|^    .*\n|`[^`]*`", re.MULTILINE)
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def read_rows() -> list[list[str]]:
    """The cells of each row: the idea in English, its word, and the words that it replaces."""
    table = GLOSSARY.read_text("utf-8").partition("\n## Chinese words")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [row for row in rows if len(row) == 3 and row[0] not in ("word", "---")]


def chinese_texts(path: Path) -> list[str]:
    """The Chinese texts of a file, without code, without the quotes of the source documents and
    without the table of words.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return CODE.sub("", text).partition("\n## Chinese words")[0].splitlines()
    if path.suffix == ".toml":
        return [line for line in text.splitlines() if not line.startswith("quote")]
    return STRING.findall(text)


def wrong_words(texts: list[str]) -> list[str]:
    """Texts that have a replaced word, with the word to use."""
    replaced = {wrong: row[1] for row in read_rows() for wrong in row[2].split("、")}
    return [
        f"{wrong}: use {word} in {text.strip()}"
        for text in filter(HAN.search, texts)
        for wrong, word in replaced.items()
        if wrong in text
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_one_idea_has_one_word(path: Path):
    assert wrong_words(chinese_texts(path)) == []


def test_other_words_and_other_texts_are_told_apart():
    assert wrong_words(["每个词元的键值缓存", "KV 缓存", "in nats", "1.2 nats 的熵"]) == [
        "键值缓存: use KV 缓存 in 每个词元的键值缓存",
        "nats: use 纳特 in 1.2 nats 的熵",
    ]
    assert len(read_rows()) > 15
    texts = {path: chinese_texts(path) for path in SOURCES}
    assert sum(bool(HAN.search(text)) for lines in texts.values() for text in lines) > 1000
