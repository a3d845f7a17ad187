"""Comparison of a compressed translator with the original, in the terminal and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..escaping import escape_html
from ..files import write_atomically
from ..learn.language import current_language
from ..report.numbers import format_bytes
from ..translation.terminal_text import pad, pad_left, wrap

# --- Comparison -----------------------------------------------------------------------------------


SIGNIFICANT_CHANGE = 0.01  # acceptable loss of exact match
COLUMN_WIDTHS = (28, 16, 16, 16)


class ComparisonRow(NamedTuple):
    """One number of the original translator, of the compressed one, and after retraining."""

    name: str
    before: str
    changed: str
    after: str


def comparison_rows(data: Mapping[str, Any]) -> Iterator[ComparisonRow]:
    """Yield exact match with its interval, parameters, cache sizes, and tokens per second."""
    proof, compressed = data["proof"], data["cut"]
    exact_match = exact_match_rows(data)
    yield ComparisonRow(
        "exact match",
        *(
            f"{entry['value']:.1%}"
            for entry in (exact_match["before"], compressed["after"], exact_match["after"])
        ),
    )
    yield ComparisonRow(
        "  95% interval",
        *(
            format_interval(entry)
            for entry in (exact_match["before"], compressed["after"], exact_match["after"])
        ),
    )
    for entry in proof["savings"]["numbers"]:
        if entry["name"] == "parameters" or entry["name"] in (
            "cache per token",
            "cache per source token",
        ):
            format_value = "{:,}".format if entry["name"] == "parameters" else format_bytes
            yield ComparisonRow(
                entry["name"],
                format_value(entry["before"]),
                format_value(entry["after"]),
                format_value(entry["after"]),
            )
    for entry in proof["speeds"]["phases"]:
        if entry["unit"] == "tokens/s":
            yield ComparisonRow(
                f"{entry['phase']}, tokens/s",
                f"{entry['before']:,.0f}",
                "",
                f"{entry['after']:,.0f}",
            )


def exact_match_rows(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return exact match before, after, and the change, each with its interval."""
    return next(
        row for row in data["proof"]["quality"]["rows"] if row["name"] == data["cut"]["name"]
    )


def change_verdict(data: Mapping[str, Any]) -> str:
    """Return a sentence on the loss of exact match, its interval, and whether it exceeds one point.

    >>> change = {"value": -0.0025, "low": -0.0075, "high": 0.0}
    >>> row = {"name": "exact_match", "change": change}
    >>> change_verdict({"cut": {"name": "exact_match"}, "proof": {"quality": {"rows": [row]}}})
    'Exact match lost: 0.2 points (95% interval: 0.0 to 0.8). That is at most one point.'
    """
    change = exact_match_rows(data)["change"]
    lost = -change["value"]
    verdict = (
        "at most one point"
        if lost <= SIGNIFICANT_CHANGE + 1e-9
        else "MORE than the target of one point"
    )
    interval = "none, because the texts have no spread"
    if change["low"] is not None:
        ends = [_format_percentage_points(-change[end]) for end in ("high", "low")]
        interval = " to ".join(ends)
    return (
        f"Exact match lost: {_format_percentage_points(lost)} points (95% interval: "
        f"{interval}). That is {verdict}."
    )


def format_comparison(data: Mapping[str, Any]) -> str:
    """Format the comparison for a terminal."""
    proof = data["proof"]
    rows = [ComparisonRow("", "before", "compressed", "retrained"), *comparison_rows(data)]
    table = [
        "".join(
            [pad(row.name, COLUMN_WIDTHS[0]), *map(pad_left, row[1:], COLUMN_WIDTHS[1:])]
        ).rstrip()
        for row in rows
    ]
    sentences = [f"{line}." for line in (data["proof"]["what"],)]
    heads_drawing = [*draw_heads(data), ""] if data.get("keep") else []
    return "\n".join(
        [
            *wrap(sentences[0]),
            "",
            *heads_drawing,
            *table,
            "",
            *wrap(change_verdict(data)),
            *wrap(_speed_sentences(data, proof)),
        ]
    )


def draw_heads(data: Mapping[str, Any]) -> list[str]:
    """Draw the heads of every attention layer: a block for a kept head, a dot for a removed one.

    >>> draw_heads({"keep": {"decoder.0.cross": [1]}, "head_counts": {"decoder.0.cross": 4}})
    ['  decoder.0.cross        · █ · ·']
    """
    return [
        f"  {site:<22} "
        + " ".join("█" if head in data["keep"][site] else "·" for head in range(count))
        for site, count in data["head_counts"].items()
    ]


