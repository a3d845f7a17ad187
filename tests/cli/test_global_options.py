"""Options of headwise itself: the environment report and completion in shells."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import headwise as hw
from headwise import cli


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_environment_names_every_dependency_and_its_version(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--version", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["headwise"] == hw.__version__
    assert report["packages"]["base"]["torch"] == metadata.version("torch")
    assert None not in report["packages"]["base"].values()
    assert {"gguf", "mt", "eval", "notebook", "bench", "ray", "triton", "site", "dev"} == set(
        report["packages"]
    ) - {"base"}


def test_a_missing_package_has_no_version(capsys, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: ["no-such-package; extra == 'hf'"])
    assert json.loads(run(capsys, "--version", "--json")[1])["packages"] == {
        "hf": {"no-such-package": None}
    }


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_lists_its_options(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--list-options"])
    listed = capsys.readouterr().out.split()
    assert ended.value.code in (0, None)
    assert {"--help", "--help-all"} < set(listed)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["he"], {"heads"}),
        (["heads", "--js"], {"--json"}),
        (["cost", "--cont"], {"--context"}),
        (["heads", "RE"], set()),
    ],
)
def test_bash_completes_commands_and_options(words: list[str], expected: set[str], tmp_path: Path):
    program = tmp_path / "headwise"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headwise "$@"\n')
    program.chmod(0o755)
    script = (
        f'eval "$(headwise --completion bash)"; COMP_WORDS=(headwise {" ".join(words)}); '
        f"COMP_CWORD={len(words)}; "
        '_headwise; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected
