"""`headwise view`: bad input is one line with a remedy, found before a model is loaded or a server
started.
"""

from __future__ import annotations

import http.server
from pathlib import Path

import pytest

from headwise import cli
from headwise.observe.bundled_sample import TRACE


def run_refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    code = cli.main(["view", *argv])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def test_a_name_that_is_no_model(capsys: pytest.CaptureFixture[str]):
    message = run_refused(capsys, ["no where"])
    assert "there is no folder or file 'no where'; give a folder with a model, a Hub id" in message


@pytest.mark.parametrize("damage", ["cut short", "changed", "another version", "text"])
def test_a_damaged_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path, damage: str):
    data, path = TRACE.read_bytes(), tmp_path / "a.trace"
    damaged = {
        "cut short": data[: len(data) // 2],
        "changed": data[:-4] + bytes(4),
        "another version": data.replace(b'\\"schema\\": 1', b'\\"schema\\": 7'),
        "text": b"not a trace",
    }[damage]
    assert damaged != data
    path.write_bytes(damaged)
    message = run_refused(capsys, [str(path), "--no-browser"])
    assert "; " in message
    assert "a.trace" in message


def test_a_taken_port():
    from headwise.viewer.server import open_socket

    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        message = f"port {server.server_port} is taken; give another --port"
        with pytest.raises(ValueError, match=message):
            open_socket("127.0.0.1", server.server_port)
    with pytest.raises(ValueError, match="there is no address 'no host'"):
        open_socket("no host", 0)


FACTORIES = {
    "raises": (
        "def make():\n    raise RuntimeError('broken')",
        "make failed: RuntimeError: broken",
    ),
    "exits": ("import sys\nsys.exit(3)", "failed: SystemExit: 3"),
    "no model": ("def make():\n    return 3", "returned a int; it must return a torch.nn.Module"),
    "no function": ("x = 3", "has no function 'make'"),
}


@pytest.mark.parametrize("case", FACTORIES)
def test_a_factory_that_makes_no_model(capsys, tmp_path, case):
    code, message = FACTORIES[case]
    (tmp_path / "a.py").write_text(code)
    assert cli.main(["view", f"{tmp_path / 'a.py'}:make"]) == 2
    out, err = capsys.readouterr()
    ran, refused = err.splitlines()
    assert (out, ran) == ("", f"headwise: running make of {tmp_path / 'a.py'}")
    assert message in refused
