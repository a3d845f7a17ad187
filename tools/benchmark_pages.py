"""The generated parts of docs/benchmarks.md and docs/backends.md: the last measurements of
`headwise bench`.

`headwise bench --out docs` and `headwise bench --scaling --out docs` write these measurements. The
page also compares the targets of every machine whose bench.json is kept as docs/bench-CLASS.json.
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

DOCS = Path(__file__).resolve().parents[1] / "docs"
MEASURED, SCALED = DOCS / "bench.json", DOCS / "scaling.json"
CHART = "![Time of every library relative to headwise, with the targets](bench.svg)"


def benchmarks_page() -> str:
    """The machine, the targets, the chart, the targets on all machines, and every row with its
    peers.
    """
    report = BenchmarkReport.read(MEASURED)
    others = [BenchmarkReport.read(path) for path in sorted(MEASURED.parent.glob("bench-*.json"))]
    parts = [machine_list(report.machine), target_summary(report.rows), CHART]
    parts += [machine_comparison([report, *others])] if others else []
    return "\n\n".join([*parts, *sections(report.rows)])


def machine_comparison(reports: Sequence[BenchmarkReport]) -> str:
    """What was reached on every machine, for each target; missed targets are bold."""
    reached: dict[tuple[str, str, str], dict[int, str]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            for target in row["aim"]:
                name, against, aim, value, _ = target_row(row, target)
                cells = reached.setdefault((name, against, aim), {})
                cells[number] = (
                    f"**{value}**"
                    if target["met"] is False
                    else value
                    if target["met"]
                    else f"{value} ?"
                )
    head = [f"{r.machine['processor']}, {r.machine.get('date', '')}".rstrip(", ") for r in reports]
    rows = [
        [*key, *(cells.get(number, "-") for number in range(len(reports)))]
        for key, cells in reached.items()
    ]
    counts = [
        sum(target["met"] is True for row in r.rows for target in row["aim"]) for r in reports
    ]
    met = "; ".join(f"{count} met on {name}" for count, name in zip(counts, head, strict=True))
    machines = "\n\n".join(machine_list(r.machine) for r in reports[1:])
    legend = f"Bold: missed. ?: no verdict. -: not measured there. {met}."
    return (
        "## Targets by "
        f"machine\n\n{legend}\n\n{table(['row', 'against', 'target', *head], rows)}\n\n{machines}"
    )


def machine_list(machine: Mapping[str, Any]) -> str:
    """The heading of the command's report, as a list."""
    text = "\n".join(benchmark_report.machine_heading(machine)).replace("\n  ", " ")
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return "\n".join(f"- {line.removeprefix('! ')}" for line in lines)


def target_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many targets are met, and a table of the others."""
    targets = [(row, target) for row in rows for target in row["aim"]]
    others = [target_row(row, target) for row, target in targets if target["met"] is not True]
    head = f"## Targets\n\n{len(targets) - len(others)} of {len(targets)} targets are met."
    return (
        f"{head} The others:\n\n{table(['row', 'against', 'target', 'reached', ''], others)}"
        if others
        else head
    )


def target_row(row: Mapping[str, Any], target: Mapping[str, Any]) -> Sequence[str]:
    """One target that is missed or has no verdict."""
    reached = target["reached"]
    reached_text = (
        "-" if reached is None else benchmark_report.format_target({**target, "times": reached})
    )
    against = "the limit" if target["against"] == LIMIT else target["against"]
    return (
        row["name"],
        against,
        benchmark_report.format_target(target),
        reached_text,
        target["why"] or "missed",
    )


def sections(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One section per kind of work; if targets are missed, it ends with what was tried."""
    for title in dict.fromkeys(row["title"] for row in rows):
        of_title = [row for row in rows if row["title"] == title]
        missed = [row for row in of_title if row["tried"] and benchmark_report.misses_target(row)]
        tried = [
            f"What was tried: {text}" for text in dict.fromkeys(row["tried"] for row in missed)
        ]
        yield "\n\n".join([f"## {title}", *map(row_section, of_title), *tried])


