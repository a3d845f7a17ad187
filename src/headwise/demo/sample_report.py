"""The report of the sample tour: one HTML file with tables and SVG pictures of heads, without
scripts and addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..escaping import escape_html, escape_svg
from ..files import write_atomically
from ..head_analysis.head_figures import CLASS_STYLES, class_group
from ..head_analysis.head_table import HeadMeasures
from ..learn.language import current_language
from ..viewer.bundled_sample import SOURCE
from . import before_after

if TYPE_CHECKING:
    from .sample_tour import Tour


NUM_SHADES = 9
CELL = 18  # units of a cell in a heat map with tokens
GLYPH = 7.2  # width of a Latin letter at the font size of tokens
# Outline of the badge of each class, in a square of 16: a shape besides letter and colour.
DISC = "M8 .5a7.5 7.5 0 1 1 0 15a7.5 7.5 0 1 1 0-15z"
CLASS_SHAPES = {
    "positional": DISC,
    "syntactic": "M.8 .8h14.4v14.4h-14.4z",
    "rare-token": "M8 0l8 8l-8 8l-8-8z",
    "broad": "M5.5 2.5h5a5.5 5.5 0 0 1 0 11h-5a5.5 5.5 0 0 1 0-11z",
    "sink": "M-.5 1.5h17L8 16z",
    "duplicate": "M.8 .8h11v3.5h3.5v11h-11v-3.5h-3.5z",
    "induction": "M8 0l8.5 14.5h-17z",
    "punctuation": "M8 0l8 6l-3 9.5h-10l-3-9.5z",
    "separator": "M8 0l8 6l-3 9.5h-10l-3-9.5z",
    "alignment": "M4 1h8l4 7l-4 7h-8l-4-7z",
}
# Names of the classes in the styles: --c-p, --c-k, ...
STYLE_LETTERS = {name: letter.lower() for name, (letter, _) in CLASS_STYLES.items()} | {
    "separator": "t"
}


def shade_of(weight: float) -> int:
    """Shade 0 to 8 of a weight, by its square root.

    >>> [shade_of(w) for w in (0.0, 0.02, 0.25, 1.0)]
    [0, 1, 4, 8]
    """
    return round(math.sqrt(min(max(weight, 0.0), 1.0)) * (NUM_SHADES - 1))


def _cells(weights: Sequence[Sequence[float]], size: float) -> str:
    """One path for all cells of equal shade; cells of shade 0 are left out."""
    paths = [""] * NUM_SHADES
    for row, line in enumerate(weights):
        for column, weight in enumerate(line):
            if shade := shade_of(weight):
                paths[shade] += f"M{column * size:g} {row * size:g}h{size:g}v{size:g}h-{size:g}z"
    return "".join(
        f'<path class="s{shade}" d="{path}"/>' for shade, path in enumerate(paths) if path
    )


def draw_thumbnail(weights: Sequence[Sequence[float]], label: str) -> str:
    """A heat map without tokens."""
    rows, columns = len(weights), len(weights[0])
    return (
        f'<svg class="map" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape_svg(label)}" shape-rendering="crispEdges">{_cells(weights, 1)}</svg>'
    )


def draw_heat_map(
    weights: Sequence[Sequence[float]], queries: Sequence[str], keys: Sequence[str], label: str
) -> str:
    """A heat map with the tokens of queries at the left and those of keys on top; hovering a cell
    shows its weight.
    """
    left = max(map(_text_width, queries)) + 10
    top = max(map(_text_width, keys)) + 10
    width, height = left + CELL * len(keys), top + CELL * len(queries)
    parts = [
        f'<svg class="heat" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img" aria-label="{escape_svg(label)}">',
        f'<g transform="translate({left:g} {top:g})"><rect class="paper" '
        f'width="{CELL * len(keys)}" '
        f'height="{CELL * len(queries)}"/>{_cells(weights, CELL)}{_hover_cells(weights, queries, keys)}</g>',
    ]
    for row, token in enumerate(queries):
        y = top + CELL * row + CELL * 0.7
        parts.append(
            f'<text class="token" x="{left - 6:g}" y="{y:g}" '
            f'text-anchor="end">{show_token(token)}</text>'
        )
    for column, token in enumerate(keys):
        x = left + CELL * column + CELL * 0.68
        parts.append(
            f'<text class="token" transform="translate({x:g} {top - 6:g}) '
            f'rotate(-90)">{show_token(token)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _hover_cells(
    weights: Sequence[Sequence[float]], queries: Sequence[str], keys: Sequence[str]
) -> str:
    """Invisible cells with the exact weight as a tooltip."""
    return "".join(
        f'<rect class="hit" x="{column * CELL}" y="{row * CELL}" width="{CELL}" height="{CELL}">'
        f"<title>{show_token(queries[row])} to {show_token(keys[column])}: "
        f"{weight:.4f}</title></rect>"
        for row, line in enumerate(weights)
        for column, weight in enumerate(line)
        if weight >= 0.005
    )


def show_token(token: str) -> str:
    """A token as HTML text: spaces and characters that cannot be printed are made visible.

    >>> show_token("<zh>"), show_token(" "), show_token("\\u202e")
    ('&lt;zh&gt;', '␣', '\\\\u202e')
    """
    visible = token.replace(" ", "␣")
    return escape_html(visible)


def _text_width(token: str) -> float:
    """Width of a token; Chinese characters are wider than Latin letters."""
    return sum(13.0 if ord(character) > 0x2E80 else GLYPH for character in token)


def draw_badge(class_name: str) -> str:
    """The badge of a class: letter, colour and shape. An unclear head has a ring.

    >>> 'aria-label="sink"' in draw_badge("first")
    True
    """
    group = class_group(class_name)
    letter = CLASS_STYLES.get(group, ("U", ""))[0]
    style = STYLE_LETTERS.get(group, "u")
    y = {"sink": 9.6, "induction": 13.0}.get(group, 11.6)
    return (
        '<svg class="badge" viewBox="-1 -1 18 18" role="img" '
        f'aria-label="{escape_svg(group)}"><path class="c-{style}" '
        f'd="{CLASS_SHAPES.get(group, DISC)}"/><text class="i-{style}" x="8" '
        f'y="{y}">{escape_svg(letter)}</text></svg>'
    )


def draw_bar(share: float, label: str) -> str:
    """A horizontal bar for a share of 1."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape_svg(label)}">'
        f'<rect class="track" width="100" height="6"/><rect class="fill" width="{width:.2f}" '
        'height="6"/></svg>'
    )


