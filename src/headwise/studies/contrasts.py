"""Contrasts of a study: comparisons that its file plans before the runs, such as of an edited and a trained model.

A contrast has two readouts, and each is one number of every seed. Their difference is tested over seeds, like that of
a variant from the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, suggest
from .cell_heads import HEAD_MEASURES

CHANGE, LEARNING = "change", "learning"
OTHER_HEAD_NUMBERS = ("diversity", "support", "support_spread")
OTHER_HEAD_NUMBERS += ("score_deviation", "score_rank", "score_change", "residual")
MEASURES = (CHANGE, LEARNING, *HEAD_MEASURES, *OTHER_HEAD_NUMBERS)
STEP = re.compile("0|[1-9][0-9]{0,8}")
PATTERN = re.compile(r"(?:(?P<measure>\S+) of )?(?P<variant>\S+)(?: (?P<place>after|on|at step) (?P<name>\S+))?")


@dataclass(frozen=True)
class Readout:
    """One number of every cell of a variant, written as `[MEASURE of] VARIANT [after EDIT | on TEST | at step N]`.

    Without a measure it is the metric of the task: of the trained model, after an edit, or on a further test. "change"
    is what the edit or the test changed in it, and "learning" its mean over the evaluations during training. "residual"
    is how different the tokens of a text are after the last layer, and all other measures are means over heads.
    """

    text: str
    measure: str
    variant: str
    place: str
    name: str

    @staticmethod
    def parse(text: str) -> Readout:
        """Read a readout; raises SpecError if it is none.

        >>> Readout.parse("change of h4 after half").name
        'half'
        """
        if (match := PATTERN.fullmatch(text)) is None:
            raise SpecError(
                f'a contrast has {text!r}, which is not "VARIANT", "VARIANT after EDIT", "VARIANT on TEST" or '
                '"MEASURE of VARIANT"; correct the file'
            )
        parts = {key: value or "" for key, value in match.groupdict().items()}
        readout = Readout(text, **parts)
        readout._check_measure()
        return readout

    def _check_measure(self) -> None:
        if self.measure and self.measure not in MEASURES:
            raise SpecError(f"a contrast has the unknown measure {self.measure!r}; {suggest(self.measure, MEASURES)}")
        places = {"": ("", "after", "on"), CHANGE: ("after", "on"), LEARNING: ("",)}
        if self.place not in places.get(self.measure, ("", "on", "at step")):
            raise SpecError(f"the contrast of {self.text!r} is not measured {self.place or 'there'}; correct the file")
        if self.place == "at step" and not STEP.fullmatch(self.name):
            raise SpecError(
                f'the contrast of {self.text!r} has the step {self.name!r}; write a number, as in "at step 0"'
            )

    def read(self, result: Mapping[str, Any], metric: str) -> float | None:
        """The number of one cell; None if it was not measured, as on a test that the task does not have."""
        if self.measure == LEARNING:
            values = [point["metrics"][metric] for point in result["curve"] if metric in point["metrics"]]
            return sum(values) / len(values) if values else None
        if self.measure in ("", CHANGE):
            trained = result["metrics"].get(metric)
            value = self._metrics(result).get(metric)
            if self.measure == "" or value is None or trained is None:
                return value
            return value - trained
        place = {"": "", "on": f"test {self.name}", "at step": f"step {self.name}"}[self.place]
        summary = result["heads_at"].get(place, {}) if place else result["heads"]
        value = {**summary, **summary.get("measures", {})}.get(self.measure)
        return value[-1] if isinstance(value, list) else value  # the residual after the last of all layers

    def _metrics(self, result: Mapping[str, Any]) -> Mapping[str, float]:
        if self.place == "after":
            return result["edits"].get(self.name, {}).get("metrics", {})
        return result["tests"].get(self.name, {}) if self.place == "on" else result["metrics"]


@dataclass(frozen=True)
class Contrast:
    """The difference `left` minus `right`, paired over seeds."""

    left: Readout
    right: Readout

    @property
    def name(self) -> str:
        """The contrast in words."""
        return f"{self.left.text} minus {self.right.text}"

    def check(self) -> None:
        """Raise SpecError unless both readouts are of one measure and differ."""
        if self.left.text == self.right.text:
            raise SpecError(f"a contrast compares {self.left.text!r} with itself; give two different readouts")
        left, right = (one.measure or "the metric of the task" for one in (self.left, self.right))
        if left != right:
            raise SpecError(f"the contrast {self.name!r} takes {right} from {left}; give two readouts of one measure")

    def check_baseline(self, baseline: str) -> None:
        """Raise SpecError if the report makes the comparison anyway: the metric of a variant and of the baseline."""
        texts = self.left.text, self.right.text
        if baseline in texts and texts == (self.left.variant, self.right.variant):
            raise SpecError(
                f"the contrast {self.name!r} compares a variant with the baseline {baseline!r}, as the report does for "
                'every variant; leave it out, or name a measure, as in "learning of VARIANT"'
            )


def parse_contrasts(values: object, tables: Mapping[str, Mapping[str, Any]]) -> tuple[Contrast, ...]:
    """Read the contrasts of a study file.

    `tables` has the variants, edits and tests of the file by their names. A contrast with one that the scale sets to
    false is left out; raises SpecError for one that the file does not have.
    """
    if not isinstance(values, list):
        raise SpecError(f'contrasts = {values!r} is no list; write contrasts = [["VARIANT", "VARIANT"]]')
    contrasts: list[Contrast] = []
    pairs: set[frozenset[str]] = set()
    for pair in values:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair)):
            raise SpecError(f'contrasts has {pair!r}, which is no pair of texts; write ["VARIANT", "VARIANT"]')
        contrast = Contrast(Readout.parse(pair[0]), Readout.parse(pair[1]))
        contrast.check()
        if frozenset(pair) in pairs:
            raise SpecError(f"contrasts has {contrast.name!r} twice, perhaps in another order; leave one of them out")
        pairs.add(frozenset(pair))
        if _is_chosen(contrast.left, tables) & _is_chosen(contrast.right, tables):
            contrasts.append(contrast)
    return tuple(contrasts)


def _is_chosen(readout: Readout, tables: Mapping[str, Mapping[str, Any]]) -> bool:
    named: Sequence[tuple[str, str]] = [("variants", readout.variant)]
    if readout.place in ("after", "on"):
        named = [*named, ("edits" if readout.place == "after" else "tests", readout.name)]
    for kind, name in named:
        if name not in tables[kind]:
            remedy = suggest(name, tables[kind]) if tables[kind] else f"add {name!r} to {kind}"
            raise SpecError(f"a contrast names {name!r}, which is not in {kind}; {remedy}")
    return all(tables[kind][name] is not False for kind, name in named)
