"""The texts of the page: every key has an English and a Chinese text with the same values, and is
used.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "headwise" / "viewer" / "web" / "src"
ENTRY = re.compile(r'^  "?(?P<key>[\w .\-]+?)"?: \[(?P<texts>".*")\],$')
CHINESE = re.compile("[\u4e00-\u9fff]")
SAME_IN_BOTH = {
    "inspector.size",
    "written.logit",
    "step.normalise",
}


def read_texts() -> dict[str, list[str]]:
    """The texts of every key, in the order of the languages."""
    texts: dict[str, list[str]] = {}
    for path in sorted((SOURCES / "i18n").glob("texts_*.ts")):
        code = re.sub(
            r'\[\n\s+(".*"),\n\s+(".*"),\n\s+\],', r"[\1, \2],", path.read_text(encoding="utf-8")
        )
        lines = code.splitlines()
        begin = next(number for number, line in enumerate(lines) if line.startswith("export const"))
        for line in lines[begin + 1 : lines.index("} as const;")]:
            entry = ENTRY.match(line)
            assert entry, line
            assert entry["key"] not in texts, entry["key"]
            texts[entry["key"]] = json.loads(f"[{entry['texts']}]")
    return texts


def test_every_key_has_both_languages_with_the_same_values():
    texts = read_texts()
    assert len(texts) > 600
    for key, languages in texts.items():
        english, chinese = languages
        assert english, key
        assert chinese, key
        assert sorted(set(re.findall(r"\{\w+\}", english))) == sorted(
            set(re.findall(r"\{\w+\}", chinese))
        ), key


def test_chinese_texts_are_chinese():
    is_word = re.compile("[a-z]{3}")
    texts = {
        key: chinese for key, (english, chinese) in read_texts().items() if is_word.search(english)
    }
    assert {key for key, chinese in texts.items() if not CHINESE.search(chinese)} == SAME_IN_BOTH


def test_every_key_is_used():
    """By its name, or by the beginning of its name where the page adds the rest."""
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted([*SOURCES.rglob("*.ts*"), *SOURCES.parents[1].glob("*.py")])
        if "texts_" not in path.name
    )
    beginnings = {
        text.split("${")[0] for text in re.findall(r"`([A-Za-z]+\.[\w.]*\$\{[^`]*)`", code)
    }
    for prefix, names in re.findall(r'choices\("([\w.]+)", (\[[^\]]*\]|\w+)', code):
        if names.startswith("["):
            code += " ".join(f'"{prefix}{name}"' for name in json.loads(names))
        else:
            beginnings.add(prefix)
    unused = [
        key
        for key in read_texts()
        if f'"{key}"' not in code and not any(key.startswith(beginning) for beginning in beginnings)
    ]
    assert unused == []
