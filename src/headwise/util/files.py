"""Crash-safe files: atomic writes, a lock per folder, and append-only JSON lines."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from .errors import SpecError

BLOCK = 1 << 20
LOCK = ".lock"
LOCK_SECONDS = 1.0  # a killed process may take as long to end
HOLDER = b"process "  # name of a lock, and how its contents begin
TEMPORARY = ".tmp"
TEMPORARY_NAME = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(TEMPORARY)}")


def write_atomically(path: Path | str, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write `data`, in one or several pieces, to a temporary file and rename it to `path` after
    syncing to disk.

    Readers see either the old or the complete new file. A failed write removes its temporary file.
    Raises OSError for devices, pipes and symbolic links, which the rename would replace.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/a", b"one")
    ...     os.listdir(folder), Path(folder, "a").read_bytes()
    (['a'], b'one')
    """
    path = Path(path)
    temporary = make_temporary_path(path)
    with explain_os_error(path):
        _refuse_special_file(path)
        delete_abandoned(path)
        try:
            with _write(temporary, [data] if isinstance(data, bytes) else data):
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def write_together(folder: Path | str, contents: Mapping[str, bytes]) -> None:
    """Write several files of a folder; none is replaced before all are on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_together(folder, {"a": b"1", "b": b"2"})
    ...     sorted(os.listdir(folder))
    ['a', 'b']
    """
    folder = Path(folder)
    temporary = {folder / name: make_temporary_path(folder / name) for name in contents}
    try:
        with ExitStack() as written:
            for path, data in zip(temporary, contents.values(), strict=True):
                with explain_os_error(path):
                    _refuse_special_file(path)
                    delete_abandoned(path)
                    written.enter_context(_write(temporary[path], [data]))
            with explain_os_error(folder):
                for path, new in temporary.items():
                    os.replace(new, path)
                sync_folder(folder)
    except BaseException:
        for new in temporary.values():
            with suppress(OSError):
                new.unlink()
        raise


def make_temporary_path(path: Path) -> Path:
    """Return a hidden path next to `path` for a file or folder that will replace it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


def _refuse_special_file(path: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")


@contextmanager
def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[None]:
    """Write a new file, which is locked within the context, so that no other process takes it for
    abandoned.
    """
    handle = _create_locked(path)
    try:
        for piece in pieces:
            _write_all(handle, piece)
        os.fsync(handle)
        yield
    finally:
        os.close(handle)


def _create_locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return handle
        os.close(handle)  # another process has deleted it before it was locked


def _write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data`, repeating os.write, which may write only a part of it."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(handle, remaining) :]


def sync_folder(path: Path) -> None:
    """Wait until a folder or a file is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explain_os_error(path: Path) -> Iterator[None]:
    """Re-raise an OSError with the path and a remedy in its message."""
    try:
        yield
    except OSError as error:
        raise explain_failed_write(error, path) from error


def explain_failed_write(error: OSError, path: Path | str) -> OSError:
    """Return an OSError with the path and a remedy in its message."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "make room and try again; existing files are intact"
        if full
        else "give a folder that can be written"
    )
    explained = OSError(f"{path} cannot be written: {error.strerror or error}; {remedy}")
    explained.errno = error.errno
    return explained


def is_leftover(path: Path) -> bool:
    """True if a file or folder is a lock or a temporary one of headwise, which a killed process may
    have left.

    >>> [
    ...     is_leftover(Path(name))
    ...     for name in ("notes.tmp", ".notes.tmp", ".model.toml.0123abcd.tmp")
    ... ]
    [False, False, True]
    """
    if path.name != LOCK:
        return TEMPORARY_NAME.fullmatch(path.name) is not None
    try:
        with os.fdopen(_open_own_file(path, os.O_RDONLY), "rb") as file:
            return _is_holder(file.read(len(HOLDER)))
    except OSError:
        return False


def _is_holder(content: bytes) -> bool:
    """True if the contents of a lock are ours; a process that was killed may have written a part of
    them.
    """
    return HOLDER.startswith(content[: len(HOLDER)])


def remove_leftovers(folder: Path | str) -> None:
    """Delete what killed writers have left; call it only while holding the folder's lock."""
    for path in Path(folder).glob(f".*{TEMPORARY}"):
        if TEMPORARY_NAME.fullmatch(path.name):
            delete_leftover(path)


