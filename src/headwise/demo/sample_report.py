"""The report of the sample tour: one HTML file with pictures and tables, without scripts and without addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..escaping import escape_html
from ..files import write_atomically
from ..head_analysis.head_figures import class_group
from ..head_analysis.head_table import HeadMeasures
from ..translation.language import current_language, localise
from ..viewer.bundled_sample import SOURCE
from . import before_after
from .sample_pictures import draw_badge, draw_bar, draw_heat_map, draw_thumbnail

if TYPE_CHECKING:
    from .sample_tour import Tour

STYLE_FILE = Path(__file__).with_name("sample_report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_tour_report(tour: Tour, path: Path) -> None:
    """Write what the tour has computed so far."""
    write_atomically(path, render_tour(tour).encode())


def render_tour(tour: Tour) -> str:
    """Return the report as HTML."""
    title = f"{localise('Heads of a translator')} · headwise demo"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{current_language()}">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape_html(POLICY)}">',
            f'<meta name="color-scheme" content="light dark"><title>{escape_html(title)}</title>',
            f"<style>\n{STYLE_FILE.read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            *_header(tour),
            *_map_section(tour),
            *_heads_section(tour),
            *_ablation_section(tour),
            *_pruning_section(tour),
            *_next_section(tour),
            "</main></body></html>",
            "",
        ]
    )


def _section(title: str, lead: str, *body: str) -> Iterator[str]:
    yield f"<section><h2>{escape_html(localise(title))}</h2>"
    if lead:
        yield f"<p>{localise(lead)}</p>"
    yield from body
    yield "</section>"


def _header(tour: Tour) -> Iterator[str]:
    layers = len(tour.trace.layers)
    yield f"<header><h1>{localise('The heads of a small translator')}</h1>"
    lead = localise(
        "The model translates dates and amounts of money between English, ISO notation and Chinese. It was trained "
        f"with headwise and has <b>{tour.num_heads}</b> attention heads in <b>{layers}</b> layers."
    )
    yield f"<p>{lead}</p>"
    yield (
        f'<dl class="pair"><dt>{localise("reads")}</dt><dd>{escape_html(SOURCE)}</dd>'
        f'<dt>{localise("writes")}</dt><dd lang="zh">{escape_html(tour.translation)}</dd></dl></header>'
    )


# --- The map of all heads -------------------------------------------------------------------------------


def _map_section(tour: Tour) -> Iterator[str]:
    keep = tour.pruning["keep"] if tour.pruning else {}
    most = max((value.value for value in tour.importance.values()), default=0.0)
    rows = [
        '<div class="maprow"><span class="site">'
        + escape_html(site)
        + "</span>"
        + "".join(
            _map_cell(tour, head, most, head.head not in keep.get(site, (head.head,)))
            for head in tour.table.heads
            if head.site == site
        )
        + "</div>"
        for site in tour.table.sites
    ]
    groups = dict.fromkeys(class_group(head.classes[0].name) for head in tour.table.heads if head.classes)
    legend = "".join(f"<span>{draw_badge(group)} {escape_html(localise(group))}</span>" for group in groups)
    ramp = "".join(f'<i class="b{shade}"></i>' for shade in range(9))
    meaning = localise("importance: loss increase without the head")
    bars = f'<span><b class="swatch"></b> {meaning}</span>' if tour.importance else ""
    removed = f'<span><b class="gone"></b> {localise("removed below")}</span>' if keep else ""
    yield from _section(
        "What every head attends to",
        "A cell is a head: rows are the tokens that are read or written, columns the tokens it looks at. The letter is "
        f"its strongest class over {escape_html(tour.table.texts)}.",
        f'<div class="headmap">{"".join(rows)}</div>',
        f'<p class="legend">{legend}<span class="ramp">{localise("weight 0")} {ramp} '
        f"{localise('1, square root')}</span>{bars}{removed}</p>",
    )


def _map_cell(tour: Tour, head: HeadMeasures, most: float, removed: bool) -> str:
    name = head.classes[0].name if head.classes else "unclear"
    label = localise(f"{head.site} head {head.head}, {name}") + (localise(", removed") if removed else "")
    weights = tour.trace.head_weights(head.site, head.head).tolist()
    importance = tour.importance.get((head.site, head.head))
    bar = ""
    if importance is not None and most > 0:
        score = localise(f"importance {importance.value:.3g}")
        label, bar = f"{label}, {score}", draw_bar(importance.value / most, score)
    classes = "cell removed" if removed else "cell"
    return (
        f'<figure class="{classes}" title="{escape_html(label)}">{draw_thumbnail(weights, label)}'
        f"<figcaption>{draw_badge(name)}<span>H{head.head}</span></figcaption>{bar}</figure>"
    )


def _heads_section(tour: Tour) -> Iterator[str]:
    if not tour.views:
        return
    figures = [
        f'<figure class="panel"><h3>{draw_badge(view.class_name)} {escape_html(localise(view.name))}</h3>'
        f'<div class="scroll">{draw_heat_map(view.weights, view.queries, view.keys, view.name)}</div>'
        f"<figcaption><b>{escape_html(localise(class_group(view.class_name)))}</b>: "
        f"{escape_html(localise(view.evidence))}.</figcaption>"
        "</figure>"
        for view in tour.views
    ]
    yield from _section(
        "Three heads in detail",
        "Queries are at the left, keys on top. Point at a cell for its weight.",
        f'<div class="panels">{"".join(figures)}</div>',
    )


# --- Ablation and pruning -------------------------------------------------------------------------------


def _ablation_section(tour: Tour) -> Iterator[str]:
    ablation = tour.ablation
    if ablation is None:
        return
    rows = [
        f'<tr><td>{escape_html(source)}</td><td lang="zh">{escape_html(before)}</td>'
        f'<td lang="zh">{_mark_changes(before, after)}'
        f"</td></tr>"
        for source, before, after in ablation.outputs
    ]
    head = "".join(f"<th>{localise(name)}</th>" for name in ("source", "with the head", "without it"))
    yield from _section(
        "One head ablated",
        f"Every head was ablated alone, over {ablation.texts} held-out texts. Without <b>"
        f"{escape_html(ablation.site)} head {ablation.head}</b> the loss rises by <b>{ablation.value:.3g}</b> (95% "
        f"interval {ablation.low:.3g} to {ablation.high:.3g}), the most of all heads.",
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>',
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def _mark_changes(before: str, after: str) -> str:
    """The output without the head; characters that differ from the output with it are marked."""
    if before == after:
        return f"{escape_html(after)} <small>{localise('unchanged')}</small>"
    marked = [
        escape_html(char) if n < len(before) and before[n] == char else f"<mark>{escape_html(char)}</mark>"
        for n, char in enumerate(after)
    ]
    return "".join(marked).replace("</mark><mark>", "")


def _pruning_section(tour: Tour) -> Iterator[str]:
    data = tour.pruning
    if data is None:
        return
    proof, comparison = data["proof"], before_after.exact_match_rows(data)
    num_kept, total = sum(map(len, data["keep"].values())), sum(data["head_counts"].values())
    bars = [
        (name, entry["value"], entry["low"], entry["high"])
        for name, entry in (
            (localise(f"{total} heads"), comparison["before"]),
            (localise(f"{num_kept} heads"), data["cut"]["after"]),
            (localise("retrained"), comparison["after"]),
        )
    ]
    yield from _section(
        "Half of the heads pruned, and proved",
        f"{escape_html(proof['what'])}. Then the smaller model was retrained for {data['steps']} steps to give the "
        "outputs of the original. Removed heads are hatched in the map above.",
        '<div class="bars" role="img" aria-label="exact match">',
        *(
            f"<span>{escape_html(name)}</span>{draw_bar(value, f'{name}: {value:.1%}')}"
            f'<span class="num">{value:.1%}</span><span class="num muted">{low:.1%} - {high:.1%}</span>'
            for name, value, low, high in bars
        ),
        "</div>",
        f'<p class="muted">{localise("Exact match over held-out examples, with its 95% interval.")}</p>',
        _comparison_table(data),
        *_proof_checks(proof),
    )


def _comparison_table(data: Mapping[str, Any]) -> str:
    rows = [row for row in before_after.comparison_rows(data) if not row.name.startswith(("exact match", "  "))]
    body = "".join(
        f"<tr><td>{escape_html(localise(row.name))}</td>"
        + "".join(f'<td class="num">{escape_html(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    head = "".join(f'<th class="num">{localise(name)}</th>' for name in ("before", "pruned", "retrained"))
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _proof_checks(proof: Mapping[str, Any]) -> Iterator[str]:
    """The comparisons that must agree up to rounding, each with its largest difference."""
    yield '<ul class="checks">'
    for check in proof["equal"]:
        state = "ok" if check["same"] else "bad"
        mark = localise("equal" if check["same"] else "NOT equal")
        numbers = localise(
            f"largest difference {check['apart']:.1e}, allowed {check['allowed']:.1e} ({check['dtype']})"
        )
        yield f'<li class="{state}"><b>{mark}</b> {escape_html(localise(check["what"]))}: {escape_html(numbers)}</li>'
    yield "</ul>"


def _next_section(tour: Tour) -> Iterator[str]:
    commands: Sequence[tuple[str, str]] = (
        ("headwise view", "this translator, live in the browser: switch heads off and watch the output"),
        (f"headwise view {tour.folder}/pruned", "the pruned model"),
        ("headwise view path/to/model --text '...'", "your own model"),
    )
    items = "".join(
        f"<li><code>{escape_html(command)}</code><span>{escape_html(localise(text))}</span></li>"
        for command, text in commands
    )
    yield from _section("Next", "", f'<ul class="next">{items}</ul>')
