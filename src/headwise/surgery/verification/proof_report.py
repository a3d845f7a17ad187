"""Proof rendered as a Markdown page, PROOF.md, and as a short text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ...costs.cost_report import format_count
from ...escaping import escape_markdown, escape_terminal
from .efficiency import AttentionSize, CostPair
from .model_comparison import DOUBLE_TOLERANCE, OUTPUT_TOLERANCE, OutputDifference
from .proof import ModelProof
from .quality_metrics import MAX_EQUAL_CHANGE, IntervalEstimate, MetricRow, describe_change

PAGE_WIDTH = 80
TEXT_WIDTH = PAGE_WIDTH - 4  # of an indented block
MAX_LINE_LENGTH = 240  # characters of a text that are shown


def render_proof(proof: ModelProof) -> str:
    """Return the proof as a Markdown page."""
    parts = [
        [
            f"# {escape_markdown(proof.model)}: report of the changed model",
            "",
            *wrap_text(to_one_line(proof.what)),
            "",
            *_summary_section(proof),
        ],
        ["## Equality checks", "", *_equivalence_section(proof)],
        ["## Size and cost", "", *_cost_section(proof)],
        ["## Speed", "", *_speed_section(proof)],
        ["## Quality", "", *_quality_section(proof)],
        ["## Agreement of both models", "", *_agreement_section(proof)],
        ["## Texts that changed most", "", *_examples_section(proof)],
        ["## How to reproduce", "", *_reproduction_section(proof)],
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def to_one_line(text: str, max_length: int = MAX_LINE_LENGTH) -> str:
    """Return a text on one line, with control characters escaped, truncated to `max_length`.

    >>> to_one_line("a\\x1b[2J\\n b")
    'a\\\\x1b[2J b'
    """
    return escape_terminal(text, max_length)


def wrap_text(text: str, indent: str = "") -> list[str]:
    """Wrap a text at the page width."""
    return textwrap.wrap(
        text, PAGE_WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent)
    )


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows as a Markdown table; the first column is left-aligned, the others right-aligned.

    >>> print("\\n".join(format_table(("what", "n"), [("a", "12")])))
    | what |  n |
    |:-----|---:|
    | a    | 12 |
    """
    body = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    widths = [max(len(row[n]) for row in [tuple(header), *body]) for n in range(len(header))]
    rule = "|".join(
        f":{'-' * (width + 1)}" if not n else f"{'-' * (width + 1)}:"
        for n, width in enumerate(widths)
    )
    return [_format_row(header, widths), f"|{rule}|", *(_format_row(row, widths) for row in body)]


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if n else cell.ljust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def _summary_section(proof: ModelProof) -> Iterator[str]:
    for sentence in iter_summary(proof):
        yield from wrap_text(sentence, "- ")


def iter_summary(proof: ModelProof) -> Iterator[str]:
    """Yield a summary of the proof, one sentence per comparison."""
    if proof.equal:
        outputs = [difference for difference in proof.equal if difference.texts]
        worst = max(outputs, key=lambda difference: difference.apart / (difference.allowed or 1.0))
        checks = f"{len(proof.equal)} check{'s' if len(proof.equal) > 1 else ''}"
        result = "equal up to rounding" if proof.holds else "NOT equal"
        yield f"Outputs in {checks}: {result} (largest difference {worst.apart:.1e}, {worst.what})."
    yield proof.savings.summary
    for phase in proof.speeds.phases:
        verdict = (
            f"{phase.speedup:.2f} times as fast ({phase.verdict})"
            if phase.has_verdict
            else phase.verdict
        )
        yield f"{phase.phase.capitalize()}: {verdict}."
    row = proof.quality.rows[0]
    yield f"{_describe_change(row, proof.quality.objective)}, over {proof.quality.texts} texts."
    for row in proof.quality.rows[1:]:
        if "/" not in row.name:
            yield f"{_describe_change(row, '')}."


