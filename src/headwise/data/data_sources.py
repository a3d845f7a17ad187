"""Which adaptor reads what was named on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import SpecError, suggest
from . import image_arrays, images, jsonl, time_series, token_files
from .file_task import FileTask
from .image_arrays import read_npz
from .language_modelling import STDLIB, TextTask
from .task_registry import TASKS, make_task
from .text_files import existing_path, find_splits, list_files

# What the end of a name says; .npz and folders are looked into.
ADAPTER_OF_SUFFIX = {
    **dict.fromkeys((*TextTask.suffixes, ".text", ".log", ".tex", ".html", ".c", ".h", ".js", ".rs"), "text"),
    **dict.fromkeys(token_files.TOKEN_FILE_SUFFIXES, "tokens"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".tsv": "parallel",
}


def open_data(source: str, options: Mapping[str, Any] | None = None) -> FileTask:
    """The task over data that a few words name: "stdlib", a file, a folder, or two aligned files with a comma between.

    What the name ends in chooses the adaptor; "parallel:cmn.txt" chooses another. `options` are the fields of the
    adaptor.

    >>> open_data("stdlib", {"length": 128})
    TextTask(path='stdlib', length=128)
    >>> open_data("image:digits")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no adaptor 'image'; did you mean 'images'?
    """
    name, colon, path = source.partition(":")
    if not (colon and len(name) > 1 and name.isalpha()):  # one letter is the drive of a path
        name, path = find_adapter(source), source
    known = {name: kind for name, kind in TASKS.items() if issubclass(kind, FileTask)}
    if name not in known:
        raise SpecError(f"there is no adaptor {name!r}; {suggest(name, known)}")
    values = {option: tuple(value) if isinstance(value, list) else value for option, value in (options or {}).items()}
    found = make_task(name, **({"path": _split_pair(path) if name == "parallel" else path} | values))
    return cast(FileTask, found)


def _split_pair(path: str) -> str | tuple[str, ...]:
    """Two files, where a comma parts them."""
    return tuple(path.split(",")) if "," in path and not Path(path).exists() else path


def find_adapter(source: str) -> str:
    """The name of the adaptor that what a name ends in, or what lies in a folder, asks for."""
    if source == STDLIB:
        return "text"
    if isinstance(_split_pair(source), tuple):
        return "parallel"
    path = existing_path(source)
    if path.is_dir():
        return _adapter_of_folder(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".npz":
        return "frames" if "frames" in read_npz(path) else "images"
    if "idx" in path.name and "ubyte" in path.name:
        return "images"
    if suffix not in ADAPTER_OF_SUFFIX:
        raise SpecError(f"{source!r} does not say what it holds; say it, as in text:{source} or parallel:{source}")
    return ADAPTER_OF_SUFFIX[suffix]


def _adapter_of_folder(folder: Path) -> str:
    """A folder is text, unless most of what lies in it is made for another adaptor."""
    if (folder / time_series.LABEL_TABLE).is_file():
        return "frames"
    if len(find_splits(folder, token_files.TOKEN_FILE_SUFFIXES)) > 1:
        return "tokens"
    if len(find_splits(folder, jsonl.JSONL_SUFFIXES)) > 1:
        return "jsonl"
    pictures, texts = (
        len(list_files(folder, suffixes)) for suffixes in (image_arrays.IMAGE_SUFFIXES, TextTask.suffixes)
    )
    return "images" if images.find_idx_files(folder) or pictures > texts else "text"
