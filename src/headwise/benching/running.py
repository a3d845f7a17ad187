"""The bench: every row, one case at a time, on one machine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import torch

from ..errors import SpecError, nearest
from . import cases
from .case import Case
from .limits import Limits
from .machine import checked, machine, on_threads
from .report import Report
from .rows import Bench, Row, failed
from .turns import Pace

PACES = {False: Pace(budget=20.0), True: Pace(budget=4.0)}  # by whether it is to be quick
Tell = Callable[[str], None]


def silent(said: str) -> None:
    """Nobody looks on."""


def bench(
    *names: str, quick: bool = False, threads: int | None = None, out: Path | str | None = None, tell: Tell = silent
) -> Report:
    """Time our paths beside those of others and the machine's limits, in one run; `names` are kinds of work or rows.

    What was measured before an interrupt is kept, and the report says so. `out` is a folder for the numbers and a
    drawing of them. No row is called so:

    >>> bench("attentoin")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of work or row 'attentoin'; ...
    """
    wanted = chosen(names, quick)
    count = checked(threads)
    if out is not None:
        Report.check(out)
    with on_threads(count), torch.random.fork_rng():
        how = Bench(PACES[quick], Limits.here())
        tell("measuring the machine")
        report = Report(machine(how.limits, count) | {"quick": quick, "interrupted": False}, [])
        try:
            for row in _rows(how, wanted, quick, tell):
                report.rows.append(row)
        except KeyboardInterrupt:
            report.machine["interrupted"] = True
    tell("")
    if out is not None:
        report.write(out)
    return report


def kinds() -> dict[str, ModuleType]:
    """Every kind of work: one module of `cases` each."""
    names = sorted(found.name for found in iter_modules(cases.__path__))
    return {name: import_module(f"{cases.__name__}.{name}") for name in names}


def listed(quick: bool = False) -> dict[str, list[str]]:
    """The rows of every kind of work, by name; to know them they have to be made."""
    return {kind: [case.name for case in _made(module, quick)] for kind, module in kinds().items()}


def chosen(names: Sequence[str], quick: bool) -> dict[str, set[str] | None]:
    """The kinds that are asked for, and which of their rows: all of them where None.

    A row is meant by its name, or by any piece of it.
    """
    every = list(kinds())
    rows = {} if all(name in every for name in names) else listed(quick)
    wanted: dict[str, set[str] | None] = {} if names else dict.fromkeys(every)
    for name in names:
        if name in every:
            wanted[name] = None
            continue
        meant = {kind: {row for row in those if name.lower() in row.lower()} for kind, those in rows.items()}
        if not any(meant.values()):
            known = [*every, *(row for those in rows.values() for row in those)]
            raise SpecError(f"there is no kind of work or row {name!r}; {nearest(name, known)}")
        for kind, those in meant.items():
            if those and wanted.get(kind, those) is not None:
                wanted[kind] = (wanted.get(kind) or set()) | those
    return wanted


def _rows(how: Bench, wanted: dict[str, set[str] | None], quick: bool, tell: Tell) -> Iterator[Row]:
    for kind, rows in wanted.items():
        tell(kind)
        module = kinds()[kind]
        try:
            for case in _made(module, quick):
                if rows is None or case.name in rows:
                    tell(f"{kind}: {case.name}")
                    yield how.row(case, kind) | {"title": module.TITLE}
                del case  # or it would live until the next is made
                gc.collect()
        except Exception as error:
            yield failed(kind, kind, error) | {"title": module.TITLE}


def _made(module: ModuleType, quick: bool) -> Iterator[Case]:
    """One case at a time, from the same seed for every kind."""
    torch.manual_seed(0)
    yield from module.cases(quick)
