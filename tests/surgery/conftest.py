"""Fixtures of the tests of surgery."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable

import pytest

from headwise.surgery.hf_export import load_check


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are tried in this process: one of their own takes seconds to begin."""

    def run_program(command: list[str]) -> load_check.LoadCheck:
        program, string_io = command[4].replace('sys.modules["headwise"] = None', ""), io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(string_io):
            patch.setattr(sys, "argv", ["-c", *command[5:]])
            exec(compile(program, "driver", "exec"), {})
        return judged(command, string_io.getvalue())

    judged = _judging(load_check._run_loader)
    monkeypatch.setattr(load_check, "_run_loader", run_program)


def _judging(function: Callable[[list[str]], load_check.LoadCheck]) -> Callable[[list[str], str], load_check.LoadCheck]:
    """What is made of the output of a process, without one."""

    def judged(command: list[str], value: str) -> load_check.LoadCheck:
        with pytest.MonkeyPatch.context() as patch:
            done = subprocess.CompletedProcess(command, 0, value, "")
            patch.setattr(load_check.subprocess, "run", lambda *_, **__: done)
            return function(command)

    return judged