STYLE_FILE = Path(__file__).with_name("sample_report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_tour_report(tour: Tour, path: Path) -> None:
    """Write what the tour has computed so far."""
    write_atomically(path, render_tour(tour).encode())


def render_tour(tour: Tour) -> str:
    """Return the report as HTML."""
    title = f"{'Heads of a translator'} · headwise demo"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{current_language()}">',
            (
                '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
                'initial-scale=1">'
            ),
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
    yield f"<section><h2>{escape_html(title)}</h2>"
    if lead:
        yield f"<p>{lead}</p>"
    yield from body
    yield "</section>"


def _header(tour: Tour) -> Iterator[str]:
    layers = len(tour.trace.layers)
    yield f"<header><h1>{'The heads of a small translator'}</h1>"
    lead = (
        "The model translates dates and amounts of money between English, ISO notation and "
        "Chinese. It was trained "
        f"with headwise and has <b>{tour.num_heads}</b> attention heads in <b>{layers}</b> layers."
    )
    yield f"<p>{lead}</p>"
    yield (
        f'<dl class="pair"><dt>{"reads"}</dt><dd>{escape_html(SOURCE)}</dd>'
        f"<dt>{'writes'}</dt><dd "
        f'lang="zh">{escape_html(tour.translation)}</dd></dl></header>'
    )


# --- The map of all heads -------------------------------------------------------------------------


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
    groups = dict.fromkeys(
        class_group(head.classes[0].name) for head in tour.table.heads if head.classes
    )
    legend = "".join(f"<span>{draw_badge(group)} {escape_html(group)}</span>" for group in groups)
    ramp = "".join(f'<i class="b{shade}"></i>' for shade in range(9))
    meaning = "importance: loss increase without the head"
    bars = f'<span><b class="swatch"></b> {meaning}</span>' if tour.importance else ""
    removed = f'<span><b class="gone"></b> {"removed below"}</span>' if keep else ""
    yield from _section(
        "What every head attends to",
        "A cell is a head: rows are the tokens that are read or written, columns the tokens it "
        "looks at. The letter is "
        f"its strongest class over {escape_html(tour.table.texts)}.",
        f'<div class="headmap">{"".join(rows)}</div>',
        f'<p class="legend">{legend}<span class="ramp">{"weight 0"} {ramp} '
        f"{'1, square root'}</span>{bars}{removed}</p>",
    )


def _map_cell(tour: Tour, head: HeadMeasures, most: float, removed: bool) -> str:
    name = head.classes[0].name if head.classes else "unclear"
    label = f"{head.site} head {head.head}, {name}" + (", removed" if removed else "")
    weights = tour.trace.head_weights(head.site, head.head).tolist()
    importance = tour.importance.get((head.site, head.head))
    bar = ""
    if importance is not None and most > 0:
        score = f"importance {importance.value:.3g}"
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
        f'<figure class="panel"><h3>{draw_badge(view.class_name)} '
        f"{escape_html(view.name)}</h3>"
        f'<div class="scroll">{draw_heat_map(view.weights, view.queries, view.keys, view.name)}</div>'
        f"<figcaption><b>{escape_html(class_group(view.class_name))}</b>: "
        f"{escape_html(view.evidence)}.</figcaption>"
        "</figure>"
        for view in tour.views
    ]
    yield from _section(
        "Three heads in detail",
        "Queries are at the left, keys on top. Point at a cell for its weight.",
        f'<div class="panels">{"".join(figures)}</div>',
    )


