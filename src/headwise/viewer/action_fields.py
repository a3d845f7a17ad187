"""Fields of jobs: one table for each job, checked once, before it starts.

`action(kind, **fields)` registers a function as a job of the page. It is then called with the model,
the arguments of the job as JSON and its progress, and gets the values of its fields by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

from .model_worker import JobFunction, JobProgress
from .open_model import ABLATION_MODES, AblatedHead, OpenModel

ALL_JOBS: dict[str, JobFunction] = {}  # every job of the page by its kind
REQUIRED: Any = object()
Pair = tuple[str, int]  # the name of a site, and the number of a head


class Field(NamedTuple):
    """One field of a job: how its value is checked, its default, and its name in JSON if that is
    not the name of the argument; "*" is the whole of the arguments.
    """

    read: Callable[[OpenModel, str, Any], Any]
    default: Any = REQUIRED
    key: str = ""

    def get(self, model: OpenModel, name: str, arguments: Mapping[str, Any]) -> Any:
        """The value in the arguments of a job, or the default."""
        name = self.key or name
        value = arguments if name == "*" else arguments.get(name)
        if value is None and self.default is not REQUIRED:
            return self.default
        return self.read(model, name, value)


def action(kind: str, /, **fields: Field) -> Callable[[Callable[..., Any]], JobFunction]:
    """Register a function of a model, its progress and these fields as a job."""

    def register(function: Callable[..., Any]) -> JobFunction:
        @wraps(function)
        def run(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> Any:
            values = {name: field.get(model, name, arguments) for name, field in fields.items()}
            return function(model, progress, **values)

        ALL_JOBS[kind] = run
        return run

    return register


# --- Kinds of values ------------------------------------------------------------------------------


def check_range(name: str, value: int, low: int, high: int) -> int:
    """The integer; raises ValueError if it is not from `low` to `high`."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range; give {low} to {high}")
    return value


def integer(low: int, high: int, default: Any = REQUIRED) -> Field:
    """An integer from `low` to `high`."""

    def read(model: OpenModel, name: str, value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"{name}={value!r} is not an integer; give {low} to {high}")
        return check_range(name, value, low, high)

    return Field(read, default)


def number(default: Any = REQUIRED, low: float = -math.inf, high: float = math.inf) -> Field:
    """A finite number."""

    def read(model: OpenModel, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not (math.isfinite(value) and low <= value <= high):
            scope = f" from {low:g} to {high:g}" if math.isfinite(high) else ""
            raise ValueError(f"{name}={value!r} is not a number{scope}; give for example 0.5")
        return value

    return Field(read, default)


def flag() -> Field:
    """True or false; false by default."""

    def read(model: OpenModel, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is neither true nor false; give one of them")
        return value

    return Field(read, False)


def text(default: Any = "", key: str = "") -> Field:
    """A text."""

    def read(model: OpenModel, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{name} is of type {type(value).__name__}; give a text")
        return value

    return Field(read, default, key)


def choice(names: Sequence[str], default: Any = REQUIRED, key: str = "") -> Field:
    """One of several words."""

    def read(model: OpenModel, name: str, value: Any) -> str:
        if value not in names:
            raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(names)}")
        return value

    return Field(read, default, key)


def _read_lines(model: OpenModel, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or any(not isinstance(line, str) for line in value):
        raise ValueError(f"{name} must be a list of texts; give one text a line")
    lines: list[str] = []
    for part in value:
        lines += [line for line in part.splitlines() if line.strip()]
    return lines


def _read_heads(model: OpenModel, name: str, value: Any) -> list[AblatedHead]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list; give [site, head, mode, scale] for each head")
    heads: list[AblatedHead] = []
    for entry in value:
        if not isinstance(entry, list) or [type(part) for part in entry[:2]] != [int, int]:
            raise ValueError(f"{entry!r} is not an ablated head; give [site, head, mode, scale]")
        head = AblatedHead(model.site_name(entry[0]), *entry[1:4])
        if type(head.scale) not in (int, float) or not math.isfinite(head.scale):
            raise ValueError(f"the scale {head.scale!r} is not a number; give for example 0.5")
        if head.mode not in ABLATION_MODES:
            modes = ", ".join(ABLATION_MODES)
            raise ValueError(f"unknown ablation {head.mode!r}; use one of {modes}")
        heads.append(head._replace(scale=float(head.scale)))
    return heads


def _read_tokens(model: OpenModel, name: str, value: Any) -> dict[str, tuple[int, ...]]:
    streams = model.get_recorded().streams
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map a stream to positions; give {{'text': [0, 1]}}")
    tokens: dict[str, tuple[int, ...]] = {}
    for stream, positions in value.items():
        if stream not in streams or not isinstance(positions, list):
            raise ValueError(
                f"tokens of {stream!r} cannot be chosen; the streams are {', '.join(streams)}"
            )
        count = len(streams[stream][0].ids)
        wrong = [place for place in positions if type(place) is not int or not 0 <= place < count]
        if wrong:
            raise ValueError(
                f"the {stream} has {count} tokens, none at {wrong[0]!r}; give 0 to {count - 1}"
            )
        if positions:
            tokens[stream] = tuple(sorted(set(positions)))
    return tokens


def _read_classes(model: OpenModel, name: str, value: Any) -> dict[Pair, str]:
    shape = [int, int, str]
    entries = value if isinstance(value, list) else [value]
    if any(not isinstance(entry, list) or list(map(type, entry)) != shape for entry in entries):
        raise ValueError(f"{name} must be a list of [site, head, name]; give one for each head")
    too_long = [entry[2] for entry in value if not 0 < len(entry[2]) <= MAX_CLASS_CHARACTERS]
    if too_long:
        raise ValueError(
            f"{too_long[0][:20]!r} is not a name of a class; give 1 to {MAX_CLASS_CHARACTERS} "
            "characters"
        )
    return {(model.site_name(site), head): label for site, head, label in value}


MAX_CLASS_CHARACTERS = 60  # of the name of a class
MAX_SEED = 2**31 - 1
MOST = 10**6  # of a number without a limit of its own
LINES = Field(_read_lines, ())  # lines of text, without empty ones
HEADS = Field(_read_heads, ())  # ablated heads: [site number, head, mode, scale], the last two free
TOKENS = Field(_read_tokens, {})  # {stream: [positions]} where heads are ablated; none: everywhere
CLASSES = Field(_read_classes, {})  # [site number, head, name] for each head with a class
SEED = integer(0, MAX_SEED, 0)
