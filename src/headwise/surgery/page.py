"""A proof as a page in Markdown, for people who were not there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ..counting.costs import short
from .equality import FEW, STEPS
from .proof import Proof
from .quality import Between, Row, surely
from .savings import Layer, Pair

WIDTH = 80
INSIDE = WIDTH - 4  # of a block that is set off
LONG = 240  # signs of a text that is shown


def page(proof: Proof) -> str:
    """What was done, what was saved, what was lost, how sure that is, and how to see it again."""
    parts = [
        [f"# {line(proof.model)}: what is left works so", "", *wrapped(line(proof.what)), "", *_summary(proof)],
        ["## The same", "", *_equal(proof)],
        ["## Saved", "", *_saved(proof)],
        ["## Speed", "", *_speed(proof)],
        ["## How well it speaks", "", *_quality(proof)],
        ["## Where the two part", "", *_agreement(proof)],
        ["## Texts that changed most", "", *_examples(proof)],
        ["## How to see it again", "", *_see(proof)],
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def line(text: str, long: int = LONG) -> str:
    """A text on one line, whatever it holds, cut where it is long.

    >>> line("a\\x1b[2J\\n b")
    'a\\\\x1b[2J b'
    """
    told = re.sub(r"\s+", " ", text).strip()
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in told)
    return shown if len(shown) <= long else f"{shown[: long - 1]}…"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines no wider than a page."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows in columns as wide as what stands in them; the first to the left, numbers to the right.

    >>> print("\\n".join(table(("what", "n"), [("a", "12")])))
    | what |  n |
    |:-----|---:|
    | a    | 12 |
    """
    body = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    wide = [max(len(row[n]) for row in [tuple(heads), *body]) for n in range(len(heads))]
    rule = "|".join(f":{'-' * (one + 1)}" if not n else f"{'-' * (one + 1)}:" for n, one in enumerate(wide))
    return [_cells(heads, wide), f"|{rule}|", *(_cells(row, wide) for row in body)]


def _cells(row: Sequence[str], wide: Sequence[int]) -> str:
    cells = [cell.rjust(one) if n else cell.ljust(one) for n, (cell, one) in enumerate(zip(row, wide, strict=True))]
    return f"| {' | '.join(cells)} |"


def _summary(proof: Proof) -> Iterator[str]:
    for sentence in sentences(proof):
        yield from wrapped(sentence, "- ")


def sentences(proof: Proof) -> Iterator[str]:
    """The proof in a few sentences."""
    if proof.equal:
        worst = max(proof.equal, key=lambda one: one.apart / one.allowed)
        checks = f"{len(proof.equal)} comparison{'s' if len(proof.equal) > 1 else ''}"
        told = "the same up to rounding" if proof.holds else "NOT the same"
        yield f"Held to be equal in {checks}: {told} (at worst {worst.apart:.1e}, {worst.what})."
    yield proof.savings.sentence
    for one in proof.speeds.phases:
        verdict = one.verdict if one.verdict.startswith("none") else f"{one.faster:.2f} times as fast ({one.verdict})"
        yield f"{one.phase.capitalize()}: {verdict}."
    row = proof.quality.rows[0]
    yield f"{_changed(row, proof.quality.objective)}, over {proof.quality.texts} texts."
    for more in proof.quality.rows[1:]:
        if "/" not in more.name:
            yield f"{_changed(more, '')}."


def _changed(row: Row, of: str) -> str:
    name = line(f"{of} {row.name}" if of and of != row.name else row.name)
    name = name[:1].upper() + name[1:]
    if row.before is None or row.change is None:
        return f"{name} {number(row.after.value)} ({_within(row.after)})"
    sure = surely(row.change)
    told = sure if sure.startswith("no") else ("better" if (sure == "more") == (row.better == "higher") else "worse")
    moved = f"{number(row.before.value)} -> {number(row.after.value)}"
    return f"{name} {moved}: {told} (change {_within(row.change)})"


def sized(count: int) -> str:
    """A number of bytes in a few signs.

    >>> sized(192), sized(31104)
    ('192 B', '31.10 kB')
    """
    told = short(count)
    return f"{told}B" if told[-1].isalpha() else f"{told} B"


def number(value: float) -> str:
    """A number in a few signs.

    >>> number(0.12345), number(12.3456), number(12345.6), number(1e-7)
    ('0.1235', '12.346', '12,346', '1.0e-07')
    """
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3f}" if size >= 1 else f"{value:.4f}"


def _within(one: Between) -> str:
    return f"{number(one.low)} to {number(one.high)}"


def _equal(proof: Proof) -> Iterator[str]:
    if not proof.equal:
        yield "Nothing was held to be equal."
        return
    rows = [
        (line(one.what), f"{one.apart:.1e}", f"{one.allowed:.1e}", str(one.texts), "yes" if one.same else "NO")
        for one in proof.equal
    ]
    yield from table(("what", "apart", "rounding", "texts", "same"), rows)
    yield ""
    yield from wrapped(
        f"Apart is the largest difference of any number that the two say of any text; rounding is what {STEPS:,} steps "
        f"of the precision, {FEW} of one of two bytes, make of the largest number said."
    )


