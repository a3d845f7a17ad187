"""The generated parts of docs/comparison.md: features of headwise and of other tools, from
feature_comparison.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).resolve().parent / "feature_comparison.toml"
POINTS = {"yes": 1.0, "partial": 0.5, "no": 0.0}
CELLS = {"yes": "yes", "partial": "part", "no": "·"}
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


def load_comparison(path: Path = DATA) -> Comparison:
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
    if row["ours"] not in POINTS:
        raise ValueError(f"{where}: unknown mark ours={row['ours']!r}; use one of {list(POINTS)}")
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the cells of the data file have no bars."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def tools_table() -> str:
    """The compared tools: code, address, version, and what their marks were read from."""
    rows = [
        [tool.code, f"[{tool.name}]({tool.address})", tool.version, tool.basis]
        for tool in load_comparison().tools
    ]
    return table(["code", "tool", "version", "marks read from"], rows)


def feature_tables() -> str:
    """One table per group of features, headwise first, and a table of totals."""
    comparison = load_comparison()
    sections = [f"### {group}\n\n{group_table(comparison, group)}" for group in comparison.groups]
    return "\n\n".join([*sections, f"### All features\n\n{totals_table(comparison)}"])


def group_table(comparison: Comparison, group: str) -> str:
    """The marks of all tools for the features of one group."""
    head = ["", "feature", OURS, *(tool.code for tool in comparison.tools)]
    rows = [
        [
            str(feature.number),
            feature.name,
            CELLS[feature.ours],
            *(CELLS[mark] for mark in feature.marks.values()),
        ]
        for feature in comparison.features
        if feature.group == group
    ]
    return table(head, rows)


def totals_table(comparison: Comparison) -> str:
    """Numbers of features by mark, for every tool in the order of the tables."""
    marks = {OURS: [feature.ours for feature in comparison.features]}
    marks |= {
        tool.name: [feature.marks[tool.code] for feature in comparison.features]
        for tool in comparison.tools
    }
    points = {name: sum(POINTS[mark] for mark in own) for name, own in marks.items()}
    rows = [
        [name, *(str(marks[name].count(mark)) for mark in POINTS), f"{points[name]:g}"]
        for name in marks
    ]
    return table(["tool", *POINTS, "yes + partial / 2"], rows)


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
