"""A proof as a page in Markdown, for people who were not there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ...costs.cost_report import format_count
from .efficiency import AttentionSize, CostPair
from .model_comparison import HALF_TOLERANCE_STEPS, TOLERANCE_STEPS
from .proof import ModelProof
from .quality_metrics import IntervalEstimate, MetricRow, describe_significance

PAGE_WIDTH = 80
TEXT_WIDTH = PAGE_WIDTH - 4  # of a block that is set off
MAX_LINE_LENGTH = 240  # signs of a text that is shown


def render_proof(proof: ModelProof) -> str:
    """What was done, what was saved, what was lost, how sure that is, and how to see it again."""
    parts = [
        [
            f"# {to_one_line(proof.model)}: what is left works so",
            "",
            *wrap_text(to_one_line(proof.what)),
            "",
            *_summary_section(proof),
        ],
        ["## The same", "", *_equivalence_section(proof)],
        ["## Saved", "", *_cost_section(proof)],
        ["## Speed", "", *_speed_section(proof)],
        ["## How well it speaks", "", *_quality_section(proof)],
        ["## Where the two part", "", *_agreement_section(proof)],
        ["## Texts that changed most", "", *_examples_section(proof)],
        ["## How to see it again", "", *_reproduction_section(proof)],
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def to_one_line(text: str, max_length: int = MAX_LINE_LENGTH) -> str:
    """A text on one line, whatever it holds, cut where it is long.

    >>> to_one_line("a\\x1b[2J\\n b")
    'a\\\\x1b[2J b'
    """
    told = re.sub(r"\s+", " ", text).strip()
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in told)
    return shown if len(shown) <= max_length else f"{shown[: max_length - 1]}…"


def wrap_text(text: str, indent: str = "") -> list[str]:
    """Lines no wider than a page."""
    return textwrap.wrap(text, PAGE_WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows in columns as wide as what stands in them; the first to the left, numbers to the right.

    >>> print("\\n".join(format_table(("what", "n"), [("a", "12")])))
    | what |  n |
    |:-----|---:|
    | a    | 12 |
    """
    body = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    wide = [max(len(row[n]) for row in [tuple(header), *body]) for n in range(len(header))]
    rule = "|".join(f":{'-' * (one + 1)}" if not n else f"{'-' * (one + 1)}:" for n, one in enumerate(wide))
    return [_format_row(header, wide), f"|{rule}|", *(_format_row(row, wide) for row in body)]


def _format_row(row: Sequence[str], wide: Sequence[int]) -> str:
    cells = [cell.rjust(one) if n else cell.ljust(one) for n, (cell, one) in enumerate(zip(row, wide, strict=True))]
    return f"| {' | '.join(cells)} |"


def _summary_section(proof: ModelProof) -> Iterator[str]:
    for sentence in iter_summary(proof):
        yield from wrap_text(sentence, "- ")


def iter_summary(proof: ModelProof) -> Iterator[str]:
    """The proof in a few sentences."""
    if proof.equal:
        worst = max(proof.equal, key=lambda one: one.apart / one.allowed)
        checks = f"{len(proof.equal)} comparison{'s' if len(proof.equal) > 1 else ''}"
        told = "the same up to rounding" if proof.holds else "NOT the same"
        yield f"Held to be equal in {checks}: {told} (at worst {worst.apart:.1e}, {worst.what})."
    yield proof.savings.summary
    for one in proof.speeds.phases:
        verdict = one.verdict if one.verdict.startswith("none") else f"{one.faster:.2f} times as fast ({one.verdict})"
        yield f"{one.phase.capitalize()}: {verdict}."
    row = proof.quality.rows[0]
    yield f"{_describe_change(row, proof.quality.objective)}, over {proof.quality.texts} texts."
    for more in proof.quality.rows[1:]:
        if "/" not in more.name:
            yield f"{_describe_change(more, '')}."


