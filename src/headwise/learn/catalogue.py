"""The catalogue of all entries: reads the text files beside the code, joins them with the runs, and finds topics."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import suggest
from .entry import Entry, Kind, Text, Verdict

FOLDER = Path(__file__).parent
# The modules of each document, in reading order; beside each is a .toml file with its texts.
MODULES = {
    "000": ("self_attention_basics",),
    "001": ("parameters_and_scaling",),
    "002": ("multi_head_idea", "multi_head_analysis", "multi_head_code", "head_variants", "cited_papers"),
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


def _read_text(table: Mapping[str, str]) -> Text:
    return Text(table["en"].strip(), table["zh"].strip())


def _read_entry(document: str, table: Mapping[str, Any], module: Any) -> Entry:
    run = table.get("run")
    return Entry(
        id=table["id"],
        document=document,
        kind=Kind(table["kind"]),
        topic=table["topic"],
        quote_zh=table["quote"].strip(),
        line=_read_text(table["line"]),
        reason_text=_read_text(table["reason"]),
        verdict=Verdict(table["verdict"]),
        rows=tuple(table.get("rows", ())),
        run=None if run is None else getattr(module, run),
        reference=table.get("reference", ""),
        see=table.get("see", ""),
        study=table.get("study", ""),
    )


def read_toml(name: str) -> dict[str, Any]:
    """The contents of one of the text files."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def load_documents(ids: Sequence[str] = tuple(MODULES)) -> list[Document]:
    """The documents with these ids, in order."""
    titles, documents = read_toml("words")["documents"], []
    for document in ids:
        entries = [
            _read_entry(document, table, import_module(f"{__package__}.{name}"))
            for name in MODULES[document]
            for table in read_toml(name)["entry"]
        ]
        documents.append(Document(document, _read_text(titles[document]), tuple(entries)))
    return documents


def load_entries() -> list[Entry]:
    """All entries of all documents, in reading order."""
    return [entry for document in load_documents() for entry in document.entries]


def find_entries(name: str) -> list[Entry]:
    """The entries of a document (003), a topic (softmax-scale), a section (003-7), a row (C1.4), or "errata".

    >>> [entry.id for entry in find_entries("C4.3")]
    ['004-1b']
    """
    entries = load_entries()
    target = name.strip()
    chosen = [
        entry
        for entry in entries
        if target in (entry.document, entry.id, entry.topic)
        or target.lower() in [row.lower() for row in entry.rows]
        or entry.id.startswith((f"{target}.", f"{target}-"))
        or (target == "errata" and any(row.startswith("C") for row in entry.rows))
    ]
    if chosen:
        return chosen
    names = [*MODULES, "errata", *dict.fromkeys(entry.topic for entry in entries), *(entry.id for entry in entries)]
    names += [row for entry in entries for row in entry.rows]
    hint = suggest(target, names)
    if not hint.startswith("did you mean"):
        hint = "headwise learn --list names all entries and topics"
    raise UnknownTopic(f"there is no document, topic or entry {name!r}; {hint}")


def list_topics(entries: Sequence[Entry]) -> list[str]:
    """The topics of these entries, each once, in reading order."""
    return list(dict.fromkeys(entry.topic for entry in entries))
