"""Pages of the source documents as HTML: sections with their entries, figures, formulas and
exercises, sliders, and a start page, in both languages. They need no network; without a script
sliders show their start values.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from ..report.data import Figure
from ..report.progress import CountedMessage, count_items
from ..report.render import fill_template
from ..util.files import write_atomically
from ..util.output_paths import FolderKind
from .catalogue import Document, Entry, Kind, Result, Text, Verdict, read_toml
from .document_sections import (
    Exercise,
    load_covers,
    load_formulas,
    load_mathml,
    load_sections,
    load_words,
)
from .entry_text import Words, describe_study, font_note, how_checked, plain_formula
from .inline_figures import draw_inline
from .language import LANGUAGES, join_clauses, localise, use_language
from .sliders import format_output, load_sliders, read_script
from .stored_findings import draw_study

FOLDER = Path(__file__).parent
DOCUMENT_PAGES = FolderKind(
    "folder of documents",
    ("00[0-4].html",),
    lambda _: ("00[0-4].html", "00[0-4].en.html", "00[0-4].zh.html", "index*.html"),
)
MOST_STUDY_LINES = 3  # longer results of a study are folded
# A formula between dollars, code between backticks, emphasis between asterisks, a section, the id
# of an entry, an exponent, and an index of a single letter.
MARKED = re.compile(
    r"(?P<dollars>\$\$?)[^$]+(?P=dollars)|`(?P<code>[^`]+)`"
    r"|(?P<stars>\*\*?)(?P<strong>[^\s*](?:[^*]*[^\s*])?)(?P=stars)"
    r"|(?P<section>\b00[0-4] \u00a7\d+)"
    r"|(?P<id>\b00\d-(?:\d|FF)(?:\.\d)*[a-z]?\b)"
    r"|(?<![\w.])(?P<paper>(?:0[7-9]|1\d|2\d)(?:0[1-9]|1[0-2])\.\d{4,5})(?!\d)"
    r"|(?<=[\w)])\^(?:(?P<exponent>\w+)|\((?P<power>[^()]+)\))"
    r"|(?<![\w.])(?P<letter>[A-Za-z])_(?P<index>[A-Za-z0-9]{1,2}|model)(?!\w)",
    re.ASCII,
)


class DocumentPages:
    """The pages of documents in one language. Texts may refer to entries of all `documents`. The
    names of pages in another language than `main` have the language in them: 004.zh.html.
    `results` has those of entries that ran for the pages in the other language.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        language: str,
        main: str = "",
        results: dict[str, Result] | None = None,
        log: Callable[[str], object] = str,
    ) -> None:
        order = list(load_covers())
        self.documents = sorted(documents, key=lambda document: order.index(document.id))
        self.language = language
        (self.other,) = {*LANGUAGES} - {language}
        self._main = main or language
        self._results = {} if results is None else results
        self._log = log
        self._addresses = {
            entry.id: f"{self.page_name(document.id)}#{entry.id}"
            for document in documents
            for entry in document.entries
        }
        self._mathml = load_mathml()
        self._words = Words(language)
        labels = read_toml("course")["labels"]
        self._quotes = labels["quotes"][language]
        self._shared: dict[str, Any] = {
            "words": self._words,
            "label": {name: self.choose(Text(**table)) for name, table in labels.items()},
            "style": Markup((FOLDER / "document_pages.css").read_text(encoding="utf-8")),
            "notes": {name: font_note(name) for name in LANGUAGES},
            "choose": self.choose,
            "set_text": self.set_text,
            "format_output": format_output,
            "other": self.other,
            "page_name": self.page_name,
            **_policy(),
        }

    def page_name(self, name: str, language: str = "") -> str:
        """The name of the file of a page: of a document by its id, or of the start page."""
        language = language or self.language
        return f"{name}.html" if language == self._main else f"{name}.{language}.html"

    def choose(self, text: Text) -> str:
        """Return a text in the language of the pages."""
        return text.zh if self.language == "zh" else text.en

    def set_formula(self, formula: str) -> Markup:
        """Return LaTeX between dollars as MathML; between two dollars it is a line that scrolls."""
        mathml = Markup(self._mathml[formula])
        return (
            Markup('<span class="formula">{}</span>').format(mathml) if "$$" in formula else mathml
        )

    def set_text(self, text: str) -> Markup:
        """Return a text as HTML, with its formulas as MathML, the ids of entries and of papers on
        arXiv as links, and indices and exponents below and above the line.
        """
        parts = [Markup("")]
        end = 0
        for match in MARKED.finditer(text):
            parts.append(escape(text[end : match.start()]))
            parts.append(self._set_marked(match))
            end = match.end()
        return Markup("").join([*parts, escape(text[end:])])

    def _set_marked(self, match: re.Match[str]) -> Markup:
        if match["dollars"]:
            return self.set_formula(match[0])
        if match["code"]:
            return Markup("<code>{}</code>").format(match["code"])
        if match["strong"]:
            return Markup("<em>{}</em>").format(match["strong"])
        if match["index"]:
            return Markup("{}<sub>{}</sub>").format(match["letter"], match["index"])
        if match["id"]:
            return self._link(match["id"])
        if match["section"]:
            return self._link_section(*match["section"].split(" §"))
        if match["paper"]:
            return Markup('<a href="https://arxiv.org/abs/{0}" rel="noreferrer">{0}</a>').format(
                match["paper"]
            )
        return Markup("<sup>{}</sup>").format(match["exponent"] or match["power"])

    def _link(self, id: str) -> Markup:
        address = self._addresses.get(id)
        if address is None:
            return escape(id)
        return Markup('<a href="{}">{}</a>').format(address, id)

    def _link_section(self, document: str, number: str) -> Markup:
        text = f"{document} \u00a7{number}"
        if document not in {one.id for one in self.documents}:
            return escape(text)
        address = f"{self.page_name(document)}#section-{number}"
        return Markup('<a href="{}">{}</a>').format(address, text)

    def render_document(self, document: Document, in_course: bool = False) -> str:
        """The page of a document; entries without a result are run. In a course it has links to the
        other pages.
        """
        self._run_entries(document)
        with use_language(self.language):  # of the texts inside figures
            return self._fill_page(document, in_course)

    def _run_entries(self, document: Document) -> None:
        left = [entry for entry in document.entries if entry.id not in self._results]
        for entry in count_items(left, self._log, f"document {document.id}", "entries"):
            self._results[entry.id] = entry.check()

    def _fill_page(self, document: Document, in_course: bool) -> str:
        results = {entry.id: self._results[entry.id] for entry in document.entries}
        sections = [one for one in load_sections(document.id) if {*one.entries} & {*results}]
        studies = {entry.id: entry.study for entry in document.entries}
        first_of_study: dict[str, str] = {}
        for id in chain.from_iterable(one.entries for one in sections):
            if studies.get(id):
                first_of_study.setdefault(studies[id], id)
        strips = {
            id: list(draw_study(study, self.language)) for study, id in first_of_study.items()
        }
        num_figures = sum(result.picture is not None for result in results.values())
        num_figures += sum(map(len, strips.values()))
        numbers = count()

        def draw(figure: Figure) -> Markup:
            number = next(numbers)
            name = f"drawing {self.page_name(document.id)}"
            self._log(CountedMessage(name, number, num_figures, "figures"))
            return draw_inline(figure, number)

        ids = [one.id for one in self.documents] if in_course else []
        place = ids.index(document.id) if in_course else 0
        return fill_template(
            FOLDER / "document_page.html",
            document=document,
            sections=sections,
            title=self._title,
            first_of_study=first_of_study,
            formulas=load_formulas(document.id),
            entries={entry.id: entry for entry in document.entries},
            results=results,
            strips=strips,
            covers=load_covers(),
            start=self.page_name("index") if in_course else "",
            show_sliders=self._show_sliders,
            previous=ids[place - 1] if place > 0 else "",
            following="".join(ids[place + 1 : place + 2]),
            set_formula=self.set_formula,
            draw=draw,
            answer=partial(self._fill_answer, results),
            plain_formula=plain_formula,
            blocks=_blocks,
            small_print=_small_print,
            study_lines=_study_lines,
            study_summary=_study_summary,
            most_study_lines=MOST_STUDY_LINES,
            source=_read_source,
            **self._shared,
        )

    def _title(self, entry: Entry) -> Markup:
        """The statement of an entry, in quotation marks if it is a claim of the source."""
        line = self.choose(entry.line)
        if entry.kind in (Kind.CLAIM, Kind.QUESTION):
            line = self._quotes.replace("{text}", line)
        return self.set_text(line)

    def _show_sliders(self, id: str) -> Markup:
        """The sliders beside an entry, at their start."""
        shown = [
            fill_template(
                FOLDER / "slider.html",
                slider=slider,
                names={name: self.choose(text) for name, text in slider.outputs.items()},
                outputs=slider.start_outputs(self.language),
                errors={name: self.choose(text) for name, text in slider.errors.items()},
                language=self.language,
                **self._shared,
            )
            for slider in load_sliders()
            if slider.entry == id
        ]
        return Markup("".join(shown))

    def _fill_answer(self, results: dict[str, Any], exercise: Exercise) -> Markup:
        """The answer of an exercise, with the numbers of its entries."""
        numbers = {}
        for id in exercise.entries:
            numbers |= results[id].numbers
        assert exercise.answer is not None
        return self.set_text(exercise.answer.fill(self.language, numbers))

    def render_start(self) -> str:
        """The start page: a cover for each document in the order of reading."""
        counts = {
            document.id: Counter(entry.verdict for entry in document.entries)
            for document in self.documents
        }
        return fill_template(
            FOLDER / "start_page.html",
            documents=self.documents,
            covers=load_covers(),
            counts=counts,
            verdicts=list(Verdict),
            sections={one.id: load_sections(one.id) for one in self.documents},
            guide=load_words("guide"),
            glossary=load_words("word"),
            **self._shared,
        )

    def folder_kind(self, in_course: bool) -> FolderKind:
        """The kind of folder that these pages may replace: any folder of documents for a course,
        otherwise one without other pages, which would be lost.
        """
        if in_course:
            return DOCUMENT_PAGES
        names = [f"{document.id}.html" for document in self.documents]
        kind = f"folder with {', '.join(names)} alone"
        suffixes = ("", *(f".{language}" for language in LANGUAGES))
        files = [
            f"{document.id}{suffix}.html" for document in self.documents for suffix in suffixes
        ]
        return DOCUMENT_PAGES._replace(name=kind, list_names=lambda _: files)

    def write(self, folder: Path, in_course: bool) -> Iterator[str]:
        """Write the pages, and the start page of a course, in both languages; yield the name of
        each.
        """
        translated = DocumentPages(
            self.documents, self.other, self.language, self._results, self._log
        )
        pair = (self, translated)
        for document in self.documents:
            for pages in pair:
                name = pages.page_name(document.id)
                text = pages.render_document(document, in_course)
                write_atomically(folder / name, text.encode())
                yield name
        for pages in pair if in_course else ():
            write_atomically(folder / pages.page_name("index"), pages.render_start().encode())
            yield pages.page_name("index")


