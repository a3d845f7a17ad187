"""Reading files as bytes, text, lines and arrays; errors name the file, the
line and the offset.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import os
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ...util.errors import SpecError

CHUNK_BYTES = 1 << 20
MAX_OTHER_FILES = 20_000
MAX_OTHERS_PER_FILE = 10  # above both, a folder is not one of data
GZIP_MAGIC = b"\x1f\x8b"
MAX_UNPACKED_BYTES = 4 * 2**30  # of a compressed file; a few megabytes can unpack to as much


def existing_path(path_text: str) -> Path:
    """Return the path of an existing regular file or folder; raises SpecError for anything else."""
    path = Path(path_text)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long for a file system, or with a NUL
        raise SpecError(
            f"{path_text!r} is not a valid path: {error}; give the path of a file or a folder"
        ) from None
    if not path_text or not exists:
        siblings = os.listdir(path.parent) if path_text and path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        remedy = "give a path that exists"
        if close:
            remedy = f"did you mean {str(path.parent / close[0])!r}?"
        raise SpecError(f"there is no file {path_text!r}; {remedy}")
    if not (path.is_file() or path.is_dir()):
        raise SpecError(
            f"{path_text} is neither a regular file nor a folder; save the data to a file first"
        )
    return path


def existing_file(path_text: str) -> Path:
    """Return the path of an existing regular file; raises SpecError for anything else."""
    path = existing_path(path_text)
    if path.is_dir():
        raise SpecError(f"{path_text} is a folder; give the path of a file")
    return path


def list_files(
    folder: Path, suffixes: Collection[str], skipped_folders: Collection[str] = ()
) -> list[Path]:
    """List files below a folder with one of these suffixes, sorted by name; hidden files and
    `skipped_folders` left out.

    Raises SpecError for the root of the file system, and for a folder with many other files: it is
    not a data folder, and walking it could take minutes.
    """
    if folder.resolve() == folder.resolve().parent:
        raise SpecError(f"{folder} is the root of the file system; give the folder with the data")
    paths: list[Path] = []
    num_others = 0
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in skipped_folders
        ]
        visible = [Path(root, name) for name in files if not name.startswith(".")]
        matches = [path for path in visible if path.suffix.lower() in suffixes and path.is_file()]
        paths += matches
        num_others += len(files) - len(matches)
        if num_others > max(MAX_OTHER_FILES, MAX_OTHERS_PER_FILE * len(paths)):
            raise SpecError(
                f"{folder} contains at least {num_others:,} files that are no data, and "
                f"{len(paths):,} that may be; give the folder with the data"
            )
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def is_gzipped(path: Path) -> bool:
    """True if a file is compressed with gzip, by its first bytes, not by its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    except OSError as error:
        raise _read_error(path, error) from None


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks, decompressed if it is a gzip file."""
    is_packed = is_gzipped(path)
    size = 0
    try:
        with cast(BinaryIO, gzip.open(path) if is_packed else path.open("rb")) as file:
            while piece := file.read(CHUNK_BYTES):
                size += len(piece) if is_packed else 0
                check_unpacked_size(path, size)
                yield piece
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(
            f"{path} is a damaged gzip file: {error}; download or create it again"
        ) from None
    except OSError as error:
        raise _read_error(path, error) from None


def check_unpacked_size(path: Path, size: int) -> None:
    """Raise SpecError if a compressed file holds more than `MAX_UNPACKED_BYTES`."""
    if size > MAX_UNPACKED_BYTES:
        raise SpecError(
            f"{path} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; unpack it, if you trust "
            "it, and give the unpacked file"
        )


def _read_error(path: Path, error: OSError) -> SpecError:
    return SpecError(
        f"cannot read {path}: {error.strerror or error}; check its permissions and its disk"
    )


def read_text_chunks(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_read = 0
    num_lines = 1
    for chunk in chain(read_chunks(path), [b""]):
        # The decoder may hold the first bytes of a character.
        start = bytes_read - len(decoder.getstate()[0])
        bytes_read += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line = num_lines + error.object[: error.start].count(b"\n")
            raise SpecError(
                f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset "
                f"{start + error.start}, in line {line}; convert it, for example with iconv -t "
                "utf-8"
            ) from None
        before, nul, _ = text.partition("\0")
        if nul:
            raise SpecError(
                f"{path} is binary or UTF-16, with a NUL byte at offset "
                f"{start + len(before.encode())}, in line {num_lines + before.count(chr(10))}; "
                "give plain text in UTF-8"
            )
        num_lines += text.count("\n")
        if text:
            yield text


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 file, without "\n" or "\r\n" at their ends and without a byte
    order mark.
    """
    parts: list[str] = []  # of the line that is being read
    for n, chunk in enumerate(read_text_chunks(path)):
        first, *following = (chunk.removeprefix("\ufeff") if n == 0 else chunk).split("\n")
        parts.append(first)
        for start in following:
            yield "".join(parts).removesuffix("\r")
            parts = [start]
    last = "".join(parts).removesuffix("\r")
    if last:
        yield last


SPLIT_NAMES = {
    "train": ("train",),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test",),
}


def find_splits(folder: Path) -> dict[str, Path]:
    """Return the folders of each split, found by their names, such as train and val."""
    split_of_name: dict[str, str] = {}
    for split, words in SPLIT_NAMES.items():
        split_of_name |= dict.fromkeys(words, split)
    paths: dict[str, Path] = {}
    for name in sorted(os.listdir(folder)):
        split = split_of_name.get(name, "")
        if split in paths:
            raise SpecError(
                f"{folder} has {paths[split].name} and {name}, both for the split {split!r}; keep "
                "one"
            )
        if split:
            paths[split] = folder / name
    if paths and "train" not in paths:
        raise SpecError(
            f"{folder} has {next(iter(paths.values())).name}, but nothing named train; add a "
            "train split"
        )
    return {split: paths[split] for split in SPLIT_NAMES if split in paths}


# --- Arrays ---------------------------------------------------------------------------------------

# What zipfile and numpy raise for damaged arrays: encrypted members, unknown methods, headers that
# are not Python, impossible shapes.
ARRAY_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    OSError,
    RuntimeError,
    MemoryError,
    KeyError,
    TypeError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,
)


def format_shape(shape: Iterable[int]) -> str:
    """Format a shape as text, "28 x 28"."""
    return " x ".join(map(str, shape))


@contextmanager
def _report_damage(path: Path, suffix: str, function: str) -> Iterator[None]:
    try:
        yield
    except SpecError:
        raise
    except ARRAY_ERRORS as error:
        reason = " ".join(str(error).split())
        raise SpecError(
            f"cannot read {path} as {suffix}: {reason}; write it again with {function}"
        ) from None


def read_npz(path: Path) -> dict[str, Any]:
    """Read the arrays of an .npz file, by name."""
    # np.load(path) would not close a damaged file.
    with _report_damage(path, ".npz", "numpy.savez"), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        members = archive.zip.infolist() if archive.zip else []
        check_unpacked_size(path, sum(member.file_size for member in members))
        return {name: archive[name] for name in archive.files}


def open_npy(path: Path) -> Any:
    """Memory-map the array of an .npy file."""
    with _report_damage(path, ".npy", "numpy.save"):
        return np.load(path, mmap_mode="r", allow_pickle=False)
