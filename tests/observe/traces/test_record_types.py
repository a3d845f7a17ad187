"""Typed readers: every value has the type and the range of its field, and a message names the
field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headwise as hw
from headwise.observe.traces import save_trace, trace_file
from headwise.util.errors import SpecError
from headwise.util.size_limits import Record
from support.refusals import refused_cases

VALUES = {
    "n": 3,
    "x": 0.5,
    "text": "a",
    "flag": True,
    "ints": [1, 2],
    "texts": ["a"],
    "rows": [{"n": 1}],
    "null": None,
}


def test_values_of_the_right_types_are_returned():
    record = Record("it", VALUES, "write another")
    assert (record.read_int("n"), record.read_number("x"), record.read_number("n")) == (3, 0.5, 3.0)
    assert (record.read_text("text"), record.read_bool("flag"), record.read_texts("texts")) == (
        "a",
        True,
        ("a",),
    )
    assert record.read_ints("ints", length=2) == (1, 2)
    assert [row.read_int("n") for row in record.read_records("rows")] == [1]
    assert (record.read_optional_int("null"), record.read_optional_number("missing")) == (
        None,
        None,
    )
    assert (record.read_int("missing", default=7), record.read_text("missing", "b")) == (7, "b")


@pytest.mark.parametrize(("read", "message"), refused_cases(__file__, "records", globals()))
def test_other_values_are_refused(read: Callable[[Record], object], message: str):
    with pytest.raises(SpecError) as excinfo:
        read(Record("it", VALUES, "write another"))
    assert str(excinfo.value).startswith(message)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, -(10**400), 1e300], ids=range(5))
def test_numbers_are_finite(value: Any):
    with pytest.raises(SpecError, match="is not a finite number"):
        Record("it", {"x": value}, "write another").read_number("x")


# --- Traces ---------------------------------------------------------------------------------------


def write_changed(path: Path, change: Callable[[Any], object]) -> Path:
    """Write a trace whose document was changed, with the right checksum."""
    source = Path(__file__).resolve().parents[2] / "hostile" / "seeds" / "generated.trace"
    text, _, mapped = trace_file._read_safetensors(source)
    document, arrays = json.loads(text), {name: np.array(array) for name, array in mapped.items()}
    change(document)
    text = json.dumps(document)
    metadata = {
        trace_file.DOCUMENT_KEY: text,
        trace_file.CHECKSUM_KEY: trace_file._compute_checksum(text, arrays),
    }
    save_file(arrays, path, metadata)
    return path


def set_call(**values: Any) -> Callable[[Any], None]:
    return lambda document: document["layers"][0]["calls"][0].update(values)


def set_layer(**values: Any) -> Callable[[Any], None]:
    return lambda document: document["layers"][0].update(values)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "far keys": (
        set_call(first=2**24),
        r"the end of the keys of layers\[0\]\.calls\[0\] = \d+ is too large; give 16777216",
    ),
    "negative queries": (
        set_call(queries=[-1, 2]),
        r"layers\[0\].calls\[0\].queries = -1 is too small; give 0 or more",
    ),
    "queries backwards": (set_call(queries=[2, 1]), "has queries 2 to 1"),
    "no call": (set_layer(calls=3), r"layers\[0\].calls = 3 is not a list"),
    "scale": (set_call(scale="a"), "scale = 'a' is not a finite number"),
    "causal": (set_call(causal=1), "causal = 1 is neither true nor false"),
    "grid": (set_call(grids=[99]), r"calls\[0\] refers to data that is not in the file"),
    "heads": (
        set_layer(heads=65537),
        r"layers\[0\].heads = 65537 is too large; give 65536 or less",
    ),
    "more heads": (set_layer(heads=60), "has shape .*, of 60 heads"),
    "head map": (set_layer(kv_head_of_query=[77]), "does not give one of"),
    "name": (set_layer(name=[]), r"name = \[\] is not a text"),
    "another field": (set_layer(other=1), "other is not known"),
    "streams": (lambda document: document.update(streams=[]), "streams is a list, not a table"),
    "skipped": (lambda document: document.update(skipped={"a": 1}), "skipped.a = 1 is not a text"),
    "classes": (lambda document: document.update(classes=[["a", "b", "c"]]), "head holds 'b'"),
    "pictures": (lambda document: document.update(thumbnails=["a"]), "has no tensor 'thumbnail.a'"),
    "depth": (
        lambda document: document.update(model={"a": json.loads("[" * 70 + "]" * 70)}),
        "nested too deeply",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_of_other_types_and_sizes_are_refused(tmp_path: Path, name: str):
    change, message = CHANGES[name]
    path = write_changed(tmp_path / "a.trace", change)
    with pytest.raises(SpecError, match=f"is not a valid trace: .*{message}"):
        hw.load_trace(path)


def test_an_unchanged_document_is_read(tmp_path: Path):
    assert hw.load_trace(write_changed(tmp_path / "a.trace", lambda document: None)).layers


@pytest.mark.parametrize(
    "change",
    [(1, 0, 0, 0), (0, 1, 0, 0), (0, -1, 0, 0), (0, 0, 1, 0), (0, 0, 0, -1), (0, 0, -3, 0)],
)
def test_thumbnails_have_the_size_of_their_layer(change: tuple[int, ...], tmp_path: Path):
    trace = hw.load_trace(write_changed(tmp_path / "a.trace", lambda document: None))
    layer = trace.layers[0]
    trace = trace.with_thumbnails(size=3)
    save_trace(trace, tmp_path / "b.trace")
    assert hw.load_trace(tmp_path / "b.trace").thumbnails[layer.name].shape == (
        *(2, layer.heads, 3, 3),
    )
    shape = [size + step for size, step in zip((2, layer.heads, 3, 3), change, strict=True)]
    save_trace(
        replace(trace, thumbnails={layer.name: np.zeros(shape, np.uint8)}), tmp_path / "c.trace"
    )
    with pytest.raises(SpecError, match=r"thumbnail\..* has shape .*, not"):
        hw.load_trace(tmp_path / "c.trace")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("none", (2, 4, 4, 3)), ("", (2, 0, 4, 3)), ("", (2, 4, 4, 2)), ("", (1, 4, 4, 3))],
)
def test_pictures_belong_to_the_trace(name: str, shape: tuple[int, ...], tmp_path: Path):
    trace = hw.load_trace(write_changed(tmp_path / "a.trace", lambda document: None))
    pictures = {name or trace.layers[0].key_stream: np.zeros(shape, np.uint8)}
    save_trace(replace(trace, images=pictures), tmp_path / "b.trace")
    with pytest.raises(SpecError, match="image for each row"):
        hw.load_trace(tmp_path / "b.trace")
    save_trace(replace(trace, thumbnails=pictures), tmp_path / "c.trace")
    with pytest.raises(SpecError, match="belongs to no layer"):
        hw.load_trace(tmp_path / "c.trace")
