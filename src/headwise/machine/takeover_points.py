"""Take-over points: the sizes from which (or up to which) headwise's own paths are faster than
torch's.

`takeover_points.toml` holds those that were measured, by class of machine, and names the machine of
each. On a class without an entry, torch's path runs at every size: a kernel that was not timed
there is not preferred. Paths that run torch's own operations on fewer numbers have one entry for
all classes. A calibration of this very machine (`headwise bench --calibrate`) replaces the table,
for the number of threads that it was made with.

Calibrations are kept in the user's cache folder, in one file per number of threads. A file is used
only if it is of this processor, these instruction sets, this number of threads, and these versions
of headwise and torch; otherwise the reason is reported, and nothing is assumed.

The environment variable HEADWISE_MACHINE_CLASS selects the entries of a class by name and ignores
calibrations, for results that do not depend on the machine.
"""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .capabilities import MACHINE_CLASSES, MachineCapabilities, this_machine

NEVER_TEXT = "never"  # infinity, which JSON has no number for
FIELDS = ("processor", "instructions", "threads", "versions", "when", "points")


@dataclass(frozen=True)
class Calibration:
    """Measured take-over points of one machine; `when` is in seconds since 1970."""

    processor: str
    instructions: tuple[str, ...]
    threads: int
    versions: str
    when: float
    points: Mapping[str, float]

    def describe(self) -> str:
        """Date, threads and versions."""
        date = time.strftime("%Y-%m-%d", time.gmtime(self.when))
        return f"{date}, {self.threads} thread{'s' if self.threads > 1 else ''}, {self.versions}"

    def conflict(self, machine: MachineCapabilities, threads: int) -> str:
        """Why the calibration does not hold for this machine and number of
        threads; "" if it does.
        """
        if self.processor != machine.processor or self.instructions != machine.instructions:
            return f"is of another machine ({self.processor}, not {machine.processor})"
        if self.threads != threads:
            return f"was made with {self.threads} threads, not {threads}"
        if self.versions != installed_versions():
            return f"was made with {self.versions}, not {installed_versions()}"
        return ""


def installed_versions() -> str:
    """The versions that a calibration holds for."""
    try:
        own = version("headwise")
    except PackageNotFoundError:
        own = "unknown"
    return f"headwise {own}, torch {torch.__version__}"


