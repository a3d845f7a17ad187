"""Tasks by name (`TASKS`, `make_task`), and file tasks by path (`open_data`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

from ...util.errors import SpecError, suggest
from . import images
from .algorithmic_tasks import CopyTask, GraphDistance, GroupProduct
from .date_translation import DateTranslation
from .file_task import FileTask
from .images import FrameClassification, ImageClassification
from .language_modelling import STDLIB, TextTask
from .recall_tasks import AssociativeRecall, MarkovChains, TwoKeyLookup
from .task import Task
from .text_files import existing_path, list_files, read_npz
from .translation import ParallelTextTask

# --- Tasks by name --------------------------------------------------------------------------------

TASKS: dict[str, type[Task]] = {
    "copy": CopyTask,
    "dates": DateTranslation,
    "frames": FrameClassification,
    "graph": GraphDistance,
    "group": GroupProduct,
    "images": ImageClassification,
    "lookup2": TwoKeyLookup,
    "markov": MarkovChains,
    "parallel": ParallelTextTask,
    "recall": AssociativeRecall,
    "text": TextTask,
}


def make_task(name: str, **options: Any) -> Task:
    """Create the task `name`; `options` are its fields.

    >>> make_task("recall", pairs=8, seed=1)
    AssociativeRecall(seed=1, pairs=8)
    >>> make_task("recal")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: there is no task 'recal'; did you mean 'recall'?
    """
    if name not in TASKS:
        raise SpecError(f"there is no task {name!r}; {suggest(name, TASKS)}")
    options_of_task = [field for field in fields(TASKS[name]) if field.init]
    names = [field.name for field in options_of_task]
    for option, value in options.items():
        if option not in names:
            raise SpecError(f"the task {name!r} has no option {option!r}; {suggest(option, names)}")
        if isinstance(value, tuple) and any(isinstance(item, (list, Mapping)) for item in value):
            raise SpecError(
                f"the option {option!r} of the task {name!r} holds lists or tables; give numbers "
                "or texts"
            )
    for field in options_of_task:
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in options:
            raise SpecError(f"the task {name!r} needs the option {field.name!r}; give it")
    return TASKS[name](**options)


# --- File tasks by path ---------------------------------------------------------------------------

# The adapter for each file suffix; .npz files and folders are chosen by their content.
TEXT_SUFFIXES = (*TextTask.suffixes, ".text", ".log", ".tex", ".html", ".c", ".h", ".js", ".rs")
ADAPTER_OF_SUFFIX = dict.fromkeys(TEXT_SUFFIXES, "text") | {".tsv": "parallel"}


def open_data(source: str, options: Mapping[str, Any] | None = None) -> FileTask:
    """Task over the data that `source` names: "stdlib", a file, a folder, or two aligned files
    joined by a comma.

    The file suffix chooses the adapter (the class that reads the data); a prefix, as in
    "parallel:cmn.txt", overrides it. `options` are the fields of the adapter.

    >>> open_data("stdlib", {"length": 128})
    TextTask(path='stdlib', length=128)
    >>> open_data("image:digits")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: there is no adapter 'image'; did you mean 'images'?
    """
    name, colon, path = source.partition(":")
    if not (colon and len(name) > 1 and name.isalpha()):  # a single letter is a Windows drive
        name = find_adapter(source)
        path = source
    adapters = {name: cls for name, cls in TASKS.items() if issubclass(cls, FileTask)}
    if name not in adapters:
        raise SpecError(f"there is no adapter {name!r}; {suggest(name, adapters)}")
    values: dict[str, Any] = {"path": _split_pair(path) if name == "parallel" else path}
    for option, value in (options or {}).items():
        values[option] = tuple(value) if isinstance(value, list) else value
    return cast(FileTask, make_task(name, **values))


def _split_pair(path: str) -> str | tuple[str, ...]:
    """Both paths of "a,b", unless a file of that name exists."""
    return tuple(path.split(",")) if "," in path and not Path(path).exists() else path


def find_adapter(source: str) -> str:
    """Return the name of the adapter for a source, from its suffix or from the content of the
    folder.
    """
    if source == STDLIB:
        return "text"
    if isinstance(_split_pair(source), tuple):
        return "parallel"
    path = existing_path(source)
    if path.is_dir():  # text, unless it has more images than texts
        files = list_files(path, {*images.IMAGE_SUFFIXES, *TextTask.suffixes})
        num_images = sum(file.suffix.lower() in images.IMAGE_SUFFIXES for file in files)
        return "images" if num_images > len(files) - num_images else "text"
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".npz":
        return "frames" if "frames" in read_npz(path) else "images"
    if suffix not in ADAPTER_OF_SUFFIX:
        raise SpecError(
            f"the suffix of {source!r} has no adapter; name one in front, as in text:{source} or "
            f"parallel:{source}"
        )
    return ADAPTER_OF_SUFFIX[suffix]
