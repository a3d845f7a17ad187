"""File writing is atomic under every failure; one writer per folder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from headwise.util import files
from headwise.util.errors import SpecError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_the_written_file_exists(tmp_path: Path):
    files.write_atomically(tmp_path / "a", b"one")
    files.write_atomically(tmp_path / "a", b"two")
    assert contents(tmp_path) == {"a": b"two"}


def failing(times: int, call, error: Exception):
    """`call`, but the n-th time it is called it fails."""
    calls = []

    def failed(*args):
        calls.append(args)
        if len(calls) == times:
            raise error
        return call(*args)

    return failed


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace"])
def test_the_old_file_outlives_every_failure(tmp_path, monkeypatch, name):
    files.write_atomically(tmp_path / "a", b"old")
    monkeypatch.setattr(
        os, name, failing(1, getattr(os, name), OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(
        OSError, match=r"a cannot be written: No space left on device; make room"
    ) as excinfo:
        files.write_atomically(tmp_path / "a", b"new")
    assert excinfo.value.errno == errno.ENOSPC
    assert "\n" not in str(excinfo.value)
    assert contents(tmp_path) == {"a": b"old"}


def test_a_folder_that_cannot_be_synced_has_the_new_file_whole(tmp_path, monkeypatch):
    files.write_atomically(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", failing(2, os.fsync, OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error; give a folder that can be written"):
        files.write_atomically(tmp_path / "a", b"new")
    assert contents(tmp_path) == {"a": b"new"}


def test_a_file_reaches_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    order = []
    for name in ("write", "fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, call=call: (order.append(name), call(*args))[1]
        )
    files.write_atomically(tmp_path / "a", b"x")
    assert order == ["write", "fsync", "replace", "fsync"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", failing(1, os.fsync, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(tmp_path / "a", b"new")
    assert contents(tmp_path) == {}


def test_a_system_that_takes_little_at_a_time_gets_all(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    files.write_atomically(tmp_path / "a", b"0123456789")
    assert contents(tmp_path) == {"a": b"0123456789"}


def test_leftovers_are_swept(tmp_path: Path):
    own = {"a", "notes.tmp", ".hidden", ".notes.tmp", ".a.1234.tmp"}
    for name in (*own, ".a.0123abcd.tmp"):
        (tmp_path / name).write_bytes(b"")
    files.remove_leftovers(tmp_path)
    assert {*contents(tmp_path)} == own


@pytest.mark.parametrize(
    "write",
    [
        files.write_atomically,
        lambda path, data: files.write_together(path.parent, {path.name: data}),
    ],
)
def test_what_killed_writers_left_is_deleted_and_what_others_write_stays(tmp_path: Path, write):
    left, written, other = (
        tmp_path / f".{name}.tmp" for name in ("a.0123abcd", "a.89abcdef", "a.b.0123abcd")
    )
    for path in (left, written, other):
        path.write_bytes(b"cut")
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(tmp_path / "a", b"1")
        assert {*contents(tmp_path)} == {"a", written.name, other.name}
    write(tmp_path / "a", b"2")
    assert contents(tmp_path) == {"a": b"2", other.name: b"cut"}


def make_link(path: Path) -> None:
    path.with_name("victim").write_bytes(b"mine")
    path.symlink_to("victim")


@pytest.mark.parametrize("make", [make_link, os.mkfifo, lambda path: path.write_bytes(b"mine")])
def test_a_lock_writes_to_no_file_of_others(tmp_path: Path, make):
    make(tmp_path / files.LOCK)
    with pytest.raises(
        (OSError, SpecError), match=r"\.lock (cannot be written: it is|is not a lock of headwise)"
    ):
        files.FolderLock(tmp_path).__enter__()
    left = {path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert left <= {b"mine"}
    assert not files.is_leftover(tmp_path / files.LOCK)


def test_lines_are_appended_to_no_file_of_others(tmp_path: Path):
    make_link(tmp_path / "a.jsonl")
    with pytest.raises(OSError, match="it is a symbolic link"):
        files.JsonLines(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["open", "write", "fsync"])
def test_several_files_outlive_every_failure(tmp_path, monkeypatch, name):
    """The failure is at the second file, when the first is on disk under a temporary name."""
    old = {"a": b"1", "b": b"1"}
    files.write_together(tmp_path, old)
    calls = {"open": 2, "write": 2, "fsync": 2}[name]
    monkeypatch.setattr(
        os,
        name,
        failing(calls, getattr(os, name), OSError(errno.ENOSPC, "No space left on device")),
    )
    with pytest.raises(OSError, match=r"b cannot be written: No space left on device; make room"):
        files.write_together(tmp_path, {"a": b"2", "b": b"2"})
    assert contents(tmp_path) == old


def test_the_checksum_is_the_systems(tmp_path: Path):
    data = os.urandom(files.BLOCK + 17)
    (tmp_path / "a").write_bytes(data)
    assert files.sha256(tmp_path / "a") == hashlib.sha256(data).hexdigest()


HOLDER = """
import sys, time
from headwise.util.files import FolderLock
FolderLock(sys.argv[1]).__enter__()
print(flush=True)
time.sleep(60)
"""


def test_a_lock_names_its_holder_and_outlives_it_not(tmp_path: Path):
    """The second writer is told the process; once that is killed, the folder is free."""
    source = str(Path(files.__file__).parents[2])
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=-1, cwd=source)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(
        SpecError, match=f"is being written by process {holder.pid} on .*; wait for it"
    ):
        files.FolderLock(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with files.FolderLock(tmp_path):
        pass
    with files.FolderLock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / files.LOCK).read_text()


def test_a_lock_makes_its_folder(tmp_path: Path):
    with files.FolderLock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="cannot be written"):
        files.FolderLock(tmp_path / "file" / "b").__enter__()


def test_lines_are_read_back_but_for_a_torn_one(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for record in ({"step": 1}, {"step": 2, "loss": 0.1}):
        lines = files.JsonLines(path)
        lines.append(record)
        lines.sync()
        lines.close()
    assert files.read_lines(path) == [{"step": 1}, {"step": 2, "loss": 0.1}]
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    assert files.read_lines(path) == [{"step": 1}, {"step": 2, "loss": 0.1}]
    files.write_lines(path, files.read_lines(path)[:1])
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_wrong_line_inside_is_no_torn_one(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(SpecError, match="line 2 is not JSON"):
        files.read_lines(tmp_path / "a.jsonl")


def test_a_full_disk_is_reported_for_lines_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = files.JsonLines(tmp_path / "a.jsonl")
    monkeypatch.setattr(
        os, "write", failing(1, os.write, OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(OSError, match=r"a.jsonl cannot be written: No space left"):
        lines.append({"step": 1})
    lines.close()


def test_a_lock_waits_for_a_process_that_ends(tmp_path: Path):
    """A killed process holds its lock for some milliseconds."""
    released: list[float] = []

    def release() -> None:
        released.append(time.monotonic())
        holder.__exit__(None, None, None)

    holder = files.FolderLock(tmp_path)
    holder.__enter__()
    Timer(0.2, release).start()
    with files.FolderLock(tmp_path):
        assert released
        assert released[0] <= time.monotonic()
