"""The bench: every row, one case at a time, on one machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import torch

from ..errors import SpecError, suggest
from . import cases
from .around import BenchmarkSession, ProgressCallback, no_progress
from .case import BenchmarkCase
from .report import BenchmarkReport
from .rows import CaseTimer, BenchmarkRow, failed_row
from .turns import TimingPace

TIMING_PACES = {False: TimingPace(max_seconds=20.0), True: TimingPace(max_seconds=3.0)}  # by whether it is to be quick


def run_benchmarks(
    *names: str, quick: bool = False, threads: int | None = None, output_folder: Path | str | None = None, progress: ProgressCallback = no_progress
) -> BenchmarkReport:
    """Time our paths beside those of others and the machine's limits, in one run.

    `names` are kinds of work; "decode:paged" are the rows of one with that in their names.

    What was measured before an interrupt is kept, and the report says so. `out` is a folder for the numbers and a
    drawing of them.

    >>> run_benchmarks("attentoin")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of work 'attentoin'; ...
    """
    wanted = select_cases(names)
    return BenchmarkSession(threads, output_folder, progress).run(TIMING_PACES[quick], quick, lambda how: _time_cases(how, wanted, quick, progress), BenchmarkReport)


def case_modules() -> dict[str, ModuleType]:
    """Every kind of work: one module of `cases` each."""
    names = sorted(found.name for found in iter_modules(cases.__path__))
    return {name: import_module(f"{cases.__name__}.{name}") for name in names}


def list_cases() -> dict[str, str]:
    """Every kind of work, with a few words of what it is."""
    return {kind: module.TITLE for kind, module in case_modules().items()}


def select_cases(names: Sequence[str]) -> dict[str, list[str]]:
    """The kinds that are asked for, each with the pieces of names by which its rows are chosen; all where none is."""
    every = list(case_modules())
    wanted = dict[str, list[str]]() if names else {kind: [""] for kind in every}
    for name in names:
        kind, _, piece = name.partition(":")
        if kind not in every:
            raise SpecError(f"there is no kind of work {kind!r}; {suggest(kind, every)}")
        wanted.setdefault(kind, []).append(piece.lower())
    return wanted


def _time_cases(how: CaseTimer, wanted: dict[str, list[str]], quick: bool, tell: ProgressCallback) -> Iterator[BenchmarkRow]:
    count = 0
    for kind, pieces in wanted.items():
        tell(kind)
        title = {"title": case_modules()[kind].TITLE}
        try:
            for row in _time_case_module(how, kind, pieces, quick, tell):
                yield row | title
                count += 1
        except Exception as error:
            if isinstance(error, SpecError) and not count:
                raise  # a wrong name is refused, but not with minutes of work
            yield failed_row(kind, kind, error) | title


def _time_case_module(how: CaseTimer, kind: str, pieces: list[str], quick: bool, tell: ProgressCallback) -> Iterator[BenchmarkRow]:
    known, begun = list[str](), how.clock()
    for case in _iter_cases(case_modules()[kind], quick):
        known.append(case.name)
        if any(piece in case.name.lower() for piece in pieces):
            tell(f"{kind}: {case.name}")
            made = {"making": how.clock() - begun}
            row = how.time_case(case, kind)
            yield row | {"took": made | row["took"]}
        del case  # or it would live until the next is made
        gc.collect()
        begun = how.clock()
    if wrong := [piece for piece in pieces if not any(piece in name.lower() for name in known)]:
        raise SpecError(f"no row of {kind} has {wrong[0]!r} in its name; its rows are: {'; '.join(known)}")


def _iter_cases(module: ModuleType, quick: bool) -> Iterator[BenchmarkCase]:
    """One case at a time, from the same seed for every kind."""
    torch.manual_seed(0)
    yield from module.features(quick)
