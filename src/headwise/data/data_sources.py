"""Which adaptor reads what was named on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import SpecError, suggest
from . import image_arrays, images, jsonl, time_series, token_files
from .file_task import Brought
from .image_arrays import npz
from .language_modelling import STDLIB, Text
from .task_registry import TASKS, task
from .text_files import listed, of_splits, there

# What the end of a name says; .npz and folders are looked into.
SUFFIXES = {
    **dict.fromkeys((*Text.suffixes, ".text", ".log", ".tex", ".html", ".c", ".h", ".js", ".rs"), "text"),
    **dict.fromkeys(token_files.SUFFIXES, "tokens"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".tsv": "parallel",
}


def open_data(said: str, options: Mapping[str, Any] | None = None) -> Brought:
    """The task over data that a few words name: "stdlib", a file, a folder, or two aligned files with a comma between.

    What the name ends in chooses the adaptor; "parallel:cmn.txt" chooses another. `options` are the fields of the
    adaptor.

    >>> open_data("stdlib", {"length": 128})
    Text(path='stdlib', length=128)
    >>> open_data("image:digits")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no adaptor 'image'; did you mean 'images'?
    """
    name, colon, path = said.partition(":")
    if not (colon and len(name) > 1 and name.isalpha()):  # one letter is the drive of a path
        name, path = adaptor(said), said
    known = {name: kind for name, kind in TASKS.items() if issubclass(kind, Brought)}
    if name not in known:
        raise SpecError(f"there is no adaptor {name!r}; {suggest(name, known)}")
    values = {option: tuple(value) if isinstance(value, list) else value for option, value in (options or {}).items()}
    found = task(name, **({"path": _files(path) if name == "parallel" else path} | values))
    return cast(Brought, found)


def _files(path: str) -> str | tuple[str, ...]:
    """Two files, where a comma parts them."""
    return tuple(path.split(",")) if "," in path and not Path(path).exists() else path


def adaptor(said: str) -> str:
    """The name of the adaptor that what a name ends in, or what lies in a folder, asks for."""
    if said == STDLIB:
        return "text"
    if isinstance(_files(said), tuple):
        return "parallel"
    path = there(said)
    if path.is_dir():
        return _of_folder(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".npz":
        return "frames" if "frames" in npz(path) else "images"
    if "idx" in path.name and "ubyte" in path.name:
        return "images"
    if suffix not in SUFFIXES:
        raise SpecError(f"{said!r} does not say what it holds; say it, as in text:{said} or parallel:{said}")
    return SUFFIXES[suffix]


def _of_folder(folder: Path) -> str:
    """A folder is text, unless most of what lies in it is made for another adaptor."""
    if (folder / time_series.TABLE).is_file():
        return "frames"
    if len(of_splits(folder, token_files.SUFFIXES)) > 1:
        return "tokens"
    if len(of_splits(folder, jsonl.SUFFIXES)) > 1:
        return "jsonl"
    pictures, texts = (len(listed(folder, suffixes)) for suffixes in (image_arrays.SUFFIXES, Text.suffixes))
    return "images" if images.idx_files(folder) or pictures > texts else "text"
