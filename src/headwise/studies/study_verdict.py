"""The verdict of a study: what its file expects, compared by rules with what its tests found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..report.text import format_difference, format_number
from ..util.errors import pluralise
from .cells import PairKey
from .seed_statistics import Comparison, VariantScore
from .study_file import Contrast, Study, StudyTask

CEILING = 0.99  # of a share, such as an accuracy
FLOOR = 0.02  # above chance
MOST_WRITTEN = 12  # differences; of more, only names are written
RISES = ("more", "less")  # expectations of the difference itself, not of what is better


class Finding(StrEnum):
    """Name what the seeds say about one expected difference."""

    SEEN = "seen"
    OPPOSITE = "the opposite"
    OPEN = "open"


@dataclass(frozen=True)
class Prediction:
    """Pair one expected difference on one task with what was found."""

    contrast: Contrast
    task: str
    comparison: Comparison
    finding: Finding

    @property
    def text(self) -> str:
        """Write what was expected, and the difference that was found."""
        contrast = self.contrast
        word = "of" if contrast.expected.startswith("within") else "than"
        return (
            f"{self.task}: {contrast.left.text} {contrast.expected} {word} {contrast.right.text}, "
            f"{format_difference(self.comparison.difference)}"
        )


@dataclass(frozen=True)
class StudyVerdict:
    """Hold what a study expected and found, and the tasks that cannot tell variants apart."""

    predictions: Sequence[Prediction]
    mute_tasks: Mapping[str, str]

    def with_finding(self, finding: Finding) -> list[str]:
        """Write the expected differences with this finding."""
        return [one.text for one in self.predictions if one.finding is finding]

    def by_task(self, finding: Finding) -> list[str]:
        """Name the left sides of the differences with this finding, task by task."""
        lefts: dict[str, list[str]] = {}
        for one in self.predictions:
            if one.finding is finding:
                lefts.setdefault(one.task, []).append(one.contrast.left.text)
        return [f"{task}: {', '.join(names)}" for task, names in lefts.items()]

    @property
    def word(self) -> str:
        """Name the verdict.

        Supported: all expected differences are seen. Contradicted: none is, and one is the
        opposite. Partly supported: some are seen. Not resolved: none is seen, and none is the
        opposite.
        """
        findings = [one.finding for one in self.predictions]
        if not findings:
            return "No verdict"
        if set(findings) == {Finding.SEEN}:
            return "Supported"
        if Finding.SEEN in findings:
            return "Partly supported"
        return "Contradicted" if Finding.OPPOSITE in findings else "Not resolved"

    @property
    def sentences(self) -> list[str]:
        """Write the verdict in at most three sentences."""
        count = len(self.predictions)
        if not count:
            first = "No verdict: no difference that the study file expects can be judged"
        else:
            number = len(self.with_finding(Finding.SEEN))
            first = f"{self.word}: {number} of {pluralise(count, 'expected difference')} seen"
        parts: list[str] = []
        for finding in Finding:
            texts = self.with_finding(finding)
            texts = self.by_task(finding) if len(texts) > MOST_WRITTEN else texts
            if texts:
                parts.append(f"{finding}: {'; '.join(texts)}")
        mute = [f"{task} {reason}" for task, reason in self.mute_tasks.items()]
        sentences = [first, "; ".join(parts), "; ".join(mute)]
        return [f"{one[0].upper()}{one[1:]}." for one in sentences if one]


def judge_study(
    study: Study,
    scores: Mapping[PairKey, VariantScore],
    comparisons: Mapping[PairKey, Comparison],
) -> StudyVerdict:
    """Judge every expected difference of a study that was measured.

    A direction is seen if the difference is significant, corrected for all comparisons of the
    study. A margin is seen if the whole interval, which is of this comparison alone, lies within
    it, and the opposite if none of it does. The metrics of trained models have no verdict on a task
    that all variants solve, or that none has begun to learn.
    """
    mute: dict[str, str] = {}
    predictions: list[Prediction] = []
    for task in study.tasks.values():
        reason = explain_mute_task(study, task, scores)
        for contrast in study.contrasts:
            compared = comparisons.get((contrast.key(study.baseline), task.name))
            is_expected = contrast.expected and task.name in (contrast.tasks or study.tasks)
            if not is_expected or compared is None:
                continue
            sides = (contrast.left, contrast.right)
            if reason and not any(side.measure or side.place for side in sides):
                mute[task.name] = reason
                continue
            finding = find(contrast, compared, task.sign)
            predictions.append(Prediction(contrast, task.name, compared, finding))
    return StudyVerdict(predictions, mute)


def find(contrast: Contrast, compared: Comparison, sign: int) -> Finding:
    """Compare an expected difference with the one that was found; `sign` is 1 if more is better."""
    margin = contrast.margin
    if margin is None:
        if not compared.is_significant:
            return Finding.OPEN
        gain = compared.difference.value * (1 if contrast.expected in RISES else sign)
        is_expected = (gain > 0) == (contrast.expected in ("better", "more"))
        return Finding.SEEN if is_expected else Finding.OPPOSITE
    low, high = compared.difference.low, compared.difference.high
    if math.isnan(low):  # all seeds have the same difference
        low = high = compared.difference.value
    if sign < 0:
        low, high = -high, -low
    if low >= -margin and (contrast.is_one_sided or high <= margin):
        return Finding.SEEN
    is_outside = high < -margin or (low > margin and not contrast.is_one_sided)
    return Finding.OPPOSITE if is_outside else Finding.OPEN


def explain_mute_task(study: Study, task: StudyTask, scores: Mapping[PairKey, VariantScore]) -> str:
    """Explain why the metric of a task cannot tell variants apart; "" if it can."""
    chance = task.task.chance.get(task.metric, math.nan)
    if task.sign < 0 or math.isnan(chance):
        return ""
    of_task = [scores[name, task.name] for name in study.variants]
    if all(one.mean.value >= CEILING for one in of_task):
        return f"is without verdict, because every variant reaches {CEILING:g}"
    values = [value for one in of_task for value in one.values]
    if all(value <= chance + FLOOR for value in values):
        return (
            f"is without verdict, because no seed of any variant is {FLOOR:g} above chance "
            f"({format_number(chance)})"
        )
    return ""
