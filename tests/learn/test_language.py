"""The language of `headwise learn`: how it is chosen, and what a terminal without Chinese prints."""

from __future__ import annotations

import io
import re
import sys

import pytest

from headwise import cli
from headwise.cli import arguments
from headwise.cli.arguments import terminal_language
from headwise.learn.language import NUMBER, current_language, localise, read_phrases, use_language

LOCALE_NAMES = ("LC_ALL", "LC_MESSAGES", "LANG")


def run(*argv: str, encoding: str, locale: str = "") -> tuple[int, bytes, bytes]:
    """Run a command with streams of an encoding; return its exit code, output and errors."""
    out, err = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        for name in LOCALE_NAMES:
            patch.delenv(name, raising=False)
        patch.setenv("LC_ALL", locale)
        patch.setattr(arguments, "_noted_encodings", set())  # as in a process of its own
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding, "backslashreplace"))
        code = cli.main(list(argv))
        sys.stdout.flush()
        sys.stderr.flush()
        return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("option", "environment", "language"),
    [
        (None, {}, "en"),
        (None, {"LANG": "zh_CN.UTF-8"}, "zh"),
        (None, {"LC_MESSAGES": "zh_TW", "LANG": "en_GB.UTF-8"}, "zh"),
        (None, {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ("en", {"LC_ALL": "zh_CN"}, "en"),
        ("zh", {"LC_ALL": "de_DE.UTF-8"}, "zh"),
    ],
)
def test_the_option_decides_before_the_locale(option, environment, language, monkeypatch):
    for name in LOCALE_NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal_language(option) == language


def test_a_language_ends_with_its_context():
    with use_language("zh"):
        assert localise("wrong") == "有误"
        assert localise("FLOPs per byte, batch 1 and 512") == "每字节 FLOPs，批量 1 和 512"
        assert localise("no such phrase") == "no such phrase"
        with use_language("en"):
            assert localise("wrong") == "wrong"
    assert current_language() == "en"
    with (
        pytest.raises(ValueError, match="there is no language 'fr'; use one of en, zh"),
        use_language("fr"),
    ):
        pass


def test_phrases_have_as_many_numbers_as_their_translations():
    for phrase, translation in read_phrases().items():
        assert phrase.count("#") == translation.count("#")
        assert NUMBER.search(phrase) is None


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_chinese_gets_english_and_one_line(encoding: str):
    code, out, err = run("learn", "--lang", "zh", encoding=encoding)
    assert code == 0
    assert out.startswith(b"Documents")
    lines = err.splitlines()
    assert b"has no Chinese characters, so texts are in English" in lines[0]
    assert b"set PYTHONIOENCODING=utf-8" in lines[0]


def test_a_chinese_encoding_that_is_not_utf_8_is_used():
    code, out, err = run("learn", encoding="gbk", locale="zh_CN.GBK")
    assert (code, err) == (0, b"")
    assert out.decode("gbk").startswith("文档")


def test_quotes_that_cannot_be_shown_are_explained_once():
    code, out, err = run("learn", "C1.1", "--lang", "en", encoding="ascii")
    assert code == 0
    assert b"[x] 001-2" in out
    assert out.count(b"?") > 10
    assert err == (
        b"headwise: characters that ascii does not have are shown as ?; set "
        b"PYTHONIOENCODING=utf-8\n"
    )


@pytest.mark.parametrize("command", ["cost", "heads", "view"])
def test_other_commands_and_their_errors_are_english(command: str):
    code, _, err = run(command, "mha", "--lang=zh", encoding="utf-8", locale="zh_CN.UTF-8")
    assert code == 2
    assert re.fullmatch(rb"headwise: .*--lang.*\n", err)
