"""Files as bytes, text and lines, read in pieces; what is wrong with one is said with the place."""

from __future__ import annotations

import codecs
import difflib
import gzip
import os
import zlib
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import SpecError

CHUNK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"


def existing_path(path_text: str) -> Path:
    """The path of a regular file or a folder that exists."""
    path = Path(path_text)
    try:
        found = path.exists()
    except (OSError, ValueError) as error:  # a name that no file system takes: too long, or with a NUL
        raise SpecError(f"{path_text!r} cannot be a path: {error}; give that of a file or a folder") from None
    if not path_text or not found:
        beside = os.listdir(path.parent) if path_text and path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        remedy = f"did you mean {str(path.parent / close[0])!r}?" if close else "give a path that exists"
        raise SpecError(f"there is no file {path_text!r}; {remedy}")
    if not (path.is_file() or path.is_dir()):
        raise SpecError(f"{path_text} is neither a file nor a folder; give one that can be read again")
    return path


def existing_file(path_text: str) -> Path:
    """The path of a regular file that exists."""
    path = existing_path(path_text)
    if path.is_dir():
        raise SpecError(f"{path_text} is a folder; give the path of a file")
    return path


def list_files(folder: Path, suffixes: Collection[str], skipped_folders: Collection[str] = ()) -> list[Path]:
    """The files below a folder with one of these suffixes, by name; neither hidden ones nor those in `skipped`."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        named = [Path(root, name) for name in files if not name.startswith(".")]
        found += [path for path in named if path.suffix.lower() in suffixes and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def is_gzipped(path: Path) -> bool:
    """Whether a file is compressed with gzip, whatever its name says."""
    try:
        with path.open("rb") as file:
            return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    except OSError as error:
        raise _read_error(path, error) from None


def read_chunks(path: Path) -> Iterator[bytes]:
    """What a file holds, a piece at a time; of a compressed one, what was compressed."""
    try:
        with cast(BinaryIO, gzip.open(path) if is_gzipped(path) else path.open("rb")) as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(f"{path} is no whole gzip file: {error}; fetch it again") from None
    except OSError as error:
        raise _read_error(path, error) from None


def _read_error(path: Path, error: OSError) -> SpecError:
    return SpecError(f"{path} cannot be read: {error.strerror or error}; see to its permissions and its disk")


def read_text_chunks(path: Path) -> Iterator[str]:
    """The text of a file in UTF-8, a piece at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    fed = line = 0
    for piece in chain(read_chunks(path), [b""]):
        begun = fed - len(decoder.getstate()[0])  # where what the decoder looks at now begins
        fed += len(piece)
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            offset, at = begun + error.start, line + error.object[: error.start].count(b"\n") + 1
            fact = f"byte {error.object[error.start]:#04x} at offset {offset}, in line {at}"
            raise SpecError(f"{path} is no text in UTF-8: {fact}; convert it, say with iconv -t utf-8") from None
        if (nul := text.find("\0")) >= 0:
            offset, at = begun + len(text[:nul].encode()), line + text[:nul].count("\n") + 1
            fact = f"a NUL byte at offset {offset}, in line {at}"
            raise SpecError(f"{path} is binary or UTF-16, with {fact}; give plain text in UTF-8")
        line += text.count("\n")
        if text:
            yield text


def read_lines(path: Path) -> Iterator[str]:
    r"""The lines of a text file without their ends, "\n" or "\r\n"; a byte order mark is no part of the first."""
    rest: list[str] = []
    for n, piece in enumerate(read_text_chunks(path)):
        first, *more = (piece.removeprefix("\ufeff") if n == 0 else piece).split("\n")
        rest.append(first)
        for begun in more:
            yield "".join(rest).removesuffix("\r")
            rest = [begun]
    if last := "".join(rest).removesuffix("\r"):
        yield last


SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "val", "validation", "dev"), "test": ("test",)}


def find_splits(folder: Path, suffixes: Collection[str] = ("",)) -> dict[str, Path]:
    """What a folder holds for each split by its name: train.bin and val.bin, say, or folders named so."""
    found: dict[str, Path] = {}
    split_of = {f"{word}{end}": split for split, words in SPLIT_NAMES.items() for word in words for end in suffixes}
    for name in sorted(os.listdir(folder)):
        split = split_of.get(name, "")
        if split in found:
            raise SpecError(f"{folder} has {found[split].name} and {name}, both for {split}; keep one")
        if split:
            found[split] = folder / name
    if found and "train" not in found:
        raise SpecError(f"{folder} has {next(iter(found.values())).name}, but nothing named train; add it")
    return {split: found[split] for split in SPLIT_NAMES if split in found}
