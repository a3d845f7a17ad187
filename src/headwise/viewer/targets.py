"""Opening a model or a trace by name: what the command and `hw.view` show first, and what the page
opens in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..observe import bundled_sample
from ..observe.traces import load_trace
from ..util.errors import SpecError, suggest
from .model_actions import capture_image, capture_trace
from .model_worker import JobProgress, action, text
from .open_model import (
    MAX_TOKENS,
    ON_CPU,
    LoadingPlace,
    OpenModel,
    is_trace,
    list_openable,
    load_target,
    read_pruned_heads,
)

DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog because the dog is asleep."


class Target(NamedTuple):
    """A target to open: a name (None is the bundled sample), texts, the folder for new models
    (None: read-only), a model or trace to compare with, an image path for a vision model, where
    the model is loaded, and what gives it a tokenizer.
    """

    name: str | None = None
    text: Any = None
    source: str | None = None
    out: Path | None = None
    other: str = ""
    image: str = ""
    loading: LoadingPlace = ON_CPU
    prepare: Callable[[Any], Any] = lambda model: model


def open_target(target: Target) -> OpenModel:
    """Open a target by name. Traces, including the bundled sample's, open without torch."""
    opened = _open_name(target)
    opened.other = target.other
    opened.loading = target.loading
    named = [Path(name) for name in (target.name, target.other) if name and Path(name).exists()]
    parents = [path.resolve().parent for path in named]
    opened.folders = tuple(dict.fromkeys([*parents, *([target.out] if target.out else [])]))
    return opened


def _open_name(target: Target) -> OpenModel:
    if target.name is None and target.text is None and target.source is None:
        return _open_sample(target.out, target.loading)
    if target.name is not None and is_trace(target.name):
        return OpenModel(load_trace(target.name))
    from ..hub.model_names import find_model

    source = find_model(bundled_sample.MODEL if target.name is None else target.name)
    folder = str(source) if isinstance(source, Path) else ""
    opened = open_model(target.prepare(load_target(source, target.loading)), target)
    opened.target = folder
    opened.pruned = read_pruned_heads(folder)
    return opened


def open_model(model: Any, target: Target) -> OpenModel:
    """Run a model on the texts of a target and record its attention."""
    from ..observe.head_analysis.annotated_examples import GENERAL_TEXTS, read_lines

    text = "" if target.text is None else target.text  # a text, or token ids
    if isinstance(text, str) and not text and not target.source:
        text = DEFAULT_TEXT
    _check_inputs(model, target)
    if target.image:
        trace = capture_image(model, target.image)
    else:
        trace = capture_trace(model, text, target.source or "", MAX_TOKENS)
    opened = OpenModel(trace, model, output_folder=target.out, read_only=target.out is None)
    if isinstance(text, str) and not target.image and "source" not in trace.streams:
        opened.texts = tuple(read_lines(GENERAL_TEXTS))
    return opened


def _check_inputs(model: Any, target: Target) -> None:
    """Refuse to open a vision model without an image, and any other model with one."""
    from ..observe.head_analysis.image_examples import PatchLayout

    try:
        PatchLayout.from_model(model)
    except SpecError as error:
        if target.image:
            raise SpecError(f"cannot read --image {target.image}: {error}") from None
        return
    if not target.image:
        raise SpecError(f"cannot view {type(model).__name__} without an image; give --image FILE")


def _open_sample(out: Path | None, loading: LoadingPlace) -> OpenModel:
    """Open the bundled sample: trace and measures immediately, the model when first needed."""
    opened = OpenModel(bundled_sample.load_sample_trace(), output_folder=out, read_only=out is None)
    opened.load_model = partial(load_target, str(bundled_sample.MODEL), loading=loading)
    opened.table = bundled_sample.load_sample_table()
    opened.target = str(bundled_sample.MODEL)
    opened.texts = bundled_sample.TEXTS
    return opened


@action("open", name=text())
def open_other(model: OpenModel, progress: JobProgress, name: str) -> dict[str, Any]:
    """Show another model or trace of the listed ones, "" for the first; if it is open, the text
    that it was opened with.
    """
    openable = list_openable(model.folders)
    if name == model.opened_name and model.first_trace is not None:
        model.set_trace(model.first_trace)
    elif not name and model.first is not None:
        model.show(model.first)
    elif name not in openable:
        raise ValueError(f"cannot open {name!r}; {suggest(name, openable)}")
    else:
        other = open_target(
            Target(
                str(openable[name]), None, None, model.output_folder, model.other, "", model.loading
            )
        )
        other.opened_name = name
        model.show(other)
    return {"revision": model.revision}
