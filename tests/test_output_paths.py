"""What may be written: every writing command against devices, links, others' files, and its own
earlier output.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from matplotlib.figure import Figure

import headwise as hw
from headwise import cli
from headwise.observe.traces import export_weights, save_trace
from headwise.observe.traces.import_export import trace_from_weights
from headwise.util import output_paths
from headwise.util.errors import SpecError
from headwise.util.output_paths import FileKind, FolderKind, check_output, stage_folder
from headwise.viewer.export_files import PageAssets, render_html
from support.command_help import list_commands, printed

REACHED = "the command got to its work"
PASSES, EXISTS = "", "it exists; add"
TEXT = FileKind("text", (b"ours",))
REPORT = FolderKind("report", ("a",), lambda folder: ("a", "b*"))


class Command(NamedTuple):
    """A writing command. Its inputs cannot be read, so that only a refusal of the output comes
    before that error.

    - `argv`: its arguments; OUT is the output, MODEL, TEXTS and TRACE are inputs that look right
      from outside.
    - `own`: writes an earlier output of this command to a path.
    - `continues`: it adds to its earlier output without --overwrite.
    """

    argv: tuple[str, ...]
    own: Callable[[Path], object]
    is_folder: bool = True
    continues: bool = False


def file(name: str, content: bytes | str) -> Callable[[Path], object]:
    """Writes a folder with one file."""

    def write(path: Path) -> None:
        path.mkdir()
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def save_weights(path: Path, **options: bool) -> None:
    export_weights(trace_from_weights([[[[[1.0]]]]], ["a"]), path, **options)


def save_trace_of_one(path: Path) -> None:
    save_trace(trace_from_weights([[[[[1.0]]]]], ["a"]), path)


def save_figure(path: Path, **options: bool) -> None:
    from headwise.costs.cost_report import save_plot

    save_plot({cost.name: cost for cost in hw.cost(hw.design(preset="gqa"))}, path, "kv", **options)


PAGE = render_html({}, "dates", PageAssets("", ""))
RECORD = json.dumps({"format": 1, "kind": "ours", "change": {}, "source": {}, "files": {}})
TEXTS = ("--data", "TEXTS")
PAIR = ("--clean", "a b", "--corrupt", "a c")
COMMANDS = {
    "trace --out": Command(
        ("trace", "MODEL", "--text", "a", "--out", "OUT"), save_trace_of_one, is_folder=False
    ),
    "trace --export": Command(("trace", "TRACE", "--export", "OUT"), save_weights, is_folder=False),
    "view --export": Command(
        ("view", "MODEL", "--export", "OUT"), lambda path: path.write_text(PAGE), is_folder=False
    ),
    "cost --plot": Command(("cost", "nowhere", "--plot", "OUT"), save_figure, is_folder=False),
    "circuit": Command(
        ("circuit", "MODEL", *PAIR, "--metric", "log_probability:a", "--out", "OUT"),
        save_figure,
        is_folder=False,
    ),
    "heads": Command(("heads", "MODEL", *TEXTS, "--out", "OUT"), file("heads.json", "{}")),
    "heads of a trace": Command(
        ("heads", "TRACE", "--draw", "L0H0", "--out", "OUT"), file("head-a-0-light.svg", "")
    ),
    "prune": Command(
        ("prune", "MODEL", *TEXTS, "--keep", "0.5", "--out", "OUT"), file("heads.json", RECORD)
    ),
    "prune --sweep": Command(
        ("prune", "MODEL", *TEXTS, "--sweep", "--out", "OUT"), file("curves.json", "{}")
    ),
    "convert": Command(
        ("convert", "MODEL", *TEXTS, "--kv", "1", "--out", "OUT"), file("heads.json", RECORD)
    ),
    "train": Command(
        ("train", "TEXTS", "--model", "MODEL", "--out", "OUT"),
        file("metrics.jsonl", ""),
        continues=True,
    ),
    "study": Command(
        ("study", "STUDY", "--out", "OUT"), file("study.json", '{"study": "a"}'), continues=True
    ),
    "learn": Command(("learn", "003-2.1", "--html", "OUT"), file("003.html", "")),
    "demo": Command(("demo", "--out", "OUT"), file("headwise.toml", ""), continues=True),
}
SUFFIXES = {
    "view --export": ".html",
    "cost --plot": ".svg",
    "circuit": ".svg",
    "trace --export": ".csv",
}
STUDY = Path(__file__).parents[1] / "studies" / "variants.toml"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "model").mkdir()
    (folder / "model" / "headwise.toml").write_text("format = 1\n")
    (folder / "texts.txt").write_text("one\ntwo\nthree\n")
    (folder / "a.trace").write_bytes(b"no trace")
    names = {"MODEL": "model", "TEXTS": "texts.txt", "TRACE": "a.trace"}
    return {word: str(folder / name) for word, name in names.items()} | {"STUDY": str(STUDY)}


INPUTS = dict[str, str]()


@pytest.fixture(autouse=True)
def fill_inputs(inputs: dict[str, str]) -> None:
    INPUTS.update(inputs)


@pytest.fixture
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"out{SUFFIXES.get(request.getfixturevalue('name'), '')}"


@pytest.fixture(autouse=True)
def no_work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands whose inputs exist end at their first piece of work."""
    if "name" not in request.fixturenames:
        return

    def stop(*_: object, **__: object) -> None:
        raise SpecError(REACHED)

    for target in (
        "headwise.learn.sample_tour.run_sample_tour",
        "headwise.studies.study_runner.run_study",
        "headwise.learn.document_page.DocumentPages.render_document",
    ):
        monkeypatch.setattr(target, stop)


