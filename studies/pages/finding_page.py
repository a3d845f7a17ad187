"""Parts that the pages of findings share: stored results, intervals, tables, pictures, the header."""

from __future__ import annotations

import argparse
import json
import os
import platform
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import headwise as hw
from headwise.observe.head_analysis.head_table import HeadClass, order_classes
from headwise.observe.head_analysis.resampling import Jackknife
from headwise.report import plots, render
from headwise.report.data import Estimate, Figure, Table
from headwise.util.errors import pluralise
from headwise.util.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = ROOT / "docs" / "findings"
HeadId = tuple[str, int]
UD_ENGLISH_EWT = """`ud_english_ewt/en_ewt-ud-dev.conllu` of
[UD English EWT](https://github.com/UniversalDependencies/UD_English-EWT) (commit 15d613d, CC BY-SA
4.0)"""
MAX_BYTES = 300_000  # of a page with its pictures
WIDTH = 120


def parse_page_arguments(program: str, model: str, data: str) -> argparse.Namespace:
    """Parse the model, the folder of data and the folder of stored results of a page; `model` and
    `data` say what they are.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("model", type=Path, help=model)
    parser.add_argument("data", type=Path, help=data)
    runs = ROOT / "runs" / "findings"
    parser.add_argument("--runs", type=Path, default=runs, metavar="DIR", help="stored results")
    args = parser.parse_args()
    if not args.model.is_file():
        parser.error(f"there is no file {args.model}; give that of the package")
    if not (args.data / "ud_english_ewt").is_dir():
        parser.error(f"{args.data} has no folder ud_english_ewt; give the folder above it")
    return args


class ResultStore:
    """Results of the parts of a page in a JSON file, so that an interrupted run goes on.

    The file also holds the seconds of each part. Versions and machine are those of the last run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, Any] = {"seconds": {}}
        if path.is_file():
            self.results |= json.loads(path.read_text())
        self.results["versions"] = read_versions()

    def measure(self, name: str, function: Callable[[], Any]) -> Any:
        """Return a stored result, or compute and store it."""
        if name not in self.results:
            print(f"{name} ...", flush=True)
            start = time.monotonic()
            self.results[name] = render.to_plain(function())
            self.results["seconds"][name] = round(time.monotonic() - start)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.results).encode())
        return self.results[name]


def read_versions() -> dict[str, Any]:
    """Return the versions and the machine that a run depends on."""
    names = [platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if "model name" in line] or names
    return {
        "headwise": hw.__version__,
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "cpu": names[0] or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def describe_run(command: str, results: dict[str, Any], data: str = "") -> str:
    """Return the command that made a page, the data that it reads, the versions, the machine and
    the time of the run.
    """
    versions = results["versions"]
    libraries = ", ".join(
        f"{name} {versions[name]}" for name in ("headwise", "torch", "transformers")
    )
    minutes = sum(results["seconds"].values()) / 60
    threads = pluralise(versions["threads"], "thread")
    machine = f"{versions['cpu']}, {pluralise(versions['cores'], 'core')}, {threads} of torch"
    line = (
        f"Made with {libraries} on {machine}. The run took {minutes:.0f} minutes beside other work."
    )
    paragraphs = [fill(text) for text in (data, line) if text]
    return "\n\n".join([f"    {command}", *paragraphs])


def mean_estimate(sums: Sequence[float], counts: Sequence[float] | float = 1.0) -> Estimate:
    """Return the mean over units, such as texts, with its 95 % interval.

    >>> [round(number, 2) for number in mean_estimate([1.0, 2.0, 3.0])[:3]]
    [2.0, -0.48, 4.48]
    """
    statistic = Jackknife.of_ratio(np.asarray(sums, dtype=float), np.asarray(counts, dtype=float))
    low, high = statistic.interval()
    return Estimate(float(statistic.value), float(low), float(high))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return Spearman's correlation with its 95 % interval (Bonett and Wright 2000).

    >>> round(rank_correlation(range(9), [n**3 for n in range(9)]).value, 2)
    1.0
    """
    from scipy.stats import spearmanr

    rho = float(spearmanr(first, second)[0])
    bounded = min(max(rho, -0.999999), 0.999999)
    reach = 1.959964 * np.sqrt((1 + rho**2 / 2) / (len(first) - 3))
    low, high = np.tanh(np.arctanh(bounded) + np.array([-reach, reach]))
    return Estimate(rho, float(low), float(high))


def fill(text: str) -> str:
    """Return a paragraph with short lines."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False)


def picture(figure: Figure, name: str, alt: str) -> str:
    """Draw a figure for light and dark pages into docs/findings; returns the lines that show it."""
    for theme in ("light", "dark"):
        data = plots.to_bytes(figure, ".svg", theme)
        write_atomically(FINDINGS / f"{name}-{theme}.svg", data)
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">\n'
        f'  <img src="{name}-light.svg" alt="{alt}">\n'
        "</picture>"
    )


