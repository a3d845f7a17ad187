"""What a bench found: a table for a terminal, one JSON document, and a folder with both the numbers and a drawing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..files import Lock, write_atomically
from .case import LIMIT
from .rows import LOOSE, OURS, Row

WIDTH = 80
NAMED, NUMBER = 33, 11  # letters of a name, and of a number behind it
KEPT, DRAWN = "bench.json", "bench.svg"
EDGE = NAMED + 2 * NUMBER + 7  # where aims stand
SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))
VERDICT = {True: "met", False: "missed", None: "no verdict"}


@dataclass(frozen=True)
class Report:
    """The machine, and a row for every case, in plain values."""

    machine: dict[str, Any]
    rows: list[Row]

    @property
    def data(self) -> dict[str, Any]:
        """What JSON can say."""
        return {"machine": self.machine, "rows": self.rows}

    @property
    def sound(self) -> bool:
        """Whether all rows ran, and everybody in them gave the same."""
        return not any(row["differs"] or row["failed"] for row in self.rows)

    def write(self, folder: Path | str) -> None:
        """The numbers and a drawing of them, each whole or as before."""
        from .bars import drawn

        with Lock(folder):
            write_atomically(Path(folder) / KEPT, (json.dumps(self.data, indent=1) + "\n").encode())
            write_atomically(Path(folder) / DRAWN, drawn(self.rows))

    @staticmethod
    def read(path: Path | str) -> Report:
        """What was written before."""
        told = json.loads(Path(path).read_text())
        return Report(told["machine"], told["rows"])

    def __str__(self) -> str:
        said, title = [*heading(self.machine)], None
        for row in self.rows:
            if row["title"] != title:
                said += ["", row["title"], "-" * min(WIDTH, len(row["title"]))]
                title = row["title"]
            said += ["", *lines(row)]
        return "\n".join([*said, "", *ending(self.rows), *shares(self.rows)])


def heading(machine: Mapping[str, Any]) -> Iterator[str]:
    """The machine in a few lines, and what is odd about it."""
    threads = machine["threads"]
    took = f"; all took {lasting(machine['took'])}" if "took" in machine else ""  # older files do not say
    yield from wrapped(f"{machine['processor']}, {threads} thread{'s' if threads > 1 else ''}{took}")
    giga = {name: rate / 1e9 for name, rate in machine.items() if name.endswith("_per_second")}
    yield from wrapped(
        f"reads {giga['read_bytes_per_second']:.1f} GB/s, copies {giga['copy_bytes_per_second']:.1f}; products "
        f"{giga['fp32_flops_per_second']:.0f} GFLOP/s in fp32, {giga['bf16_flops_per_second']:.0f} in bf16"
    )
    yield from wrapped(", ".join(f"{name} {which}" for name, which in machine["versions"].items()))
    for label in labels(machine):
        yield from wrapped(f"! {label}")


def labels(machine: Mapping[str, Any]) -> list[str]:
    """What makes a run another than a usual one."""
    said = [*machine["labels"]]
    said += ["quick: fewer samples, and not every row"] if machine["quick"] else []
    return said + (["interrupted: not every row is here"] if machine["interrupted"] else [])


class Line(NamedTuple):
    """Somebody's seconds: as how many times, or as which share, ours are; the spread, and what is aimed at."""

    name: str
    seconds: float
    reached: str
    spread: str
    aims: Sequence[str] = ()

    def __str__(self) -> str:
        first, *rest = textwrap.wrap(self.name, NAMED - 2)
        numbers = f"{timed(self.seconds):>{NUMBER}}{self.reached:>{NUMBER - 2}}{self.spread:>7}"
        aim, *more = self.aims or [""]
        said = f"  {first:<{NAMED - 2}}{numbers}  {aim}".rstrip()
        return "\n".join([said, *(f"    {part}" for part in rest), *(f"{'':{EDGE}}{each}" for each in more)])


