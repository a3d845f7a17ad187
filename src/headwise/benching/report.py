"""What a bench found: a table for a terminal, one JSON document, and a folder with both the numbers and a drawing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..files import FolderLock, write_atomically
from .case import LIMIT
from .rows import MAX_SPREAD, HEADWISE, BenchmarkRow

TERMINAL_WIDTH = 80
NAME_WIDTH, NUMBER_WIDTH = 33, 11  # letters of a name, and of a number behind it
REPORT_FILE, CHART_FILE = "bench.json", "bench.svg"
VALUE_COLUMN = NAME_WIDTH + 2 * NUMBER_WIDTH + 7  # where aims stand
TIME_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))
VERDICT_LABELS = {True: "met", False: "missed", None: "no verdict"}


@dataclass(frozen=True)
class BenchmarkReport:
    """The machine, and a row for every case, in plain values."""

    machine: dict[str, Any]
    rows: list[BenchmarkRow]

    @property
    def data(self) -> dict[str, Any]:
        """What JSON can say."""
        return {"machine": self.machine, "rows": self.rows}

    @property
    def is_valid(self) -> bool:
        """Whether all rows ran, and everybody in them gave the same."""
        return not any(row["differs"] or row["failed"] for row in self.rows)

    def write(self, folder: Path | str) -> None:
        """The numbers and a drawing of them, each whole or as before."""
        from .bars import render_chart

        with FolderLock(folder):
            write_atomically(Path(folder) / REPORT_FILE, (json.dumps(self.data, indent=1) + "\n").encode())
            write_atomically(Path(folder) / CHART_FILE, render_chart(self.rows))

    @staticmethod
    def read(path: Path | str) -> BenchmarkReport:
        """What was written before."""
        told = json.loads(Path(path).read_text())
        return BenchmarkReport(told["machine"], told["rows"])

    def __str__(self) -> str:
        said, title = [*machine_heading(self.machine)], None
        for row in self.rows:
            if row["title"] != title:
                said += ["", row["title"], "-" * min(TERMINAL_WIDTH, len(row["title"]))]
                title = row["title"]
            said += ["", *row_lines(row)]
        return "\n".join([*said, "", *format_summary(self.rows), *format_time_shares(self.rows)])


def machine_heading(machine: Mapping[str, Any]) -> Iterator[str]:
    """The machine in a few lines, and what is odd about it."""
    threads = machine["threads"]
    took = f"; all took {format_duration(machine['took'])}" if "took" in machine else ""  # older files do not say
    yield from wrap_lines(f"{machine['processor']}, {threads} thread{'s' if threads > 1 else ''}{took}")
    giga = {name: rate / 1e9 for name, rate in machine.items() if name.endswith("_per_second")}
    yield from wrap_lines(
        f"reads {giga['read_bytes_per_second']:.1f} GB/s, copies {giga['copy_bytes_per_second']:.1f}; products "
        f"{giga['fp32_flops_per_second']:.0f} GFLOP/s in fp32, {giga['bf16_flops_per_second']:.0f} in bf16"
    )
    yield from wrap_lines(", ".join(f"{name} {which}" for name, which in machine["versions"].items()))
    for label in machine_labels(machine):
        yield from wrap_lines(f"! {label}")


def machine_labels(machine: Mapping[str, Any]) -> list[str]:
    """What makes a run another than a usual one."""
    said = [*machine["labels"]]
    said += ["quick: fewer samples, and not every row"] if machine["quick"] else []
    return said + (["interrupted: not every row is here"] if machine["interrupted"] else [])


class ReportLine(NamedTuple):
    """Somebody's seconds: as how many times, or as which share, ours are; the spread, and what is aimed at."""

    name: str
    seconds: float
    ratio: str
    spread: str
    targets: Sequence[str] = ()

    def __str__(self) -> str:
        first, *rest = textwrap.wrap(self.name, NAME_WIDTH - 2)
        numbers = f"{format_seconds(self.seconds):>{NUMBER_WIDTH}}{self.ratio:>{NUMBER_WIDTH - 2}}{self.spread:>7}"
        aim, *more = self.targets or [""]
        said = f"  {first:<{NAME_WIDTH - 2}}{numbers}  {aim}".rstrip()
        return "\n".join([said, *(f"    {part}" for part in rest), *(f"{'':{VALUE_COLUMN}}{each}" for each in more)])