def _describe_change(row: MetricRow, objective: str) -> str:
    name = to_one_line(
        f"{objective} {row.name}" if objective and objective != row.name else row.name
    )
    name = name[:1].upper() + name[1:]
    if row.before is None or row.change is None:
        return f"{name} {format_number(row.after.value)} ({_format_interval(row.after)})"
    values = f"{format_number(row.before.value)} -> {format_number(row.after.value)}"
    return f"{name} {values}: {describe_change(row)} (change {_format_interval(row.change)})"


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit.

    >>> format_bytes(192), format_bytes(31104)
    ('192 B', '31.10 kB')
    """
    number = format_count(count)
    return f"{number}B" if number[-1].isalpha() else f"{number} B"


def format_number(value: float) -> str:
    """Format a number with about four significant digits.

    >>> format_number(0.12345), format_number(12.3456), format_number(12345.6), format_number(1e-7)
    ('0.1235', '12.346', '12,346', '1.0e-07')
    """
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3f}" if size >= 1 else f"{value:.4f}"


def _format_interval(estimate: IntervalEstimate) -> str:
    if not estimate.low < estimate.high:
        return "no spread"
    return f"{format_number(estimate.low)} to {format_number(estimate.high)}"


def _equivalence_section(proof: ModelProof) -> Iterator[str]:
    if not proof.equal:
        yield "No equality was checked."
        return
    rows = [
        _difference_row(check, f"{check.allowed:.1e}", "yes" if check.same else "NO")
        for check in proof.equal
    ]
    rows += [_difference_row(difference, "-", "-") for difference in proof.rounding]
    yield from format_table(("outputs compared", "difference", "tolerance", "texts", "equal"), rows)
    yield ""
    yield from wrap_text(
        "Difference is the largest absolute difference of any output on any text. Tolerance is "
        f"{OUTPUT_TOLERANCE:.0e} of the largest output, {DOUBLE_TOLERANCE:.0e} in float64. "
        "Differences of weights are "
        "relative to the largest of each tensor."
    )
    if proof.rounding:
        yield ""
        yield from wrap_text(
            "Models of 16 bits are compared in float32, on one text. The row without a tolerance "
            "shows their rounding, "
            "which would hide a wrong head."
        )


def _difference_row(check: OutputDifference, allowed: str, verdict: str) -> tuple[str, ...]:
    return to_one_line(check.what), f"{check.apart:.1e}", allowed, str(check.texts or "-"), verdict


def _cost_section(proof: ModelProof) -> Iterator[str]:
    saved = proof.savings
    yield from format_table(
        ("", "before", "after", "ratio"), [_cost_row(pair) for pair in saved.costs]
    )
    yield ""
    source = f" and a source of {saved.source_length:,}" if saved.source_length else ""
    yield from wrap_text(
        f"For one sequence of {saved.length:,} tokens{source}, {saved.dtype}. FLOPs count allowed "
        "query-key pairs only."
    )
    if saved.sites:
        yield ""
        yield from format_table(
            ("attention", "heads", "kv heads", "parameters", "cached k, v"),
            _site_rows(saved.sites.items()),
        )
        yield ""
        yield from wrap_text("Cached k, v: numbers of keys and values cached per token.")


def _cost_row(pair: CostPair) -> tuple[str, ...]:
    format_value = {"": "{:,}".format, "bytes": format_bytes, "FLOPs": format_count}[pair.unit]
    ratio = "-" if pair.ratio is None else f"{pair.ratio:.1%}"
    unit = " FLOPs" if pair.unit == "FLOPs" else ""
    return pair.name + unit, format_value(pair.before), format_value(pair.after), ratio


def _site_rows(
    sites: Iterable[tuple[str, tuple[AttentionSize, AttentionSize]]],
) -> Iterator[tuple[str, ...]]:
    """Yield one row per attention; consecutive layers with the same sizes share a row."""
    groups = list[tuple[list[str], tuple[AttentionSize, AttentionSize]]]()
    for site, pair in sites:
        if groups and groups[-1][1] == pair and _split_site(groups[-1][0][-1]) == _split_site(site):
            groups[-1][0].append(site)
        else:
            groups.append(([site], pair))
    for names, (before, after) in groups:
        stack, first, kind = names[0].split(".")
        name = names[0] if len(names) == 1 else f"{stack}.{first}-{names[-1].split('.')[1]}.{kind}"
        yield name, *(_format_change(old, new) for old, new in zip(before, after, strict=True))


def _split_site(site: str) -> tuple[str, str]:
    stack, _, kind = site.split(".")
    return stack, kind


def _format_change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def _speed_section(proof: ModelProof) -> Iterator[str]:
    speeds = proof.speeds
    rows = [
        (
            f"{phase.phase}, {phase.unit}",
            format_count(round(phase.before)),
            format_count(round(phase.after)),
            f"{phase.speedup:.2f}" if phase.has_verdict else "-",
            f"{phase.low:.2f} to {phase.high:.2f}",
            f"{phase.spread:.0%}",
        )
        for phase in speeds.phases
    ]
    yield from format_table(
        ("units per second", "before", "after", "speedup", "quartiles", "spread"), rows
    )
    yield ""
    memory_rows = [(phase.phase, *map(format_bytes, phase.peak_bytes)) for phase in speeds.phases]
    yield from format_table(("peak memory", "before", "after"), memory_rows)
    yield ""
    for phase in speeds.phases:
        yield from wrap_text(f"{phase.phase}: {phase.verdict}, {phase.rounds} rounds.", "- ")
    yield ""
    yield from wrap_text(
        f"Both models were measured alternately in one process ({speeds.machine}): batch "
        f"{speeds.batch}, "
        f"{speeds.length:,} prompt tokens, {speeds.steps} decode steps; medians. Spread is the "
        "interquartile range of "
        "the rounds over their median; above 20% there is no verdict. Peak memory has tensors of "
        "a run with caches, "
        "without weights."
    )
    for note in speeds.notes:
        yield from wrap_text(to_one_line(note))


def _quality_section(proof: ModelProof) -> Iterator[str]:
    quality = proof.quality
    rows = [
        (
            to_one_line(row.name),
            "-" if row.before is None else format_number(row.before.value),
            format_number(row.after.value),
            *(
                ("-", "-")
                if row.change is None
                else (format_number(row.change.value), _format_interval(row.change))
            ),
        )
        for row in quality.rows
    ]
    yield from format_table(
        (to_one_line(quality.objective), "before", "after", "change", "95% interval"), rows
    )
    yield ""
    yield from wrap_text(
        f"Over {quality.texts:,} texts with {quality.num_positions:,} scored positions. Intervals "
        "are "
        "95 % confidence intervals over texts, for the change over pairs; a change is not "
        "significant if its interval "
        "contains 0, and no difference is shown only if the interval stays within "
        f"{MAX_EQUAL_CHANGE:.0%} of the value."
    )
    for note in quality.notes:
        yield from wrap_text(to_one_line(note))


def _agreement_section(proof: ModelProof) -> Iterator[str]:
    agreement = proof.agreement
    rows = [
        (name, f"{cosine.mean:.4f}", f"{cosine.low:.4f}")
        for name, cosine in agreement.layers.items()
    ]
    rows.append(("output", f"{agreement.output.mean:.4f}", f"{agreement.output.low:.4f}"))
    yield from format_table(("cosine similarity after", "mean", "minimum"), rows)
    if agreement.top1_match is not None and agreement.kl is not None:
        yield ""
        yield from wrap_text(
            f"Both models have the same most likely output at {agreement.top1_match:.1%} of "
            "positions; "
            f"KL(before || after) is {format_number(agreement.kl)} nats on average."
        )


def _examples_section(proof: ModelProof) -> Iterator[str]:
    for example in proof.examples:
        yield (
            f"Text {example.number}: loss {format_number(example.before)} -> "
            f"{format_number(example.after)}"
        )
        yield ""
        texts = {
            "input": example.read,
            "target": example.target,
            "before": example.output_before,
            "after": example.output_after,
        }
        for name, text in texts.items():
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
            f"    {row}"
            for row in textwrap.wrap(
                to_one_line(proof.command), TEXT_WIDTH, subsequent_indent="    "
            )
        )
        yield ""
    versions = ", ".join(f"{name} {version}" for name, version in (proof.versions or {}).items())
    yield from wrap_text(
        f"All numbers are in proof.json, with the heads that were kept. {versions}."
    )
    for note in proof.notes:
        yield from wrap_text(to_one_line(note), "- ")


# --- Terminal -------------------------------------------------------------------------------------


def render_summary(proof: ModelProof) -> str:
    """Return the summary for a terminal: plain text, 80 columns."""
    lines = [*wrap_text(f"{to_one_line(proof.model)}: {to_one_line(proof.what)}"), ""]
    for sentence in iter_summary(proof):
        lines += wrap_text(sentence, "  ")
    for note in proof.notes:
        lines += wrap_text(to_one_line(note), "note: ")
    return "\n".join(lines)