def lines(row: Row) -> Iterator[str]:
    """One row: a line for everybody in it, and one for everybody who is not."""
    yield from wrapped(row["name"])
    for line in seconds_of(row):
        yield str(line)
    for name, why in row["absent"].items():
        yield from wrapped(f"{name}: {why}", "  ")
    for name, how in row["differs"].items():
        yield from wrapped(f"{name} says something else ({how}): no verdict", "  ")
    if row["failed"]:
        yield from wrapped(f"ours failed: {row['failed']}", "  ")
    for one in row["aim"]:
        if one["why"]:
            yield from wrapped(f"no verdict on {wanted(one)} against {one['against']}: {one['why']}", "  ")
    for name, note in row["notes"].items():
        yield from wrapped(f"{name}: {note}", "  ")
    if row["tried"] and falls_short(row):
        yield from wrapped(f"tried: {row['tried']}", "  ")


def falls_short(row: Mapping[str, Any]) -> bool:
    """Whether an aim is missed, or cannot be told."""
    return any(one["met"] is not True for one in row["aim"])


def seconds_of(row: Row) -> Iterator[Line]:
    """Ours, every peer, and the limit."""
    if row["ours_s"] is None:
        return
    yield Line(OURS, row["ours_s"], "", share(row["spread"][OURS]))
    for name, seconds in row["peers"].items():
        yield Line(name, seconds, times(row["ratio"][name]), share(row["spread"][name]), aims(row, name))
    if limit := row["limit"]:
        name = f"limit, waiting for {limit['waits_for']}"
        yield Line(name, limit["seconds"], share(limit["share"]), share(limit["spread"]), aims(row, LIMIT))


def aims(row: Row, against: str) -> list[str]:
    """What is aimed at against somebody, and what came of it."""
    return [f"{wanted(one)}: {VERDICT[one['met']]}" for one in row["aim"] if one["against"] == against]


def wanted(aim: Mapping[str, Any]) -> str:
    """How many times as fast, or which share of what the machine allows."""
    return share(aim["times"]) if aim["against"] == LIMIT else times(aim["times"])


def ending(rows: list[Row]) -> Iterator[str]:
    """How many aims are met, and how to read the columns."""
    counts = {word: sum(one["met"] is met for row in rows for one in row["aim"]) for met, word in VERDICT.items()}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    yield from wrapped(
        f"Columns: median seconds of a call; how many times as fast ours is, or which share of the limit it reaches; "
        f"the spread (middle half of the samples over their median; no verdict above {LOOSE:.0%}); the aim. "
        f"Aims: {told}."
    )


def shares(rows: list[Row]) -> Iterator[str]:
    """Where the time went: kinds of work, those that took longest first."""
    took: dict[str, float] = {}
    for row in rows:
        took[row["kind"]] = took.get(row["kind"], 0.0) + sum(row.get("took", {}).values())  # older files do not say
    told = [f"{kind} {lasting(took[kind])}" for kind in sorted(took, key=lambda kind: -took[kind])]
    if any(took.values()):
        yield from wrapped(f"Time went to: {', '.join(told)}.")


def lasting(seconds: float) -> str:
    """Seconds as a clock tells them.

    >>> lasting(7.6), lasting(391.2)
    ('8 s', '6 min 31 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def times(ratio: float) -> str:
    """A ratio in three figures.

    >>> times(3.417), times(31.28), times(0.981), times(100)
    ('3.42 x', '31.3 x', '0.98 x', '100 x')
    """
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f} x"


def share(part: float) -> str:
    """A share in per cent.

    >>> share(0.917)
    '92 %'
    """
    return f"{part * 100:.0f} %"


def timed(seconds: float) -> str:
    """Seconds in three figures, in the unit that suits them.

    >>> timed(0.0029134), timed(12.5), timed(8.2e-6)
    ('2.91 ms', '12.5 s', '8.2 us')
    """
    _, factor, unit = next(scale for scale in SCALES if seconds >= scale[0])
    value = seconds * factor
    places = 0 if value >= 100 else 1 if value >= 10 or unit == "us" else 2
    return f"{value:,.{places}f} {unit}"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most 80 letters; those after the first stand further in."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ") or [""]
