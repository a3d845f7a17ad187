"""Generated pages of measurements: benchmarks, serving, reliability, coverage of intervals, and the
comparison of tools.

`python tools/measured_pages.py` simulates the coverage of our intervals and the rejection rates of
our tests in about a minute, and writes docs/interval-coverage.json; a slow test computes it again.
"""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import headwise as hw
from headwise.attention import backends
from headwise.observe.head_analysis.resampling import Array, Jackknife

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from benchmarks.report import (  # noqa: E402
    compare_targets,
    format_seconds as format_seconds,
    markdown,
    table,
)

# --- Benchmarks ----------------------------------------------------------------------------------


MEASURED = ROOT / "docs" / "bench.json"
CHART = "![Time of every library relative to headwise, with the targets](bench.svg)"


def benchmarks_page() -> str:
    """The chart, every row with its peers, and the targets on all machines."""
    paths = [MEASURED, *sorted(MEASURED.parent.glob("bench-*.json"))]
    reports = [json.loads(path.read_text()) for path in paths]
    targets = f"## Targets on each machine\n\n{compare_targets(reports)}"
    return "\n\n".join([CHART, markdown(reports[0]), targets])


def backends_page() -> str:
    """Every backend in order of preference on the CPU: its definition and presets it supports."""
    specs = {name: hw.design(preset=name, model=512, heads=8) for name in hw.PRESETS}
    whole = {name: hw.why(spec) for name, spec in specs.items()}
    causal = {name: spec for name, spec in specs.items() if not spec.pattern.tokens_before_decode}
    step = {name: hw.why(spec, tokens="one") for name, spec in causal.items()}
    lines = []
    for name in next(iter(whole.values())).reasons_against:
        summary = (backends.BACKENDS[name].__doc__ or "").strip().split("\n\n")[0]
        summary = " ".join(summary.split())
        lines.append((f"`{name}`", summary, _presets(whole, name), _presets(step, name)))
    head = ["backend", "definition", "presets, whole sequences", "presets, decode steps"]
    note = "A preset is bold if the backend is chosen for it on the CPU in float32."
    return f"{table(head, lines)}\n\n{note}"


def _presets(reports: Mapping[str, Any], backend: str) -> str:
    """The presets that a backend supports; those for which it is chosen are bold."""
    names = []
    for preset, report in reports.items():
        if not report.reasons_against[backend]:
            names.append(f"**{preset}**" if report.backend == backend else preset)
    return ", ".join(names) or "-"


# --- Serving -------------------------------------------------------------------------------------

SERVED = ROOT / "benchmarks" / "serve.json"
ENGINE_PARTS = {
    "weights": "matrix products with weights",
    "core": "attention core",
    "gather": "gathering of pages",
    "else": "other",
}


def engine_page() -> str:
    """Markdown: machine, comparison with transformers, steps by number of rows, and the time of
    each part of a step.
    """
    measured = json.loads(SERVED.read_text())
    return "\n\n".join(
        [
            _machine(measured),
            _compared(measured["lognormal"]),
            _equal_lengths(measured["equal_lengths"]),
            _scaling(measured["scaling"]),
            _parts(measured["parts"]),
        ]
    )


def _machine(measured: dict[str, Any]) -> str:
    machine, size = measured["machine"], measured["parameters"] / 1e6
    rate, bandwidth = machine["flops"] / 1e9, machine["bandwidth"] / 1e9
    return (
        f"A random model of {size:.1f} million parameters in the shape of Llama, float32, threads: "
        f"{machine['threads']}, torch {machine['torch']}. The machine reached {rate:.0f} GFLOP/s "
        "in a large product "
        f"and {bandwidth:.0f} GB/s in a large copy; predictions follow from these."
    )


