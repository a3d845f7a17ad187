"""Make the notebooks of the documents of `headwise learn`: prose, formulas, and a cell for each
entry that runs it and shows its figure.

    python tools/learn_notebooks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwise.learn.catalogue import Document, load_documents
from headwise.learn.document_sections import Section, load_formulas, load_sections

START = """from headwise.learn.catalogue import load_documents
from headwise.learn.entry_text import format_entry
from headwise.report.notebook import ShownFigure

ENTRIES = {{entry.id: entry for entry in load_documents(["{document}"])[0].entries}}


def run(id):
    \"\"\"Run an entry: print its verdict with the numbers, and return its figure.\"\"\"
    result = ENTRIES[id].check()
    print(format_entry(ENTRIES[id], result, "en"))
    return ShownFigure(**vars(result.figure)) if result.figure else None
"""


def make_notebook(document: Document) -> dict[str, Any]:
    """Return the notebook of a document."""
    title = f"# {document.id} {document.title.en}"
    cells = [_make_cell("markdown", title), _make_cell("code", START.format(document=document.id))]
    for section in load_sections(document.id):
        cells += _list_cells(document, section)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _list_cells(document: Document, section: Section) -> Iterator[dict[str, Any]]:
    entries = {entry.id: entry for entry in document.entries}
    formulas = load_formulas(document.id)
    heading = " ".join(filter(None, ("##", section.number, section.title.en)))
    yield _make_cell("markdown", f"{heading}\n\n{section.text.en}")
    for id in section.entries:
        formula = formulas.get(id)
        lines = [f"**{id}** {entries[id].line_en}"]
        if formula is not None:
            lines.append(f"$${formula.corrected or formula.source}$$")
        yield _make_cell("markdown", "\n\n".join(lines))
        yield _make_cell("code", f'run("{id}")')


def _make_cell(kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def main() -> None:
    """Write 000.ipynb to 004.ipynb into a folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for document in load_documents():
        text = json.dumps(make_notebook(document), ensure_ascii=False, indent=1) + "\n"
        (folder / f"{document.id}.ipynb").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
