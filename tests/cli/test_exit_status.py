"""How commands end: internal errors, panics of the tokenizers library, closed streams, SIGTERM."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import headwise as hw
from headwise import cli
from headwise.models.vocabulary import (
    ByteVocabulary,
    decode_tokens,
    encode_tokens,
    parse_tokenizer,
    read_tokenizer_file,
)
from headwise.util.errors import SpecError
from support.saved_models import GPT

COMMAND = [sys.executable, "-c", "import sys; from headwise.cli import main; sys.exit(main())"]
PANICS_ON = (
    "a" * 40 + "b"
)  # the regular expression below needs more steps for it than the library takes


def write_model(folder: Path) -> None:
    """A model of bytes whose tokenizer panics on some texts."""
    document: dict[str, Any] = json.loads(ByteVocabulary().document)
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, document["pre_tokenizer"]],
    }
    net = hw.build(hw.families.read_model_spec(GPT | {"n_positions": 64}), seed=0)
    net.usage = hw.ProcessorSpec(tokenizer=json.dumps(document))
    hw.save(net, folder)


class Panic(BaseException):
    """As the panics of libraries written in Rust: no Exception."""


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a\nb"),
        KeyError("x"),
        RecursionError("deep"),
        AssertionError(),
        Panic("index out of bounds"),
    ],
)
def test_an_internal_error_is_one_line_and_a_file(error, capsys, monkeypatch, tmp_path):
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run_command", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["why", "mha"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    found = re.fullmatch(
        rf"headwise: error of headwise itself: {type(error).__name__}:.*report it with (\S+)\n", err
    )
    assert found is not None
    report = Path(found[1]).read_text()
    assert f"headwise {hw.__version__}" in report
    assert "['why', 'mha']" in report
    assert "in fail" in report


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_one_line(capsys, monkeypatch):
    def fail(argv: list[str]) -> int:
        raise Unprintable

    monkeypatch.setattr(cli, "_run_command", fail)
    assert cli.main([]) == 3
    assert capsys.readouterr().err.startswith("headwise: error of headwise itself: Unprintable:")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "n" * 400),
            f"cannot use '{'n' * 300}…': file name too long; give a shorter name",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", b"a"),
            "cannot use 'a': permission denied; give a path that you may use",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "cannot go on: too many open files; allow more open files with ulimit -n",
        ),
        (OSError("a cannot be written: no; try b"), "a cannot be written: no; try b"),
    ],
)
def test_errors_of_the_system_have_a_path_and_a_remedy(error, line, capsys, monkeypatch):
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run_command", fail)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == f"headwise: {line}\n"


def test_warnings_and_records_are_lines_without_invisible_characters(tmp_path: Path):
    script = """
import logging, sys, warnings
from headwise import cli
def warn(argv):
    warnings.warn("a\\nb\\x1b[2J")
    logging.getLogger("any").warning("c %s", "\\x1b[2J")
    logging.getLogger("any").warning("%d", "d")
    return 0
