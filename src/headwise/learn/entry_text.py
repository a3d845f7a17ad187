"""Text of documents and entries for a terminal, in English or Chinese, with the claims of stored
studies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from ..report.plots import find_undrawable
from ..report.text import pad, text_width, wrap
from .catalogue import Document, Entry, Result, Verdict, list_topics
from .language import SAMPLE, join_clauses, join_items, localise, use_language
from .stored_findings import list_claims
from .view_links import ViewLink

MARKS = {
    Verdict.HOLDS: "[+]",
    Verdict.HOLDS_IF: "[~]",
    Verdict.WRONG: "[x]",
    Verdict.NOT_RESOLVED: "[?]",
    Verdict.NOT_RUN: "[ ]",
    Verdict.FAULT: "[!]",
}


PHRASES = {
    "reference": "Reference",
    "see": "More",
    "command": "Command",
    "view": "In the bundled translator, on the page of `headwise view`",
    "topics": "Topics",
    "documents": "Documents",
    "entries": "entries",
    "figure": "The figure of this entry is on the page that --html writes.",
    "marks": "[+] holds, [~] holds if, [x] wrong, [?] not resolved, [ ] not run. C1.4 is an "
    "erratum, D6 a claim of a cited paper, B3 a run that the errata ask for.",
    "start": "Read a document in order, a section (003-6 has the seven questions), a topic or an "
    "erratum:",
    "facts": "A fact about the cited source; nothing to compute.",
    "arithmetic": "Arithmetic, or torch alone; the run uses no part of headwise.",
    "wrote": "wrote",
    "study": "Tested by training",
    "no_run": "no stored run here; run",
    "stored": "stored run",
    "page": "stored results of",
    "strips": "The strip picture of each task is on the page that --html writes.",
    "again": "to run it again",
    "no_script": "Sliders show only their start values, because the script of the pages is not "
    "built. In a checkout, run make web and write the pages again.",
    "font": "No font with Chinese characters is installed, so quotes and figures may show boxes "
    "in their place. "
    "Install one, as the package fonts-noto-cjk, and open the page again.",
}


class Words:
    """Words of the command and of the pages in one language."""

    def __init__(self, language: str) -> None:
        self.language = language

    def verdict(self, verdict: Verdict) -> str:
        """The name of a verdict."""
        return self._translate(verdict.value)

    def kind(self, entry: Entry) -> str:
        """The name of the kind of an entry."""
        return self._translate(entry.kind.value)

    def items(self, items: Iterable[str]) -> str:
        """The items in one text."""
        with use_language(self.language):
            return join_items(items)

    def reference(self, entry: Entry) -> str:
        """The cited papers and their parts."""
        with use_language(self.language):
            papers = (
                join_clauses(map(localise, paper.split(", ")))
                for paper in entry.reference.split("; ")
            )
            return join_clauses(papers, "; ")

    def describe_view(self, link: ViewLink) -> str:
        """The screen, head and token of a link to the page, and the command that starts it."""
        with use_language(self.language):
            head = f"{localise('head')} {link.head}"
            screen = localise(f"screen {link.screen}")
            place = join_clauses([head, localise(f"token {link.token}"), screen])
            return join_clauses([self.phrase("view"), place, f"`{link.command}`"], ": ")

    def phrase(self, name: str) -> str:
        """A phrase of `PHRASES`."""
        return self._translate(PHRASES[name])

    def label(self, name: str) -> str:
        """A phrase as a label, with the colon of the language after it.

        >>> Words("en").label("see") + "headwise view"
        'More: headwise view'
        """
        with use_language(self.language):
            return join_clauses([localise(PHRASES[name]), ""], ": ")

    def _translate(self, text: str) -> str:
        with use_language(self.language):
            return localise(text)


# Commands of LaTeX in the quotes, innermost first; the last ones have no braces.
LATEX = (
    (re.compile(r"\\(?:text|mathcal)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=[_^])\{(\w+|\([^{}]*\))\}"), r"\1"),
    (re.compile(r"(?<=[_^])\{([^{}]*)\}"), r"(\1)"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), "\u221a\\1"),
    (re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}"), r"\1 / \2"),
    (re.compile(r"\\begin\{bmatrix\} (.*?) \\end\{bmatrix\}"), r"[\1]"),
    (re.compile(r" & "), "  "),
    (re.compile(r"\\(?:left|right|quad ?)"), ""),
    (
        re.compile(r"\\(alpha|cdot|dots|sim|sin|sum|times)(?![a-z])"),
        lambda match: SYMBOLS[match[1]],
    ),
)
SYMBOLS = {
    "alpha": "\u03b1",
    "cdot": "\u00b7",
    "dots": "\u2026",
    "sim": "~",
    "sin": "sin",
    "sum": "\u03a3",
    "times": "\u00d7",
}


def plain_formula(text: str) -> str:
    r"""The quote with its LaTeX as plain text.

    >>> plain_formula(r"\text{head}_1 = \frac{QK^T}{\sqrt{d_{\text{model}}}}")
    'head_1 = QK^T / √d_model'
    """
    before = ""
    while text != before:
        before = text
        for command, plain in LATEX:
            text = command.sub(plain, text)
    return text


def align_table(text: str) -> str:
    """Align the columns of rows that are written as cells between bars; other lines stay.

    >>> print(align_table("键 | 1\\nkeys | 22"))
    键   | 1
    keys | 22
    """
    lines = text.splitlines()
    rows = {
        n: [*map(str.strip, line.split(" | "))] for n, line in enumerate(lines) if " | " in line
    }
    widths = [max(map(text_width, column)) for column in zip(*rows.values(), strict=True)]
    for n, row in rows.items():
        lines[n] = " | ".join(map(pad, row, widths)).rstrip()
    return "\n".join(lines)


def wrap_page(text: str, indent: str) -> list[str]:
    """Break every paragraph of a text into lines; rows of a table and code stay."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        if " | " in paragraph or paragraph.startswith("    ") or not paragraph:
            lines.append(indent + paragraph)
        else:
            lines += wrap(paragraph, indent=indent)
    return lines


