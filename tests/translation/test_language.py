"""The language of the commands: how it is chosen, what a terminal without Chinese prints, and width
of Chinese text.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headwise.translation.language import choose_language, current_language, localise, use_language
from headwise.translation.terminal_text import (
    cut,
    heading_cell,
    label_cell,
    pad,
    paragraph,
    rule,
    text_width,
    wrap,
)

LOCALE_NAMES = (
    "LC_ALL",
    "LC_MESSAGES",
    "LANG",
    "PYTHONIOENCODING",
    "PYTHONUTF8",
    "PYTHONCOERCECLOCALE",
)


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `headwise` in an environment whose locale is set by the arguments alone."""
    inherited = {name: value for name, value in os.environ.items() if name not in LOCALE_NAMES}
    return subprocess.run(
        [sys.executable, "-m", "headwise", *argv],
        env=inherited | environment,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "environment", "language"),
    [
        ([], {}, "en"),
        (["cost", "mha"], {"LANG": "zh_CN.UTF-8"}, "zh"),
        (["cost", "mha"], {"LC_MESSAGES": "zh_TW", "LANG": "en_GB.UTF-8"}, "zh"),
        (["cost", "mha"], {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        (["cost", "mha", "--lang", "en"], {"LC_ALL": "zh_CN"}, "en"),
        (["cost", "--lang=zh", "mha"], {"LC_ALL": "de_DE.UTF-8"}, "zh"),
        (["cost", "--lang", "fr"], {"LANG": "zh_CN"}, "zh"),  # the parser reports the value
    ],
)
def test_the_option_decides_before_the_locale(
    argv: list[str], environment: dict[str, str], language: str
):
    assert choose_language(argv, environment) == language


def test_a_language_ends_with_its_context():
    with use_language("zh"):
        assert localise("  the text is empty") == "  文本为空"
        assert localise("a sentence that no one translated") == "a sentence that no one translated"
        with use_language("en"):
            assert localise("the text is empty") == "the text is empty"
    assert current_language() == "en"
    with (
        pytest.raises(ValueError, match="there is no language 'fr'; use one of en, zh"),
        use_language("fr"),
    ):
        pass


def test_chinese_takes_two_columns():
    with use_language("zh"):
        cells = [
            label_cell(name, 20) + heading_cell(number, 8)
            for name, number in (("parameters", "7"), ("x", "正确"))
        ]
    assert [text_width(cell) for cell in cells] == [28, 28]
    assert text_width(pad("键值缓存", 11)) == text_width(rule("键 ", 11)) == 11
    assert cut("注意力分数", 7) == "注意力…"
    lines = wrap(
        "多头注意力 multi-head attention 的每个头读取整个向量而不是其中的一段。" * 3,
        40,
        "  ",
        "    ",
    )
    assert max(map(text_width, lines)) <= 40 + 2  # a closing mark may stand beyond the margin
    assert [line[:4].strip() for line in lines[1:]] == ["" for _ in lines[1:]]


def test_english_paragraphs_wrap_as_before():
    assert paragraph("one two three", 8, "  ", "   ") == ["  one", "   two", "   three"]


# --- terminals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "begins", "environment", "encoding"),
    [
        (
            ["cost", "mha"],
            b"one layer, 1 row",
            {"PYTHONIOENCODING": "ascii", "LC_ALL": "zh_CN.UTF-8"},
            b"ascii",
        ),
        (
            ["cost", "--help"],
            b"usage: ",
            {"PYTHONIOENCODING": "latin-1", "LANG": "zh_CN"},
            b"latin-1",
        ),
        (
            ["cost", "--help"],
            b"usage: ",
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            b"ascii",
        ),
    ],
)
def test_a_terminal_without_chinese_gets_english_and_one_line(
    argv: list[str], begins: bytes, environment: dict[str, str], encoding: bytes
):
    done = run(*argv, "--lang", "zh", **environment)
    assert done.returncode == 0
    assert done.stdout.startswith(begins)
    assert done.stdout.isascii()
    (line,) = done.stderr.splitlines()
    assert (
        b"has no Chinese characters, so messages are in English; set PYTHONIOENCODING=utf-8" in line
    )
    assert encoding in line.replace(b"iso8859-1", b"latin-1").replace(
        b"ANSI_X3.4-1968", b"ascii"
    ).replace(b"us-", b"")


def test_a_chinese_encoding_that_is_not_utf_8_is_used():
    done = run("cost", "--help", LC_ALL="zh_CN.GBK", PYTHONIOENCODING="gbk")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("gbk").startswith("用法")


def test_quotes_that_cannot_be_shown_are_explained_once():
    done = run("learn", "C1.1", "--lang", "en", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"[x] 001-2" in done.stdout
    assert done.stdout.count(b"?") > 10
    assert done.stderr == (
        b"headwise: characters that ascii does not have are shown as ?; set "
        b"PYTHONIOENCODING=utf-8\n"
    )


def test_errors_are_chinese_where_they_can_be_shown():
    chinese = run("cost", "mha", "--batch", "x", LC_ALL="zh_CN.UTF-8", PYTHONIOENCODING="utf-8")
    assert chinese.returncode == 2
    assert "--batch 需要整数" in chinese.stderr.decode()
    english = run("cost", "mha", "--batch", "x", LC_ALL="zh_CN.UTF-8", PYTHONIOENCODING="ascii")
    assert english.returncode == 2
    assert b"--batch needs a whole number" in english.stderr


def test_commands_without_translations_stay_english():
    done = run("why", "nothing", LC_ALL="zh_CN.UTF-8", PYTHONIOENCODING="utf-8")
    assert done.returncode == 2
    assert done.stderr.isascii()
