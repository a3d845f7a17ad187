"""Commands and their help, as a user sees them."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

import pytest

from headwise import cli


def run_command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Run a command; return its code, output and errors. Words after an option may be one string."""
    words: list[str] = []
    for word in argv:
        is_options = isinstance(word, str) and word.startswith("--")
        words += word.split() if is_options else [str(word)]
    code = cli.main(words)
    return (code, *capsys.readouterr())


def run_ok(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must succeed; return its output."""
    code, out, err = run_command(capsys, *argv)
    assert code == 0, err
    return out


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    """Run a command with --json, which must succeed; return its document."""
    return json.loads(run_ok(capsys, *argv, "--json"))


def printed(arguments: list[str]) -> str:
    """Return what a command prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return stream.getvalue()


def list_commands() -> list[str]:
    section = printed(["--help"]).split("commands:")[1].split("\n\n")[0]
    return re.findall(r"^  ([a-z]+) ", section, re.MULTILINE)
