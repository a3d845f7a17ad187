"""The demo as one HTML page: all pages, and the comparison of the compressed translators with the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .before_after import change_verdict, comparison_rows, draw_heads, exact_match_rows

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
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>headwise demo</title>
<style>
{CSS}
</style></head>
<body>"""


def render_report(pages: Sequence[tuple[str, str]], changes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the HTML page; `changes` are the numbers of the compressed translators, by page title.

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
    """Write the page to a folder and return its path."""
    path = folder / REPORT_FILE
    write_atomically(path, render_report(pages, changes).encode())
    return path


def _render_text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _render_change(data: Mapping[str, Any]) -> str:
    """Render the summary, the kept heads, exact match as bars, all numbers as a table, the verdict, and the loss."""
    parts = [f"<p>{escape(data['proof']['what'])}.</p>"]
    if data.get("keep"):
        parts.append(_render_text("\n".join(draw_heads(data))))
    score = exact_match_rows(data)
    bars = {"before": score["before"], "compressed": data["cut"]["after"], "retrained": score["after"]}
    parts += ['<div class="bars">', *(_render_bar(name, one) for name, one in bars.items()), "</div>"]
    head = "".join(f"<th>{name}</th>" for name in ("", *bars))
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in one) for one in comparison_rows(data)]
    parts += ["<table>", *(f"<tr>{row}</tr>" for row in (head, *rows)), "</table>"]
    curve = [(point["step"], point["held_out"]) for point in data["curve"] if point["held_out"] is not None]
    parts += [f"<p>{escape(change_verdict(data))}</p>", _render_loss_curve(curve)]
    return "\n".join([*parts, f"<p>The proof is in {escape(data['folder'])}/PROOF.md.</p>"])


def _render_bar(name: str, score: Mapping[str, float]) -> str:
    """Render a share as a bar, with its confidence interval as a line across the end."""
    low, high = BAR_WIDTH * score["low"], BAR_WIDTH * score["high"]
    drawing = (
        f'<rect width="{BAR_WIDTH}" height="16" fill="#eceaf4"/>'
        f'<rect width="{BAR_WIDTH * score["value"]:.1f}" height="16" '
        f'fill="#5b4b8a"/><path d="M{low:.1f} 8H{high:.1f}" stroke="#e0a030" stroke-width="3"/>'
    )
    label = f'<text x="{BAR_WIDTH + 8}" y="13" font-size="13">{score["value"]:.1%}</text>'
    return f'<span>{escape(name)}</span><svg width="{BAR_WIDTH + 70}" height="16">{drawing}{label}</svg>'


def _render_loss_curve(points: Sequence[tuple[int, float]]) -> str:
    """Render the held-out loss over training steps."""
    max_loss, last_step = max(loss for _, loss in points) or 1.0, points[-1][0] or 1
    coordinates = " ".join(
        f"{40 + 320 * step / last_step:.1f},{110 - 100 * loss / max_loss:.1f}" for step, loss in points
    )
    labels = (
        f'<text x="36" y="16" font-size="11" text-anchor="end">{max_loss:.2f}</text>'
        f'<text x="36" y="112" font-size="11" text-anchor="end">0</text>'
        f'<text x="360" y="126" font-size="11" text-anchor="end">step {last_step:,}</text>'
    )
    axes = '<path d="M40 10V110H360" fill="none" stroke="#999"/>'
    line = f'<polyline points="{coordinates}" fill="none" stroke="#5b4b8a" stroke-width="2"/>'
    caption = "<p>Held-out loss during retraining:</p>"
    return f'{caption}<svg width="380" height="132">{axes}{line}{labels}</svg>'