# --- Ablation and pruning -------------------------------------------------------------------------


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
    head = "".join(f"<th>{name}</th>" for name in ("source", "with the head", "without it"))
    yield from _section(
        "One head ablated",
        f"Every head was ablated alone, over {ablation.texts} held-out texts. Without <b>"
        f"{escape_html(ablation.site)} head {ablation.head}</b> the loss rises by "
        f"<b>{ablation.value:.3g}</b> (95% "
        f"interval {ablation.low:.3g} to {ablation.high:.3g}), the most of all heads.",
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>',
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def _mark_changes(before: str, after: str) -> str:
    """The output without the head; characters that differ from the output with it are marked."""
    if before == after:
        return f"{escape_html(after)} <small>{'unchanged'}</small>"
    marked = [
        escape_html(char)
        if n < len(before) and before[n] == char
        else f"<mark>{escape_html(char)}</mark>"
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
        (name, entry["value"], before_after.format_interval(entry))
        for name, entry in (
            (f"{total} heads", comparison["before"]),
            (f"{num_kept} heads", data["cut"]["after"]),
            ("retrained", comparison["after"]),
        )
    ]
    yield from _section(
        "Half of the heads pruned, and proved",
        f"{escape_html(proof['what'])}. Then the smaller model was retrained for {data['steps']} "
        "steps to give the "
        "outputs of the original. Removed heads are hatched in the map above.",
        '<div class="bars" role="img" aria-label="exact match">',
        *(
            f"<span>{escape_html(name)}</span>{draw_bar(value, f'{name}: {value:.1%}')}"
            f'<span class="num">{value:.1%}</span><span class="num muted">{interval}</span>'
            for name, value, interval in bars
        ),
        "</div>",
        f'<p class="muted">{"Exact match over held-out examples, with its 95% interval."}</p>',
        _comparison_table(data),
        *_proof_checks(proof),
    )


def _comparison_table(data: Mapping[str, Any]) -> str:
    rows = [
        row
        for row in before_after.comparison_rows(data)
        if not row.name.startswith(("exact match", "  "))
    ]
    body = "".join(
        f"<tr><td>{escape_html(row.name)}</td>"
        + "".join(f'<td class="num">{escape_html(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    head = "".join(f'<th class="num">{name}</th>' for name in ("before", "pruned", "retrained"))
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _proof_checks(proof: Mapping[str, Any]) -> Iterator[str]:
    """The comparisons that must agree up to rounding, each with its largest difference."""
    yield '<ul class="checks">'
    for check in proof["equal"]:
        state = "ok" if check["same"] else "bad"
        mark = "equal" if check["same"] else "NOT equal"
        numbers = (
            f"largest difference {check['apart']:.1e}, allowed {check['allowed']:.1e} "
            f"({check['dtype']})"
        )
        yield (
            f'<li class="{state}"><b>{mark}</b> {escape_html(check["what"])}: '
            f"{escape_html(numbers)}</li>"
        )
    yield "</ul>"


def _next_section(tour: Tour) -> Iterator[str]:
    commands: Sequence[tuple[str, str]] = (
        (
            "headwise view",
            "this translator, live in the browser: switch heads off and watch the output",
        ),
        (f"headwise view {tour.folder}/pruned", "the pruned model"),
        ("headwise view path/to/model --text '...'", "your own model"),
    )
    items = "".join(
        f"<li><code>{escape_html(command)}</code><span>{escape_html(text)}</span></li>"
        for command, text in commands
    )
    yield from _section("Next", "", f'<ul class="next">{items}</ul>')
