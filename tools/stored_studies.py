"""The stored results of the studies, which `headwise learn` ships: read from the pages
docs/findings/study-NAME.md and their figures. `tools/build_docs.py` writes
src/headwise/learn/stored_studies.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FINDINGS = ROOT / "docs" / "findings"
OUT = ROOT / "src" / "headwise" / "learn" / "stored_studies.json"
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
NUMBERS = re.compile(NUMBER)
INTERVAL = re.compile(rf"\s*[(\[]({NUMBER})(?: to |, )({NUMBER})[)\]]")
AXIS_TICK = re.compile(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">([-+\d.e]+)</text>')
PARTS_OF_DIFFERENCES = re.compile(r'(?=<text x="16" y="[\d.]+")')
ROW_NAME = re.compile(r'<text x="16" y="[\d.]+"[^>]*>([^<]*)</text>')
DOT = re.compile(r'<circle class="seed" cx="([\d.]+)"')

KEPT_MEASURES = ("entropy", "breadth", "self", "induction", "diversity")  # of heads
LEFT_OUT = ("parameters", "FLOPs/step", "KV bytes", "lr", "p", "test error", "steps")

Cells = dict[str, Any]


def stored_studies() -> str:
    """The results of all studies as one JSON document."""
    studies = {}
    for path in sorted(FINDINGS.glob("study-*.md")):
        name = path.stem.removeprefix("study-")
        studies[name] = read_study_page(name, path.read_text(encoding="utf-8"))
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in studies.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_study_page(name: str, text: str) -> dict[str, Any]:
    """Scores, comparisons, edits and measures of heads of one study."""
    study: dict[str, Any] = {"tasks": {}}
    text = text.replace("\\[", "[").replace("\\]", "]")
    for heading, rows in read_tables(text):
        task, _, about = heading.partition(", ")
        of_task = study["tasks"].setdefault(
            task, {"scores": {}, "comparisons": {}, "edits": {}, "heads": {}}
        )
        if not about:
            add_scores(of_task, rows)
        elif about == "planned contrasts":  # one with the baseline replaces that of the scores
            of_task["comparisons"] |= {row["contrast"]: contrast(row) for row in rows}
        elif about.endswith("after edits"):
            of_task["edits"] = {row.pop("variant"): cells_as_numbers(row) for row in rows}
        elif about == "by part and test":
            for row in rows:
                variant = row.pop("variant")
                tests = {name: cell for name, cell in row.items() if name.startswith("test ")}
                of_task["scores"][variant] |= cells_as_numbers(tests)
        elif about in ("what heads do", "heads before training, during it, and on further tests"):
            for row in rows:
                variant = f"{row.pop('variant')} {row.pop('heads at', 'trained')}"
                kept = {name: row[name] for name in KEPT_MEASURES if name in row}
                of_task["heads"].setdefault(variant, cells_as_numbers(kept))
    study["tasks"] = {task: of for task, of in study["tasks"].items() if "metric" in of}
    scale = re.search(r"^- scale:? (\w+)", text, re.MULTILINE)
    assert scale is not None, f"study-{name}.md does not state its scale"
    study["scale"] = scale[1]
    seeds = FINDINGS / f"study-{name}-seeds.json"
    listed = json.loads(seeds.read_text(encoding="utf-8")) if seeds.exists() else {}
    for task, of_task in study["tasks"].items():
        figure = FINDINGS / f"study-{name}-{task}-differences.svg"
        dots = listed[task] if task in listed else read_dots(figure)
        for comparison, one in of_task["comparisons"].items():
            one["seeds"] = dots.get(comparison, [])
            one["zh"] = in_chinese(comparison)
    return study


def read_tables(text: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Heading and rows (by column) of each table below "### "."""
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        lines = [line.strip("| ").split(" | ") for line in rest.splitlines() if line[:1] == "|"]
        if lines:
            head, _, *rows = [[cell.replace("**", "").strip() for cell in line] for line in lines]
            yield heading.strip(), [dict(zip(head, row, strict=True)) for row in rows]