def row_section(row: Mapping[str, Any]) -> str:
    """One row: a table of all implementations that ran, then notes and those that are missing."""
    lines = [
        (
            line.name,
            format_seconds(line.seconds),
            line.ratio,
            line.spread,
            "; ".join(map(mark_missed, line.targets)),
        )
        for line in benchmark_report.row_seconds(dict(row))
    ]
    head = ["", "time per call", "speedup of headwise", "spread or interval", "target"]
    parts = (
        [f"**{row['name']}**", table(head, lines)]
        if lines
        else [f"**{row['name']}**: {row['failed']}"]
    )
    notes = [f"{name}: {reason}" for name, reason in row["absent"].items()]
    notes += [
        f"{name} gives a different result ({how}): no verdict"
        for name, how in row["differs"].items()
    ]
    notes += [f"{name}: {note}" for name, note in row["notes"].items()]
    return "\n\n".join([*parts, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def mark_missed(target: str) -> str:
    """Put a missed target in bold."""
    return f"**{target}**" if benchmark_report.VERDICT_LABELS[False] in target else target


def backends_page() -> str:
    """Every backend with the presets that it supports, and the time of each
    kind of layer by size.
    """
    if not SCALED.exists():
        return f"{support_table()}\n\nThere are no measurements yet.\n\n{refusal_table()}"
    report = ScalingReport.read(SCALED)
    layers = [layer_section(report, order) for order in report.speed_order]
    return "\n\n".join(
        [
            support_table(),
            machine_list(report.machine),
            *layers,
            power_section(report),
            refusal_table(),
        ]
    )


def preset_reports() -> tuple[dict[str, Any], dict[str, Any]]:
    """Reports on all backends for every preset: for a whole sequence, and for a decode step of
    causal presets.
    """
    specs = {name: hw.design(preset=name, model=512, heads=8) for name in hw.PRESETS}
    whole = {name: hw.why(spec) for name, spec in specs.items()}
    step = {
        name: hw.why(spec, tokens="one")
        for name, spec in specs.items()
        if spec.pattern.tokens_before_decode == 0
    }
    return whole, step


def support_table() -> str:
    """Every backend in order of preference on the CPU: its definition and the
    presets it supports.
    """
    whole, step = preset_reports()
    lines = []
    for name in next(iter(whole.values())).reasons_against:
        summary = (backends.BACKENDS[name].__doc__ or "").strip().split("\n")[0]
        lines.append(
            (f"`{name}`", summary, supported_presets(whole, name), supported_presets(step, name))
        )
    head = ["backend", "definition", "presets, whole sequences", "presets, decode steps"]
    return (
        f"{table(head, lines)}\n\nA preset is bold if the backend is chosen for it on the CPU in "
        "float32 without "
        "gradients. [Presets that a backend does not "
        "support](#presets-that-a-backend-does-not-support) lists the "
        "reasons for all other presets."
    )


def refusal_table() -> str:
    """For every backend, the reasons why it does not support a preset, with the presets."""
    whole, step = preset_reports()
    lines: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for call, reports in (("whole sequence", whole), ("decode step", step)):
        for preset, report in reports.items():
            for line in (
                (name, reason)
                for name, reasons in report.reasons_against.items()
                for reason in reasons
            ):
                calls, presets = lines.setdefault(line, ({}, {}))
                calls[call], presets[preset] = None, None
    order = list(next(iter(whole.values())).reasons_against)
    rows = [
        (
            f"`{name}`",
            reason,
            " and ".join(calls),
            "all" if len(presets) == len(whole) else ", ".join(presets),
        )
        for (name, reason), (calls, presets) in sorted(
            lines.items(), key=lambda line: order.index(line[0][0])
        )
    ]
    return (
        "### Presets that a backend does not "
        f"support\n\n{table(['backend', 'reason', 'call', 'presets'], rows)}"
    )


def supported_presets(reports: Mapping[str, Any], backend: str) -> str:
    """The presets that a backend supports; those for which it is chosen are bold."""
    chosen = {
        preset: report.backend
        for preset, report in reports.items()
        if not report.reasons_against[backend]
    }
    return (
        ", ".join(f"**{preset}**" if name == backend else preset for preset, name in chosen.items())
        or "-"
    )


def layer_section(report: ScalingReport, order: Mapping[str, Any]) -> str:
    """One kind of layer: the chosen backends, crossovers, and seconds by number of tokens."""
    points = report.seconds_by_size(order["kind"], "tokens")
    names = list(dict.fromkeys(name for seconds in points.values() for name in seconds))
    lines = [
        (f"{size:,}", *(seconds_cell(seconds, name, order["fastest"][str(size)]) for name in names))
        for size, seconds in points.items()
    ]
    layer, spec = SCALING_LAYERS[order["kind"]], design_layer(order["kind"], CallSize())
    call = hw.why(
        spec, tokens="one" if layer.single_query else "many", when=["grad"] * layer.needs_grad
    ).call
    chosen = ", ".join(
        f"`{name}`" + f" from {start:,} tokens on" * (start > 0)
        for start, name in call.length_ranges
    )
    crossovers = [
        f"`{one['to']}` overtakes `{one['from']}` at {one['at']:,.0f} tokens"
        for one in order["crossings"]
    ]
    measured = "; ".join(crossovers) or "there is no crossover"
    summary = f"Chosen: {chosen}. Measured: {measured}."
    return f"### {order['kind'].capitalize()}\n\n{summary}\n\n{table(['tokens', *names], lines)}"


def seconds_cell(seconds: Mapping[str, float], name: str, fastest: str) -> str:
    """Seconds of one backend, bold for the fastest."""
    text = format_seconds(seconds[name]) if name in seconds else "-"
    return f"**{text}**" if name == fastest else text


def power_section(report: ScalingReport) -> str:
    """Exponents of the time in every size."""
    axes = list(dict.fromkeys(fit["axis"] for fit in report.power_laws))
    exponents: dict[tuple[str, str], dict[str, str]] = {}
    for fit in report.power_laws:
        half_width = (fit["high"] - fit["low"]) / 2
        exponents.setdefault((fit["kind"], fit["backend"]), {})[fit["axis"]] = (
            f"{fit['power']:.2f} ± {half_width:.2f}"
        )
    lines = [
        (kind, f"`{name}`", *(cells.get(axis, "-") for axis in axes))
        for (kind, name), cells in exponents.items()
    ]
    return (
        "### Power laws\n\nTime grows as a power of the size. Exponents are fitted by least "
        "squares of logarithms over "
        "the larger half of the sizes, with 95 % intervals.\n\n"
        + table(["layer", "backend", *axes], lines)
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )
