"""The command line: right answers, one clear line on bad input, no heavy import before it is
needed.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headwise as hw
from headwise import cli
from headwise.cli import arguments
from support import command_help


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return command_help.run_command(capsys, *argv)


def test_help_is_light():
    """Neither torch nor numpy is imported, also for commands that compute."""
    code = """if True:
        import sys
        from headwise.cli import main
        for command in ("run", "train"):
            try:
                main([command, "--help"])
            except SystemExit as ended:
                assert ended.code == 0
        main(["--help"])
        print(*{"torch", "numpy"} & set(sys.modules))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *result, last = ran.stdout.splitlines()
    assert last == ""
    assert max(map(len, result)) <= 80


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"headwise {hw.__version__}\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        ("spec", "gqa"),
        ("walk", "mha", "--batch", "2", "--tokens", "3"),
        ("why", "mla"),
    ],
)
def test_json_is_one_document(capsys, argv: tuple[str, ...]):
    code, out, err = run(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), dict)


def test_help_names_every_preset():
    assert list(hw.PRESETS) == arguments.PRESETS


def test_a_preset_comes_in_other_sizes(capsys):
    code, out, err = run(capsys, "spec", "moh", "--model 256 --heads 4 --toml")
    assert (code, err) == (0, "")
    assert hw.from_toml(out) == hw.design(preset="moh", model=256, heads=4)
    code, out, err = run(capsys, "spec", "moh", "--model 250")
    assert (code, out) == (2, "")
    assert "does not divide among 8 heads" in err


def test_sizes_of_a_file_are_its_own(capsys, tmp_path: Path):
    (tmp_path / "a.toml").write_text(str(hw.design(model=8, heads=2)))
    code, out, err = run(capsys, "spec", str(tmp_path / "a.toml"), "--heads 4")
    assert (code, out) == (2, "")
    assert "--heads is for presets" in err
    assert "--set heads.q=4" in err
    code, out, _ = run(capsys, "spec", str(tmp_path / "a.toml"), "--set heads.q=4 --set heads.kv=4")
    assert code == 0


@pytest.mark.parametrize("name", hw.PRESETS)
def test_pages_fit_a_terminal(capsys, name: str):
    for verb in ("spec", "why", "walk"):
        code, out, _ = run(capsys, verb, name)
        assert code == 0
        lines = [
            line for line in out.splitlines() if not line.startswith('pattern = "perhead(')
        ]  # TOML, to be pasted
        assert max(map(len, lines)) <= 80, verb


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        (("transformer-base",), "encoder.0.attention"),
        (("transformer-base", "--layer", "decoder.3.cross"), "decoder.3.cross"),
        (("vit-base",), "encoder.0.attention"),
    ],
)
def test_walk_follows_an_attention_of_a_named_model(capsys, argv: tuple[str, ...], place: str):
    code, out, _ = run(capsys, "walk", *argv, "--batch 2 --tokens 3")
    assert code == 0
    assert out.splitlines()[0] == f"{argv[0]}, {place}"
    width = 768 if argv[0] == "vit-base" else 512
    assert f"2 rows of 3 tokens, width {width}" in out
    assert (f"source              2 3 {width}" in out) == place.endswith("cross")


def test_a_spec_travels_through_a_file(capsys, tmp_path: Path):
    _, text, _ = run(capsys, "spec", "mla", "--set pattern=window(7) --toml")
    path = tmp_path / "layer.toml"
    path.write_text(text)
    data = json.loads(run(capsys, "spec", str(path), "--json")[1])
    assert data["spec"]["pattern"] == "window(7)"
    assert data["cache"]["keeps"] == {"first": 0, "last": 7}
    (tmp_path / "layer.json").write_text(json.dumps(data["spec"]))
    assert json.loads(run(capsys, "spec", str(tmp_path / "layer.json"), "--json")[1]) == data


def test_set_changes_one_thing(capsys):
    argv = (
        "spec",
        "gqa",
        "--set",
        "heads.kv=4",
        "--set",
        "modifiers.0.base=500000.0",
        "--set",
        "project.bias=qv",
    )
    data = json.loads(run(capsys, *argv, "--json")[1])
    expected = hw.design(preset="gqa", kv=4, bias="qv", modifiers=(hw.parts.Rotary(base=500000.0),))
    assert hw.from_json(json.dumps(data["spec"])) == expected
    assert data["counts"]["parameters"] == hw.costs.count_parameters(expected)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"\x00\xff\xfe", "not a text"),
        (b"model = = 3", "not TOML"),
        (b'{"model": ', "not JSON"),
        (b"", "the spec lacks"),
        (b"model = 8\nheads = 3", "give a table"),
        (b"a = " + b"[" * 5000, "nested too deeply"),
        (b"#" * 2**21, "too long"),
    ],
    ids=["binary", "toml", "json", "empty", "type", "deep", "long"],
)
def test_bad_files_are_one_line(capsys, tmp_path: Path, content: bytes, remedy: str):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    code, out, err = run(capsys, "spec", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert remedy in err


def test_a_folder_is_no_spec(capsys, tmp_path: Path):
    code, _, err = run(capsys, "why", str(tmp_path))
    assert code == 2
    assert "holds neither headwise.toml nor config.json" in err


def test_interrupted(capsys, monkeypatch: pytest.MonkeyPatch):
    def stop(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_command", stop)
    assert run(capsys, "why", "mha") == (130, "", "")


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert cli.main(["spec", "gqa"]) == 0
    sys.stdout.flush()
    sample = printed.getvalue().decode("ascii")
    assert "###.." in sample
    assert "?" not in sample
