"""Stored results of studies and of measured models: the claims and the strip picture of a study,
and runs of entries that read these results. `tools/build_docs.py` writes them from the pages in
docs/findings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..report.data import Estimate
from .catalogue import Number, Outcome, Text, Verdict, judge, read_toml
from .language import localise
from .matrix_figures import Picture, draw_strips

NO_VALUES: Mapping[str, str] = MappingProxyType({})
MOST_COMPARISONS = 12  # of a study with more, only the significant ones are listed


@cache
def read_stored(name: str) -> Any:
    """The stored results of "studies", of "models", or of small experiments in "training"."""
    path = Path(__file__).with_name(f"stored_{name}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def list_claims(study: str, language: str) -> Iterator[str]:
    """Sentences with the scores and the comparisons of a study; none without stored results."""
    sentences = {name: Text(**text) for name, text in read_toml("words")["claims"].items()}
    tasks = {name: Text(**text) for name, text in read_toml("reading_guide")["tasks"].items()}
    for task, stored in read_stored("studies").get(study, {"tasks": {}})["tasks"].items():
        metric = stored["metric"]
        values = [f"{name} {one[metric]:.3f}" for name, one in stored["scores"].items()]
        scores = (", " if language == "en" else "、").join(values)
        about = tasks.get(task.partition("-")[0])
        described = task
        if about is not None:
            meaning = {"task": task, "about": about.fill(language, {})}
            described = sentences["task"].fill(language, meaning)
        numbers = {"task": described, "scores": scores, "metric": metric}
        yield sentences["scores"].fill(language, numbers)
        shown = _shown_comparisons(stored["comparisons"])
        for name, one in shown.items():
            verdict = localise("significant" if one["significant"] else "not significant")
            named = name if language == "en" else one["zh"]
            numbers = {"task": task, "name": named, "verdict": verdict}
            yield sentences["difference"].fill(language, {**one, **numbers})
        others = len(stored["comparisons"]) - len(shown)
        if others:
            yield sentences["others"].fill(language, {"task": task, "others": others})


def draw_study(study: str, language: str) -> Iterator[Picture]:
    """The strip picture of each task: the difference of every seed, and means with intervals."""
    for task, stored in read_stored("studies").get(study, {"tasks": {}})["tasks"].items():
        rows: dict[str, tuple[Sequence[float], Estimate]] = {}
        for name, one in _shown_comparisons(stored["comparisons"]).items():
            named = name if language == "en" else one["zh"]
            mean = Estimate(one["difference"], one["low"], one["high"])
            rows[f"{named} *" if one["significant"] else named] = (one["seeds"], mean)
        if rows:
            title = f"{task}: {localise('differences of every seed (*: significant)')}"
            yield draw_strips(title, rows)


def _shown_comparisons(comparisons: Mapping[str, Any]) -> dict[str, Any]:
    is_short = len(comparisons) <= MOST_COMPARISONS
    return {name: one for name, one in comparisons.items() if is_short or one["significant"]}


# --- Runs of entries ------------------------------------------------------------------------------


def read_place(place: str) -> Any:
    """A stored result by its place, such as "models|minilm|heads"."""
    name, *keys = place.split("|")
    return reduce(getitem, keys, read_stored(name))


def stored_differences(
    *, expected: Mapping[str, int], values: Mapping[str, str] = NO_VALUES
) -> Outcome:
    """Stored comparisons by their places, each with the sign that the statement expects, and
    further values.

    The statement holds if all are significant with this sign, is wrong if one is significant with
    the other sign, and is not resolved if none is significant.
    """
    numbers: dict[str, Number] = {name: read_place(place) for name, place in values.items()}
    signs: set[int] = set()
    for place, (path, sign) in enumerate(expected.items(), 1):
        one = read_place(path)
        numbers |= {f"{part}_{place}": one[part] for part in ("difference", "low", "high", "p")}
        agrees = 1 if one["difference"] * sign > 0 else -1
        signs.add(agrees if one["significant"] else 0)
    if -1 in signs:
        return Outcome(Verdict.WRONG, numbers)
    if 1 not in signs:
        return Outcome(Verdict.NOT_RESOLVED, numbers)
    return Outcome(Verdict.HOLDS_IF if 0 in signs else Verdict.HOLDS, numbers)


def stored_values(*, values: Mapping[str, str | float], ascending: Sequence[str]) -> Outcome:
    """Stored numbers by their places; the statement holds if those of `ascending` ascend.

    A value that is a number itself is a bound.
    """
    numbers = {
        name: read_place(place) if isinstance(place, str) else place
        for name, place in values.items()
    }
    ordered = [float(numbers[name]) for name in ascending]
    ascend = all(low < high for low, high in pairwise(ordered))
    return judge(ascend, corrected=not ascend, **numbers)  # the stored numbers correct it
