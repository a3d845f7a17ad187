"""Hypothesis strategies of hostile documents: valid ones with wrong types, sizes and depths, and
damaged bytes.
"""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from headwise.attention.spec.serialization import format_toml
from headwise.util.escaping import shorten_message

# --- Values ---------------------------------------------------------------------------------------

SEEDS = Path(__file__).resolve().parent / "seeds"
DOCUMENTS: dict[str, Any] = json.loads((SEEDS / "documents.json").read_text())
NUMBERS, TEXTS = DOCUMENTS["numbers"], DOCUMENTS["texts"]
SCALARS = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.integers(),
)
KEYS = st.sampled_from(DOCUMENTS["keys"])
SMALL_TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def nest(depth: int, in_lists: bool) -> Any:
    """Return a value inside many lists or tables."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value


VALUES = st.one_of(
    SCALARS,
    SMALL_TREES,
    st.builds(nest, st.sampled_from((1, 5, 63, 64, 70, 200)), st.booleans()),
    st.lists(st.integers(-3, 70000), max_size=5),
    st.sampled_from(([], {}, [0] * 1000, ["a"] * 1000, [[]], [{}], {"a": {}}, [None])),
)

# --- Documents ------------------------------------------------------------------------------------

Keys = tuple[Any, ...]


def list_paths(tree: Any, path: Keys = ()) -> list[Keys]:
    """Return the paths of all values in a document."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(inner for key, value in items for inner in list_paths(value, (*path, key)))]


def change(tree: Any, path: Keys, operation: str, value: Any) -> Any:
    """Return a document with the value at a path replaced, removed, doubled, renamed, or with
    another one beside it.
    """
    if not path:
        return value if operation == "replace" else tree
    owner = tree
    for key in path[:-1]:
        owner = owner[key]
    key = path[-1]
    if operation == "replace":
        owner[key] = value
    elif operation == "remove":
        del owner[key]
    elif operation == "double" and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    elif operation == "rename" and isinstance(owner, dict):
        owner[f"{key}x"] = owner.pop(key)
    elif isinstance(owner, dict):
        owner["other" if operation == "add" else str(value)[:20]] = value
    else:
        owner.append(value)
    return tree


@st.composite
def hostile_trees(draw: st.DrawFn, seeds: Sequence[Any]) -> Any:
    """Draw a valid document with up to four changes; sometimes any small document."""
    if draw(st.integers(0, 19)) == 0:
        return draw(SMALL_TREES)
    tree = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from(list_paths(tree)))
        operation = draw(
            st.sampled_from(
                ("replace", "replace", "replace", "remove", "double", "rename", "add", "key")
            )
        )
        tree = change(tree, path, operation, copy.deepcopy(draw(VALUES)))
    return tree


@st.composite
def damaged_bytes(draw: st.DrawFn, seed: bytes, max_changes: int = 4) -> bytes:
    """Draw bytes with up to four places changed, removed or inserted, or the end cut off."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(0, max_changes))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("set", "insert", "remove", "cut", "double")))
        block = draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from((b"\xff" * 8, b"\0" * 8, b'"', b"[", b"}"))
        )
        if kind == "set":
            data[at : at + len(block)] = block
        elif kind == "insert":
            data[at:at] = block
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 20))]
        elif kind == "cut":
            del data[at:]
        else:
            data[at:at] = data[max(0, at - 40) : at]
    return bytes(data)


def to_json_text(tree: Any) -> str:
    """Return a document as JSON, with NaN and infinities as Python writes them; deep ones too."""
    return json.dumps(tree, ensure_ascii=False)


def to_toml_text(tree: Any) -> str:
    """Return a table as lines of TOML, as well as TOML can express it."""
    if not isinstance(tree, dict):
        return f"value = {_toml_value(tree)}"
    return "\n".join(
        f"{json.dumps(str(key))} = {_toml_value(value)}" for key, value in tree.items()
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(str(key))} = {_toml_value(item)}" for key, item in value.items()
            )
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return '"null"' if value is None else format_toml(value)


def texts_of(seeds: Sequence[Any], write: Any = to_json_text) -> st.SearchStrategy[str]:
    """Draw documents as text: mostly changed in their values, sometimes in their bytes."""
    damaged = st.one_of(
        [damaged_bytes(write(seed).encode("utf-8", "surrogatepass")) for seed in seeds]
    )
    return hostile_trees(seeds).map(write) | damaged.map(
        lambda data: data.decode("utf-8", "replace")
    )


# --- Outcomes -------------------------------------------------------------------------------------

REFUSALS = (ValueError, OSError, OverflowError)
MAX_MESSAGE = 2000  # characters that a command prints


class TookTooLong(BaseException):
    """An input that was not read within its time."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the main thread after some seconds."""

    def stop(signum: int, frame: object) -> None:
        raise TookTooLong(f"not read within {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def check_refusal(error: BaseException) -> None:
    """Raise AssertionError unless an error is a refusal in one line that says something."""
    message = str(error) or type(error).__name__
    assert message.strip(), type(error)
    assert "\n" not in shorten_message(message[:MAX_MESSAGE]), message
