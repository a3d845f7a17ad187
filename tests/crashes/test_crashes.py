"""Outputs of all commands that write outlive kills and full disks; `make slow` makes 500 kills and
fills 50 disks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="needs Linux and a C compiler",
)


def run_crashes(path: Path, *argv: str) -> dict[str, Any]:
    """The figures of a run; its failures are printed."""
    search = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "crashes", *argv, "--json", str(path)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": search}, check=False)
    return json.loads(path.read_text())


@pytest.mark.lengthy
def test_outputs_outlive_kills_and_full_disks(tmp_path: Path):
    names = [
        word for name in ("trace", "heads --draw", "prune", "train") for word in ("--only", name)
    ]
    figures = run_crashes(tmp_path / "figures.json", "--kills", "12", "--full-disks", "4", *names)
    assert [figures[kind]["failures"] for kind in ("kills", "full_disk")] == [0, 0]
    assert figures["kills"]["trials"] >= 10


@pytest.mark.slow
def test_outputs_outlive_500_kills_and_50_full_disks(tmp_path: Path):
    figures = run_crashes(tmp_path / "figures.json", "--kills", "500", "--full-disks", "50")
    assert [figures[kind]["failures"] for kind in ("kills", "full_disk")] == [0, 0]
    assert (figures["kills"]["trials"], figures["full_disk"]["trials"]) >= (500, 50)
