"""The demo as one page of HTML: what was shown, and the translator beside what was made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .before_after import change_verdict, comparison_rows, draw_heads, exact_match_rows

REPORT_FILE = "report.html"
BAR_WIDTH = 220  # pixels of a whole
CSS = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1f }
pre { font: 13px/1.35 ui-monospace, monospace; background: #f5f5f7; padding: 1rem; overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .9rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #d8d8de }
.bars { display: grid; grid-template-columns: 8rem auto; gap: .3rem; align-items: center }"""

HTML_HEAD = f"""\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>headwise demo</title>
<style>
{CSS}
</style></head>
<body>"""


def render_report(pages: Sequence[tuple[str, str]], changes: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page; `changes` are the numbers of what was made, by the title of its page.

    >>> page = render_report([("Soft look-up", "1 < 2")], {})
    >>> "<h2>Soft look-up</h2>" in page, "<pre>1 &lt; 2</pre>" in page
    (True, True)
    """
    parts = list[str]()
    for title, text in pages:
        body = _render_change(changes[title]) if title in changes else _render_text(text)
        parts += ["<section>", f"<h2>{escape(title)}</h2>", body, "</section>"]
    return "\n".join([HTML_HEAD, "<h1>headwise demo</h1>", *parts, "</body>", "</html>", ""])


def write_report(folder: Path, pages: Sequence[tuple[str, str]], changes: Mapping[str, Mapping[str, Any]]) -> Path:
    """The page in a folder."""
    path = folder / REPORT_FILE
    write_atomically(path, render_report(pages, changes).encode())
    return path


def _render_text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _render_change(data: Mapping[str, Any]) -> str:
    """What was done, the heads that stay, exact match as bars, all numbers as a table, and the verdict."""
    told = [f"<p>{escape(data['proof']['what'])}.</p>"]
    if data.get("keep"):
        told.append(_render_text("\n".join(draw_heads(data))))
    score = exact_match_rows(data)
    bars = {"before": score["before"], "at once": data["cut"]["after"], "learnt again": score["after"]}
    told += ['<div class="bars">', *(_render_bar(name, one) for name, one in bars.items()), "</div>"]
    head = "".join(f"<th>{name}</th>" for name in ("", *bars))
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in one) for one in comparison_rows(data)]
    told += ["<table>", *(f"<tr>{row}</tr>" for row in (head, *rows)), "</table>"]
    curve = [(at["step"], at["held_out"]) for at in data["curve"] if at["held_out"] is not None]
    told += [f"<p>{escape(change_verdict(data))}</p>", _render_loss_curve(curve)]
    return "\n".join([*told, f"<p>The proof is in {escape(data['folder'])}/PROOF.md.</p>"])


def _render_bar(name: str, one: Mapping[str, float]) -> str:
    """A share as a bar, and between which values it might have come out as a line across its end."""
    low, high = BAR_WIDTH * one["low"], BAR_WIDTH * one["high"]
    drawing = (
        f'<rect width="{BAR_WIDTH}" height="16" fill="#eceaf4"/>'
        f'<rect width="{BAR_WIDTH * one["value"]:.1f}" height="16" '
        f'fill="#5b4b8a"/><path d="M{low:.1f} 8H{high:.1f}" stroke="#e0a030" stroke-width="3"/>'
    )
    label = f'<text x="{BAR_WIDTH + 8}" y="13" font-size="13">{one["value"]:.1%}</text>'
    return f'<span>{escape(name)}</span><svg width="{BAR_WIDTH + 70}" height="16">{drawing}{label}</svg>'


def _render_loss_curve(points: Sequence[tuple[int, float]]) -> str:
    """The loss of texts held back, step by step, on a scale of its own."""
    most, last = max(loss for _, loss in points) or 1.0, points[-1][0] or 1
    places = " ".join(f"{40 + 320 * step / last:.1f},{110 - 100 * loss / most:.1f}" for step, loss in points)
    ends = (
        f'<text x="36" y="16" font-size="11" text-anchor="end">{most:.2f}</text>'
        f'<text x="36" y="112" font-size="11" text-anchor="end">0</text>'
        f'<text x="360" y="126" font-size="11" text-anchor="end">step {last:,}</text>'
    )
    axes = '<path d="M40 10V110H360" fill="none" stroke="#999"/>'
    line = f'<polyline points="{places}" fill="none" stroke="#5b4b8a" stroke-width="2"/>'
    says = "<p>Loss of examples held back, while it learns again:</p>"
    return f'{says}<svg width="380" height="132">{axes}{line}{ends}</svg>'