def delete_abandoned(path: Path) -> None:
    """Delete the temporary files and folders that killed writers of `path` left next to it."""
    start = f".{path.name}."
    with suppress(OSError), os.scandir(path.parent) as entries:
        for name in [entry.name for entry in entries if entry.name.startswith(start)]:
            if TEMPORARY_NAME.fullmatch(name) and len(name) == len(start) + 8 + len(TEMPORARY):
                delete_leftover(path.with_name(name))


def delete_leftover(path: Path) -> None:
    """Delete a temporary file or folder, unless a running process has locked it."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        finally:
            os.close(handle)


def _open_own_file(path: Path, flags: int) -> int:
    """Open a regular file and return its handle; raises OSError for symbolic links, devices and
    pipes.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return handle


def read_text_file(path: Path | str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark; an error names the file and the
    line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(b"one\\ntwo \\xe9")
    ...     read_text_file(f"{folder}/a")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: .../a, line 2: byte 0xe9 is not UTF-8; ...
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"{path} cannot be read: {reason}; give a file that can be read") from None
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = data[error.start]
        source = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        fact = f"{path}, line {line}: byte {byte:#04x} is not UTF-8"
        raise SpecError(f"{fact}; convert the file, as in iconv -f {source} -t utf-8") from None


def read_json_file(path: Path | str) -> Any:
    """Return the document in a JSON file; an error names the file and the line."""
    try:
        return json.loads(read_text_file(path))
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{path}, line {error.lineno} is not JSON: {error.msg}; delete or correct the file"
        ) from None
    except RecursionError:
        raise SpecError(f"{path} is nested too deeply; delete or correct the file") from None


def sha256(path: Path | str) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


class FolderLock:
    """Exclusive lock for writing to a folder, which is created if missing; a second process gets a
    SpecError.

    The operating system releases the lock when its process ends, however it ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     FolderLock(folder).__enter__()
    Traceback (most recent call last):
    headwise.util.errors.SpecError: ... is being written by process ...; wait for it, or give
    another folder
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._handle = -1

    def __enter__(self) -> Self:
        path = self.folder / LOCK
        with explain_os_error(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = _open_own_file(path, os.O_RDWR | os.O_CREAT)
        try:
            self._acquire(handle)
        except BaseException:
            os.close(handle)  # releases the lock
            raise
        self._handle = handle
        return self

    def _acquire(self, handle: int) -> None:
        try:
            _wait_for_lock(handle)
        except OSError:
            holder = os.read(handle, BLOCK).decode(errors="replace").strip() or "another process"
            raise SpecError(
                f"{self.folder} is being written by {holder}; wait for it, or give another folder"
            ) from None
        if not _is_holder(os.pread(handle, len(HOLDER), 0)):
            raise SpecError(f"{self.folder / LOCK} is not a lock of headwise; give another folder")
        with explain_os_error(self.folder / LOCK):
            os.truncate(handle, 0)
            _write_all(handle, HOLDER + f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def _wait_for_lock(handle: int) -> None:
    """Lock a file; raise OSError if another process still holds it after `LOCK_SECONDS`."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOCK_SECONDS / 20)


class JsonLines:
    """An append-only file of JSON lines. `read_lines` skips a last line that was cut short by a
    crash.

    `append` passes a line to the operating system at once; `sync` waits until all lines are on
    disk.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with explain_os_error(self.path):
            self._handle = _open_own_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        with explain_os_error(self.path):
            _write_all(self._handle, _line(record))

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with explain_os_error(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of all complete lines of a JSON lines file; an empty list without a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_text('{"step": 1}\\n{"step": 2}\\n{"st')
    ...     read_lines(f"{folder}/a")
    [{'step': 1}, {'step': 2}]
    """
    path = Path(path)
    *complete_lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    records: list[dict[str, Any]] = []
    for number, line in enumerate(complete_lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise SpecError(
                f"{path}: line {number} is not JSON; delete the line or the file"
            ) from None
    return records


def write_lines(path: Path | str, records: list[dict[str, Any]]) -> None:
    """Replace the contents of a JSON lines file by these records."""
    write_atomically(path, b"".join(_line(record) for record in records))


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
