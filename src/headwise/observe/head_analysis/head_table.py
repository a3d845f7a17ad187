"""The heads of a model with their measures, classes and importance: rows of a table and plain
values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...report.data import Column, Estimate as Measure, Figure, HeatMap, Item, Table
from ...report.notebook import NotebookResult, ShownTable
from ...report.render import colour_text, note_lines, to_csv, to_plain, to_text
from ...report.text import NOT_MEASURED, choose_format, format_p, wrap
from ...util.errors import check_known, pluralise
from ..head_names import locate_head, print_head
from ..traces.attention_record import AttentionRecord

if TYPE_CHECKING:
    from ..inspect.site import Site  # imports torch

# Letter and colour of each class. Colours are from Okabe and Ito; the letter distinguishes classes
# without colour.
CLASS_STYLES: Mapping[str, tuple[str, str]] = {
    "sink": ("K", "#999999"),
    "positional": ("P", "#56B4E9"),
    "syntactic": ("S", "#009E73"),
    "rare-token": ("R", "#CC79A7"),
    "induction": ("I", "#D55E00"),
    "duplicate": ("D", "#E69F00"),
    "separator": ("E", "#7A7ACF"),
    "punctuation": ("T", "#B58B5A"),
    "alignment": ("A", "#0072B2"),
    "broad": ("B", "#F0E442"),
    "neighbour": ("N", "#44AA99"),
    "row": ("H", "#882255"),
    "column": ("V", "#117733"),
    "unclear": ("·", ""),
}
NAMED_CLASSES = [name for name in CLASS_STYLES if name != "unclear"]
CLASS_GROUPS = {
    "offset": "positional",
    "previous": "positional",
    "self": "positional",
    "next": "positional",
    "first": "sink",
}
HEADS_PER_CLASS = 2  # heads listed for each class
# weight on one kind of key, from 0 to 1
KEY_MEASURES = [
    "previous",
    "self",
    "next",
    "first",
    "separator",
    "punctuation",
    "duplicate",
    "induction",
]
NUM_STRONGEST = 5
MIN_ROWS = 20  # smallest number of rows behind a class, and behind a first place
INTERVAL_NOTE = "low and high: 95 % interval"


def class_group(name: str) -> str:
    """Return the group of a class, which has one letter and one colour.

    >>> class_group("syntactic det to its governor"), class_group("previous")
    ('syntactic', 'positional')
    """
    first = name.partition(" ")[0]
    return CLASS_GROUPS.get(first, first)


class HeadClass(NamedTuple):
    """A class of a head: its name, a score from 0 to 1, and a sentence with the evidence."""

    name: str
    score: float
    evidence: str


def order_classes(classes: Iterable[HeadClass], sinks_first: bool = False) -> tuple[HeadClass, ...]:
    """Sort the classes of a head, the likeliest first, and "sink" last unless `sinks_first`.

    Of most heads of a trained decoder "sink" has the highest score. What they do is what they do
    with the weight that sinks leave, which the other measures describe.

    >>> sink, previous = HeadClass("sink", 0.9, ""), HeadClass("previous", 0.6, "")
    >>> [one.name for one in order_classes([sink, previous])]
    ['previous', 'sink']
    """
    return tuple(
        sorted(classes, key=lambda one: (one.name == "sink" and not sinks_first, -one.score))
    )


@dataclass(frozen=True, repr=False)
class HeadMeasures:
    """One head: its position in the model, its measures and its classes in the order of
    `order_classes`.

    `kv` is the index of the head's key-value group; `site` the name of the attention layer, as
    `headwise.observe.inspect` gives it.
    """

    stack: str
    kind: str
    layer: int
    head: int
    kv: int
    site: str
    measures: Mapping[str, Measure]
    classes: tuple[HeadClass, ...] = ()

    def __repr__(self) -> str:
        best = f", {self.classes[0].name} {self.classes[0].score:.2f}" if self.classes else ""
        return f"<HeadMeasures: {self.site} head {self.head}{best}>"

    def __hash__(self) -> int:  # a row names its head in mappings
        return hash((self.site, self.head))

    @property
    def group(self) -> str:
        """Group of the first class."""
        return class_group(self.classes[0].name) if self.classes else "unclear"

    @property
    def letter(self) -> str:
        """Letter of the first class, in lower case if its score is below 0.5."""
        letter = CLASS_STYLES.get(self.group, ("?", ""))[0]
        return letter if not self.classes or self.classes[0].score >= 0.5 else letter.lower()

    def with_sinks_first(self) -> HeadMeasures:
        """Return the head with "sink" as its first class where that has the highest score."""
        return replace(self, classes=order_classes(self.classes, sinks_first=True))

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return {
            "stack": self.stack,
            "kind": self.kind,
            "layer": self.layer,
            "head": self.head,
            "kv": self.kv,
            "measures": {name: measure.data for name, measure in self.measures.items()},
            "classes": [head_class._asdict() for head_class in self.classes],
            "class": order_classes(self.classes)[0].name if self.classes else None,
            "class_with_sinks": self.with_sinks_first().classes[0].name if self.classes else None,
        }


def rows_of_heads(
    sites: Sequence[Site | AttentionRecord],
    measures: Mapping[tuple[str, int], Mapping[str, Measure]],
) -> list[HeadMeasures]:
    """Return the rows of a table: the heads of these sites with their measures by site and head."""
    heads: list[HeadMeasures] = []
    num_heads = Counter(name for name, _ in measures)
    for site in sites:
        count = num_heads[site.name]
        kv_heads = _kv_head_of_query(site)
        if len(kv_heads) != count:  # equal groups of neighbouring heads
            heads_per_kv = max(1, count // max(1, site.kv))
            kv_heads = [head // heads_per_kv for head in range(count)]
        for head in range(count):
            place = (site.stack, site.kind, site.layer, head, kv_heads[head], site.name)
            heads.append(HeadMeasures(*place, measures[site.name, head]))
    return heads


def _kv_head_of_query(site: Site | AttentionRecord) -> Sequence[int]:
    """Return the KV head of each query head; nothing if it is unknown."""
    if isinstance(site, AttentionRecord):
        return site.kv_head_of_query
    return () if site.spec is None else site.spec.heads.kv_head_of_query


@dataclass(frozen=True, repr=False)
class HeadTable(NotebookResult):
    """Every measured head of a model, the data it was measured on, and notes on what was left out.

    Prints as a grid of the heads' classes and the heads with the highest scores in each class.
    """

    model: str
    texts: str
    heads: tuple[HeadMeasures, ...]
    notes: tuple[str, ...] = field(default=())

    def with_notes(self, notes: Sequence[str]) -> HeadTable:
        """Return the table with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_sinks_first(self) -> HeadTable:
        """Return the table in which a head that is mostly a sink is shown as one, whatever else it
        does.
        """
        return replace(self, heads=tuple(head.with_sinks_first() for head in self.heads))

    def __str__(self) -> str:
        return self.to_text()

    @property
    def report_items(self) -> Sequence[Item]:
        """The grid of classes, the heads with the highest scores and why, and all heads."""
        evidence = self.evidence
        return [self.class_grid(), *([evidence] if evidence.rows else []), self.main_table]

    @property
    def main_table(self) -> Table:
        """A row for each head with the value of every measure."""
        names = list(dict.fromkeys(name for head in self.heads for name in head.measures))
        rows: list[list[Any]] = []
        for head in self.heads:
            best = head.classes[0] if head.classes else HeadClass("unclear", math.nan, "")
            values = [
                head.measures[name].value if name in head.measures else None for name in names
            ]
            rows.append([head.site, head.head, best.name, best.score, *values])
        columns = ("site", "head", "class", "score", *names)
        return Table("", columns, rows, self.notes)

    def to_text(self, colour: bool = False) -> str:
        """Return the table for a terminal; `colour` allows ANSI colours."""
        lines = [to_text(self.class_grid(), colour=colour)]
        for group in NAMED_CLASSES:
            letter, shade = CLASS_STYLES[group]
            members = self.class_members(group)
            if not members:
                continue
            count = pluralise(len({id(head) for _, head in members}), "head")
            name = f"{letter}  {group}"
            lines.append(f"\n{colour_text(name, shade) if colour else name}: {count}")
            for one, head in members[:HEADS_PER_CLASS]:
                line = f"{self.name(head)}: {one.name} {one.score:.2f}, {one.evidence}"
                lines += wrap(line, indent="   ")
        if self.texts == "1 text":
            lines += ["", to_text(self.strongest)]
        return "\n".join([*lines, *note_lines(self.notes)])

    @property
    def evidence(self) -> Table:
        """The heads with the highest scores in each class and why; of one text those furthest above
        chance.
        """
        if self.texts == "1 text":
            return self.strongest
        rows: list[tuple[Any, ...]] = []
        for group in NAMED_CLASSES:
            for one, head in self.class_members(group)[:HEADS_PER_CLASS]:
                rows.append((self.name(head), one.name, f"{one.score:.2f}", one.evidence))
        return ShownTable("", ("head", "class", "score", "evidence"), rows)

    @property
    def strongest(self) -> Table:
        """The heads with a measure that is furthest above its chance level."""
        rows: list[tuple[Any, ...]] = []
        for head in self.heads:
            measures = {name: head.measures[name] for name in KEY_MEASURES if name in head.measures}
            excess = {name: one.value - one.chance for name, one in measures.items()}
            names = [name for name, value in excess.items() if not math.isnan(value)]
            if names:
                best = max(names, key=lambda name: excess[name])
                value, _, _, chance, num_rows, _ = measures[best]
                rows.append((self.name(head), best, value, chance, int(num_rows)))
        rows.sort(key=lambda row: row[3] - row[2])
        columns = ("head", "measure", "value", "chance", "rows")
        return ShownTable("furthest above chance", columns, rows[:NUM_STRONGEST])

    def name(self, head: HeadMeasures) -> str:
        """Return the short name of a head, such as L0H3."""
        return print_head(head.site, head.head, self.sites)

    def class_grid(self, title: str = "") -> Figure:
        """Return every head of every layer as a cell with the letter and colour of its class.

        A stronger colour is a higher score.
        """
        num_heads = max(head.head for head in self.heads) + 1
        sites = self.sites
        texts = [[" "] * num_heads for _ in sites]
        colours = [[""] * num_heads for _ in sites]
        strengths = [[1.0] * num_heads for _ in sites]
        for head in self.heads:
            row = sites.index(head.site)
            texts[row][head.head] = head.letter
            colours[row][head.head] = CLASS_STYLES.get(head.group, ("?", "muted"))[1]
            if head.group != "unclear":
                strengths[row][head.head] = 0.35 + 0.65 * head.classes[0].score
        columns = [str(n) for n in range(num_heads)]
        grid = HeatMap(strengths, sites, columns, x_label="head", texts=texts, colours=colours)
        note = "in lower case if the score is below 0.5"
        if self.with_sinks_first() != self:
            letter = CLASS_STYLES["sink"][0]
            note += f"; sinks set aside: a head is {letter} if it has no other class"
        heading = title or f"{self.model}, {self.texts}"
        return Figure(heading, [grid], self.class_legend, legend_title=note)

    @property
    def class_legend(self) -> dict[str, str]:
        """Letter and name of each class of a head of the table -> its colour."""
        groups = {head.group for head in self.heads}
        for head in self.heads:
            groups |= {class_group(one.name) for one in head.classes}
        return {
            f"{letter} {name}": colour or "empty"
            for name, (letter, colour) in CLASS_STYLES.items()
            if name in groups
        }

    def class_members(self, group: str) -> list[tuple[HeadClass, HeadMeasures]]:
        """Return the classes of a group with their heads, the highest score first."""
        check_known("class", group, CLASS_STYLES)
        members: list[tuple[HeadClass, HeadMeasures]] = []
        for head in self.heads:
            members += [(one, head) for one in head.classes if class_group(one.name) == group]
        return sorted(members, key=lambda member: -member[0].score)

    def ranking(self, measure: str) -> Table:
        """Return the heads by decreasing value of a measure, with its interval and chance."""
        rows: list[tuple[Any, ...]] = []
        for head in self.sorted_by(measure):
            classes = ", ".join(f"{one.name} {one.score:.2f}" for one in head.classes[:2])
            rows.append((self.name(head), *head.measures[measure][:4], classes))
        numbers = list(chain.from_iterable(row[1:5] for row in rows))
        alike = [
            Column(name, choose_format(numbers)) for name in (measure, "low", "high", "chance")
        ]
        columns = ("head", *alike, "classes")
        title = f"{self.model}, {self.texts}; {INTERVAL_NOTE}"
        return ShownTable(title, columns, rows, self.notes)

    def head(self, site: str, number: int | None = None) -> HeadMeasures:
        """Return a head by the name of its site and its number, or by its own name, as in L0H3."""
        return _find_head(self.heads, site, number)

    def __getitem__(self, name: str) -> HeadMeasures:
        return self.head(name)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites, in the order of the table."""
        return tuple(dict.fromkeys(head.site for head in self.heads))

    def sorted_by(self, measure: str) -> tuple[HeadMeasures, ...]:
        """Return the heads by decreasing value of a measure. Heads where it rests on fewer than
        `MIN_ROWS` rows come after the others, and heads where it is NaN last.
        """
        measures = self.heads[0].measures if self.heads else {}
        if measure not in measures:
            raise ValueError(
                f"cannot sort by {measure!r}: it was not measured; use one of {', '.join(measures)}"
            )
        return tuple(sorted(self.heads, key=lambda head: _descending(head.measures[measure])))

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        heads = [head.data for head in self.heads]
        return {"model": self.model, "data": self.texts, "heads": heads, "notes": list(self.notes)}

    def to_csv(self) -> str:
        """Return CSV with one line for each measure of each head.

        `class` is the likeliest class of the head. What was not measured, or not tested, is an
        empty field.
        """
        columns = ("site", "stack", "kind", "layer", "head", "kv", "class", "measure")
        rows: list[tuple[Any, ...]] = []
        for head in self.heads:
            best = head.classes[0].name if head.classes else ""
            place = (head.site, head.stack, head.kind, head.layer, head.head, head.kv, best)
            rows += [(*place, name, *measure) for name, measure in head.measures.items()]
        return to_csv(Table("", (*columns, *Measure._fields), rows))


def _find_head(heads: Sequence[Any], site: str, number: int | None) -> Any:
    if number is None:
        layers = [SimpleNamespace(**vars(head) | {"name": head.site}) for head in heads]
        site, number = locate_head(site, {one.name: one for one in layers}.values())
    for head in heads:
        if (head.site, head.head) == (site, number):
            return head
    sites = ", ".join(dict.fromkeys(head.site for head in heads))
    raise ValueError(f"there is no head {number} of {site!r} here; the sites are {sites}")


def _descending(measure: Measure) -> tuple[bool, bool, float]:
    """Return the key of a measure: NaN last, before it those of few rows."""
    is_unknown = math.isnan(measure.value)
    return is_unknown, measure.rows < MIN_ROWS, -measure.value


# --- Importance -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadImportance:
    """Importance of one head, with its confidence interval and p-value.

    `p` is the p-value of this head alone, `level` the one corrected for all heads; both are NaN if
    the method is not tested.
    """

    site: str
    stack: str
    kind: str
    layer: int
    head: int
    kv: int
    value: float
    low: float
    high: float
    p: float = math.nan
    level: float = math.nan

    @property
    def measure(self) -> Measure:
        """Return the importance as a `Measure` with chance level 0."""
        return Measure(self.value, self.low, self.high, 0.0)


@dataclass(frozen=True, repr=False)
class ImportanceResult(NotebookResult):
    """Importance of every head of a model: the method, the objective and the number of texts."""

    model: str
    method: str
    objective: str
    texts: int
    heads: tuple[HeadImportance, ...]
    notes: tuple[str, ...] = ()

    def with_notes(self, notes: Sequence[str]) -> ImportanceResult:
        """Return the result with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def head(self, site: str, number: int | None = None) -> HeadImportance:
        """Return a head by the name of its site and its number, or by its own name, as in L0H3."""
        return _find_head(self.heads, site, number)

    @property
    def table(self) -> Table:
        """The heads by decreasing importance."""
        heads = self.by_importance
        numbers = list(chain.from_iterable(one.measure[:3] for one in heads))
        alike = [Column(name, choose_format(numbers)) for name in ("importance", "low", "high")]
        columns = ("head", *alike, Column("corrected p", format_p))
        sites = tuple(dict.fromkeys(one.site for one in self.heads))
        rows = [
            (print_head(one.site, one.head, sites), one.value, one.low, one.high, one.level)
            for one in heads
        ]
        title = f"{self._subject}: importance by {self.method} for {self.objective}"
        return Table(f"{title}; {INTERVAL_NOTE}", columns, rows, self.notes)

    @property
    def _subject(self) -> str:
        """The model and how many texts it read; none if the time was over in the first."""
        texts = pluralise(self.texts, "text") if self.texts else "a part of the heads on 1 text"
        return f"{self.model}, {texts}"

    @property
    def grid(self) -> Figure:
        """The importance of every head: a row for each layer, a column for each head."""
        sites = list(dict.fromkeys(one.site for one in self.heads))
        sizes = [abs(one.value) for one in self.heads if not math.isnan(one.value)]
        largest = max(sizes, default=0)
        exponent = math.floor(math.log10(largest)) if largest else 0
        num_heads = max(one.head for one in self.heads) + 1
        texts = [[" "] * num_heads for _ in sites]
        strengths = [[0.0] * num_heads for _ in sites]
        for one in self.heads:
            row = sites.index(one.site)
            texts[row][one.head] = NOT_MEASURED
            if not math.isnan(one.value):
                texts[row][one.head] = f"{one.value / 10.0**exponent:.2f}"
                strengths[row][one.head] = max(one.value, 0) / largest if largest else 0.0
        names = [f"{head:>5}" for head in range(num_heads)]
        unit = f", in units of 1e{exponent}" if exponent else ""
        title = f"{self._subject}: importance by {self.method}{unit}"
        return Figure(title, [HeatMap(strengths, sites, names, x_label="head", texts=texts)])

    @property
    def report_items(self) -> Sequence[Item]:
        """The grid and the table of heads."""
        return [self.grid, self.table]

    def __str__(self) -> str:
        return "\n\n".join(map(to_text, self.report_items))

    @property
    def by_importance(self) -> tuple[HeadImportance, ...]:
        """The heads by decreasing importance; heads with NaN come last."""
        return tuple(sorted(self.heads, key=lambda head: (math.isnan(head.value), -head.value)))

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self)

    def to_csv(self) -> str:
        """Return CSV, the most important head first; what was not tested is an empty field."""
        columns = ("site", "head", "importance", "low", "high", "corrected p")
        rows = [
            (one.site, one.head, one.value, one.low, one.high, one.level)
            for one in self.by_importance
        ]
        return to_csv(Table("", columns, rows))
