"""What `docs/build.py` writes into docs/benchmarks.md and docs/backends.md: what `headwise bench` measured last.

`headwise bench --out docs` and `headwise bench --scaling --out docs` leave the numbers here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import headwise as hw
from headwise import backends
from headwise.bench import benchmark_report
from headwise.bench.benchmark_case import LIMIT
from headwise.bench.benchmark_report import BenchmarkReport, format_seconds
from headwise.bench.runner import SCALING_LAYERS, CallSize, ScalingReport, design_layer

HERE = Path(__file__).resolve().parent
MEASURED, SCALED = HERE / "bench.json", HERE / "scaling.json"
PICTURE = "![Everybody's seconds as multiples of ours, with the aims](bench.svg)"


def rows() -> str:
    """The machine, what became of the aims, the drawing, and every row with its peers."""
    told = BenchmarkReport.read(MEASURED)
    return "\n\n".join([machine(told.machine), aims(told.rows), PICTURE, *chapters(told.rows)])


def machine(told: Mapping[str, Any]) -> str:
    """One line each, as the table of the command has it."""
    lines = [
        " ".join(line.split())
        for line in "\n".join(benchmark_report.machine_heading(told)).replace("\n  ", " ").split("\n")
    ]
    return "\n".join(f"- {line.removeprefix('! ')}" for line in lines)


def aims(told: Sequence[Mapping[str, Any]]) -> str:
    """How many aims are met, and every other in one table."""
    every = [(row, one) for row in told for one in row["aim"]]
    found = [missed(row, one) for row, one in every if one["met"] is not True]
    head = f"## Aims\n\n{len(every) - len(found)} of {len(every)} aims are met."
    return f"{head} The others:\n\n{table(['row', 'against', 'aim', 'reached', ''], found)}" if found else head


def missed(row: Mapping[str, Any], one: Mapping[str, Any]) -> Sequence[str]:
    """One aim that is not met, or could not be told."""
    reached = "-" if one["reached"] is None else benchmark_report.format_target({**one, "times": one["reached"]})
    against = "the limit" if one["against"] == LIMIT else one["against"]
    return row["name"], against, benchmark_report.format_target(one), reached, one["why"] or "missed"


def chapters(told: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One chapter for each kind of work; what was tried where aims are missed comes last."""
    for title in dict.fromkeys(row["title"] for row in told):
        those = [row for row in told if row["title"] == title]
        tried = dict.fromkeys(row["tried"] for row in those if row["tried"] and benchmark_report.misses_target(row))
        said = [f"Tried where an aim is missed: {one}" for one in tried]
        yield "\n\n".join([f"## {title}", *map(chapter, those), *said])


def chapter(row: Mapping[str, Any]) -> str:
    """One row: a table of everybody in it, and a line for everybody who is not."""
    lines = [
        (line.name, format_seconds(line.seconds), line.ratio, line.spread, "; ".join(map(bold, line.targets)))
        for line in benchmark_report.row_seconds(dict(row))
    ]
    told = [f"**{row['name']}**", table(["", "a call", "ours is", "spread", "aim"], lines)] if lines else []
    told += [] if lines else [f"**{row['name']}**: {row['failed']}"]
    notes = [f"{name}: {why}" for name, why in row["absent"].items()]
    notes += [f"{name} says something else, {how}: no verdict" for name, how in row["differs"].items()]
    notes += [f"{name}: {note}" for name, note in row["notes"].items()]
    return "\n\n".join([*told, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def bold(aim: str) -> str:
    """An aim that is missed is seen before others."""
    return f"**{aim}**" if aim.endswith(benchmark_report.VERDICT_LABELS[False]) else aim


def scales() -> str:
    """What every backend is, takes and refuses, what it costs as calls grow, and who is fastest where."""
    if not SCALED.exists():
        return f"{takes()}\n\nNo measurements are kept here yet."
    told = ScalingReport.read(SCALED)
    return "\n\n".join([takes(), machine(told.machine), *(kind(told, one) for one in told.speed_order), powers(told)])


def takes() -> str:
    """Every backend in order of preference on the CPU: its definition, and the presets that it runs or could run."""
    specs = {name: hw.design(preset=name, model=512, heads=8) for name in hw.PRESETS}
    whole = {name: hw.why(spec) for name, spec in specs.items()}
    step = {name: hw.why(spec, tokens="one") for name, spec in specs.items() if spec.pattern.tokens_before_decode == 0}
    lines, refusals = [], []
    for name in next(iter(whole.values())).unsupported:
        said = (backends.BACKENDS[name].__doc__ or "").strip().split("\n")[0]
        lines.append((f"`{name}`", said, taken(whole, name), taken(step, name)))
        reasons = [why for one in (*whole.values(), *step.values()) for why in one.unsupported[name]]
        refusals.append(f"- `{name}`: {'; '.join(dict.fromkeys(reasons))}")
    head = ["backend", "what it is", "texts of these presets", "single tokens of these"]
    return (
        f"{table(head, lines)}\n\nIn bold where it is the one that runs, on the CPU in float32 without gradients. "
        "What each says to the presets that it refuses:\n\n" + "\n".join(refusals)
    )


def taken(reasons: Mapping[str, Any], backend: str) -> str:
    """The presets that a backend could run, those that it does run in bold."""
    those = {preset: one.backend for preset, one in reasons.items() if not one.unsupported[backend]}
    return ", ".join(f"**{preset}**" if runs == backend else preset for preset, runs in those.items()) or "-"


def kind(told: ScalingReport, one: Mapping[str, Any]) -> str:
    """One kind of layer: seconds by tokens, and what follows for the order of preference."""
    points = told.seconds_by_size(one["kind"], "tokens")
    names = list(dict.fromkeys(name for each in points.values() for name in each))
    lines = [
        (f"{size:,}", *(cell(each, name, one["fastest"][str(size)]) for name in names)) for size, each in points.items()
    ]
    how = SCALING_LAYERS[one["kind"]]
    spec = design_layer(one["kind"], CallSize())
    asked = hw.why(spec, tokens="one" if how.single_query else "many", when=["grad"] * how.needs_grad).call
    runs = ", ".join(f"`{name}`" + f" from {least:,} tokens on" * (least > 0) for least, name in asked.length_ranges)
    changes = [f"`{each['to']}` overtakes `{each['from']}` at {each['at']:,.0f} tokens" for each in one["crossings"]]
    said = f"Chosen: {runs}. " + (f"Measured: {'; '.join(changes)}." if changes else "Measured: nobody overtakes.")
    return f"### {one['kind'].capitalize()}\n\n{said}\n\n{table(['tokens', *names], lines)}"


def cell(each: Mapping[str, float], name: str, first: str) -> str:
    """Seconds, in bold for the fastest."""
    told = format_seconds(each[name]) if name in each else "-"
    return f"**{told}**" if name == first else told


def powers(told: ScalingReport) -> str:
    """By which power seconds grow with every axis."""
    axes = list(dict.fromkeys(one["axis"] for one in told.power_laws))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for one in told.power_laws:
        wide = (one["high"] - one["low"]) / 2
        found.setdefault((one["kind"], one["backend"]), {})[one["axis"]] = f"{one['power']:.2f} ± {wide:.2f}"
    lines = [(name, f"`{backend}`", *(each.get(axis, "-") for axis in axes)) for (name, backend), each in found.items()]
    return (
        "### Powers\n\nSeconds grow as a power of the size: least squares of logarithms over the larger half of the "
        "sizes, with 95 % intervals.\n\n" + table(["kind", "backend", *axes], lines)
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    every = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(one.replace("|", "\\|") for one in line) + " |" for line in every)
