"""A run of the benchmarks as one Markdown table and one chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import LIMIT, Row

TIME_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))
VERDICTS = {True: "met", False: "**missed**", None: "no verdict"}
CHART_STYLE: Any = {"svg.hashsalt": "headwise", "svg.fonttype": "none", "font.size": 8}
COLOURS = {True: "#0072b2", False: "#d55e00"}  # of peers that are slower than headwise, and faster


def format_seconds(seconds: float) -> str:
    """Format seconds with about three digits.

    >>> format_seconds(0.0029134), format_seconds(12.5), format_seconds(8.2e-6)
    ('2.91 ms', '12.5 s', '8.2 us')
    """
    _, factor, unit = next(scale for scale in TIME_UNITS if seconds >= scale[0])
    value = seconds * factor
    places = 0 if value >= 100 else 1 if value >= 10 or unit == "us" else 2
    return f"{value:,.{places}f} {unit}"


def format_ratio(ratio: float, against: str = "") -> str:
    """Format a speedup, or a share of the machine's limit.

    >>> format_ratio(3.417), format_ratio(31.28), format_ratio(0.917, LIMIT)
    ('3.42 x', '31.3 x', '92 %')
    """
    if against == LIMIT:
        return f"{ratio * 100:.0f} %"
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f} x"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def machine_line(machine: Mapping[str, Any]) -> str:
    """Processor, date, threads, rates and versions, and whether rows are missing."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    text = (
        f"{machine['processor']}, {machine['date']}, {machine['threads']} threads; reads "
        f"{machine['read_bytes_per_second'] / 1e9:.1f} GB/s, products "
        f"{machine['fp32_flops_per_second'] / 1e9:.0f} GFLOP/s in fp32, "
        f"{machine['bf16_flops_per_second'] / 1e9:.0f} in bf16; {versions}"
    )
    text += "; quick: fewer samples, and some rows left out" if machine["quick"] else ""
    return text + ("; interrupted: some rows are missing" if machine["interrupted"] else "")


def markdown(report: Mapping[str, Any]) -> str:
    """The machine, how many targets are met, and every row with its peers and its limit."""
    rows = report["rows"]
    verdicts = [target["met"] for row in rows for target in row["aim"]]
    met = f"{verdicts.count(True)} of {len(verdicts)} targets are met."
    lines = []
    for row in rows:
        lines += row_lines(row)
    head = ["row", "ours", "against", "its time", "speedup, or share of the limit", "target"]
    return f"{machine_line(report['machine'])}\n\n{met}\n\n{table(head, lines)}"


def row_lines(row: Row) -> Iterator[list[str]]:
    """The lines of one row of the table: one for each peer, and one for the machine's limit."""
    name = f"{row['kind']}: {row['name']}"
    if row["ours_s"] is None:
        yield [name, f"failed: {row['failed']}", "", "", "", ""]
        return
    ours = format_seconds(row["ours_s"])
    ratios = {peer: (row["peers"][peer], ratio) for peer, ratio in row["ratio"].items()}
    if row["limit"]:
        ratios[LIMIT] = (row["limit"]["seconds"], row["limit"]["share"])
    for against, (seconds, ratio) in ratios.items():
        targets = [target for target in row["aim"] if target["against"] == against]
        verdict = ", ".join(
            f"{format_ratio(target['times'], against)}: {VERDICTS[target['met']]}"
            for target in targets
        )
        if against in row["differs"]:
            verdict = f"different result ({row['differs'][against]})"
        where = f"limit ({row['limit']['bottleneck']})" if against == LIMIT else against
        numbers = [format_seconds(seconds), format_ratio(ratio, against)]
        yield [name, ours, where, *numbers, verdict]
    for peer, reason in row["absent"].items():
        yield [name, ours, peer, "-", "-", reason]
    for title, note in row["notes"].items():
        yield [name, "", title, "", "", note]


def compare_targets(reports: Sequence[Mapping[str, Any]]) -> str:
    """What each machine reached of each target; missed ones are bold."""
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for number, report in enumerate(reports):
        for row in report["rows"]:
            for target in row["aim"]:
                against = target["against"]
                key = (row["name"], against, format_ratio(target["times"], against))
                reached = target["reached"]
                text = "-" if reached is None else format_ratio(reached, against)
                cells.setdefault(key, {})[number] = text if target["met"] else f"**{text}**"
    machines = [f"{r['machine']['processor']}, {r['machine']['date']}" for r in reports]
    lines = [
        [*key, *(values.get(number, "-") for number in range(len(reports)))]
        for key, values in cells.items()
    ]
    return table(["row", "against", "target", *machines], lines)


def draw_chart(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of every peer relative to headwise, with the targets, on a logarithmic axis."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["ratio"]]
    with mpl.rc_context(CHART_STYLE):
        figure = Figure(figsize=(9, 1 + 0.19 * len(timed)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(1, color="black", linewidth=0.8)
        for height, row in enumerate(timed):
            ratios = list(row["ratio"].values())
            colours = [COLOURS[ratio >= 1] for ratio in ratios]
            axes.scatter(ratios, [height] * len(ratios), c=colours, s=14, zorder=3)
            targets = [goal["times"] for goal in row["aim"] if goal["against"] != LIMIT]
            axes.scatter(targets, [height] * len(targets), marker="|", c="black", s=40, zorder=4)
        axes.set_xscale("log")
        axes.set_ylim(len(timed) - 0.5, -0.5)
        axes.set_yticks(range(len(timed)), [f"{row['kind']}: {row['name']}" for row in timed])
        axes.grid(axis="x", alpha=0.3)
        axes.set_title("Time of each peer / time of headwise (mark: target)", fontsize=9)
        figure.savefig(path, metadata={"Date": None})