def _describe_change(row: MetricRow, of: str) -> str:
    name = to_one_line(f"{of} {row.name}" if of and of != row.name else row.name)
    name = name[:1].upper() + name[1:]
    if row.before is None or row.change is None:
        return f"{name} {format_number(row.after.value)} ({_format_interval(row.after)})"
    sure = describe_significance(row.change)
    told = sure if sure.startswith("no") else ("better" if (sure == "more") == (row.better == "higher") else "worse")
    moved = f"{format_number(row.before.value)} -> {format_number(row.after.value)}"
    return f"{name} {moved}: {told} (change {_format_interval(row.change)})"


def format_bytes(count: int) -> str:
    """A number of bytes in a few signs.

    >>> format_bytes(192), format_bytes(31104)
    ('192 B', '31.10 kB')
    """
    told = format_count(count)
    return f"{told}B" if told[-1].isalpha() else f"{told} B"


def format_number(value: float) -> str:
    """A number in a few signs.

    >>> format_number(0.12345), format_number(12.3456), format_number(12345.6), format_number(1e-7)
    ('0.1235', '12.346', '12,346', '1.0e-07')
    """
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3f}" if size >= 1 else f"{value:.4f}"


def _format_interval(one: IntervalEstimate) -> str:
    return f"{format_number(one.low)} to {format_number(one.high)}"


def _equivalence_section(proof: ModelProof) -> Iterator[str]:
    if not proof.equal:
        yield "Nothing was held to be equal."
        return
    rows = [
        (to_one_line(one.what), f"{one.apart:.1e}", f"{one.allowed:.1e}", str(one.texts), "yes" if one.same else "NO")
        for one in proof.equal
    ]
    yield from format_table(("what", "apart", "rounding", "texts", "same"), rows)
    yield ""
    yield from wrap_text(
        f"Apart is the largest difference of any number that the two say of any text; rounding is what "
        f"{TOLERANCE_STEPS:,} steps "
        f"of the precision, {HALF_TOLERANCE_STEPS} of one of two bytes, make of the largest number said."
    )


def _cost_section(proof: ModelProof) -> Iterator[str]:
    saved = proof.savings
    yield from format_table(("", "before", "after", "left"), [_cost_row(one) for one in saved.costs])
    yield ""
    source = f", {saved.source_length:,} of a source" if saved.source_length else ""
    yield from wrap_text(f"For one row of {saved.length:,} tokens{source}, {saved.dtype}; FLOPs of allowed pairs only.")
    if saved.sites:
        yield ""
        yield from format_table(
            ("attention", "heads", "kv heads", "parameters", "k, v a token"), _site_rows(saved.sites.items())
        )
        yield ""
        yield from wrap_text("k, v a token: how many numbers of keys and values each token has there.")


def _cost_row(one: CostPair) -> tuple[str, ...]:
    told = {"": "{:,}".format, "bytes": format_bytes, "FLOPs": format_count}[one.unit]
    left = "-" if one.ratio is None else f"{one.ratio:.1%}"
    unit = " FLOPs" if one.unit == "FLOPs" else ""
    return one.name + unit, told(one.before), told(one.after), left


def _site_rows(sites: Iterable[tuple[str, tuple[AttentionSize, AttentionSize]]]) -> Iterator[tuple[str, ...]]:
    """A line for each attention; those of one kind and alike, layer after layer, are one."""
    found = list[tuple[list[str], tuple[AttentionSize, AttentionSize]]]()
    for site, pair in sites:
        if found and found[-1][1] == pair and _split_site(found[-1][0][-1]) == _split_site(site):
            found[-1][0].append(site)
        else:
            found.append(([site], pair))
    for names, (before, after) in found:
        stack, first, kind = names[0].split(".")
        name = names[0] if len(names) == 1 else f"{stack}.{first}-{names[-1].split('.')[1]}.{kind}"
        yield name, *(_format_change(one, other) for one, other in zip(before, after, strict=True))


def _split_site(site: str) -> tuple[str, str]:
    stack, _, kind = site.split(".")
    return stack, kind


def _format_change(one: int, other: int) -> str:
    return f"{one:,}" if one == other else f"{one:,} -> {other:,}"


