"""The heads of a model with their measures and classes: rows of a table, plain values, and files of
both; and the importance of every head, as one result.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import SpecError
from ..files import write_atomically
from ..output_paths import FileKind, check_output

CSV_COLUMNS = (
    *("site", "stack", "kind", "layer", "head", "kv", "class", "measure"),
    *("value", "low", "high", "chance", "rows", "p"),
)


class Measure(NamedTuple):
    """A value with its confidence interval and the value expected by chance.

    `rows` is the number of rows (dependencies, alignment links) that the value averages. `p` is the
    one-sided p-value of the excess over chance, not corrected; NaN if it was not tested.
    """

    value: float
    low: float
    high: float
    chance: float
    rows: float = math.nan
    p: float = math.nan

    @property
    def is_above_chance(self) -> bool:
        """True if the lower end of the interval is above chance."""
        return self.low > self.chance

    @property
    def data(self) -> dict[str, float | None]:
        """Dictionary of plain values; NaN (nothing was counted) becomes None."""
        return {
            name: None if math.isnan(value) else value for name, value in self._asdict().items()
        }


class HeadClass(NamedTuple):
    """A class of a head: its name, a score from 0 to 1, and a sentence with the evidence."""

    name: str
    score: float
    evidence: str


@dataclass(frozen=True)
class HeadMeasures:
    """One head: its position in the model, its measures and its classes.

    `kv` is the index of the head's key-value group; `site` the name of the attention layer, as
    `headwise.inspect` gives it.
    """

    stack: str
    kind: str
    layer: int
    head: int
    kv: int
    site: str
    measures: Mapping[str, Measure]
    classes: tuple[HeadClass, ...] = ()

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
        }


@dataclass(frozen=True)
class HeadTable:
    """Every measured head of a model, the data it was measured on, and notes on
    what was left out.
    """

    model: str
    texts: str
    heads: tuple[HeadMeasures, ...]
    notes: tuple[str, ...] = field(default=())

    def with_notes(self, notes: Sequence[str]) -> HeadTable:
        """Return the table with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def __str__(self) -> str:
        from .head_figures import format_head_table

        return format_head_table(self)

    def head(self, site: str, number: int) -> HeadMeasures:
        """Return head `number` of the site named `site`; raise ValueError if the table has none."""
        matches = [head for head in self.heads if (head.site, head.head) == (site, number)]
        if not matches:
            raise ValueError(
                f"the table has no head {number} of {site!r}; its sites are {', '.join(self.sites)}"
            )
        return matches[0]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites, in the order of the table."""
        return tuple(dict.fromkeys(head.site for head in self.heads))

    def sorted_by(self, measure: str) -> tuple[HeadMeasures, ...]:
        """Return the heads by decreasing value of a measure; heads where it is NaN come last."""
        measures = self.heads[0].measures if self.heads else {}
        if measure not in measures:
            raise ValueError(
                f"cannot sort by {measure!r}: it was not measured; use one of {', '.join(measures)}"
            )
        return tuple(
            sorted(self.heads, key=lambda head: -_finite_or_last(head.measures[measure].value))
        )

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        heads = [head.data for head in self.heads]
        return {"model": self.model, "data": self.texts, "heads": heads, "notes": list(self.notes)}

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the table to a .json file with `data`, or to a .csv file."""
        save_table(path, self.data, self.to_csv, overwrite=overwrite)

    def to_csv(self) -> str:
        """The table as CSV: one line for each measure of each head, with its interval and its
        chance level.

        `class` is the likeliest class of the head. What was not measured, or not tested, is an
        empty field.
        """
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(CSV_COLUMNS)
        for head in self.heads:
            best = head.classes[0].name if head.classes else ""
            place = (head.site, head.stack, head.kind, head.layer, head.head, head.kv, best)
            for name, measure in head.measures.items():
                writer.writerow(
                    [*place, name, *("" if math.isnan(value) else value for value in measure)]
                )
        return buffer.getvalue()


def _finite_or_last(value: float) -> float:
    return -math.inf if math.isnan(value) else value


# --- Names of heads -------------------------------------------------------------------------------

HEAD_NAME = re.compile(r"([LEDX])(\d+) ?H(\d+)")
EXAMPLE_NAMES = "L3H2 (or E3H2, D3H2, X3H2 for encoder, decoder and cross-attention), or SITE:HEAD"