def run(name: str, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The error of a command, which ends in one line; "" if it is about the input, so that the
    output was accepted.
    """
    words = {"OUT": str(out), "ELSEWHERE": str(out.with_name("elsewhere")), **INPUTS}
    code = cli.main([*(words.get(word, word) for word in COMMANDS[name].argv), *options])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured.err
    return captured.err if "cannot write to" in captured.err else ""


def make_foreign_file(path: Path, command: Command) -> None:
    path.write_text("mine")


def make_foreign_folder(path: Path, command: Command) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")


def make_link(path: Path, command: Command) -> None:
    target = path.with_name(f"target{path.suffix}")
    command.own(target)
    path.symlink_to(target)


def make_pipe(path: Path, command: Command) -> None:
    os.mkfifo(path)


def make_own_with_a_link(path: Path, command: Command) -> None:
    command.own(path)
    if command.is_folder:
        (path / ".lock").symlink_to(path.with_name("victim"))


def make_own_with_a_foreign_file(path: Path, command: Command) -> None:
    command.own(path)
    if command.is_folder:
        (path / "thesis.txt").write_text("mine")


STATES: dict[str, Callable[[Path, Command], None]] = {
    "link": make_link,
    "pipe": make_pipe,
    "foreign file": make_foreign_file,
    "foreign folder": make_foreign_folder,
}
FACTS = {
    "link": "it is a symbolic link to",
    "pipe": "it is a pipe or socket",
    "foreign folder": "it ",
}


def snapshot(path: Path) -> dict[str, object]:
    """What lies in a folder: kinds, contents and targets."""
    return {
        name.relative_to(path).as_posix(): (
            os.readlink(name)
            if name.is_symlink()
            else name.read_bytes()
            if name.is_file()
            else None
        )
        for name in sorted(path.rglob("*"))
    }


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_of_a_folder_have_the_usual_permissions(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        with stage_folder(tmp_path / "new", REPORT) as folder:
            (folder / "inner").mkdir()
            for path in (folder / "a", folder / "inner" / "b"):
                path.write_text("1")
            (folder / "a").chmod(0o600)  # as safetensors writes its files
            (folder / "inner" / "b").chmod(0o700)
    finally:
        os.umask(before)
    modes = [(tmp_path / "new" / name).stat().st_mode & 0o777 for name in ("a", "inner/b")]
    assert modes == [0o666 & ~umask, 0o700 | (0o666 & ~umask)]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for name, command in COMMANDS.items()
        for options in [(), *([] if command.continues else [("--overwrite",)])]
    ],
)
def test_what_is_not_ours_stays(name, state, options, out, capsys):
    command = COMMANDS[name]
    STATES[state](out, command)
    before = snapshot(out.parent)
    message = run(name, out, capsys, *options)
    assert FACTS.get(state, "it is a file") in message
    assert f"; give the path of a new {'folder' if command.is_folder else 'file'}" in message
    assert snapshot(out.parent) == before


@pytest.mark.parametrize(
    "name",
    [name for name in COMMANDS if name not in SUFFIXES],
)
def test_devices_stay(name: str, capsys: pytest.CaptureFixture[str]):
    device = Path("/dev/null")
    words = {"OUT": str(device), **INPUTS}
    assert cli.main([words.get(word, word) for word in COMMANDS[name].argv]) == 2
    assert "cannot write to /dev/null: it is a device" in capsys.readouterr().err
    assert device.is_char_device()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_earlier_output_is_replaced_on_request_only(name, out, capsys):
    command = COMMANDS[name]
    command.own(out)
    message = run(name, out, capsys)
    assert message == PASSES if command.continues else f"{EXISTS} --overwrite" in message
    if not command.continues:
        assert run(name, out, capsys, "--overwrite") == PASSES


@pytest.mark.parametrize("name", ["heads", "heads of a trace", "prune", "prune --sweep", "convert"])
def test_a_folder_with_files_of_the_user_is_not_replaced(name, out, capsys):
    make_own_with_a_foreign_file(out, COMMANDS[name])
    assert "it contains thesis.txt, which is not part of a" in run(name, out, capsys, "--overwrite")
    assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].is_folder])
def test_a_folder_with_a_link_is_not_written(name, out, capsys):
    """A writer that follows it would change what lies outside."""
    make_own_with_a_link(out, COMMANDS[name])
    (out.parent / "victim").write_text("mine")
    options = () if COMMANDS[name].continues else ("--overwrite",)
    assert "it contains .lock, which is a link, device or pipe" in run(name, out, capsys, *options)
    assert (out.parent / "victim").read_text() == "mine"


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].is_folder])
def test_temporary_files_of_others_stay(name: str, out: Path, capsys: pytest.CaptureFixture[str]):
    out.mkdir()
    for own in ("thesis.tmp", ".lock"):
        (out / own).write_text("mine")
    assert "it contains .lock, and is not a" in run(name, out, capsys)
    (out / ".lock").write_text("process 1 on a\n")
    (out / ".bench.json.0123abcd.tmp").write_text("cut")
    assert "it contains thesis.tmp, and is not a" in run(name, out, capsys)
    (out / "thesis.tmp").unlink()
    assert run(name, out, capsys) == PASSES


@pytest.mark.parametrize("state", ["link", "pipe", "foreign file"])
def test_the_folder_of_pages_is_a_folder(state, tmp_path, capsys):
    """Any folder may be that of `view --out`, because every model is a new folder inside."""
    STATES[state](tmp_path / "out", COMMANDS["prune"])
    assert cli.main(["view", "nowhere", "--out", str(tmp_path / "out")]) == 2
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_parent(name: str, out: Path, capsys: pytest.CaptureFixture[str]):
    """Folders are made with their parents; files need theirs, and none goes below a file."""
    message = run(name, out.parent / "missing" / out.name, capsys)
    assert (
        message == PASSES if COMMANDS[name].is_folder else "missing does not exist; give" in message
    )
    (out.parent / "file").write_text("mine")
    message = run(name, out.parent / "file" / out.name, capsys)
    assert (
        "file is not a folder; give" in message
        or "file does not exist; give" in message
        or "not a dir" in message
    )


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].is_folder])
def test_an_empty_folder_may_be_filled(name: str, out: Path, capsys: pytest.CaptureFixture[str]):
    out.mkdir()
    assert run(name, out, capsys) == PASSES


def test_every_command_with_an_output_is_in_the_table():
    """A command that takes a path to write to, but is not tested above, fails here."""
    writing: set[str] = set()
    for command in list_commands():
        options = printed([command, "--help-all"])
        if "--out" in options or "--overwrite" in options:
            writing.add(command)
    tested = {"trace", "view", "heads", "train", "study", "demo", "learn"}
    assert writing == {*tested, "prune", "convert", "cost", "circuit"}


# --- Python functions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "save", "kind"),
    [
        *((s, save_weights, "file of attention weights") for s in (".csv", ".json", ".npz")),
        *((s, save_figure, "figure") for s in (".svg", ".png", ".pdf")),
    ],
)
def test_a_file_is_replaced_by_its_kind_only(suffix, save, kind, tmp_path):
    path = tmp_path / f"a{suffix}"
    save(path)
    data = path.read_bytes()
    with pytest.raises(SpecError, match=f"{EXISTS} overwrite=True"):
        save(path)
    save(path, overwrite=True)
    assert path.read_bytes() == data
    if kind == "figure":
        Figure().savefig(path)
    else:
        path.write_bytes(b"mine")
    data = path.read_bytes()
    with pytest.raises(SpecError, match=f"it is a file, but not a {kind} of headwise"):
        save(path, overwrite=True)
    assert path.read_bytes() == data


def test_other_functions_refuse_a_folder_of_others(tmp_path: Path):
    from headwise.studies.study_report import write_report
    from headwise.surgery.hf_export.model_folder import write_model_folder
    from headwise.surgery.verification.verify import write_verification

    net = hw.build(
        hw.families.read_model_spec(
            {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
        )
    )
    make_foreign_folder(tmp_path / "mine", COMMANDS["prune"])
    before = snapshot(tmp_path)
    nothing: object = None
    writers: list[Callable[[Path], object]] = [
        lambda folder: hw.save(net, folder),
        lambda folder: hw.export(net, folder),
        lambda folder: write_model_folder(net, None, folder, {}),
        lambda folder: write_verification(nothing, folder),  # pyright: ignore[reportArgumentType] - it is not read
        lambda folder: write_report(nothing, folder),  # pyright: ignore[reportArgumentType] - it is not read
        lambda folder: hw.train(hw.data.make_task("copy"), out=folder),
    ]
    for write in writers:
        with pytest.raises(SpecError, match=r"it contains thesis\.txt, and is not a"):
            write(tmp_path / "mine")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_what_is_no_path(path: str):
    with pytest.raises(SpecError, match=r"cannot write to .*; give the path of a new file"):
        check_output(path, TEXT)


# --- folders that appear complete or not at all ---------------------------------------------------


def test_a_staged_folder_replaces_the_old_one_whole(tmp_path: Path):
    with stage_folder(tmp_path / "new", REPORT) as folder:
        (folder / "a").write_text("1")
        (folder / "b").write_text("1")
    with stage_folder(tmp_path / "new", REPORT, "overwrite") as folder:
        (folder / "a").write_text("2")
        assert (tmp_path / "new" / "a").read_text() == "1"
    assert snapshot(tmp_path) == {"new": None, "new/a": b"2"}


@pytest.mark.parametrize("system", ["linux", "no exchange", "mac"])
def test_a_block_that_fails_leaves_the_old_folder(tmp_path, system, monkeypatch):
    """The C library of Linux has no renamex_np of a Mac, as on file systems that cannot swap."""
    if system == "no exchange":
        monkeypatch.setattr(output_paths, "_exchange", lambda *_: False)
    if system == "mac":
        monkeypatch.setattr(sys, "platform", "darwin")
    for text in "12":
        with stage_folder(tmp_path / "new", REPORT, "overwrite") as folder:
            (folder / "a").write_text(text)

    def fail() -> None:
        with stage_folder(tmp_path / "new", REPORT, "overwrite") as folder:
            (folder / "a").write_text("3")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert snapshot(tmp_path) == {"new": None, "new/a": b"2"}


def test_ctrl_c_while_the_hidden_folder_is_deleted_leaves_none(tmp_path, monkeypatch):
    interrupts, rmdir = iter([KeyboardInterrupt]), os.rmdir

    def interrupted(path: str, *, dir_fd: int | None = None) -> None:
        for interrupt in interrupts:
            raise interrupt
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        stage_folder(tmp_path / "new", FolderKind("report", ("a",))) as folder,
    ):
        (folder / "a").write_text("1")
    assert os.listdir(tmp_path) == ["new"]


def test_a_folder_that_others_fill_meanwhile_is_theirs(tmp_path: Path):

    def write() -> None:
        with stage_folder(tmp_path / "new", REPORT) as folder:
            (folder / "a").write_text("1")
            make_foreign_folder(tmp_path / "new", COMMANDS["heads"])

    with pytest.raises(SpecError, match=r"it contains thesis\.txt"):
        write()
    assert snapshot(tmp_path) == {"new": None, "new/thesis.txt": b"mine"}


def test_an_error_of_the_disk_names_the_folder_and_not_the_hidden_one(tmp_path: Path):
    with (
        pytest.raises(OSError, match=f"{tmp_path}/new/b") as caught,
        stage_folder(tmp_path / "new", REPORT) as folder,
    ):
        (folder / "b" / "c").write_text("1")
    assert ".tmp" not in str(caught.value)


WRITER = """
import sys
from pathlib import Path
from headwise.util.output_paths import FolderKind, stage_folder
kind = FolderKind("report", ("a",), lambda folder: ("a", "b*"))
print("started", flush=True)
while True:
    with stage_folder(sys.argv[1], kind, "overwrite") as folder:
        for name in ("a", "b1", "b2", "b3"):
            (folder / name).write_text(sys.argv[2] * 1000)
"""


def kill_writers(folder: Path, kills: int) -> dict[str, bytes | None]:
    """Kill a process that replaces a folder again and again; each time the folder is whole, old or
    new.

    Returns what is left after one more.
    """
    random_delays = random.Random(0)
    for number in range(kills):
        letter = "xyz"[number % 3]
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), letter],
            stdout=subprocess.PIPE,
            env=os.environ,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(random_delays.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        if folder.exists():
            files = snapshot(folder)
            assert sorted(files) == ["a", "b1", "b2", "b3"]
            assert len({*files.values()}) == 1
    with stage_folder(folder, REPORT, "overwrite") as staged:
        (staged / "a").write_text("1")
    return dict(snapshot(folder.parent))


def test_a_kill_leaves_the_old_or_the_new_folder(tmp_path: Path):
    assert kill_writers(tmp_path / "out", 6) == {"out": None, "out/a": b"1"}


@pytest.mark.slow
def test_many_kills_leave_the_old_or_the_new_folder(tmp_path: Path):
    assert kill_writers(tmp_path / "out", 200) == {"out": None, "out/a": b"1"}
