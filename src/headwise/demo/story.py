"""A translator from its first step to two smaller ones: the pages of the demo that are learned as you watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..training import Recipe
from . import beside, report
from .smaller import COMPRESSION_METHODS, DEFAULT_SCALE, CompressionScale, CompressedTranslator
from .translator import Translator


class TrainingDemo:
    """A translator and what is made of it; a folder that holds something else is refused at once."""

    def __init__(self, folder: Path, recipe: Recipe | None = None, scale: CompressionScale = DEFAULT_SCALE) -> None:
        self.translator = Translator(folder, recipe)
        self.smaller = {change.title: CompressedTranslator(self.translator, change, scale) for change in COMPRESSION_METHODS}

    def pages(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """A title, and what makes the page when it is its turn."""
        yield "A translator learns", self.translator.training_page
        yield "What it says", self.translator.examples_page
        yield "Which head reads what", self.translator.alignment_page
        for title, one in self.smaller.items():
            yield title, partial(_format_compressed, one)

    def report(self, shown: Sequence[tuple[str, str]]) -> Path:
        """Everything that was shown, as a page of HTML in the folder."""
        changes = {title: one.data for title, one in self.smaller.items()}
        return report.write_report(self.translator.folder, shown, changes)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        smaller = {one.change.name: one.data for one in self.smaller.values()}
        return {"translator": self.translator.data, **smaller}


def _format_compressed(one: CompressedTranslator) -> str:
    return beside.format_comparison(one.data)