class LayerName(Protocol):
    """Name of an attention layer: a site of a model or a layer of a trace."""

    @property
    def name(self) -> str: ...
    @property
    def stack(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def layer(self) -> int: ...


def check_head_name(name: str) -> None:
    """Raise ValueError unless `name` could name a head."""
    site, _, head = name.rpartition(":")
    if not HEAD_NAME.fullmatch(name) and not (site and head.isdecimal()):
        raise ValueError(f"{name!r} is not a head; write {EXAMPLE_NAMES}")


def locate_head(name: str, layers: Iterable[LayerName]) -> tuple[str, int]:
    """Return the site and the number of a head by its short name, as the page of headwise view
    writes it, or SITE:HEAD.

    L is any layer, E the encoder, D the self-attention of the decoder, X the cross-attention.

    >>> from types import SimpleNamespace as Layer
    >>> cross = Layer(name="decoder.1.cross", stack="decoder", kind="cross", layer=1)
    >>> locate_head("X1H3", [cross]), locate_head("decoder.1.cross:3", [cross])
    (('decoder.1.cross', 3), ('decoder.1.cross', 3))
    """
    check_head_name(name)
    match = HEAD_NAME.fullmatch(name)
    if match is None:
        site, _, head = name.rpartition(":")
        return site, int(head)
    letter, number, head = match[1], int(match[2]), int(match[3])
    sites = [
        layer.name
        for layer in layers
        if layer.layer == number and letter in ("L", _layer_letter(layer))
    ]
    if len(sites) != 1:
        fact = (
            f"layer {number} is each of {', '.join(sites)}"
            if sites
            else f"there is no layer {letter}{number}"
        )
        raise ValueError(f"{name} is not one head, because {fact}; write {EXAMPLE_NAMES}")
    return sites[0], head


def _layer_letter(layer: LayerName) -> str:
    return "X" if layer.kind == "cross" else "E" if layer.stack == "encoder" else "D"


# --- Files of tables ------------------------------------------------------------------------------

TABLE_SUFFIXES = (".json", ".csv")
TABLE_NAME = "table of heads"
# The first key of the .json files, and the first column names of both kinds of .csv files.
TABLE_FILE = FileKind(
    TABLE_NAME,
    (f'"format": "{TABLE_NAME}"'.encode(), b"site,stack,kind,", b"site,head,importance,"),
)


def save_table(
    path: Path | str, data: Mapping[str, Any], to_csv: Callable[[], str], *, overwrite: bool = False
) -> None:
    """Write a table as .json or .csv; the file appears complete or not at all."""
    suffix = Path(path).suffix
    if suffix not in TABLE_SUFFIXES:
        suffixes = ", ".join(TABLE_SUFFIXES)
        raise SpecError(
            f"cannot save heads to {path}: its suffix is {suffix!r}; use one of {suffixes}"
        )
    target = check_output(path, TABLE_FILE, "overwrite" if overwrite else "refuse")
    if suffix == ".csv":
        write_atomically(target, to_csv().encode())
        return
    document = {"format": TABLE_NAME} | dict(data)
    write_atomically(target, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


SIGNIFICANCE_LEVEL = 0.05  # largest corrected p-value of a significant head
IMPORTANCE_COLUMNS = ("site", "head", "importance", "low", "high", "corrected p")


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
        """The importance as a `Measure`, whose chance level is 0."""
        return Measure(self.value, self.low, self.high, 0.0)

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values; NaN becomes None."""
        fields = asdict(self)
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in fields.items()
        }


@dataclass(frozen=True)
class ImportanceResult:
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

    def head(self, site: str, number: int) -> HeadImportance:
        """Return head `number` of the site named `site`; raise ValueError if it was not rated."""
        matches = [head for head in self.heads if (head.site, head.head) == (site, number)]
        if not matches:
            sites = ", ".join(dict.fromkeys(head.site for head in self.heads))
            raise ValueError(
                f"head {number} of {site!r} was not rated; the rated sites are {sites}"
            )
        return matches[0]

    def __str__(self) -> str:
        from .measure_tables import format_importance

        return format_importance(self)

    @property
    def by_importance(self) -> tuple[HeadImportance, ...]:
        """The heads by decreasing importance; heads with NaN come last."""
        return tuple(
            sorted(self.heads, key=lambda head: math.inf if math.isnan(head.value) else -head.value)
        )

    @property
    def significant_heads(self) -> tuple[HeadImportance, ...]:
        """Heads whose corrected p-value is below `SIGNIFICANCE_LEVEL`."""
        return tuple(head for head in self.heads if head.level < SIGNIFICANCE_LEVEL)

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return {
            "model": self.model,
            "method": self.method,
            "objective": self.objective,
            "texts": self.texts,
            "heads": [head.data for head in self.heads],
            "notes": list(self.notes),
        }

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the result to a .json file with `data`, or to a .csv file with one line for each
        head.
        """
        save_table(path, self.data, self.to_csv, overwrite=overwrite)

    def to_csv(self) -> str:
        """The result as CSV, the most important head first; what was not tested
        is an empty field.
        """
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(IMPORTANCE_COLUMNS)
        for head in self.by_importance:
            numbers = (*head.measure[:3], head.level)
            writer.writerow(
                [
                    head.site,
                    head.head,
                    *("" if math.isnan(number) else number for number in numbers),
                ]
            )
        return buffer.getvalue()
