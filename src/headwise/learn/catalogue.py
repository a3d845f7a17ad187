"""`Entry`: one formula, table, figure, listing or claim of a source document. `Result`: what its
run found. The catalogue of all entries reads the text files next to the code, joins them with the
runs, and finds topics.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from ..report.data import Figure
from ..util.errors import suggest
from .language import LANGUAGES, current_language, join_items, localise, use_language
from .matrix_figures import Picture, draw_numbers
from .view_links import ViewLink

Number = float | int | str
SPACE_BEFORE_LESS = re.compile("(?<=[\u4e00-\u9fff]) (?=不到)")  # "less than" follows a word


class Verdict(StrEnum):
    """The result of a run for a statement."""

    HOLDS = "holds"
    HOLDS_IF = "holds if"
    WRONG = "wrong"
    NOT_RESOLVED = "not resolved"
    NOT_RUN = "not run"
    FAULT = "fault"  # of this program: neither the statement nor its correction holds


class Kind(StrEnum):
    """The kind of an entry in its document."""

    FORMULA = "formula"
    TABLE = "table"
    FIGURE = "figure"
    LISTING = "listing"
    CLAIM = "claim"
    QUESTION = "question"


@dataclass(frozen=True)
class Text:
    """One text in both languages; `{name}` is replaced by a number of the run, or by a list of
    several.

    >>> Text("{n} keys", "{n} 个键").fill("zh", {"n": 3})
    '3 个键'
    >>> Text("keys {n}", "键 {n}").fill("zh", {"n": ItemList("2, 3")})
    '键 2、3'
    >>> Text("error {n:.0e}", "误差 {n:.0e}").fill("zh", {"n": 2e-16})
    '误差不到 1e-12'
    """

    en: str
    zh: str

    def fill(self, language: str, numbers: Mapping[str, Number]) -> str:
        """The text in one language, with the numbers filled in."""
        if language not in LANGUAGES:
            raise ValueError(
                f"there is no language {language!r}; use one of {', '.join(LANGUAGES)}"
            )
        with use_language(language):
            shown = {
                name: _Shown(value) if isinstance(value, float) else value
                for name, value in numbers.items()
            }
            text = (self.zh if language == "zh" else self.en).format_map(shown)
        return SPACE_BEFORE_LESS.sub("", text)


class ItemList(str):
    """Items of a list, separated by a comma and a space; a Chinese text separates them by its own
    comma.
    """

    def __format__(self, spec: str) -> str:
        return join_items(self.split(", "))


class _Shown(float):
    """A number of a text; rounding errors are printed as <1e-12, because their digits differ
    between machines.

    >>> f"{_Shown(2e-16):.0e}, {_Shown(2e-3):.0e}"
    '<1e-12, 2e-03'
    """

    def __format__(self, spec: str) -> str:
        is_rounding_error = spec.endswith("e") and abs(self) < 1e-12
        return localise("<1e-12") if is_rounding_error else super().__format__(spec)


@dataclass(frozen=True)
class Outcome:
    """Numbers of one run, the verdict that follows from them, and a picture if there is one."""

    verdict: Verdict
    numbers: Mapping[str, Number] = field(default_factory=dict)
    picture: Picture | None = None


@dataclass(frozen=True)
class Result:
    """An outcome with its reason in both languages."""

    numbers: Mapping[str, Number]
    verdict: Verdict
    reason_en: str
    reason_zh: str
    picture: Picture | None
    title: Text

    @property
    def figure(self) -> Figure | None:
        """The figure with its title, in the current language."""
        if self.picture is None:
            return None
        figure = self.picture()
        title = self.title.fill(current_language(), {})
        return replace(figure, title=title) if title else figure

    def reason(self, language: str) -> str:
        """The reason in one language."""
        return self.reason_zh if language == "zh" else self.reason_en


def judge(holds: bool, *, corrected: Any = False, figure: Any = None, **numbers: Number) -> Outcome:
    """An outcome that holds, or is wrong because the statement as the reason corrects it is true.

    If neither is true, the program that measures them has a fault.

    >>> judge(2 + 2 == 4, total=4).verdict, judge(2 + 2 == 5, corrected=2 + 2 == 4).verdict
    (<Verdict.HOLDS: 'holds'>, <Verdict.WRONG: 'wrong'>)
    >>> judge(2 + 2 == 5).verdict
    <Verdict.FAULT: 'fault'>
    """
    if holds:
        return Outcome(Verdict.HOLDS, numbers, figure)
    return Outcome(Verdict.WRONG if corrected else Verdict.FAULT, numbers, figure)


def judge_condition(
    holds: bool, holds_without: bool, *, figure: Any = None, **numbers: Number
) -> Outcome:
    """An outcome for a statement that needs a condition: it must hold with the condition.

    `holds_without` is whether it also holds where the condition is broken; then the condition is
    not needed.
    """
    if not holds:
        return Outcome(Verdict.FAULT, numbers, figure)
    return Outcome(Verdict.HOLDS if holds_without else Verdict.HOLDS_IF, numbers, figure)


UNEXPECTED = Text(
    "This run gives another verdict than the page expects ({expected}). Its numbers: {numbers}.",
    "这次运行的结论与本页预期（{expected}）不同。所得数值：{numbers}。",
)
FAULT = Text(
    "Neither the statement nor its correction holds in this run, so this installation computes "
    "something else than the page describes ({expected}). Its numbers: {numbers}.",
    "这次运行中，原句与更正后的说法都不成立，说明本机安装的程序所计算的与本页所述"
    "（{expected}）不符。所得数值：{numbers}。",
)


@dataclass(frozen=True)
class Entry:
    """One statement of a document, quoted in Chinese, with what is run to check it.

    `verdict` is the expected verdict, and `reason` its reason with placeholders for the numbers of
    the run. `rows` are ids of errata (C1.4) and of demands (B12). `run` is None for facts about a
    cited paper, which have nothing to compute. `study` is the study that tests the statement by
    training. `arithmetic` marks a statement about numbers or torch alone: its run needs no part of
    this library. `picture` has the title of the run's figure. With `columns`, the figure is one of
    the run's numbers, see `draw_numbers`; with `draw`, a function makes it. `view` is a
    screen of `headwise view` that shows the statement in a trained model.
    """

    id: str
    document: str
    kind: Kind
    topic: str
    quote_zh: str
    line: Text
    reason_text: Text
    verdict: Verdict
    rows: tuple[str, ...] = ()
    run: Callable[..., Outcome] | None = None
    reference: str = ""
    see: str = ""
    study: str = ""
    arithmetic: bool = False
    picture: Mapping[str, Any] = field(default_factory=dict[str, Any])
    view: ViewLink | None = None

    @property
    def line_en(self) -> str:
        """The statement in English."""
        return self.line.en

    @property
    def line_zh(self) -> str:
        """The statement in Chinese, in our words."""
        return self.line.zh

    @property
    def command(self) -> str:
        """The command that runs this entry."""
        return f"headwise learn {self.id}"

    def check(self) -> Result:
        """Run the entry; without anything to run, the expected verdict and its reason."""
        outcome = Outcome(self.verdict) if self.run is None else self.run()
        text = self.reason_text
        numbers = outcome.numbers
        if outcome.verdict != self.verdict:
            listed = ItemList(", ".join(f"{name} = {value}" for name, value in numbers.items()))
            text = FAULT if outcome.verdict == Verdict.FAULT else UNEXPECTED
            numbers = {"expected": self.verdict.value, "numbers": listed}
        picture = outcome.picture
        if "draw" in self.picture:
            picture = self.picture["draw"]()
        if "columns" in self.picture and outcome.verdict == self.verdict:
            picture = draw_numbers(self.picture, outcome.numbers)
        return Result(
            outcome.numbers,
            outcome.verdict,
            text.fill("en", numbers),
            text.fill("zh", numbers),
            picture,
            read_text(self.picture.get("title", {"en": "", "zh": ""})),
        )


# --- The catalogue --------------------------------------------------------------------------------

FOLDER = Path(__file__).parent
# The modules of each document, in reading order; each has a .toml file with its texts next to it.
MODULES = {
    "000": ("self_attention_basics",),
    "001": ("parameters_and_scaling",),
    "002": (
        "multi_head_idea",
        "multi_head_analysis",
        "multi_head_code",
        "head_variants",
        "cited_papers",
    ),
    "003": ("attention_mechanism", "attention_comparison", "misconceptions"),
    "004": ("kernel_lookup",),
}


@dataclass(frozen=True)
class Document:
    """A source document: its title, and its entries in reading order."""

    id: str
    title: Text
    entries: tuple[Entry, ...]


class UnknownTopic(ValueError):
    """A document, entry or topic that does not exist; the message names similar ones."""


def read_text(table: Mapping[str, str]) -> Text:
    """Read a text in both languages."""
    return Text(table["en"].strip(), table["zh"].strip())


def _find_run(table: Mapping[str, Any], module: Any) -> Callable[..., Outcome] | None:
    """The run of an entry: a function of its module, or "MODULE.FUNCTION" of another one."""
    if "run" not in table:
        return None
    other, _, name = table["run"].rpartition(".")
    run = getattr(import_module(f"{__package__}.{other}") if other else module, name)
    return partial(run, **table["arguments"]) if "arguments" in table else run


def _read_entry(document: str, table: Mapping[str, Any], module: Any) -> Entry:
    picture = dict(table.get("picture", {}))
    if "draw" in picture:
        picture["draw"] = getattr(module, picture["draw"])
    return Entry(
        id=table["id"],
        document=document,
        kind=Kind(table["kind"]),
        topic=table["topic"],
        quote_zh=table["quote"].strip(),
        line=read_text(table["line"]),
        reason_text=read_text(table["reason"]),
        verdict=Verdict(table["verdict"]),
        rows=tuple(table.get("rows", ())),
        run=_find_run(table, module),
        reference=table.get("reference", ""),
        see=table.get("see", ""),
        study=table.get("study", ""),
        arithmetic=table.get("arithmetic", False),
        picture=picture,
        view=ViewLink(table["id"], **table["view"]) if "view" in table else None,
    )


def read_toml(name: str) -> dict[str, Any]:
    """The contents of one of the text files."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def load_documents(ids: Sequence[str] = tuple(MODULES)) -> list[Document]:
    """The documents with these ids, in order."""
    titles = read_toml("words")["documents"]
    documents = []
    for document in ids:
        entries: list[Entry] = []
        for name in MODULES[document]:
            module = import_module(f"{__package__}.{name}")
            entries += [_read_entry(document, table, module) for table in read_toml(name)["entry"]]
        documents.append(Document(document, read_text(titles[document]), tuple(entries)))
    return documents


