"""The planted bugs still fit the source, and the machine that plants them tells caught from missed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mutate import ROOT, Bug, main, misfits
from planted import BUGS


def test_every_bug_fits_the_source():
    assert BUGS, "a list without bugs proves nothing"
    assert misfits(BUGS) == []


def test_a_patch_must_fit_exactly_once():
    bug = Bug("double", "x.py", old="a + b", new="a - b", tests=("house/test_planted.py",))
    assert bug.planted("return a + b") == "return a - b"
    for text in ("return b + a", "a + b + a + b"):
        with pytest.raises(ValueError, match=r"occurs [02] times"):
            bug.planted(text)


def test_misfits_are_all_named(tmp_path: Path):
    (tmp_path / "x.py").write_text("a + b")
    bugs = [
        Bug("same", "x.py", old="a + b", new="a + b", tests=("house/test_planted.py",)),
        Bug("gone", "absent.py", old="a", new="b", tests=("house/test_planted.py",)),
        Bug("gone", "x.py", old="a + b", new="a", tests=("house/absent.py::test_x",)),
    ]
    said = "\n".join(misfits(bugs, tmp_path))
    for reason in ("by the same text", "absent.py", "used twice", "no test file"):
        assert reason in said


def test_an_empty_list_fails(capsys: pytest.CaptureFixture[str]):
    assert main([], []) == 1
    assert "no bug is planted" in capsys.readouterr().err


def test_the_harmless_survive_and_the_harmful_are_caught(capsys: pytest.CaptureFixture[str]):
    text = (ROOT / "src" / "headwise" / "errors.py").read_text()
    doctests = ("house/test_house.py::test_doctests[headwise.errors]",)
    wrong = '\n\ndef wrong():\n    """\n    >>> 1 + 1\n    3\n    """\n'
    bugs = [
        Bug("harmless", "errors.py", old=text, new=text + "\n", tests=doctests),
        Bug("harmful", "errors.py", old=text, new=text + wrong, tests=doctests),
    ]
    assert main(bugs, []) == 1
    said = capsys.readouterr().out
    for line in (r"harmless +\d+ ms  SURVIVED", r"harmful +\d+ ms  caught", "1 of 2 caught"):
        assert re.search(line, said), said
