"""One document as an HTML page that needs no network: quotes, verdicts, reasons with numbers, and
figures.

Also the errata of all documents as rows: claim, correction with the numbers of the run, reference
and command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..observe.head_analysis.head_figures import find_undrawable
from ..util.escaping import escape_html as escape
from ..util.files import write_atomically
from ..util.output_paths import FolderKind
from .catalogue import Document, Entry, Result, Verdict
from .entry_text import MARKS, Words, describe_study, plain_formula
from .language import LANGUAGES, SAMPLE, join_clauses, join_items, use_language

STYLE_FILE = Path(__file__).with_name("document_page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CLASSES = {
    Verdict.HOLDS: "holds",
    Verdict.HOLDS_IF: "condition",
    Verdict.WRONG: "wrong",
    Verdict.NOT_RUN: "small",
}


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
    words = Words(language)
    title = escape(f"{document.id} {document.title.fill(language, {})}")
    with use_language(language):  # of the texts inside figures
        results = [(entry, entry.check()) for entry in document.entries]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{language}">',
            (
                '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
                'initial-scale=1">'
            ),
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            (
                f'<meta name="color-scheme" content="light dark"><title>{title} · headwise '
                "learn</title>"
            ),
            f"<style>\n{STYLE_FILE.read_text(encoding='utf-8')}</style></head>",
            f"<body><main><h1>{title}</h1>",
            *(
                f'<p lang="{name}" class="note">{escape(note)}</p>'
                for name in LANGUAGES
                if (note := font_note(name))
            ),
            "<nav>",
            *(_link(entry, result, words) for entry, result in results),
            "</nav>",
            *(line for entry, result in results for line in _article(entry, result, words)),
            "</main></body></html>",
            "",
        ]
    )


def _link(entry: Entry, result: Result, words: Words) -> str:
    text = f"{MARKS[result.verdict]} {entry.id} {entry.line.fill(words.language, {})}"
    return f'<a href="#{entry.id}">{escape(text)}</a>'


def _article(entry: Entry, result: Result, words: Words) -> Iterator[str]:
    rows = f"<span>{escape(words.items(entry.rows))}</span>" if entry.rows else ""
    verdict = (
        '<span class="verdict '
        f'{CLASSES[result.verdict]}">{escape(words.verdict(result.verdict))}</span>'
    )
    yield f'<article id="{entry.id}"><header><h2>{entry.id}</h2><span>{escape(words.kind(entry))}</span>'
    yield f"{verdict}{rows}</header>"
    yield f'<blockquote lang="zh">{escape(plain_formula(entry.quote_zh))}</blockquote>'
    yield f"<p>{escape(entry.line.fill(words.language, {}))}</p>"
    yield from _paragraphs(result.reason(words.language))
    if result.figure:
        yield f'<div class="scroll">{result.figure}</div>'
    if entry.run is None:
        yield f'<p class="small">{escape(words.phrase("facts"))}</p>'
    for name, text in (("reference", words.reference(entry)), ("see", entry.see)):
        if text:
            yield f'<p class="small">{escape(words.label(name) + text)}</p>'
    if entry.study:
        yield from (
            f'<p class="small">{escape(text)}</p>' for text in describe_study(entry.study, words)
        )
    yield f'<p class="small">{escape(words.label("command"))}<code>{escape(entry.command)}</code></p></article>'


def _paragraphs(reason: str) -> Iterator[str]:
    """Paragraphs, and rows of cells between bars as a table."""
    rows: list[str] = []
    for line in [*reason.splitlines(), ""]:
        if " | " in line:
            rows.append(
                "<tr>"
                + "".join(f"<td>{escape(cell.strip())}</td>" for cell in line.split(" | "))
                + "</tr>"
            )
            continue
        if rows:
            yield f'<div class="scroll"><table>{"".join(rows)}</table></div>'
            rows = []
        if line:
            yield f"<p>{escape(line)}</p>"


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