def row_lines(row: BenchmarkRow) -> Iterator[str]:
    """One row: a line for everybody in it, and one for everybody who is not."""
    yield from wrap_lines(row["name"])
    for line in row_seconds(row):
        yield str(line)
    for name, why in row["absent"].items():
        yield from wrap_lines(f"{name}: {why}", "  ")
    for name, how in row["differs"].items():
        yield from wrap_lines(f"{name} says something else ({how}): no verdict", "  ")
    if row["failed"]:
        yield from wrap_lines(f"ours failed: {row['failed']}", "  ")
    for one in row["aim"]:
        if one["why"]:
            yield from wrap_lines(f"no verdict on {format_target(one)} against {one['against']}: {one['why']}", "  ")
    for name, note in row["notes"].items():
        yield from wrap_lines(f"{name}: {note}", "  ")
    if row["tried"] and misses_target(row):
        yield from wrap_lines(f"tried: {row['tried']}", "  ")


def misses_target(row: Mapping[str, Any]) -> bool:
    """Whether an aim is missed, or cannot be told."""
    return any(one["met"] is not True for one in row["aim"])


def row_seconds(row: BenchmarkRow) -> Iterator[ReportLine]:
    """Ours, every peer, and the limit."""
    if row["ours_s"] is None:
        return
    yield ReportLine(HEADWISE, row["ours_s"], "", format_share(row["spread"][HEADWISE]))
    for name, seconds in row["peers"].items():
        yield ReportLine(name, seconds, format_ratio(row["ratio"][name]), format_share(row["spread"][name]), target_labels(row, name))
    if limit := row["limit"]:
        name = f"limit, waiting for {limit['waits_for']}"
        yield ReportLine(name, limit["seconds"], format_share(limit["share"]), format_share(limit["spread"]), target_labels(row, LIMIT))


def target_labels(row: BenchmarkRow, against: str) -> list[str]:
    """What is aimed at against somebody, and what came of it."""
    return [f"{format_target(one)}: {VERDICT_LABELS[one['met']]}" for one in row["aim"] if one["against"] == against]


def format_target(aim: Mapping[str, Any]) -> str:
    """How many times as fast, or which share of what the machine allows."""
    return format_share(aim["times"]) if aim["against"] == LIMIT else format_ratio(aim["times"])


def format_summary(rows: list[BenchmarkRow]) -> Iterator[str]:
    """How many aims are met, and how to read the columns."""
    counts = {word: sum(one["met"] is met for row in rows for one in row["aim"]) for met, word in VERDICT_LABELS.items()}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    yield from wrap_lines(
        f"Columns: median seconds of a call; how many times as fast ours is, or which share of the limit it reaches; "
        f"the spread (middle half of the samples over their median; no verdict above {MAX_SPREAD:.0%}); the aim. "
        f"Aims: {told}."
    )


def format_time_shares(rows: list[BenchmarkRow]) -> Iterator[str]:
    """Where the time went: kinds of work, those that took longest first."""
    took: dict[str, float] = {}
    for row in rows:
        took[row["kind"]] = took.get(row["kind"], 0.0) + sum(row.get("took", {}).values())  # older files do not say
    told = [f"{kind} {format_duration(took[kind])}" for kind in sorted(took, key=lambda kind: -took[kind])]
    if any(took.values()):
        yield from wrap_lines(f"Time went to: {', '.join(told)}.")


def format_duration(seconds: float) -> str:
    """Seconds as a clock tells them.

    >>> format_duration(7.6), format_duration(391.2)
    ('8 s', '6 min 31 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_ratio(ratio: float) -> str:
    """A ratio in three figures.

    >>> format_ratio(3.417), format_ratio(31.28), format_ratio(0.981), format_ratio(100)
    ('3.42 x', '31.3 x', '0.98 x', '100 x')
    """
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f} x"


def format_share(part: float) -> str:
    """A share in per cent.

    >>> format_share(0.917)
    '92 %'
    """
    return f"{part * 100:.0f} %"


def format_seconds(seconds: float) -> str:
    """Seconds in three figures, in the unit that suits them.

    >>> format_seconds(0.0029134), format_seconds(12.5), format_seconds(8.2e-6)
    ('2.91 ms', '12.5 s', '8.2 us')
    """
    _, factor, unit = next(scale for scale in TIME_UNITS if seconds >= scale[0])
    value = seconds * factor
    places = 0 if value >= 100 else 1 if value >= 10 or unit == "us" else 2
    return f"{value:,.{places}f} {unit}"


def wrap_lines(text: str, indent: str = "") -> list[str]:
    """Lines of at most 80 letters; those after the first stand further in."""
    return textwrap.wrap(text, TERMINAL_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ") or [""]