def _compared(measured: dict[str, Any]) -> str:
    ours = measured["ours"]
    theirs = measured["transformers"]
    sizes = measured["bytes"]
    rows = [
        ("`Engine`", _whole(ours["tokens_per_second"]), _seconds(ours), _millions(sizes["peak"])),
        (
            "transformers, padded",
            _whole(theirs["tokens_per_second"]),
            _seconds(theirs),
            _millions(sizes["padded_batch"]),
        ),
    ]
    total, speedup = measured["requests"], measured["ratio"]["seconds"]
    return (
        f"{total} requests of log-normal lengths, submitted together: "
        f"{measured['prompt_tokens']:,} prompt tokens and "
        f"{measured['tokens']:,} generated, at most {measured['longest_answer']} per request. "
        f"{measured['same_answers']} of {total} answers are equal. **{speedup:.1f} times the "
        "tokens per second** "
        f"({measured['ratio']['processor']:.1f} by processor time) of `generate` on the padded "
        "batch with the same "
        f"weights. The KV cache is limited to {_millions(sizes['budget'])} and takes "
        f"{_millions(sizes['allocated'])}.\n\n"
        + table(["", "tokens per second", "seconds (processor time)", "peak KV cache"], rows)
    )


def _equal_lengths(measured: list[dict[str, Any]]) -> str:
    rows = []
    for row in measured:
        best = row["best"]
        seconds = {
            name: f"{times['seconds']:.2f} ({times['processor']:.2f})"
            for name, times in best.items()
        }
        ratios = [
            f"{best[other]['processor'] / best['engine']['processor']:.2f}"
            for other in ("transformers", "generate")
        ]
        shape = f"{row['rows']} x ({row['prompt']} + {row['tokens']})"
        rows.append(
            (shape, seconds["engine"], seconds["transformers"], seconds["generate"], *ratios)
        )
    same = sum(row["same_answers"] for row in measured)
    head = ["rows x (prompt + answer)", "`Engine`, s (processor)", "transformers", "`hw.generate`"]
    return (
        "Requests of equal lengths, submitted together, where a padded batch has no padding: the "
        "lower-bound latency of each in "
        "interleaved rounds, and how many times as fast the engine is, by processor time. Other "
        "work ran on the "
        f"machine. {same} of {sum(row['rows'] for row in measured)} answers are equal.\n\n"
        + table([*head, "of transformers' speed", "of `hw.generate`'s speed"], rows)
    )


def _scaling(measured: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['rows']}",
            f"{row['context']}",
            f"{row['step_seconds'] * 1e3:.1f} ms",
            f"{row['predicted_seconds'] * 1e3:.1f} ms",
            _whole(row["tokens_per_second"]),
            _whole(row["predicted_tokens_per_second"]),
        )
        for row in reversed(measured)
    ]
    head = [
        "rows",
        "tokens per row",
        "time per step",
        "predicted lower limit",
        "tokens per second",
        "predicted upper limit",
    ]
    return "Decode steps of all rows:\n\n" + table(head, list(rows))


def _parts(measured: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['rows']}",
            ENGINE_PARTS[row["part"]],
            f"{row['intensity']:.2f}" if "intensity" in row else "",
            row.get("bottleneck", ""),
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['predicted_seconds'] * 1e3:.2f} ms" if "predicted_seconds" in row else "",
            f"{row['flops_per_second'] / 1e9:.1f}" if "flops_per_second" in row else "",
            f"{row['bytes_per_second'] / 1e9:.1f}" if "bytes_per_second" in row else "",
        )
        for row in sorted(measured, key=lambda row: row["rows"])
    ]
    head = [
        "rows",
        "part of a step",
        "FLOP/byte",
        "bound by",
        "measured",
        "lower limit",
        "GFLOP/s",
        "GB/s",
    ]
    return (
        "Time of each part of a step. Rows share the weights, so with more rows the products with "
        "weights change from "
        "memory-bound to compute-bound. The arithmetic intensity of the attention core does not "
        "depend on the number "
        "of rows: it is two FLOPs for each query head of a key-value head, per byte of a "
        "number.\n\n" + table(head, list(rows))
    )


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _seconds(measured: dict[str, float]) -> str:
    return f"{measured['seconds']:.1f} ({measured['processor']:.1f})"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


# --- Reliability ---------------------------------------------------------------------------------

RELIABILITY = ROOT / "docs" / "reliability.json"
LEAST_INPUTS, LEAST_TOTAL = 1000, 20_000
CRASH_TRIALS = {
    "kills": "kills of commands that write",
    "full_disk": "full disks under commands that write",
}