def format_entry(entry: Entry, result: Result, language: str) -> str:
    """One entry: its quote, the statement, the verdict and the reason with the
    numbers of the run.
    """
    words = Words(language)
    rows = f"  {words.items(entry.rows)}" if entry.rows else ""
    lines = [
        (
            f"{MARKS[result.verdict]} {entry.id}  {words.kind(entry)}  "
            f"{words.verdict(result.verdict)}{rows}"
        )
    ]
    lines += wrap_page(f"「{plain_formula(entry.quote_zh)}」", indent="    ")
    lines += wrap_page(entry.line.fill(language, {}), indent="    ")
    lines += wrap_page(align_table(result.reason(language)), indent="    > ")
    note = how_checked(entry)
    if note:
        lines += wrap_page(words.phrase(note), indent="    ")
    if result.picture:
        lines += wrap_page(words.phrase("figure"), indent="    ")
    if entry.reference:
        lines += wrap_page(f"{words.label('reference')}{words.reference(entry)}", indent="    ")
    if entry.see:
        lines += wrap_page(f"{words.label('see')}{entry.see}", indent="    ")
    if entry.view:
        lines += wrap_page(words.describe_view(entry.view), indent="    ")
    if entry.study:
        for text in [*describe_study(entry.study, words), words.phrase("strips")]:
            lines += wrap_page(text, indent="    ")
    return "\n".join(lines)


def how_checked(entry: Entry) -> str:
    """The name of the phrase about an entry whose run uses no part of this library, or that has
    none; else "".
    """
    return "facts" if entry.run is None else "arithmetic" if entry.arithmetic else ""


def describe_study(study: str, words: Words) -> list[str]:
    """The claims of the last run of a study under the current folder, otherwise those of its page,
    and the command.
    """
    title = words.label("study")
    command = f"headwise study studies/{study}.toml"
    reports = find_reports(study)
    with use_language(words.language):
        if reports:
            _, _, text = reports[0].read_text(encoding="utf-8").partition(CLAIMS)
            lines = text.partition("\n## ")[0].splitlines()
            claims = [line.replace("\\", "") for line in lines if line.startswith("- ")]
            source = f"{words.phrase('stored')} {reports[0].parent.parent}"
        else:
            claims = [f"- {claim}" for claim in list_claims(study, words.language)]
            source = f"{words.phrase('page')} docs/findings/study-{study}.md"
        if not claims:
            return [f"{title}{words.phrase('no_run')} {command}"]
        head = join_clauses([title + source, words.label("again") + command], "; ")
    return [head, *claims]


def format_list(documents: Sequence[Document], language: str) -> str:
    """One line for each entry: id, expected verdict, topic, rows and the statement."""
    words = Words(language)
    lines = []
    for document in documents:
        lines += ["", f"{document.id}  {document.title.fill(language, {})}", ""]
        for entry in document.entries:
            rows = f" ({words.items(entry.rows)})" if entry.rows else ""
            head = f"{pad(entry.id, 12)}{pad(words.verdict(entry.verdict), 14)}"
            lines.append(f"{head}{pad(entry.topic, 20)} {entry.line.fill(language, {})}{rows}")
    return "\n".join(lines[1:])


def format_overview(documents: Sequence[Document], language: str) -> str:
    """The documents with counts of verdicts, the topics, and how to go on."""
    words = Words(language)
    lines = [words.phrase("documents"), ""]
    for document in documents:
        lines.append(f"  {document.id}  {document.title.fill(language, {})}")
        lines.append(f"       {_count_verdicts(document.entries, words)}")
    topics = list_topics(chain.from_iterable(document.entries for document in documents))
    option = "" if language == "en" else f" --lang {language}"
    with use_language(language):
        names = [topic if language == "en" else f"{topic} {localise(topic)}" for topic in topics]
    lines += [
        "",
        words.phrase("topics"),
        "",
        *wrap(words.items(names), indent="  "),
        "",
        *wrap(words.phrase("marks")),
        "",
        *wrap(words.phrase("start")),
        "",
    ]
    examples = ("003", "003-6", "softmax-scale", "C1.4")
    lines += [f"  headwise learn {name}{option}" for name in examples]
    return "\n".join(lines)


def _count_verdicts(entries: Iterable[Entry], words: Words) -> str:
    counts = Counter(entry.verdict for entry in entries)
    with use_language(words.language):
        listed = join_clauses(
            localise(f"{counts[verdict]} {verdict.value}") for verdict in Verdict if counts[verdict]
        )
    return f"{counts.total()} {words.label('entries')}{listed}"


# --- Stored runs of studies -----------------------------------------------------------------------

STUDIES = Path("runs/studies")  # where headwise study writes, under the current folder
CLAIMS = "## What can be claimed"


def find_reports(study: str) -> list[Path]:
    """The reports of stored runs of a study at any scale, the most recent first."""
    reports = STUDIES.glob(f"{study}-*/report/report.md")
    title = f"# Study: {study}"  # another study may begin with the same name
    named = [path for path in reports if path.read_text("utf-8").splitlines()[:1] == [title]]
    return sorted(named, key=lambda path: path.stat().st_mtime, reverse=True)


def font_note(language: str) -> str:
    """A note on what to install if this machine has no font for Chinese quotes and figures; empty
    if it has one.
    """
    return Words(language).phrase("font") if find_undrawable(SAMPLE) else ""
