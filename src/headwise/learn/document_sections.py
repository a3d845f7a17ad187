"""`Section`: a part of a source document, told in our words, with its entries and exercises. The
texts and the formulas are in `sections_000.toml` to `sections_004.toml`; `course.toml` has the
order of the documents for beginners, `reading_guide.toml` what they should know and the terms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .catalogue import MODULES, Text, read_text, read_toml

FORMULA = re.compile(r"\$\$?[^$]+\$\$?")  # LaTeX in a text; between two dollars on its own line
MATHML = Path(__file__).with_name("formulas.json")


@dataclass(frozen=True)
class Exercise:
    """A question with an answer. The entries check the answer; they are the answer where it has no
    text of its own.
    """

    question: Text
    answer: Text | None
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A section of a document: its number in the source, its paragraphs, the ids of its entries in
    reading order, and exercises.
    """

    number: str
    title: Text
    text: Text
    entries: tuple[str, ...]
    exercises: tuple[Exercise, ...]

    @property
    def entries_outside_exercises(self) -> tuple[str, ...]:
        """The ids of the entries that are not the answer of an exercise."""
        answers = {
            id for exercise in self.exercises if exercise.answer is None for id in exercise.entries
        }
        return tuple(id for id in self.entries if id not in answers)


@dataclass(frozen=True)
class Formula:
    """LaTeX of an entry: the formula of the source, and the right one if it is another."""

    source: str
    corrected: str = ""


@dataclass(frozen=True)
class Cover:
    """A document on the start page: a short title, its subject, what a reader can do after it."""

    title: Text
    subject: Text
    skill: Text


def _read_exercise(table: Mapping[str, Any]) -> Exercise:
    answer = read_text(table["answer"]) if "answer" in table else None
    return Exercise(read_text(table["question"]), answer, tuple(table["entries"]))


def load_sections(document: str) -> list[Section]:
    """Return the sections of a document in reading order."""
    return [
        Section(
            table["number"],
            read_text(table["title"]),
            read_text(table["text"]),
            tuple(table["entries"]),
            tuple(map(_read_exercise, table.get("exercise", ()))),
        )
        for table in read_toml(f"sections_{document}")["section"]
    ]


def load_formulas(document: str) -> dict[str, Formula]:
    """Return the formulas of entries of a document by the id of the entry."""
    tables = read_toml(f"sections_{document}").get("formula", {})
    return {id: Formula(**table) for id, table in tables.items()}


def load_covers() -> dict[str, Cover]:
    """Return the covers of all documents, in the order in which a beginner reads them."""
    covers = read_toml("course")["cover"]
    return {
        table["id"]: Cover(*(read_text(table[one.name]) for one in fields(Cover)))
        for table in covers
    }


def load_words(kind: str) -> list[tuple[Text, Text]]:
    """Return names with their explanations: how to read the pages ("guide"), or terms ("word")."""
    tables = read_toml("reading_guide")[kind]
    return [(read_text(table["name"]), read_text(table["text"])) for table in tables]


def list_formulas() -> list[str]:
    """Return all formulas of the documents as LaTeX between dollars, each once, sorted."""
    formulas: set[str] = set()
    for document in MODULES:
        for formula in load_formulas(document).values():
            variants = filter(None, (formula.source, formula.corrected))
            formulas |= {f"$${latex}$$" for latex in variants}
        for section in load_sections(document):
            texts = [section.text]
            for exercise in section.exercises:
                texts += [exercise.question, *([exercise.answer] if exercise.answer else [])]
            for text in texts:
                formulas |= {*FORMULA.findall(text.en), *FORMULA.findall(text.zh)}
    return sorted(formulas)


def load_mathml() -> dict[str, str]:
    """Return the formulas as MathML by their LaTeX between dollars, which `tools/build_docs.py`
    writes.
    """
    return json.loads(MATHML.read_text(encoding="utf-8"))
