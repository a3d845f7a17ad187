"""Text of documents and entries for a terminal, in English or Chinese, with the claims of stored studies."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Document, list_topics, read_toml
from .entry import Entry, Result, Verdict

WIDTH = 80
MARKS = {Verdict.HOLDS: "[+]", Verdict.HOLDS_IF: "[~]", Verdict.WRONG: "[x]", Verdict.NOT_RUN: "[ ]"}


class Words:
    """Words of the command and of the pages in one language."""

    def __init__(self, language: str) -> None:
        self.language, self._table = language, read_toml("words")

    def verdict(self, verdict: Verdict) -> str:
        """The name of a verdict."""
        return self._table["verdicts"][verdict.value][self.language]

    def kind(self, entry: Entry) -> str:
        """The name of the kind of an entry."""
        return self._table["kinds"][entry.kind.value][self.language]

    def phrase(self, name: str) -> str:
        """A phrase of `words.toml`."""
        return self._table["phrases"][name][self.language]


def text_width(text: str) -> int:
    """Columns of a text in a terminal; Chinese characters take two.

    >>> text_width("QK^T 点积")
    9
    """
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def pad(text: str, width: int) -> str:
    """The text with spaces up to this width in a terminal."""
    return text + " " * max(width - text_width(text), 0)


def wrap(text: str, indent: str = "  ", width: int = WIDTH) -> list[str]:
    """Break a text into lines; Latin words stay whole, Chinese text breaks between any two characters.

    >>> wrap("a long word 一二三", indent="", width=8)
    ['a long', 'word 一', '二三']
    """
    return [
        indent + line for paragraph in text.splitlines() for line in _wrap_paragraph(paragraph, width - len(indent))
    ]


def _wrap_paragraph(paragraph: str, width: int) -> list[str]:
    if " | " in paragraph or paragraph.startswith("    "):
        return [paragraph]  # a row of a table, or code
    lines, line = [], ""
    for piece in _pieces(paragraph):
        if line and text_width(line + piece.rstrip()) > width and not _is_closing(piece):
            lines.append(line.rstrip())
            line = ""
        line += piece if line else piece.lstrip()
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def _pieces(text: str) -> Iterator[str]:
    """Single wide characters, and Latin words with the spaces after them."""
    word = ""
    for letter in text:
        if unicodedata.east_asian_width(letter) in "WF":
            if word:
                yield word
            word = ""
            yield letter
        elif word.endswith(" ") and letter != " ":
            yield word
            word = letter
        else:
            word += letter
    if word:
        yield word


def _is_closing(piece: str) -> bool:
    return piece[:1] in "，。；：、）」！？"


def align_table(text: str) -> str:
    """Align the columns of rows that are written as cells between bars."""
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines if " | " in line]
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)] if rows else []
    aligned = iter(" | ".join(pad(cell, w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(next(aligned) if " | " in line else line for line in lines)


def format_entry(entry: Entry, result: Result, language: str) -> str:
    """One entry: its quote, the statement, the verdict and the reason with the numbers of the run."""
    words = Words(language)
    rows = f"  {', '.join(entry.rows)}" if entry.rows else ""
    lines = [f"{MARKS[result.verdict]} {entry.id}  {words.kind(entry)}  {words.verdict(result.verdict)}{rows}"]
    lines += wrap(f"「{entry.quote_zh}」", indent="    ")
    lines += wrap(entry.line.fill(language, {}), indent="    ")
    lines += wrap(align_table(result.reason(language)), indent="    > ")
    if entry.run is None:
        lines += wrap(words.phrase("facts"), indent="    ")
    if result.figure:
        lines += wrap(words.phrase("figure"), indent="    ")
    if entry.reference:
        lines += wrap(f"{words.phrase('reference')}: {entry.reference}", indent="    ")
    if entry.see:
        lines += wrap(f"{words.phrase('see')}: {entry.see}", indent="    ")
    if entry.study:
        lines += [line for text in describe_study(entry.study, words) for line in wrap(text, indent="    ")]
    return "\n".join(lines)


def describe_study(study: str, words: Words) -> list[str]:
    """The claims of the last stored run of a study with its folder, or that there is none; and the command."""
    title, command, runs = words.phrase("study"), study_command(study), find_study_runs(study)
    if not runs:
        return [f"{title}: {words.phrase('no_run')} {command}"]
    head = f"{title}: {words.phrase('stored')} {runs[0].folder}; {words.phrase('again')} {command}"
    return [head, *(f"- {claim}" for claim in runs[0].claims)]


def format_list(documents: Sequence[Document], language: str) -> str:
    """One line for each entry: id, expected verdict, topic, rows and the statement."""
    words, lines = Words(language), []
    for document in documents:
        lines += ["", f"{document.id}  {document.title.fill(language, {})}", ""]
        lines += [_list_line(entry, words) for entry in document.entries]
    return "\n".join(lines[1:])


def _list_line(entry: Entry, words: Words) -> str:
    head = f"{pad(entry.id, 12)}{pad(words.verdict(entry.verdict), 11)}"
    rows = f" ({', '.join(entry.rows)})" if entry.rows else ""
    return f"{head}{pad(entry.topic, 20)} {entry.line.fill(words.language, {})}{rows}"


def format_overview(documents: Sequence[Document], language: str) -> str:
    """The documents with counts of verdicts, the topics, and how to go on."""
    words = Words(language)
    lines = [words.phrase("documents"), ""]
    for document in documents:
        lines.append(f"  {document.id}  {document.title.fill(language, {})}")
        lines.append(f"       {_count_verdicts(document.entries, words)}")
    topics = list_topics([entry for document in documents for entry in document.entries])
    lines += ["", words.phrase("topics"), "", *wrap(", ".join(topics)), "", words.phrase("start"), ""]
    lines += [f"  headwise learn {name}" for name in ("003", "softmax-scale", "C1.4")]
    return "\n".join(lines)


def _count_verdicts(entries: Iterable[Entry], words: Words) -> str:
    counts = Counter(entry.verdict for entry in entries)
    listed = ", ".join(f"{counts[verdict]} {words.verdict(verdict)}" for verdict in Verdict if counts[verdict])
    return f"{counts.total()} {words.phrase('entries')}: {listed}"


# --- Stored runs of studies ----------------------------------------------------------------------------

STUDIES = Path("runs/studies")  # where headwise study writes, under the current folder
CLAIMS = "## What can be claimed"


@dataclass(frozen=True)
class StudyRun:
    """The report of one finished run of a study: its folder and its claims."""

    folder: Path
    claims: tuple[str, ...]


def study_command(study: str) -> str:
    """The command that runs a study.

    >>> study_command("heads-count")
    'headwise study studies/heads-count.toml'
    """
    return f"headwise study studies/{study}.toml"


def find_study_runs(study: str, folder: Path = STUDIES) -> Sequence[StudyRun]:
    """The stored runs of a study at any scale, the most recent first."""
    reports = [path for path in folder.glob(f"{study}-*/report/report.md") if _names_study(path, study)]
    reports.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [StudyRun(path.parent.parent, _read_claims(path)) for path in reports]


def _names_study(report: Path, study: str) -> bool:
    """Whether the first line names this study, and not another whose name begins alike."""
    lines = report.read_text(encoding="utf-8").splitlines()
    return lines[:1] == [f"# Study: {study}"]


def _read_claims(report: Path) -> tuple[str, ...]:
    _, _, text = report.read_text(encoding="utf-8").partition(CLAIMS)
    section = text.partition("\n## ")[0]
    return tuple(line.removeprefix("- ") for line in section.splitlines() if line.startswith("- "))
