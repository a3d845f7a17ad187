"""One document as an HTML page that needs no network: quotes, verdicts, reasons with numbers, and
figures.

Also the errata of all documents as rows: claim, correction with the numbers of the run, reference
and command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..report.plots import find_undrawable, to_svg
from ..util.escaping import make_visible
from ..util.files import write_atomically
from ..util.output_paths import FolderKind
from .catalogue import Document, Entry, Result
from .entry_text import MARKS, Words, describe_study, plain_formula
from .language import LANGUAGES, SAMPLE, join_clauses, join_items, use_language

TEMPLATE = Path(__file__).with_name("document_page.html")
DOCUMENT_PAGES = FolderKind("folder of documents", ("00[0-4].html",), lambda _: ("00[0-4].html",))


def font_note(language: str) -> str:
    """A note on what to install if this machine has no font for Chinese quotes and figures; empty
    if it has one.
    """
    return Words(language).phrase("font") if find_undrawable(SAMPLE) else ""


def write_document_page(document: Document, language: str, path: Path) -> None:
    """Run all entries of a document and write its page."""
    write_atomically(path, render_document(document, language).encode())


def render_document(document: Document, language: str) -> str:
    """The page of a document as HTML; every entry is run."""
    import jinja2

    def show(value: object) -> object:
        return make_visible(value, keep="\n\t") if type(value) is str else value

    with use_language(language):  # of the texts inside figures
        results = [(entry, entry.check()) for entry in document.entries]
    environment = jinja2.Environment(
        autoescape=True, finalize=show, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        marks=MARKS,
        plain_formula=plain_formula,
        blocks=_blocks,
        small_print=_small_print,
        to_svg=to_svg,
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"{document.id} {document.title.fill(language, {})}",
        words=Words(language),
        notes={name: font_note(name) for name in LANGUAGES},
        results=results,
    )


def _blocks(reason: str) -> list[tuple[bool, list[str]]]:
    """Paragraphs, and rows of cells between bars (True), which make a table."""
    groups = groupby(reason.splitlines(), key=lambda line: " | " in line)
    return [(is_table, list(lines)) for is_table, lines in groups]


def _small_print(entry: Entry, words: Words) -> Iterator[str]:
    if entry.run is None:
        yield words.phrase("facts")
    for name, text in (("reference", words.reference(entry)), ("see", entry.see)):
        if text:
            yield words.label(name) + text
    if entry.study:
        yield from describe_study(entry.study, words)


# --- Errata: a page of the documentation ----------------------------------------------------------


@dataclass(frozen=True)
class Erratum:
    """One row of the errata; an entry that covers two rows gives two errata."""

    id: str
    entry: Entry
    result: Result

    def cells(self, language: str) -> tuple[str, str, str, str, str]:
        """Id, claim, correction, reference and command; lines of a correction
        are joined by `<br>`.
        """
        claim = self.entry.line.fill(language, {})
        with use_language(language):
            reason = "<br>".join(
                _as_sentence(line) for line in self.result.reason(language).splitlines()
            )
        reference = Words(language).reference(self.entry) or "-"
        return self.id, claim, reason, reference, f"`headwise learn {self.id}`"


def _as_sentence(line: str) -> str:
    """A row of cells between bars as `first: second, third`; other lines as they are."""
    cells = [cell.strip() for cell in line.split(" | ")]
    label = [cells[0]] if cells[0] else []
    values = join_items(cells[1:])
    return join_clauses([*label, values], ": ") if values else line


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