def read_reliability() -> dict[str, Any]:
    """Return the figures; raises SystemExit if a parser was tried too rarely,
    or anything failed.
    """
    figures = json.loads(RELIABILITY.read_text())
    rows = figures["inputs"]
    for key, name in CRASH_TRIALS.items():
        trials = figures[key]
        figures["faults"][name] = {"injected": trials["trials"], "failures": trials["failures"]}
    if rare := [name for name, counts in rows.items() if counts["inputs"] < LEAST_INPUTS]:
        raise SystemExit(
            f"{RELIABILITY.name}: {rare[0]} has fewer than {LEAST_INPUTS:,} inputs; run tests/soak.py "
            "again"
        )
    if sum(counts["inputs"] for counts in rows.values()) < LEAST_TOTAL:
        raise SystemExit(
            f"{RELIABILITY.name} has fewer than {LEAST_TOTAL:,} inputs in all; run tests/soak.py again"
        )
    if failed := [
        name for name, counts in (rows | figures["faults"]).items() if counts["failures"]
    ]:
        raise SystemExit(
            f"{RELIABILITY.name}: {failed[0]} failed; correct it, and run tests/soak.py again"
        )
    return figures


def summary_line() -> str:
    """Return inputs, faults and failures in one sentence."""
    figures = read_reliability()
    rows, faults = figures["inputs"].values(), figures["faults"].values()
    inputs, injected = sum(row["inputs"] for row in rows), sum(row["injected"] for row in faults)
    failures = sum(row["failures"] for row in (*rows, *faults))
    return (
        f"**{inputs:,} inputs** of {len(rows)} parsers, routes and commands and **{injected:,} "
        "injected faults**; "
        f"**{failures} failures**. {figures['versions']}."
    )


def input_rows() -> list[list[str]]:
    """Return a row for each parser: inputs, read, refused, failures."""
    keys = ("inputs", "read", "refused", "failures")
    return [
        [name, *(f"{counts[key]:,}" for key in keys)]
        for name, counts in read_reliability()["inputs"].items()
    ]


def fault_rows() -> list[list[str]]:
    """Return a row for each kind of fault: how many were injected, and failures."""
    keys = ("injected", "failures")
    return [
        [name, *(f"{counts[key]:,}" for key in keys)]
        for name, counts in read_reliability()["faults"].items()
    ]


# --- Coverage of confidence intervals ------------------------------------------------------------

CHECKS = ("ablated", "traced", "priced", "pruned", "converted")


