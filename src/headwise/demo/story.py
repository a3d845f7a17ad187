"""A translator from its first step to two smaller ones: the pages of the demo that are learned as you watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..training import Recipe
from . import beside, report
from .smaller import CHANGES, USUAL, Scale, Smaller
from .translator import Translator


class Story:
    """A translator and what is made of it; a folder that holds something else is refused at once."""

    def __init__(self, folder: Path, recipe: Recipe | None = None, scale: Scale = USUAL) -> None:
        self.translator = Translator(folder, recipe)
        self.smaller = {change.title: Smaller(self.translator, change, scale) for change in CHANGES}

    def pages(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """A title, and what makes the page when it is its turn."""
        yield "A translator learns", self.translator.told
        yield "What it says", self.translator.said
        yield "Which head reads what", self.translator.read
        for title, one in self.smaller.items():
            yield title, partial(_page, one)

    def report(self, shown: Sequence[tuple[str, str]]) -> Path:
        """Everything that was shown, as a page of HTML in the folder."""
        changes = {title: one.data for title, one in self.smaller.items()}
        return report.write(self.translator.folder, shown, changes)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        smaller = {one.change.name: one.data for one in self.smaller.values()}
        return {"translator": self.translator.data, **smaller}


def _page(one: Smaller) -> str:
    return beside.page(one.data)