def _policy() -> dict[str, Any]:
    """The script of the pages, and what their policy allows: this script alone, by its checksum."""
    script = read_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    element = Markup("<script>{}</script>").format(Markup(script)) if script else ""
    policy = f"script-src 'sha256-{digest}'; " if script else ""
    return {"script": element, "script_policy": Markup(policy), "can_move": bool(script)}


def _blocks(reason: str) -> list[tuple[bool, list[str]]]:
    """Paragraphs, and rows of cells between bars (True), which make a table."""
    groups = groupby(reason.splitlines(), key=lambda line: " | " in line)
    return [(is_table, list(lines)) for is_table, lines in groups]


def _small_print(entry: Entry, words: Words) -> Iterator[str]:
    note = how_checked(entry)
    if note:
        yield words.phrase(note)
    if entry.reference:
        yield words.label("reference") + words.reference(entry)
    if entry.see:
        with use_language(words.language):
            places = (f"`{place}`" for place in entry.see.split("; "))
            yield words.label("see") + join_clauses(places, "; ")
    if entry.view:
        yield words.describe_view(entry.view)


def _study_lines(entry: Entry, words: Words) -> list[str]:
    """The source of the results of an entry's study, and one line for each result."""
    return describe_study(entry.study, words) if entry.study else []


def _study_summary(entry: Entry, lines: Sequence[str], words: Words) -> str:
    """The name of an entry's study, and its number of results, which follow the first line."""
    with use_language(words.language):
        return join_clauses(
            [words.label("study") + entry.study, localise(f"{len(lines) - 1} results")]
        )


def _read_source(entry: Entry) -> str:
    """The source of the run of an entry, and its call if the entry has arguments of its own."""
    run = entry.run
    if run is None:
        return ""
    if not isinstance(run, partial):
        return inspect.getsource(run)
    arguments = ", ".join(f"{name}={value!r}" for name, value in run.keywords.items())
    return f"{inspect.getsource(run.func)}\n\n{run.func.__name__}({arguments})\n"
