"""The logic of the page in Node, without a browser: tests/viewer/logic/*.test.ts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import headwise.viewer

WEB = Path(headwise.viewer.__file__).with_name("web")
ESBUILD = WEB / "node_modules" / ".bin" / "esbuild"


def test_the_logic_of_the_page(tmp_path: Path):
    node = shutil.which("node")
    if node is None or not ESBUILD.exists():
        pytest.skip("needs node and the packages of the page: make web")
    source = Path(__file__).with_name("logic") / "logic.test.ts"
    bundle = tmp_path / "logic.test.mjs"
    options = ["--bundle", "--platform=node", "--format=esm", "--jsx=automatic"]
    options += ["--jsx-import-source=preact", f"--outfile={bundle}", "--log-level=warning"]
    environment = {**os.environ, "NODE_PATH": str(WEB / "node_modules")}
    subprocess.run([str(ESBUILD), str(source), *options], check=True, env=environment)
    found = subprocess.run([node, "--test", str(bundle)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
