"""What every backend costs as calls grow: in tokens, heads, rows and layers; by which power, and who is first where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..files import FolderLock, write_atomically
from .around import BenchmarkSession, ProgressCallback, no_progress
from .fits import find_crossings, fastest_by_size, fit_power_law
from .growing import SCALING_PACE, select_layers, measure_scaling
from .report import machine_heading, format_seconds, wrap_lines
from .rows import CaseTimer

SCALING_FILE = "scaling.json"


@dataclass(frozen=True)
class ScalingReport:
    """Seconds of every backend at every size, and the machine they were measured on."""

    machine: dict[str, Any]
    points: list[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        """The points, and what follows from them."""
        return {"machine": self.machine, "points": self.points, "powers": self.power_laws, "order": self.speed_order}

    @property
    def is_valid(self) -> bool:
        """Whether all backends that take a call ran it, and gave the same."""
        return not any(point["differs"] or point["absent"] for point in self.points)

    @property
    def power_laws(self) -> list[dict[str, Any]]:
        """By which power the seconds of every backend grow, along every axis."""
        found = []
        for kind, axis, points in self._lines():
            for name in dict.fromkeys(name for told in points.values() for name in told):
                fit = fit_power_law({size: told[name] for size, told in points.items() if name in told})
                found += [] if fit is None else [{"kind": kind, "axis": axis, "backend": name, **fit._asdict()}]
        return found

    @property
    def speed_order(self) -> list[dict[str, Any]]:
        """Who runs a kind of layer, who is fastest at how many tokens, and where that changes."""
        found = []
        for kind, axis, points in self._lines():
            if axis == "tokens":
                changes = [{"from": one.from_, "to": one.to, "at": one.at} for one in find_crossings(points)]
                runs = next(point["runs"] for point in self.points if point["kind"] == kind)
                best = {str(size): name for size, name in fastest_by_size(points).items()}
                found.append({"kind": kind, "runs": runs, "fastest": best, "crossings": changes})
        return found

    def seconds_by_size(self, kind: str, axis: str) -> dict[int, dict[str, float]]:
        """Seconds of every backend by size."""
        those = [point for point in self.points if (point["kind"], point["axis"]) == (kind, axis)]
        return {point["at"]: point["seconds"] for point in those if point["seconds"]}

    def _lines(self) -> Iterator[tuple[str, str, dict[int, dict[str, float]]]]:
        for kind, axis in dict.fromkeys((point["kind"], point["axis"]) for point in self.points):
            yield kind, axis, self.seconds_by_size(kind, axis)

    def write(self, folder: Path | str) -> None:
        """The whole as JSON, whole or as before."""
        with FolderLock(folder):
            write_atomically(Path(folder) / SCALING_FILE, (json.dumps(self.data, indent=1) + "\n").encode())

    @staticmethod
    def read(path: Path | str) -> ScalingReport:
        """What was written before."""
        told = json.loads(Path(path).read_text())
        return ScalingReport(told["machine"], told["points"])

    def __str__(self) -> str:
        said = [*machine_heading(self.machine)]
        for one in self.speed_order:
            said += ["", one["kind"], *_format_seconds_table(self.seconds_by_size(one["kind"], "tokens")), *_format_order(one)]
            said += [f"  {line}" for line in _format_power_laws(self.power_laws, one["kind"])]
        faults = {f"{point['kind']}, {name}: {why}" for point in self.points for name, why in _point_faults(point).items()}
        return "\n".join([*said, *(line for fault in sorted(faults) for line in wrap_lines(f"! {fault}"))])


def run_scaling(*names: str, threads: int | None = None, output_folder: Path | str | None = None, progress: ProgressCallback = no_progress) -> ScalingReport:
    """Time every backend that takes a kind of layer, in turns, at growing sizes; `names` are kinds by any piece.

    >>> run_scaling("anything else")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of layer 'anything else'; use one of ...
    """
    kinds = select_layers(names)

    def found(how: CaseTimer) -> Iterator[dict[str, Any]]:
        for point in chain.from_iterable(measure_scaling(how, kind) for kind in kinds):
            progress(f"{point['kind']}: {point['at']} {point['axis']}")
            yield point

    return BenchmarkSession(threads, output_folder, progress).run(SCALING_PACE, False, found, ScalingReport)


def _point_faults(point: Mapping[str, Any]) -> dict[str, str]:
    """Who failed where it does not refuse, and who gives something else."""
    return point["absent"] | {name: f"something else ({how})" for name, how in point["differs"].items()}


def _format_seconds_table(points: Mapping[int, Mapping[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for told in points.values() for name in told))
    lines = ["  tokens" + "".join(f"{name:>12}" for name in names)]
    for size, told in points.items():
        cells = (format_seconds(told[name]) if name in told else "-" for name in names)
        lines.append(f"  {size:>6,}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def _format_order(one: Mapping[str, Any]) -> list[str]:
    changes = [f"{each['to']} overtakes {each['from']} at {each['at']:,.0f} tokens" for each in one["crossings"]]
    slow = [size for size, name in one["fastest"].items() if name != one["runs"]]
    told = f"{one['runs']} runs it" + (f", and is not the fastest at {', '.join(slow)} tokens" if slow else "")
    return wrap_lines("; ".join([told, *changes]), "  ")


def _format_power_laws(powers: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for one in powers:
        if one["kind"] == kind:
            wide = (one["high"] - one["low"]) / 2
            found.setdefault(one["backend"], []).append(f"{one['axis']} {one['power']:.2f} ± {wide:.2f}")
    return [line for name, told in found.items() for line in wrap_lines(f"{name} grows as: {', '.join(told)}")]
