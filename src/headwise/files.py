"""Files that are never half written: whole or as before, whatever fails; one writer to a folder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from .errors import SpecError

BLOCK = 1 << 20
LOCK = ".lock"
TEMPORARY = ".tmp"


def write_atomically(path: Path | str, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Put `data`, one piece or several, there under another name, and rename it once it has reached the disk.

    Until the rename the old file is untouched; after it the new one is whole. What fails leaves no other name behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/a", b"one")
    ...     os.listdir(folder), Path(folder, "a").read_bytes()
    (['a'], b'one')
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    with _explain_os_error(path):
        try:
            _write(temporary, [data] if isinstance(data, bytes) else data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            _write_all(handle, piece)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    """All of it: one call may take less than it was given."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explain_os_error(path: Path) -> Iterator[None]:
    """What the system says, with the file it says it of and a remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room and go on; what was there before is whole" if full else "give a folder that can be written"
        refused = OSError(f"{path} cannot be written: {error.strerror or error}; {remedy}")
        refused.errno = error.errno
        raise refused from error


def remove_temporary_files(folder: Path | str) -> None:
    """Take away what a killed writer left under temporary names; only for who holds the lock."""
    for left in Path(folder).glob(f".*{TEMPORARY}"):
        left.unlink()


def sha256(path: Path | str) -> str:
    """The checksum of a file, as `sha256sum` prints it."""
    found = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


class FolderLock:
    """The right to write a folder, made where it is missing; whoever comes second is told who holds it.

    The system takes the lock back when its holder ends, however it ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     FolderLock(folder).__enter__()
    Traceback (most recent call last):
    headwise.errors.SpecError: ... is being written by process ...; wait for it, or give another folder
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._handle = -1

    def __enter__(self) -> Self:
        path = self.folder / LOCK
        with _explain_os_error(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take(handle)
        except BaseException:
            os.close(handle)  # and with it the lock
            raise
        self._handle = handle
        return self

    def _take(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(handle, BLOCK).decode(errors="replace").strip() or "another process"
            raise SpecError(
                f"{self.folder} is being written by {holder}; wait for it, or give another folder"
            ) from None
        with _explain_os_error(self.folder / LOCK):
            os.truncate(handle, 0)
            _write_all(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


class JsonLines:
    """A file of JSON lines that only grows, one document each. A line cut short by a crash is dropped by `read_lines`.

    `add` hands a line to the system at once; `sync` waits until all of them have reached the disk.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with _explain_os_error(self.path):
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line."""
        with _explain_os_error(self.path):
            _write_all(self._handle, _line(record))

    def sync(self) -> None:
        """Wait for the disk."""
        with _explain_os_error(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """Every whole line of a file of JSON lines; none where there is no file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_text('{"step": 1}\\n{"step": 2}\\n{"st')
    ...     read_lines(f"{folder}/a")
    [{'step': 1}, {'step': 2}]
    """
    path = Path(path)
    *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found: list[dict[str, Any]] = []
    for number, line in enumerate(whole, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise SpecError(f"{path}: line {number} is no JSON; take the line out, or the file away") from None
    return found


def write_lines(path: Path | str, records: list[dict[str, Any]]) -> None:
    """Put these lines in the place of all that the file had."""
    write_atomically(path, b"".join(_line(record) for record in records))


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
