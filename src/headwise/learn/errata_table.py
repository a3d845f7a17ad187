"""The errata of the five documents as rows: claim, correction with the numbers of the run, reference and command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .entry import Entry, Result


@dataclass(frozen=True)
class Erratum:
    """One row of the errata; an entry that covers two rows gives two errata."""

    id: str
    entry: Entry
    result: Result

    def cells(self, language: str) -> tuple[str, str, str, str, str]:
        """Id, claim, correction, reference and command; lines of a correction are joined by `<br>`."""
        claim = self.entry.line.fill(language, {})
        reason = "<br>".join(_as_sentence(line) for line in self.result.reason(language).splitlines())
        return self.id, claim, reason, self.entry.reference or "-", f"`headwise learn {self.id}`"


def _as_sentence(line: str) -> str:
    """A row of cells between bars as `first: second, third`; other lines as they are."""
    cells = [cell.strip() for cell in line.split(" | ")]
    return f"{cells[0]}: {', '.join(cells[1:])}".removeprefix(": ") if len(cells) > 1 else line


def is_erratum(row: str) -> bool:
    """Whether a row is an erratum such as C1.4, and no demand such as B4.

    >>> is_erratum("C1.4"), is_erratum("B4")
    (True, False)
    """
    return row.startswith("C")


def list_errata(entries: Sequence[Entry]) -> Iterator[Erratum]:
    """The errata of these entries, by document and number; every entry is run."""
    named = [(row, entry) for entry in entries for row in entry.rows if is_erratum(row)]
    results = {entry.id: entry.check() for _, entry in named}
    for row, entry in sorted(named, key=lambda pair: _number(pair[0])):
        yield Erratum(row, entry, results[entry.id])


def _number(row: str) -> tuple[int, int]:
    document, number = row[1:].split(".")
    return int(document), int(number)
