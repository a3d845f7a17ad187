"""The bench: every row, one case at a time, on one machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import torch

from ..errors import SpecError, nearest
from . import cases
from .around import Around, Tell, silent
from .case import Case
from .report import Report
from .rows import Bench, Row, failed
from .turns import Pace

PACES = {False: Pace(budget=20.0), True: Pace(budget=3.0)}  # by whether it is to be quick


def bench(
    *names: str, quick: bool = False, threads: int | None = None, out: Path | str | None = None, tell: Tell = silent
) -> Report:
    """Time our paths beside those of others and the machine's limits, in one run.

    `names` are kinds of work; "decode:paged" are the rows of one with that in their names.

    What was measured before an interrupt is kept, and the report says so. `out` is a folder for the numbers and a
    drawing of them.

    >>> bench("attentoin")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of work 'attentoin'; ...
    """
    wanted = chosen(names)
    return Around(threads, out, tell).run(PACES[quick], quick, lambda how: _rows(how, wanted, quick, tell), Report)


def kinds() -> dict[str, ModuleType]:
    """Every kind of work: one module of `cases` each."""
    names = sorted(found.name for found in iter_modules(cases.__path__))
    return {name: import_module(f"{cases.__name__}.{name}") for name in names}


def listed() -> dict[str, str]:
    """Every kind of work, with a few words of what it is."""
    return {kind: module.TITLE for kind, module in kinds().items()}


def chosen(names: Sequence[str]) -> dict[str, list[str]]:
    """The kinds that are asked for, each with the pieces of names by which its rows are chosen; all where none is."""
    every = list(kinds())
    wanted = dict[str, list[str]]() if names else {kind: [""] for kind in every}
    for name in names:
        kind, _, piece = name.partition(":")
        if kind not in every:
            raise SpecError(f"there is no kind of work {kind!r}; {nearest(kind, every)}")
        wanted.setdefault(kind, []).append(piece.lower())
    return wanted


def _rows(how: Bench, wanted: dict[str, list[str]], quick: bool, tell: Tell) -> Iterator[Row]:
    count = 0
    for kind, pieces in wanted.items():
        tell(kind)
        title = {"title": kinds()[kind].TITLE}
        try:
            for row in _of_kind(how, kind, pieces, quick, tell):
                yield row | title
                count += 1
        except Exception as error:
            if isinstance(error, SpecError) and not count:
                raise  # a wrong name is refused, but not with minutes of work
            yield failed(kind, kind, error) | title


def _of_kind(how: Bench, kind: str, pieces: list[str], quick: bool, tell: Tell) -> Iterator[Row]:
    known, begun = list[str](), how.clock()
    for case in _made(kinds()[kind], quick):
        known.append(case.name)
        if any(piece in case.name.lower() for piece in pieces):
            tell(f"{kind}: {case.name}")
            made = {"making": how.clock() - begun}
            row = how.row(case, kind)
            yield row | {"took": made | row["took"]}
        del case  # or it would live until the next is made
        gc.collect()
        begun = how.clock()
    if wrong := [piece for piece in pieces if not any(piece in name.lower() for name in known)]:
        raise SpecError(f"no row of {kind} has {wrong[0]!r} in its name; its rows are: {'; '.join(known)}")


def _made(module: ModuleType, quick: bool) -> Iterator[Case]:
    """One case at a time, from the same seed for every kind."""
    torch.manual_seed(0)
    yield from module.cases(quick)