def _speed_sentences(data: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    speeds = [phase for phase in proof["speeds"]["phases"] if phase["unit"] == "tokens/s"]
    verdicts = "; ".join(f"{phase['phase']} {phase['verdict']}" for phase in speeds)
    proof_state = "holds" if proof["holds"] else "does NOT hold"
    return (
        f"Retrained for {data['steps']:,} steps by distillation from the original; step "
        f"{data['kept']:,} is kept. "
        f"Speed, {proof['speeds']['machine']}: {verdicts}. The proof {proof_state}: "
        f"{data['folder']}/PROOF.md."
    )


def format_interval(score: Mapping[str, Any]) -> str:
    """Format the ends of an interval; a dash where texts without spread have none."""
    return "-" if score["low"] is None else f"{score['low']:.1%} - {score['high']:.1%}"


def _format_percentage_points(share: float) -> str:
    """Format a share in percentage points, without -0.0."""
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


# --- HTML page ------------------------------------------------------------------------------------

REPORT_FILE = "report.html"
BAR_WIDTH = 220  # pixels of a bar for 100 %
CSS = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1f }
pre { font: 13px/1.35 ui-monospace, monospace; background: #f5f5f7; padding: 1rem; overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .9rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #d8d8de }
.bars { display: grid; grid-template-columns: 8rem auto; gap: .3rem; align-items: center }"""

HTML_HEAD = f"""\
<!doctype html>
<html lang="LANGUAGE">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>headwise demo</title>
<style>
{CSS}
</style></head>
<body>"""


def render_report(
    pages: Sequence[tuple[str, str]], changes: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the HTML page; `changes` are the numbers of the compressed translators, by page title.

    >>> page = render_report([("Soft look-up", "1 < 2")], {})
    >>> "<h2>Soft look-up</h2>" in page, "<pre>1 &lt; 2</pre>" in page
    (True, True)
    """
    parts = list[str]()
    for title, text in pages:
        body = _render_change(changes[title]) if title in changes else _render_text(text)
        parts += ["<section>", f"<h2>{escape_html(title)}</h2>", body, "</section>"]
    head = HTML_HEAD.replace("LANGUAGE", current_language())
    return "\n".join([head, "<h1>headwise demo</h1>", *parts, "</body>", "</html>", ""])


def write_report(
    folder: Path, pages: Sequence[tuple[str, str]], changes: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Write the page to a folder and return its path."""
    path = folder / REPORT_FILE
    write_atomically(path, render_report(pages, changes).encode())
    return path


def _render_text(text: str) -> str:
    return f"<pre>{escape_html(text)}</pre>"


def _render_change(data: Mapping[str, Any]) -> str:
    """Render the summary, the kept heads, exact match as bars, all numbers as a table, the verdict,
    and the loss.
    """
    parts = [f"<p>{escape_html(data['proof']['what'] + '.')}</p>"]
    if data.get("keep"):
        parts.append(_render_text("\n".join(draw_heads(data))))
    score = exact_match_rows(data)
    bars = {
        "before": score["before"],
        "compressed": data["cut"]["after"],
        "retrained": score["after"],
    }
    parts += [
        '<div class="bars">',
        *(_render_bar(name, one) for name, one in bars.items()),
        "</div>",
    ]
    head = "".join(f"<th>{name}</th>" for name in ("", *bars))
    rows = [
        "".join(f"<td>{escape_html(cell)}</td>" for cell in one) for one in comparison_rows(data)
    ]
    parts += ["<table>", *(f"<tr>{row}</tr>" for row in (head, *rows)), "</table>"]
    curve = [
        (point["step"], point["held_out"])
        for point in data["curve"]
        if point["held_out"] is not None
    ]
    parts += [f"<p>{escape_html(change_verdict(data))}</p>", _render_loss_curve(curve)]
    place = f"The proof is in {data['folder']}/PROOF.md."
    return "\n".join([*parts, f"<p>{escape_html(place)}</p>"])


def _render_bar(name: str, score: Mapping[str, Any]) -> str:
    """Render a share as a bar, with its confidence interval as a line across the end."""
    drawing = (
        f'<rect width="{BAR_WIDTH}" height="16" fill="#eceaf4"/>'
        f'<rect width="{BAR_WIDTH * score["value"]:.1f}" height="16" fill="#5b4b8a"/>'
    )
    if score["low"] is not None:  # texts without spread have no interval
        low, high = BAR_WIDTH * score["low"], BAR_WIDTH * score["high"]
        drawing += f'<path d="M{low:.1f} 8H{high:.1f}" stroke="#e0a030" stroke-width="3"/>'
    label = f'<text x="{BAR_WIDTH + 8}" y="13" font-size="13">{score["value"]:.1%}</text>'
    return (
        f'<span>{escape_html(name)}</span><svg width="{BAR_WIDTH + 70}" '
        f'height="16">{drawing}{label}</svg>'
    )


def _render_loss_curve(points: Sequence[tuple[int, float]]) -> str:
    """Render the held-out loss over training steps."""
    max_loss, last_step = max(loss for _, loss in points) or 1.0, points[-1][0] or 1
    coordinates = " ".join(
        f"{40 + 320 * step / last_step:.1f},{110 - 100 * loss / max_loss:.1f}"
        for step, loss in points
    )
    labels = (
        f'<text x="36" y="16" font-size="11" text-anchor="end">{max_loss:.2f}</text>'
        f'<text x="36" y="112" font-size="11" text-anchor="end">0</text>'
        '<text x="360" y="126" font-size="11" '
        f'text-anchor="end">{f"step {last_step:,}"}</text>'
    )
    axes = '<path d="M40 10V110H360" fill="none" stroke="#999"/>'
    line = f'<polyline points="{coordinates}" fill="none" stroke="#5b4b8a" stroke-width="2"/>'
    caption = f"<p>{'Held-out loss during retraining:'}</p>"
    return f'{caption}<svg width="380" height="132">{axes}{line}{labels}</svg>'