def user_cache_folder() -> Path:
    """The folder of measurements and compiled kernels, which headwise can make again.

    It is `headwise` in $XDG_CACHE_HOME, or in ~/.cache. RuntimeError without a home folder.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "headwise"


def calibration_path(threads: int) -> Path:
    """The file of a number of threads; RuntimeError without a home folder."""
    return user_cache_folder() / f"calibration-{threads}-thread{'s' if threads > 1 else ''}.json"


def read_calibration(machine: MachineCapabilities, threads: int) -> tuple[Calibration | None, str]:
    """The calibration of this machine; or None, and why there is a file that is not used ("" if
    there is none).
    """
    try:
        path = calibration_path(threads)
        text = path.read_text()
    except FileNotFoundError:
        return None, _other_threads_note(machine, threads)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: no home folder
        return None, f"the calibration cannot be read: {error}"
    remedy = "it is not used; run headwise bench --calibrate"
    try:
        calibration = _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, f"the calibration in {path} is damaged; {remedy}"
    conflict = calibration.conflict(machine, threads)
    return (
        (None, f"the calibration in {path} {conflict}; {remedy}") if conflict else (calibration, "")
    )


def write_text_of(calibration: Calibration) -> str:
    """The calibration as the text of its file."""
    points = {
        name: NEVER_TEXT if math.isinf(size) else size for name, size in calibration.points.items()
    }
    return json.dumps(asdict(calibration) | {"points": points}, indent=1) + "\n"


def _other_threads_note(machine: MachineCapabilities, threads: int) -> str:
    """A note about calibrations of this machine that were made with other numbers of threads."""
    others = []
    for path in sorted(calibration_path(threads).parent.glob("calibration-*.json")):
        try:
            calibration = _parse(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        if not calibration.conflict(machine, calibration.threads):
            others.append(str(calibration.threads))
    if not others:
        return ""
    return (
        f"the calibration for {' and '.join(others)} threads is not used, because torch has "
        f"{threads} now"
    )


def _parse(document: Any) -> Calibration:
    """Check and convert the document of a file."""
    if set(document) != set(FIELDS):
        raise ValueError("unknown fields")
    points = {
        name: math.inf if size == NEVER_TEXT else float(size)
        for name, size in document["points"].items()
    }
    if any(size < 0 or math.isnan(size) for size in points.values()):
        raise ValueError("sizes below 0")
    values = document | {"instructions": tuple(document["instructions"]), "points": points}
    return Calibration(**values)


TABLE_FILE = Path(__file__).with_name("takeover_points.toml")
CLASS_VARIABLE = "HEADWISE_MACHINE_CLASS"
NEVER = math.inf
ANY_CLASS = "any"
CALIBRATE_COMMAND = "headwise bench --calibrate"

# What each point counts. "from": the own path runs at this size and above; "up_to": at this size
# and below.
FROM_POINTS = {
    "flash_cpu": "keys, where some pairs are masked",
    "flash_cpu_full": "keys, where none are",
    "block_sparse": "keys",
    "routed": "keys",
    "linear": "keys",
    "bf16_matmul": "keys",
    "ragged_float32": "bytes of keys and values",
    "ragged_bfloat16": "bytes of keys and values",
    "gemv_float32": "bytes of weights, for one token",
    "gemv_bfloat16": "bytes of weights, for one token",
    "gemm_float32": "bytes of weights, for several tokens",
    "gemm_bfloat16": "bytes of weights, for several tokens",
    "bf16_training": "parameters",
}
UP_TO_POINTS = {
    "bf16_matmul_gradients": "keys",
    "gemm_tokens_float32": "tokens",
    "gemm_tokens_bfloat16": "tokens",
    "varlen": "tokens of a packed sequence",
    "elementwise": "numbers",
}
POINT_NAMES = (*FROM_POINTS, *UP_TO_POINTS)


class TakeoverPoint(NamedTuple):
    """A size, and the machine that it was measured on; "" if it was not measured on this class."""

    size: float
    measured_on: str = ""


UNMEASURED = {name: TakeoverPoint(NEVER) for name in FROM_POINTS} | {
    name: TakeoverPoint(0) for name in UP_TO_POINTS
}


@dataclass(frozen=True)
class TakeoverPoints:
    """The points that apply: those of a class, or of a calibration. `problem` says why a
    calibration is not used.
    """

    machine_class: str
    points: Mapping[str, TakeoverPoint]
    calibration: Calibration | None = None
    problem: str = ""

    @property
    def data(self) -> dict[str, object]:
        """Class, source and sizes as plain values; null is "never" for a size from which, 0 for one
        up to which.
        """
        sizes = {
            name: None if math.isinf(point.size) else point.size
            for name, point in self.points.items()
        }
        calibrated = None if self.calibration is None else self.calibration.describe()
        return {
            "class": self.machine_class,
            "calibration": calibrated,
            "problem": self.problem,
            "sizes": {name: sizes[name] for name in POINT_NAMES},
            "measured_on": {name: self.points[name].measured_on for name in POINT_NAMES},
        }

    def with_sizes(self, **sizes: float) -> TakeoverPoints:
        """The points with other sizes, as if they had been measured on this machine."""
        changed = {name: TakeoverPoint(size, "this machine") for name, size in sizes.items()}
        return replace(self, points=dict(self.points) | changed)

    def describe(self) -> list[str]:
        """Where the points come from, and a calibration that is not used."""
        if self.calibration is not None:
            return [f"take-over points: calibration of this machine, {self.calibration.describe()}"]
        machines = list(
            dict.fromkeys(point.measured_on for point in self.points.values() if point.measured_on)
        )
        unmeasured = [name for name in POINT_NAMES if not self.points[name].measured_on]
        text = f"take-over points: table of {self.machine_class}, measured on {'; '.join(machines)}"
        if unmeasured:
            text += (
                f"; torch's path where nothing was measured ({', '.join(unmeasured)}); "
                f"{CALIBRATE_COMMAND} measures it"
            )
        return [text, *([self.problem] if self.problem else [])]


def read_table(
    path: Path = TABLE_FILE, threads: int | None = None
) -> dict[str, dict[str, TakeoverPoint]]:
    """The measured points by class of machine, from the table of the package.

    With one thread, entries that have a size of their own for it ("one_thread") have that size.
    """
    document = tomllib.loads(path.read_text())
    machines: dict[str, str] = document.pop("machines")
    table: dict[str, dict[str, TakeoverPoint]] = {}
    for name, entries in document.items():
        if name not in (ANY_CLASS, *MACHINE_CLASSES):
            raise ValueError(
                f"{path.name} has an unknown class of machine {name!r}; use one of "
                f"{MACHINE_CLASSES}"
            )
        table[name] = {
            point: _read_point(point, entry, machines, threads) for point, entry in entries.items()
        }
    return table


def _read_point(
    name: str, entry: Mapping[str, object], machines: Mapping[str, str], threads: int | None
) -> TakeoverPoint:
    kind = "from" if name in FROM_POINTS else "up_to"
    size = (
        entry.get("one_thread", entry.get(kind))
        if threads == 1 and kind in entry
        else entry.get(kind)
    )
    words = {"never": NEVER, "always": 0.0} if kind == "from" else {"never": 0.0, "always": NEVER}
    if (
        name not in POINT_NAMES
        or entry.get("on") not in machines
        or not (size in words or isinstance(size, int))
    ):
        raise ValueError(
            f"{TABLE_FILE.name} has an entry {name} = {dict(entry)} without {kind!r} and 'on'"
        )
    return TakeoverPoint(
        words[str(size)] if size in words else float(str(size)), machines[str(entry["on"])]
    )


def points_of_class(machine_class: str, threads: int | None = None) -> TakeoverPoints:
    """The table's points of a class; those that were not measured keep torch's path.

    >>> points_of_class("other").points["flash_cpu"].size
    inf
    """
    table = read_table(threads=threads)
    return TakeoverPoints(
        machine_class, UNMEASURED | table[ANY_CLASS] | table.get(machine_class, {})
    )


class _CurrentPoints:
    """The points of this process by torch's number of threads, and what tests
    put in their place.
    """

    def __init__(self) -> None:
        self.by_threads: dict[int, TakeoverPoints] = {}
        self.assumed: TakeoverPoints | None = None

    def get(self) -> TakeoverPoints:
        if self.assumed is not None:
            return self.assumed
        threads = torch.get_num_threads()
        points = self.by_threads.get(threads)
        if points is None:
            points = self.by_threads[threads] = _find_points(this_machine(), threads)
        return points


_CURRENT = _CurrentPoints()


def current_points() -> TakeoverPoints:
    """The points that apply now: a calibration made with torch's present number of threads, or the
    table's.
    """
    return _CURRENT.get()


def takeover_size(name: str) -> float:
    """The size of one point: from it on, or up to it, headwise's own path runs.

    `torch.compile` evaluates this while tracing, so that a graph keeps the points it was traced
    with.
    """
    return _CURRENT.get().points[name].size


takeover_size._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] - torch reads it


@contextmanager
def assume_points(points: TakeoverPoints) -> Iterator[None]:
    """Let choices go by these points inside the context, in all threads: for tests, and for calls
    as on other machines.

    >>> with assume_points(points_of_class("x86-avx2")):
    ...     takeover_size("bf16_matmul")
    inf
    """
    previous, _CURRENT.assumed = _CURRENT.assumed, points
    try:
        yield
    finally:
        _CURRENT.assumed = previous


def machine_notes() -> list[str]:
    """Capabilities of the machine, where the take-over points come from, and what is wrong with its
    threads.
    """
    machine = this_machine()
    notes = machine.notes(torch.get_num_threads())
    return [f"machine: {machine.describe()}", *current_points().describe(), *notes]


def forget_points() -> None:
    """Read the calibration again at the next choice: after a new one was stored."""
    _CURRENT.by_threads.clear()


def _find_points(machine: MachineCapabilities, threads: int) -> TakeoverPoints:
    if chosen := os.environ.get(CLASS_VARIABLE):
        if chosen not in MACHINE_CLASSES:
            raise ValueError(
                f"{CLASS_VARIABLE} is {chosen!r}; use one of {', '.join(MACHINE_CLASSES)}"
            )
        return points_of_class(chosen)
    table = points_of_class(machine.machine_class, threads)
    calibration, problem = read_calibration(machine, threads)
    if calibration is None:
        return TakeoverPoints(table.machine_class, table.points, None, problem)
    measured = {
        name: TakeoverPoint(size, "this machine") for name, size in calibration.points.items()
    }
    return TakeoverPoints(table.machine_class, dict(table.points) | measured, calibration)
