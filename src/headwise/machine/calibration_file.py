"""The calibration of this machine: measured take-over points, kept in the user's cache folder.

There is one file per number of threads. A file is used only if it is of this processor, these instruction sets, this
number of threads, and these versions of headwise and torch; otherwise the reason is reported, and nothing is assumed.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .capabilities import MachineCapabilities

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
        """Why the calibration does not hold for this machine and number of threads; "" if it does."""
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
    """The calibration of this machine; or None, and why there is a file that is not used ("" if there is none)."""
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
    return (None, f"the calibration in {path} {conflict}; {remedy}") if conflict else (calibration, "")


def write_text_of(calibration: Calibration) -> str:
    """The calibration as the text of its file."""
    points = {name: NEVER_TEXT if math.isinf(size) else size for name, size in calibration.points.items()}
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
    return f"the calibration for {' and '.join(others)} threads is not used, because torch has {threads} now"


def _parse(document: Any) -> Calibration:
    """Check and convert the document of a file."""
    if set(document) != set(FIELDS):
        raise ValueError("unknown fields")
    points = {name: math.inf if size == NEVER_TEXT else float(size) for name, size in document["points"].items()}
    if any(size < 0 or math.isnan(size) for size in points.values()):
        raise ValueError("sizes below 0")
    values = document | {"instructions": tuple(document["instructions"]), "points": points}
    return Calibration(**values)
