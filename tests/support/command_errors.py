"""Commands that are refused in one line and leave no file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from headwise import cli

FAST = ("--seconds", "0.05", "--length", "8")


def run_refused(
    capsys: pytest.CaptureFixture[str],
    verb: str,
    argv: Sequence[str],
    names: Mapping[str, Path],
    room: Path,
) -> str:
    """The error line of a refused command; names of folders are replaced by their paths."""
    out = [] if "--out" in argv else ["--out", str(room / "out")]
    argv_with_paths = [str(names.get(word, word)) for word in argv]
    defaults = [] if "--length" in argv else FAST
    code = cli.main([verb, *argv_with_paths, *out, *defaults])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert len(re.findall("\n", captured.err)) == 1
    assert not (room / "out").exists()
    assert not [path for path in room.iterdir() if path.name.startswith(".")]
    return captured.err