def load_entries() -> list[Entry]:
    """All entries of all documents, in reading order."""
    return list(chain.from_iterable(document.entries for document in load_documents()))


def find_entries(name: str) -> list[Entry]:
    """The entries of a document (003), a topic (softmax-scale), a section of it (003-7) or of its
    page (002 \u00a713), a row (C1.4), "errata", or those with a Chinese word.

    >>> [entry.id for entry in find_entries("C4.3")]
    ['004-1b']
    """
    entries = load_entries()
    target = name.strip()
    of_section = _list_section(target)
    chosen = [
        entry
        for entry in entries
        if target in (entry.document, entry.id, entry.topic)
        or entry.id in of_section
        or target.lower() in map(str.lower, entry.rows)
        or entry.id.startswith((f"{target}.", f"{target}-"))
        or (target == "errata" and "C" in "".join(entry.rows))
        or (not target.isascii() and target in entry.quote_zh + entry.line_zh)
    ]
    if chosen:
        return chosen
    names = [
        *MODULES,
        "errata",
        *dict.fromkeys(entry.topic for entry in entries),
        *(entry.id for entry in entries),
    ]
    names += chain.from_iterable(entry.rows for entry in entries)
    hint = suggest(target, names)
    if not hint.startswith("did you mean"):
        hint = "headwise learn --list names all entries and topics"
    raise UnknownTopic(f"there is no document, topic or entry {name!r}; {hint}")


def _list_section(name: str) -> Sequence[str]:
    """The ids of the entries of a section of a page, such as 002 \u00a713; none for other names."""
    match = re.fullmatch("(\\d+) \u00a7(\\d+)", name)
    if match is None or match[1] not in MODULES:
        return ()
    sections = read_toml(f"sections_{match[1]}")["section"]
    number = int(match[2])
    return sections[number - 1]["entries"] if 0 < number <= len(sections) else ()


def list_topics(entries: Iterable[Entry]) -> list[str]:
    """The topics of these entries, each once, in reading order."""
    return list(dict.fromkeys(entry.topic for entry in entries))
