"""What every backend costs as calls grow: in tokens, heads, rows and layers; by which power, and who is first where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..files import Lock, write_atomically
from .around import Around, Tell, silent
from .fits import crossings, fastest, fitted
from .growing import PACE, chosen, measured
from .report import heading, timed, wrapped
from .rows import Bench

KEPT = "scaling.json"


@dataclass(frozen=True)
class Scaling:
    """Seconds of every backend at every size, and the machine they were measured on."""

    machine: dict[str, Any]
    points: list[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        """The points, and what follows from them."""
        return {"machine": self.machine, "points": self.points, "powers": self.powers, "order": self.order}

    @property
    def sound(self) -> bool:
        """Whether all backends that take a call ran it, and gave the same."""
        return not any(point["differs"] or point["absent"] for point in self.points)

    @property
    def powers(self) -> list[dict[str, Any]]:
        """By which power the seconds of every backend grow, along every axis."""
        found = []
        for kind, axis, points in self._lines():
            for name in dict.fromkeys(name for told in points.values() for name in told):
                fit = fitted({size: told[name] for size, told in points.items() if name in told})
                found += [] if fit is None else [{"kind": kind, "axis": axis, "backend": name, **fit._asdict()}]
        return found

    @property
    def order(self) -> list[dict[str, Any]]:
        """Who runs a kind of layer, who is fastest at how many tokens, and where that changes."""
        found = []
        for kind, axis, points in self._lines():
            if axis == "tokens":
                changes = [{"from": one.from_, "to": one.to, "at": one.at} for one in crossings(points)]
                runs = next(point["runs"] for point in self.points if point["kind"] == kind)
                best = {str(size): name for size, name in fastest(points).items()}
                found.append({"kind": kind, "runs": runs, "fastest": best, "crossings": changes})
        return found

    def line(self, kind: str, axis: str) -> dict[int, dict[str, float]]:
        """Seconds of every backend by size."""
        those = [point for point in self.points if (point["kind"], point["axis"]) == (kind, axis)]
        return {point["at"]: point["seconds"] for point in those if point["seconds"]}

    def _lines(self) -> Iterator[tuple[str, str, dict[int, dict[str, float]]]]:
        for kind, axis in dict.fromkeys((point["kind"], point["axis"]) for point in self.points):
            yield kind, axis, self.line(kind, axis)

    def write(self, folder: Path | str) -> None:
        """The whole as JSON, whole or as before."""
        with Lock(folder):
            write_atomically(Path(folder) / KEPT, (json.dumps(self.data, indent=1) + "\n").encode())

    @staticmethod
    def read(path: Path | str) -> Scaling:
        """What was written before."""
        told = json.loads(Path(path).read_text())
        return Scaling(told["machine"], told["points"])

    def __str__(self) -> str:
        said = [*heading(self.machine)]
        for one in self.order:
            said += ["", one["kind"], *_table(self.line(one["kind"], "tokens")), *_told(one)]
            said += [f"  {line}" for line in _powers(self.powers, one["kind"])]
        faults = {f"{point['kind']}, {name}: {why}" for point in self.points for name, why in _faults(point).items()}
        return "\n".join([*said, *(line for fault in sorted(faults) for line in wrapped(f"! {fault}"))])


def scaling(*names: str, threads: int | None = None, out: Path | str | None = None, tell: Tell = silent) -> Scaling:
    """Time every backend that takes a kind of layer, in turns, at growing sizes; `names` are kinds by any piece.

    >>> scaling("anything else")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of layer 'anything else'; use one of ...
    """
    kinds = chosen(names)

    def found(how: Bench) -> Iterator[dict[str, Any]]:
        for point in chain.from_iterable(measured(how, kind) for kind in kinds):
            tell(f"{point['kind']}: {point['at']} {point['axis']}")
            yield point

    return Around(threads, out, tell).run(PACE, False, found, Scaling)


def _faults(point: Mapping[str, Any]) -> dict[str, str]:
    """Who failed where it does not refuse, and who gives something else."""
    return point["absent"] | {name: f"something else ({how})" for name, how in point["differs"].items()}


def _table(points: Mapping[int, Mapping[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for told in points.values() for name in told))
    lines = ["  tokens" + "".join(f"{name:>12}" for name in names)]
    for size, told in points.items():
        cells = (timed(told[name]) if name in told else "-" for name in names)
        lines.append(f"  {size:>6,}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def _told(one: Mapping[str, Any]) -> list[str]:
    changes = [f"{each['to']} overtakes {each['from']} at {each['at']:,.0f} tokens" for each in one["crossings"]]
    slow = [size for size, name in one["fastest"].items() if name != one["runs"]]
    told = f"{one['runs']} runs it" + (f", and is not the fastest at {', '.join(slow)} tokens" if slow else "")
    return wrapped("; ".join([told, *changes]), "  ")


def _powers(powers: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for one in powers:
        if one["kind"] == kind:
            wide = (one["high"] - one["low"]) / 2
            found.setdefault(one["backend"], []).append(f"{one['axis']} {one['power']:.2f} ± {wide:.2f}")
    return [line for name, told in found.items() for line in wrapped(f"{name} grows as: {', '.join(told)}")]