def _saved(proof: Proof) -> Iterator[str]:
    saved = proof.savings
    yield from table(("", "before", "after", "left"), [_pair(one) for one in saved.pairs])
    yield ""
    source = f", {saved.source:,} of a source" if saved.source else ""
    yield from wrapped(f"For one row of {saved.length:,} tokens{source}, {saved.dtype}; FLOPs of allowed pairs only.")
    if saved.sites:
        yield ""
        yield from table(("attention", "heads", "kv heads", "parameters", "k, v a token"), _sites(saved.sites.items()))
        yield ""
        yield from wrapped("k, v a token: how many numbers of keys and values each token has there.")


def _pair(one: Pair) -> tuple[str, ...]:
    told = {"": "{:,}".format, "bytes": sized, "FLOPs": short}[one.unit]
    left = "-" if one.ratio is None else f"{one.ratio:.1%}"
    unit = " FLOPs" if one.unit == "FLOPs" else ""
    return one.name + unit, told(one.before), told(one.after), left


def _sites(sites: Iterable[tuple[str, tuple[Layer, Layer]]]) -> Iterator[tuple[str, ...]]:
    """A line for each attention; those of one kind and alike, layer after layer, are one."""
    found = list[tuple[list[str], tuple[Layer, Layer]]]()
    for site, pair in sites:
        if found and found[-1][1] == pair and _kind(found[-1][0][-1]) == _kind(site):
            found[-1][0].append(site)
        else:
            found.append(([site], pair))
    for names, (before, after) in found:
        stack, first, kind = names[0].split(".")
        name = names[0] if len(names) == 1 else f"{stack}.{first}-{names[-1].split('.')[1]}.{kind}"
        yield name, *(_moved(one, other) for one, other in zip(before, after, strict=True))


def _kind(site: str) -> tuple[str, str]:
    stack, _, kind = site.split(".")
    return stack, kind


def _moved(one: int, other: int) -> str:
    return f"{one:,}" if one == other else f"{one:,} -> {other:,}"


def _speed(proof: Proof) -> Iterator[str]:
    told = proof.speeds
    rows = [
        (f"{one.phase}, {one.unit}", short(round(one.before)), short(round(one.after)), f"{one.faster:.2f}",
         f"{one.low:.2f} to {one.high:.2f}", f"{one.spread:.0%}")
        for one in told.phases
    ]  # fmt: skip
    yield from table(("", "before", "after", "times", "middle half", "spread"), rows)
    yield ""
    held = [(one.phase, *map(sized, one.held)) for one in told.phases]
    yield from table(("held at once", "before", "after"), held)
    yield ""
    for one in told.phases:
        yield from wrapped(f"{one.phase}: {one.verdict}, {one.rounds} rounds.", "- ")
    yield ""
    yield from wrapped(
        f"Measured in turns in one process ({told.machine}), batch {told.batch}, {told.length:,} tokens read, "
        f"{told.steps} then said one by one; medians. Spread is the middle half of the rounds over their median; above "
        "20% nothing is concluded. Held at once is what tensors of a run take, caches too, weights aside."
    )
    for note in told.notes:
        yield from wrapped(line(note))


def _quality(proof: Proof) -> Iterator[str]:
    told = proof.quality
    rows = [
        (line(one.name), "-" if one.before is None else number(one.before.value), number(one.after.value),
         *(("-", "-") if one.change is None else (number(one.change.value), _within(one.change))))
        for one in told.rows
    ]  # fmt: skip
    yield from table((line(told.objective), "before", "after", "change", "95% of draws"), rows)
    yield ""
    yield from wrapped(
        f"Over {told.texts:,} texts, {told.places:,} places asked. Intervals draw texts anew, the same for both "
        "models; a change whose interval holds 0 is not shown."
    )
    for note in told.notes:
        yield from wrapped(line(note))


def _agreement(proof: Proof) -> Iterator[str]:
    told = proof.agreement
    rows = [(name, f"{one.mean:.4f}", f"{one.low:.4f}") for name, one in told.layers.items()]
    rows.append(("what is said", f"{told.output.mean:.4f}", f"{told.output.low:.4f}"))
    yield from table(("cosine behind", "mean", "lowest"), rows)
    if told.same is not None and told.kl is not None:
        yield ""
        yield from wrapped(
            f"Both hold the same for likeliest at {told.same:.1%} of places; KL(before || after) is {number(told.kl)} "
            "nats on average."
        )


def _examples(proof: Proof) -> Iterator[str]:
    for one in proof.examples:
        yield f"Text {one.number}: {number(one.before)} -> {number(one.after)}"
        yield ""
        told = {"read": one.read, "wanted": one.wanted, "before": one.said_before, "after": one.said_after}
        for name, text in told.items():
            if text:
                yield from (f"    {row}" for row in textwrap.wrap(f"{name + ':':<8}{line(text)}", INSIDE,
                                                                   subsequent_indent=" " * 8))  # fmt: skip
        yield ""


def _see(proof: Proof) -> Iterator[str]:
    if proof.command:
        yield from (f"    {row}" for row in textwrap.wrap(line(proof.command), INSIDE, subsequent_indent="    "))
        yield ""
    versions = ", ".join(f"{name} {told}" for name, told in (proof.versions or {}).items())
    yield from wrapped(f"Every number stands in proof.json, with the heads that were kept. {versions}.")
    for note in proof.notes:
        yield from wrapped(line(note), "- ")
