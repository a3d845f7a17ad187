"""Which paths may be written, and folders that appear complete or not at all.

`check_output` is the only rule: a new path may be written, and a file or folder that headwise wrote
earlier may be replaced if the caller asks for it. Devices, symbolic links, and files and folders of
others are refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from .errors import SpecError
from .files import (
    delete_abandoned,
    delete_leftover,
    explain_failed_write,
    explain_os_error,
    is_leftover,
    make_temporary_path,
    sync_folder,
)

MARKER_BYTES = 4096  # markers are in the first or last bytes of a file
Existing = Literal["refuse", "overwrite", "continue"]


class FileKind(NamedTuple):
    """A kind of file that headwise writes: its name in messages, and bytes that identify it, one of
    `markers`.
    """

    name: str
    markers: tuple[bytes, ...]


class FolderKind(NamedTuple):
    """A kind of folder that headwise writes.

    - `name`: its name in messages.
    - `markers`: patterns of file names; a folder with such a file is of this kind.
    - `list_names`: patterns of all names in such a folder. Only a folder without other names may be
      replaced. None if
      the files are written one by one, so that other files may be in the folder too.
    """

    name: str
    markers: tuple[str, ...]
    list_names: Callable[[Path], Iterable[str]] | None = None


OutputKind = FileKind | FolderKind

# What a figure of headwise states about itself, by suffix: without dates, so that equal data gives
# an equal file.
FIGURE_METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": "headwise"},
    ".pdf": {"CreationDate": None, "ModDate": None, "Creator": "headwise"},
    ".png": {"Software": "headwise"},
}
FIGURE_FILE = FileKind(
    "figure", (b"<dc:title>headwise</dc:title>", b"/Creator (headwise)", b"Software\0headwise")
)


def check_output(path: Path | str, kind: OutputKind, existing: Existing = "refuse") -> Path:
    """Return `path` if an output of this kind may be written there; raise SpecError otherwise.

    A path without a file or folder may be written, and so may an empty folder. An output of the
    same kind is refused unless `existing` is "overwrite" or, for commands that add to their earlier
    output, "continue".

    >>> check_output("/dev/null", FileKind("trace", (b"x",)), "overwrite")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: cannot write to /dev/null: it is a device; give the path of a
    new file
    """
    name = os.fspath(path)
    form = "file" if isinstance(kind, FileKind) else "folder"
    if not name or "\0" in name:
        raise SpecError(
            f"cannot write to {name!r}: it is not a path; give the path of a new {form}"
        )
    target = Path(name)
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        fact = _parent_problem(target, kind)
    except OSError as error:
        fact = (error.strerror or str(error)).lower()
    else:
        fact = _existing_problem(target, status.st_mode, kind)
        if not fact and existing == "refuse" and not _is_empty_folder(target):
            raise SpecError(
                f"cannot write to {target}: it exists; add overwrite=True to replace it, "
                f"or give a new {form}"
            )
    if fact:
        raise SpecError(f"cannot write to {target}: {fact}; give the path of a new {form}")
    return target


def _parent_problem(target: Path, kind: OutputKind) -> str:
    """Why a new path cannot be created; "" if it can. Folders are created with their parents, files
    are not.
    """
    parent = target.absolute().parent
    if isinstance(kind, FileKind) and not parent.is_dir():
        return f"the folder {parent} does not exist"
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is not a folder"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"the folder {parent} is not writable"


def _existing_problem(target: Path, mode: int, kind: OutputKind) -> str:
    """Why a path that exists must not be replaced; "" if it is of this kind, or an empty folder."""
    if stat.S_ISLNK(mode):
        return f"it is a symbolic link to {os.readlink(target)}"
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return (
            "it is a device"
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
            else "it is a pipe or socket"
        )
    if isinstance(kind, FileKind):
        if stat.S_ISDIR(mode):
            return "it is a folder"
        return (
            ""
            if _has_marker(target, kind.markers)
            else f"it is a file, but not a {kind.name} of headwise"
        )
    return _folder_problem(target, kind) if stat.S_ISDIR(mode) else "it is a file"


def _has_marker(path: Path, markers: tuple[bytes, ...]) -> bool:
    with path.open("rb") as file:
        start = file.read(MARKER_BYTES)
        file.seek(max(0, path.stat().st_size - MARKER_BYTES))
        end = file.read()
    return any(marker in start or marker in end for marker in markers)


def _folder_problem(folder: Path, kind: FolderKind) -> str:
    names = _list_names(folder)
    if not names:
        return ""
    special = [name for name in names if _is_special(folder / name)]
    if special:
        return f"it contains {special[0]}, which is a link, device or pipe"
    if not any(fnmatchcase(*pair) for pair in product(names, kind.markers)):
        return f"it contains {names[0]}, and is not a {kind.name} of headwise"
    if kind.list_names is None:
        return ""
    patterns = tuple(kind.list_names(folder))
    foreign = [
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    return f"it contains {foreign[0]}, which is not part of a {kind.name}" if foreign else ""


def _is_special(path: Path) -> bool:
    """True if a name in a folder is a symbolic link, device, pipe or socket, through which a writer
    could leave it.
    """
    mode = os.lstat(path).st_mode
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _list_names(folder: Path) -> list[str]:
    """Return names in a folder, without the locks and temporary files of headwise."""
    return sorted(name for name in os.listdir(folder) if not is_leftover(folder / name))


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not _list_names(path)


# --- Folders that appear complete or not at all ---------------------------------------------------


@contextmanager
def stage_folder(
    path: Path | str, kind: FolderKind, existing: Existing = "refuse"
) -> Iterator[Path]:
    """Yield an empty folder to write to, which becomes `path` in one step if the block ends without
    an error.

    The folder is next to `path`, in a hidden folder that is deleted in the end. Until the last step
    `path` is unchanged, even if the process is killed. Hidden folders of killed processes are
    deleted by the next call for the same path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with stage_folder(f"{parent}/new", FolderKind("report", ("a",))) as folder:
    ...         _ = Path(folder, "a").write_text("1")
    ...         print(os.path.exists(f"{parent}/new"))
    ...     os.listdir(parent), os.listdir(f"{parent}/new")
    False
    (['new'], ['a'])
    """
    target = check_output(path, kind, existing).absolute()
    hidden = make_temporary_path(target)
    staged = hidden / target.name
    try:
        with explain_os_error(target):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
            delete_abandoned(target)
            # The handle holds a lock on the folder until it is closed or the process ends.
            hidden.mkdir()
            handle = os.open(hidden, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except BaseException:
                os.close(handle)
                raise
        try:
            staged.mkdir()
            yield staged
            check_output(target, kind, existing)
            with explain_os_error(target):
                _sync_tree(staged)
                _publish(staged, target)
                sync_folder(target.parent)
        finally:
            os.close(handle)
    except OSError as error:
        if error.strerror is not None:  # not explained yet
            error = explain_failed_write(error, error.filename or staged)
        raise OSError(str(error).replace(str(staged), str(target))) from error
    finally:
        try:
            shutil.rmtree(hidden, ignore_errors=True)
        except BaseException:  # Ctrl-C while it is deleted: delete the rest
            shutil.rmtree(hidden, ignore_errors=True)
            raise


def _sync_tree(folder: Path) -> None:
    """Wait until all files and folders are on disk, the files with the permissions of the user's
    other new files; libraries such as safetensors write some for their owner alone.
    """
    usual = folder.stat().st_mode & 0o666  # what the umask leaves, as in the new folder itself
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            mode = path.stat().st_mode
            if mode | usual != mode:
                path.chmod(mode | usual)
            sync_folder(path)
        sync_folder(Path(place))


def _publish(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`; a folder that exists there takes the place of `staged`, in the
    same step.
    """
    if not target.exists() or _is_empty_folder(target):
        for name in os.listdir(target) if target.exists() else ():
            delete_leftover(target / name)
        os.rename(staged, target)
    elif not _exchange(
        staged, target
    ):  # a system without this operation: two steps, and back if the second fails
        previous = staged.with_name("previous")
        os.rename(target, previous)
        try:
            os.rename(staged, target)
        except OSError:
            os.rename(previous, target)
            raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step; False if the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    try:
        if sys.platform == "darwin":
            return library.renamex_np(*names, 2) == 0  # RENAME_SWAP
        return (
            library.renameat2(-100, names[0], -100, names[1], 2) == 0
        )  # AT_FDCWD, RENAME_EXCHANGE
    except AttributeError:
        return False