cli._run_command = warn
sys.exit(cli.main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.stderr.splitlines()[:2] == ["headwise: a b\\x1b[2J", "c \\x1b[2J"]
    assert "\x1b" not in ran.stderr
    assert ran.returncode == 0


def test_a_full_temporary_folder_does_not_hide_the_error(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_run_command", lambda argv: {}["x"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert cli.main(["why"]) == 3
    assert "KeyError: 'x'; please report it\n" in capsys.readouterr().err


# --- tokenizers -----------------------------------------------------------------------------------


def broken(**parts: Any) -> str:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return json.dumps(
        {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": model, **parts}
    )


def test_panics_are_errors_about_one_text(tmp_path: Path):
    with pytest.raises(
        SpecError, match=r"the tokenizer cannot be built from its document: .*; give another"
    ):
        parse_tokenizer(
            broken(normalizer={"type": "Precompiled", "precompiled_charsmap": "EAAAAP//////////"})
        )
    decoder = parse_tokenizer(
        broken(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 9})
    )
    with pytest.raises(
        SpecError, match="the tokenizer cannot decode these ids: index out of bounds"
    ):
        decode_tokens(decoder, [0, 1])
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
    }
    processor = parse_tokenizer(broken(post_processor=template | {"special_tokens": {}}))
    with pytest.raises(SpecError, match="the tokenizer cannot encode this text: no entry found"):
        encode_tokens(processor, "ab")
    assert encode_tokens(Tokenizer.from_str(broken()), "ab").ids == [0, 1]
    (tmp_path / "a").write_text("{}")
    with pytest.raises(SpecError, match="is not a tokenizer document: Model missing"):
        read_tokenizer_file(tmp_path / "a")


def test_a_text_that_the_tokenizer_fails_on_is_one_line(tmp_path, capsys):
    write_model(tmp_path / "model")
    assert (
        cli.main(
            [
                "trace",
                str(tmp_path / "model"),
                "--text",
                PANICS_ON,
                "--out",
                str(tmp_path / "a.trace"),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert err.startswith("headwise: the tokenizer cannot encode this text: Onig")
    assert err.count("\n") == 1


# --- streams and signals --------------------------------------------------------------------------


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "closed", [c for n in (1, 2, 3) for c in itertools.combinations((0, 1, 2), n)]
)
@pytest.mark.parametrize("argv", [("--version",), ("spec", "--nothing")])
def test_closed_streams(closed: tuple[int, ...], argv: tuple[str, ...]):
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *COMMAND, *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    expected = 2 if 1 in closed or argv[0] == "spec" else 0
    assert ran.returncode == expected
    assert ran.stdout == (f"headwise {hw.__version__}\n" if expected == 0 else "")
    assert ran.stderr.count("\n") == (0 if 2 in closed or expected == 0 else 1)
    assert "Traceback" not in ran.stderr


@pytest.mark.lengthy
def test_a_full_output_is_one_line():
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 2
    assert (
        ran.stderr == "headwise: cannot go on: no space left on device; make room and try again\n"
    )


@pytest.mark.lengthy
def test_a_reader_that_leaves_is_silent():
    with subprocess.Popen(
        [*COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


SLEEPER = """
import sys, time
from headwise import cli
from headwise.util.output_paths import FolderKind, stage_folder
def sleep(argv):
    with stage_folder(argv[0], FolderKind("report", ("a",))):
        print("ready", flush=True)
        time.sleep(60)
cli._run_command = sleep
sys.exit(cli.main())
"""


@pytest.mark.lengthy
def test_sigterm_ends_with_143_and_leaves_nothing(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(Path(hw.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == b""
        assert process.wait() == 143
    assert list(tmp_path.iterdir()) == []


DELETER = """
import signal, sys, time
from headwise import cli
class Held:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)
def drop(argv):
    Held()
    time.sleep(60)
cli._run_command = drop
sys.exit(cli.main())
"""


@pytest.mark.lengthy
def test_sigterm_while_an_object_is_deleted_ends_the_command_too():
    """Python prints and drops an exception that __del__ raises."""
    environment = os.environ | {"PYTHONPATH": str(Path(hw.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", DELETER], capture_output=True, env=environment, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (143, b"")


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_training_ends_with_the_code_of_its_signal(number: int, code: int, tmp_path: Path):
    """Training handles both signals in the same way: it writes a checkpoint first."""
    argv = ["train", "copy", "--out", str(tmp_path / "run"), "--steps", "100000"]
    quick = (
        "precision=fp32",
        "attention=plain",
        "rows=padded",
        "compile=off",
        "evaluate_batches=1",
        "batch=4",
    )
    for setting in ("checkpoint_every=1", *quick):
        argv += ["--set", f"recipe.{setting}"]
    with subprocess.Popen(
        [*COMMAND, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # jobs of a shell ignore SIGINT
    ) as process:
        while not any(tmp_path.rglob("*.safetensors")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert "run the same command with --resume" in process.communicate(timeout=120)[1]
    assert process.returncode == code


def test_the_handler_of_sigterm_is_removed(capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before
