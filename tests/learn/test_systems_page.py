"""docs/systems.md: 57 systems of the documents, and a command for each that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwise import cli
from headwise.learn import catalogue

PAGE = Path(__file__).resolve().parents[2] / "docs" / "systems.md"
ROWS = re.findall(
    r"^\| (\d+) \| (.*?) \| `headwise (.*?)` \|$", PAGE.read_text("utf-8"), re.MULTILINE
)
# Entries of these rows take longer than a few seconds; tests of their own run them.
SLOW = {"002-FF.3", "002-FF.4", "003-4.2d", "002-FF.1"}


def test_there_are_57_rows_in_order():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 58))
    assert len({system for _, system, _ in ROWS}) == 57


@pytest.mark.parametrize("command", sorted({command for _, _, command in ROWS}))
def test_the_command_of_a_row_works(command: str, capsys: pytest.CaptureFixture[str]):
    verb, *arguments = command.split()
    if verb == "learn":
        entries = catalogue.find_entries(arguments[0])
        assert any(entry.run is not None for entry in entries)
        for entry in entries[:1]:
            if entry.id not in SLOW:
                assert entry.check().verdict == entry.verdict
    else:
        assert cli.main([verb, *arguments]) == 0
        assert capsys.readouterr().out