def write_page(name: str, title: str, parts: Sequence[str | Table]) -> Path:
    """Write the Markdown of a page; raises if it is too large with its pictures."""
    texts = [part if isinstance(part, str) else render.to_markdown(part, level=3) for part in parts]
    path = FINDINGS / f"{name}.md"
    write_atomically(path, ("\n\n".join([f"# {title}", *texts]) + "\n").encode())
    size = sum(one.stat().st_size for one in [path, *FINDINGS.glob(f"{name}-*.svg")])
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes with its pictures; the limit is {MAX_BYTES:,}")
    print(f"{path}: {size / 1000:.0f} kB with pictures")
    return path


# --- Heads ----------------------------------------------------------------------------------------


def members(table: Mapping[str, Any], name: str) -> list[HeadId]:
    """Return the heads with a class, the highest score first."""
    found: list[tuple[float, HeadId]] = []
    for head in table["heads"]:
        scores = [one["score"] for one in head["classes"] if one["name"] == name]
        if scores:
            found.append((scores[0], site_of(head)))
    return [head for _, head in sorted(found, reverse=True)]


def site_of(head: Mapping[str, Any]) -> HeadId:
    """Return the site and number of a head in the JSON of `hw.heads`."""
    return f"{head['stack']}.{head['layer']}.{head['kind']}", head["head"]


def short_name(head: HeadId) -> str:
    """Return a name such as L3H2."""
    return f"L{head[0].split('.')[1]}H{head[1]}"


def draw_others(heads: Sequence[HeadId], everyone: Iterable[HeadId], seed: int) -> list[HeadId]:
    """Return as many random heads of the same layers that are not among `heads`, or all others of
    a layer that has too few.
    """
    generator = np.random.default_rng(seed)
    counts = Counter(site for site, _ in heads)
    drawn: list[HeadId] = []
    for site, count in counts.items():
        others = [head for head in everyone if head[0] == site and head not in heads]
        chosen = generator.permutation(len(others))[:count]
        drawn += [others[number] for number in chosen]
    return drawn


def first_class(head: Mapping[str, Any], sinks_first: bool = False) -> str:
    """Return the likeliest class of a head; "sink" only if it has no other one, or `sinks_first`."""
    classes = [HeadClass(one["name"], one["score"], "") for one in head["classes"]]
    return order_classes(classes, sinks_first)[0].name


def class_table(table: Mapping[str, Any]) -> Table:
    """Return the number of heads of each class and the strongest of them."""
    beside_sinks = Counter(first_class(head) for head in table["heads"])
    highest = Counter(first_class(head, sinks_first=True) for head in table["heads"])
    names = dict.fromkeys(one["name"] for head in table["heads"] for one in head["classes"])
    rows: list[list[Any]] = []
    for name in names:
        heads = members(table, name)
        best = next(head for head in table["heads"] if site_of(head) == heads[0])
        score = next(one["score"] for one in best["classes"] if one["name"] == name)
        best_cells = (short_name(heads[0]), score) if name != "unclear" else (None, None)
        rows.append([name, len(heads), beside_sinks[name], highest[name], *best_cells])
    rows.sort(key=lambda row: -row[1])
    columns = (
        "class",
        "heads with it",
        "first, beside sinks",
        "highest score",
        "strongest",
        "score",
    )
    return Table("", columns, rows)
