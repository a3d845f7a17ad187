"""The importance of every head of a model, as one result."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .head_table import Measure, save_table

SIGNIFICANCE_LEVEL = 0.05  # largest corrected p-value of a significant head
IMPORTANCE_COLUMNS = ("site", "head", "importance", "low", "high", "corrected p")


@dataclass(frozen=True)
class HeadImportance:
    """Importance of one head, with its confidence interval and p-value.

    `p` is the p-value of this head alone, `level` the one corrected for all heads; both are NaN if the method is not
    tested.
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
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()
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
            raise ValueError(f"head {number} of {site!r} was not rated; the rated sites are {sites}")
        return matches[0]

    def __str__(self) -> str:
        from .measure_tables import format_importance

        return format_importance(self)

    @property
    def by_importance(self) -> tuple[HeadImportance, ...]:
        """The heads by decreasing importance; heads with NaN come last."""
        return tuple(sorted(self.heads, key=lambda head: math.inf if math.isnan(head.value) else -head.value))

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
        """Write the result to a .json file with `data`, or to a .csv file with one line for each head."""
        save_table(path, self.data, self.to_csv, overwrite=overwrite)

    def to_csv(self) -> str:
        """The result as CSV, the most important head first; what was not tested is an empty field."""
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(IMPORTANCE_COLUMNS)
        for head in self.by_importance:
            numbers = (*head.measure[:3], head.level)
            writer.writerow([head.site, head.head, *("" if math.isnan(number) else number for number in numbers)])
        return buffer.getvalue()