def add_scores(of_task: dict[str, Any], rows: list[dict[str, str]]) -> None:
    """Add the rows of a table of scores, and their comparisons with the baseline."""
    for row in rows:
        variant = row.pop("variant")
        of_task["scores"][variant] = {}
        for column, cell in row.items():
            interval = re.fullmatch(r"(.*) [(\[]95 % interval[)\]]", column)
            numbers = NUMBERS.match(cell)
            if interval and interval[1].startswith("minus "):
                if numbers:
                    label = {"contrast": f"{variant} {interval[1]}", "difference": cell}
                    of_task["comparisons"][label["contrast"]] = contrast(label | {"p": row["p"]})
                continue
            if numbers and column not in LEFT_OUT:
                of_task["scores"][variant] |= cells_as_numbers({column: cell})
            if interval and numbers:
                of_task["metric"] = interval[1]


def contrast(row: dict[str, str]) -> Cells:
    """One comparison: difference, interval and p; without a spread, an interval of one point.

    A table of scores has no column "significant"; there the rounded p decides.
    """
    column = next(name for name in row if name.startswith("difference"))
    value = read_number(row[column])
    ends = INTERVAL.search(row[column])
    p = row["p"].replace("&lt;", "<").replace("\\", "")
    number = 0.0 if p.startswith("<") else read_number(p)
    by_p = "yes" if number is not None and number < 0.05 else "no"
    return {
        "difference": value,
        "low": read_number(ends[1]) if ends else value,
        "high": read_number(ends[2]) if ends else value,
        "p": p,
        "significant": row.get("significant", by_p) == "yes",
    }


def cells_as_numbers(row: dict[str, str]) -> Cells:
    """The numeric cells of a row; a column with an interval also gives its ends."""
    cells: Cells = {}
    for column, cell in row.items():
        name = re.sub(r" [(\[]95 % interval[)\]]", "", column)
        value = read_number(cell)
        if value is None:
            continue
        cells[name] = value / 100 if cell.endswith("%") else value
        if ends := INTERVAL.search(cell):
            cells[f"{name} low"], cells[f"{name} high"] = map(read_number, ends.groups())
    return cells


def read_number(cell: str) -> float | None:
    """The number that a cell begins with; none for "-"."""
    match = NUMBERS.match(cell.strip())
    return float(match[0].replace(",", "")) if match else None


def read_dots(path: Path) -> dict[str, list[float]]:
    """The difference of every seed, by the name of the comparison, from the figure."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    ticks = [(float(x), float(label)) for x, label in AXIS_TICK.findall(text)]
    (x0, v0), (x1, v1) = ticks[0], ticks[-1]
    dots: dict[str, list[float]] = {}
    for part in PARTS_OF_DIFFERENCES.split(text)[1:]:
        name = ROW_NAME.match(part)
        if name is not None:
            places = map(float, DOT.findall(part))
            dots[name[1]] = [round(v0 + (x - x0) * (v1 - v0) / (x1 - x0), 4) for x in places]
    return dots


PHRASES = (
    (r"change of (.+?) after (\S+)", r"\1 经 \2 后的变化"),
    (r"change of (.+?) on (\S+)", r"\1 在 \2 上的变化"),
    (r"learning of (\S+)", r"\1 学习过程的平均"),
    (r"(\S+) of (\S+) at step 0", r"第 0 步 \2 的 \1"),
    (r"(\S+) of (\S+) on (\S+)", r"\2 在 \3 上的 \1"),
    (r"(\S+) of (\S+)", r"\2 的 \1"),
    (r"(\S+) after (\S+)", r"经 \2 后的 \1"),
    (r"(\S+) on (\S+)", r"\1 在 \2 上"),
    (r"(\S+)", r"\1"),
)


def in_chinese(name: str) -> str:
    """The name of a comparison in Chinese; variants, tests and measures keep their names.

    >>> in_chinese("change of h2 after noise-one minus change of h4 after noise-one")
    'h2 经 noise-one 后的变化 减 h4 经 noise-one 后的变化'
    """
    sides = []
    for side in name.split(" minus "):
        pattern, chinese = next(one for one in PHRASES if re.fullmatch(one[0], side))
        sides.append(re.sub(pattern, chinese, side))
    return " 减 ".join(sides)