def _speed_section(proof: ModelProof) -> Iterator[str]:
    told = proof.speeds
    rows = [
        (
            f"{one.phase}, {one.unit}",
            format_count(round(one.before)),
            format_count(round(one.after)),
            f"{one.faster:.2f}",
            f"{one.low:.2f} to {one.high:.2f}",
            f"{one.spread:.0%}",
        )
        for one in told.phases
    ]
    yield from format_table(("", "before", "after", "times", "middle half", "spread"), rows)
    yield ""
    held = [(one.phase, *map(format_bytes, one.held)) for one in told.phases]
    yield from format_table(("held at once", "before", "after"), held)
    yield ""
    for one in told.phases:
        yield from wrap_text(f"{one.phase}: {one.verdict}, {one.rounds} rounds.", "- ")
    yield ""
    yield from wrap_text(
        f"Measured in turns in one process ({told.machine}), batch {told.batch}, {told.length:,} tokens read, "
        f"{told.steps} then said one by one; medians. Spread is the middle half of the rounds over their median; above "
        "20% nothing is concluded. Held at once is what tensors of a run take, caches too, weights aside."
    )
    for note in told.notes:
        yield from wrap_text(to_one_line(note))


def _quality_section(proof: ModelProof) -> Iterator[str]:
    told = proof.quality
    rows = [
        (
            to_one_line(one.name),
            "-" if one.before is None else format_number(one.before.value),
            format_number(one.after.value),
            *(("-", "-") if one.change is None else (format_number(one.change.value), _format_interval(one.change))),
        )
        for one in told.rows
    ]
    yield from format_table((to_one_line(told.objective), "before", "after", "change", "95% of draws"), rows)
    yield ""
    yield from wrap_text(
        f"Over {told.texts:,} texts, {told.num_positions:,} places asked. Intervals draw texts anew, the same for both "
        "models; a change whose interval holds 0 is not shown."
    )
    for note in told.notes:
        yield from wrap_text(to_one_line(note))


def _agreement_section(proof: ModelProof) -> Iterator[str]:
    told = proof.agreement
    rows = [(name, f"{one.mean:.4f}", f"{one.low:.4f}") for name, one in told.layers.items()]
    rows.append(("what is said", f"{told.output.mean:.4f}", f"{told.output.low:.4f}"))
    yield from format_table(("cosine behind", "mean", "lowest"), rows)
    if told.top1_match is not None and told.kl is not None:
        yield ""
        yield from wrap_text(
            f"Both hold the same for likeliest at {told.top1_match:.1%} of places; KL(before || after) is "
            f"{format_number(told.kl)} "
            "nats on average."
        )


def _examples_section(proof: ModelProof) -> Iterator[str]:
    for one in proof.examples:
        yield f"Text {one.number}: {format_number(one.before)} -> {format_number(one.after)}"
        yield ""
        told = {"read": one.read, "wanted": one.wanted, "before": one.said_before, "after": one.said_after}
        for name, text in told.items():
            if text:
                yield from (
                    f"    {row}"
                    for row in textwrap.wrap(
                        f"{name + ':':<8}{to_one_line(text)}", TEXT_WIDTH, subsequent_indent=" " * 8
                    )
                )
        yield ""


def _reproduction_section(proof: ModelProof) -> Iterator[str]:
    if proof.command:
        yield from (
            f"    {row}" for row in textwrap.wrap(to_one_line(proof.command), TEXT_WIDTH, subsequent_indent="    ")
        )
        yield ""
    versions = ", ".join(f"{name} {told}" for name, told in (proof.versions or {}).items())
    yield from wrap_text(f"Every number stands in proof.json, with the heads that were kept. {versions}.")
    for note in proof.notes:
        yield from wrap_text(to_one_line(note), "- ")


# --- A proof on a terminal -----------------------------------------------------------------------------


def render_summary(proof: ModelProof) -> str:
    """A few lines, no wider than a terminal, without colour."""
    lines = [*wrap_text(f"{to_one_line(proof.model)}: {to_one_line(proof.what)}"), ""]
    for sentence in iter_summary(proof):
        lines += wrap_text(sentence, "  ")
    for note in proof.notes:
        lines += wrap_text(to_one_line(note), "note: ")
    return "\n".join(lines)