def format_families() -> str:
    """Format docs/families.csv as a table, after a sentence with the shares of families."""
    with (ROOT / "docs" / "families.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    with_attention = [row for row in rows if row["sites"] != "0"]
    shares = list[str]()
    for check in CHECKS:
        done = sum(row[check] in ("yes", "plain", "resized") for row in with_attention)
        shares.append(f"{check} {done}")
    first = f"On {rows[0]['date']} with transformers {rows[0]['transformers']}, of "
    first += f"{len(with_attention)} families with attention: {', '.join(shares)}."
    names = ("family", "model_type", "sites", *CHECKS, "reason")
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    cells = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return "\n".join([first, "", *(f"| {line} |" for line in cells)])


COVERAGE = ROOT / "docs" / "interval-coverage.json"
NUM_UNITS = (2, 3, 5, 8, 12, 19, 20, 40, 60)
NUM_SAMPLES = 20_000  # the standard error of a rate of 0.05 is 0.0015
RARE = 0.1  # how often the rare event happens
KINDS = ("normal", "skewed", "rare", "rounded")
WORDS = {
    "en": {name: name for name in (*KINDS, "coverage")}
    | {"units": "texts or seeds", "rejected": "rejected, two sides"}
    | {"above": "rejected, above", "below": "rejected, below"},
    "zh": {
        "units": "文本或种子数",
        "normal": "正态",
        "skewed": "偏斜",
        "rare": "罕见",
        "rounded": "取整",
    }
    | {
        "coverage": "覆盖率",
        "rejected": "双侧拒绝率",
        "above": "单侧拒绝率 above",
        "below": "单侧拒绝率 below",
    },
}


def sample_centred(kind: str, num_units: int) -> Array:
    """Values with mean 0, [units, samples]; "rare" is an event of probability `RARE`, "skewed" is
    exponential.
    """
    generator = np.random.default_rng([KINDS.index(kind), num_units])
    shape = (num_units, NUM_SAMPLES)
    if kind == "skewed":
        return generator.exponential(size=shape) - 1
    if kind == "rare":
        return (generator.random(shape) < RARE) - RARE
    normal = generator.standard_normal(shape)
    return np.round(normal) if kind == "rounded" else normal


def simulate(kind: str, num_units: int) -> dict[str, float]:
    """Coverage of the 95 % interval, and how often tests reject a true null hypothesis at 5 %.

    `above` is the one-sided test that a mean is above chance, `below` that test of the mirrored
    values. `untested` is the share of samples without spread, which have no p-value.
    """
    values = sample_centred(kind, num_units)
    shift = RARE if kind == "rare" else 0.0  # the units themselves are not centred: 0 and 1
    mean = Jackknife.of_ratio(values + shift)
    low, high = mean.interval()
    centred = Jackknife.of_ratio(values)
    mirrored = Jackknife.of_ratio(-values)
    rounding = 1e-12
    rates = {
        "coverage": (low <= shift + rounding) & (high >= shift - rounding),
        "rejected": centred.p_values() < 0.05,
        "above": centred.p_values(sides=1) < 0.05,
        "below": mirrored.p_values(sides=1) < 0.05,
        "untested": ~centred.has_spread,
    }
    return {name: round(float(rate.mean()), 4) for name, rate in rates.items()}


def simulate_all() -> dict[str, Any]:
    """The rates of every kind of values and number of units."""
    return {kind: {str(count): simulate(kind, count) for count in NUM_UNITS} for kind in KINDS}


def format_coverage(language: str = "en") -> str:
    """Return the stored figures as a Markdown table."""
    figures, word = json.loads(COVERAGE.read_text()), WORDS[language]
    lines = [_row([word["units"], *map(str, NUM_UNITS)]), _row(["---"] + ["--:"] * len(NUM_UNITS))]
    rows = [(kind, "coverage", ".2f") for kind in KINDS] + [
        (kind, "rejected", ".3f") for kind in KINDS
    ]
    rows += [("skewed", name, ".3f") for name in ("above", "below")]
    for kind, rate, digits in rows:
        rates = (format(figures[kind][str(count)][rate], digits) for count in NUM_UNITS)
        lines.append(_row([f"{word[kind]}: {word[rate]}", *rates]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# --- Comparison of tools -------------------------------------------------------------------------

FEATURES = ROOT / "docs" / "feature-comparison.toml"
TASKS = ROOT / "docs" / "compared-tasks.json"
FEATURE_CELLS = {"yes": "yes", "partial": "part", "no": "·"}
OURS = "headwise"


class Tool(NamedTuple):
    """A tool that headwise is compared with; `basis` is what its marks were read from."""

    code: str
    name: str
    address: str
    version: str
    basis: str


class Feature(NamedTuple):
    """One row: the mark of headwise with its evidence, and the marks of the other tools by code."""

    group: str
    number: int
    name: str
    ours: str
    evidence: tuple[str, ...]
    missing: str
    marks: dict[str, str]


class Comparison(NamedTuple):
    """All tools and features, in the order of the page."""

    tools: tuple[Tool, ...]
    features: tuple[Feature, ...]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(feature.group for feature in self.features))


def load_comparison(path: Path = FEATURES) -> Comparison:
    """Read and check the data file; a ValueError names the first row that is inconsistent."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    tools = tuple(Tool(**tool) for tool in data["tools"])
    codes = [tool.code for tool in tools]
    features = tuple(
        read_feature(group["name"], row, codes) for group in data["groups"] for row in group["rows"]
    )
    numbers = [feature.number for feature in features]
    if len(set(codes)) < len(codes) or numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(
            f"{path.name}: codes of tools must differ, and rows are numbered from 1; got {codes}, "
            f"{numbers}"
        )
    return Comparison(tools, features)


def read_feature(group: str, row: dict, codes: Sequence[str]) -> Feature:
    """Check one row of the data file and return it."""
    where = f"row {row['number']} ({row['feature']})"
    marked = [*row["yes"], *row["partial"]]
    unknown = sorted(set(marked) - set(codes))
    if unknown:
        raise ValueError(f"{where}: unknown tools {unknown}; use codes in {list(codes)}")
    if len(set(marked)) < len(marked):
        raise ValueError(f"{where}: a tool has two marks in {marked}; keep one of them")
    if row["ours"] not in FEATURE_CELLS:
        raise ValueError(
            f"{where}: unknown mark ours={row['ours']!r}; use one of {list(FEATURE_CELLS)}"
        )
    missing = row.get("missing", "")
    if row["ours"] == "yes" and (missing or not row["evidence"]):
        raise ValueError(
            f"{where}: ours='yes' needs evidence and no `missing`; name a test or a command"
        )
    if row["ours"] != "yes" and not missing:
        raise ValueError(f"{where}: ours={row['ours']!r} needs `missing`; name what is missing")
    marks = (
        dict.fromkeys(codes, "no")
        | dict.fromkeys(row["partial"], "partial")
        | dict.fromkeys(row["yes"], "yes")
    )
    return Feature(
        group, row["number"], row["feature"], row["ours"], tuple(row["evidence"]), missing, marks
    )


def tools_table() -> str:
    """The compared tools: code, address, version, and what their marks were read from."""
    rows = [
        [tool.code, f"[{tool.name}]({tool.address})", tool.version, tool.basis]
        for tool in load_comparison().tools
    ]
    return table(["code", "tool", "version", "marks read from"], rows)


def feature_tables() -> str:
    """One table per group of features, headwise first."""
    comparison = load_comparison()
    return "\n\n".join(
        f"### {group}\n\n{group_table(comparison, group)}" for group in comparison.groups
    )


def group_table(comparison: Comparison, group: str) -> str:
    """The marks of all tools for the features of one group."""
    head = ["", "feature", OURS, *(tool.code for tool in comparison.tools)]
    rows = [
        [
            str(feature.number),
            feature.name,
            FEATURE_CELLS[feature.ours],
            *(FEATURE_CELLS[mark] for mark in feature.marks.values()),
        ]
        for feature in comparison.features
        if feature.group == group
    ]
    return table(head, rows)


def tasks_table() -> str:
    """Lines of code, processor time and memory of both sides of the tasks in examples/compared."""
    report = json.loads(TASKS.read_text())
    rows = []
    for row in report["tasks"]:
        for name, side in row["sides"].items():
            tool = f"{name.replace('_', '-')} {side.get('version', '')}".strip()
            link = f"[{row['task']}.py](../examples/compared/{row['task']}.py)"
            seconds = f"{side['seconds']:.2f}" if side["seconds"] >= 0.005 else "< 0.01"
            cells = [str(side["lines"]), seconds, f"{side['peak']:.2f}"]
            rows.append([link, row["model"] or "-", tool, *cells])
    machine = report["machine"]
    sentence = (
        f"{machine['processor']}, {machine['threads']} thread, torch {machine['torch']}, "
        f"transformers {machine['transformers']}."
    )
    heads = ["task", "model", "solved with", "lines of code", "processor seconds", "memory, GB"]
    return f"{sentence}\n\n{table(heads, rows)}"


def evidence_table() -> str:
    """The evidence for every mark of headwise, and what is missing."""
    return table(["", OURS, "shown by", "missing"], list(evidence_rows(load_comparison())))


def evidence_rows(comparison: Comparison) -> Iterator[list[str]]:
    for feature in comparison.features:
        shown = "<br>".join(f"`{one}`" for one in feature.evidence)
        yield [
            f"{feature.number} {feature.name}",
            feature.ours,
            shown or "·",
            feature.missing or "·",
        ]


if __name__ == "__main__":
    COVERAGE.write_text(json.dumps(simulate_all(), indent=1) + "\n")
