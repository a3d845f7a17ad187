"""Curves over training steps for `induction_study.py`, with intervals over texts and corrected
tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headwise.head_analysis.resampling import Jackknife, correct_p_values
from induction_measures import TESTED, Array, Found, Story

LEVEL = 0.05
DRAWS = 1000
CONTEXT, AGAIN = "in-context score", "loss on repetition"
Key = tuple[str | int, ...]


class Test(NamedTuple):
    """A mean of differences over texts, and how likely chance alone does as much, corrected over
    all tests.
    """

    mean: float
    p: float

    @property
    def verdict(self) -> bool:
        """Whether it is significant."""
        return self.p < LEVEL

    @property
    def is_above_chance(self) -> bool:
        """Whether it is significant and more."""
        return self.verdict and self.mean > 0


def in_context(losses: Array) -> Array:
    """How much less is lost late in a text than early, [texts]: an eighth of it at the end, one
    around an eighth.

    >>> in_context(np.arange(15.0)[None]).tolist()
    [12.0]
    """
    each = (losses.shape[1] + 1) // 8
    early = losses[:, each // 2 : each // 2 + each]
    return losses[:, -each:].mean(1) - early.mean(1)


def again(losses: Array) -> Array:
    """How much less is lost of random tokens when they come again, [texts], but for the first,
    which none could know.

    >>> again(np.array([[5.0, 5.0, 5.0, 9.0, 1.0, 1.0, 1.0]])).tolist()
    [-4.0]
    """
    half = (losses.shape[1] + 1) // 2
    return losses[:, half:].mean(1) - losses[:, : half - 1].mean(1)


def curves(story: Story) -> Mapping[str, Array]:
    """What is followed, [steps, texts]."""
    values = {
        CONTEXT: [in_context(one.losses["source"]) for one in story.steps],
        AGAIN: [again(one.losses["repeated"]) for one in story.steps],
    }
    for name in TESTED:
        values[name] = [one.scores["repeated", name][:, story.heads[name]] for one in story.steps]
    return {name: np.stack(each) for name, each in values.items()}


def tests(found: Found) -> Mapping[Key, Test]:
    """Every head at every step against the twin's strongest, every change, what silence does.

    Corrected are all heads at all steps and seeds together, and all else together."""
    columns: dict[Key, Array] = {}
    for story in found.stories:
        columns |= dict(_against(story, found))
        for name, curve in curves(story).items():
            for before, step in enumerate(found.setting.kept[1:]):
                columns["change", story.seed, step, name] = curve[before + 1] - curve[before]
        columns |= dict(_silent(story))
    found_of: dict[Key, Test] = {}
    for heads in (True, False):
        p = _likely({key: one for key, one in columns.items() if (key[0] == "head") == heads})
        sure = correct_p_values(np.array(list(p.values())))
        found_of |= {
            key: Test(float(np.nanmean(columns[key])), float(q))
            for key, q in zip(p, sure, strict=True)
        }
    return found_of


def _likely(columns: Mapping[Key, Array]) -> dict[Key, float]:
    """p of each, those with as many texts at once."""
    p_values: dict[Key, float] = {}
    for count in {len(one) for one in columns.values()}:
        own = [key for key, one in columns.items() if len(one) == count]
        differences = np.nan_to_num(np.stack([columns[key] for key in own], -1))
        p_values |= dict(zip(own, Jackknife.of_ratio(differences).p_values().tolist(), strict=True))
    return p_values


def _against(story: Story, found: Found) -> Iterator[tuple[Key, Array]]:
    for step, one in list(zip(found.setting.kept, story.steps, strict=True))[1:]:
        for (data, name), scores in one.scores.items():
            theirs = found.twin.scores[data, name]
            best = theirs[:, np.nanmean(theirs, 0).argmax()]
            for head, own in enumerate(scores.T):
                yield ("head", story.seed, step, data, name, head), own - best


def _silent(story: Story) -> Iterator[tuple[Key, Array]]:
    last = story.steps[-1].losses
    if story.silenced[0]:
        for which, quiet in zip(("called", "others"), story.quiet, strict=True):
            yield (
                ("silent", story.seed, which, CONTEXT),
                in_context(quiet["source"]) - in_context(last["source"]),
            )
            yield (
                ("silent", story.seed, which, AGAIN),
                again(quiet["repeated"]) - again(last["repeated"]),
            )


def halfway(steps: Sequence[int], curve: Array) -> float:
    """The step at which a curve is first halfway from its first value to its last, on a line
    between kept steps.

    >>> halfway((0, 10, 20), np.array([0.0, 0.0, 1.0]))
    15.0
    """
    goal = (curve[0] + curve[-1]) / 2
    beyond = (curve - goal) * np.sign(curve[-1] - curve[0]) >= 0
    at = max(1, int(beyond.argmax()))
    part = (
        (goal - curve[at - 1]) / (curve[at] - curve[at - 1]) if curve[at] != curve[at - 1] else 1.0
    )
    return float(steps[at - 1] + part * (steps[at] - steps[at - 1]))


def spread(curve: Array) -> Array:
    """The mean of every draw of texts, [draws, steps], of [steps, texts]."""
    texts = curve.shape[1]
    return (
        np.random.default_rng(0).multinomial(texts, np.full(texts, 1 / texts), size=DRAWS)
        @ curve.T
        / texts
    )


def when(steps: Sequence[int], curve: Array) -> tuple[float, float, float]:
    """Halfway, and between which steps 95 % of draws of texts have it."""
    low, high = np.quantile([halfway(steps, one) for one in spread(curve)], (0.025, 0.975))
    return halfway(steps, curve.mean(1)), float(low), float(high)


def called(found: Found, story: Story, tests_by_key: Mapping[Key, Test]) -> list[int]:
    """How many heads at each kept step are called induction on random tokens, and are surely above
    the twin's.
    """
    counts = [0]
    for step, one in list(zip(found.setting.kept, story.steps, strict=True))[1:]:
        names = [[own.name for own in head.classes] for head in one.tables["repeated"].heads]
        counts.append(
            sum(
                "induction" in own
                and tests_by_key[
                    "head", story.seed, step, "repeated", "induction", head
                ].is_above_chance
                for head, own in enumerate(names)
            )
        )
    return counts


def appears(steps: Sequence[int], counts: Sequence[int]) -> tuple[int, int] | None:
    """The last kept step without such a head and the next, from which on there always is one; None
    if there is none.

    >>> appears((0, 10, 20, 30), (0, 1, 0, 2)), appears((0, 10), (0, 0))
    ((20, 30), None)
    """
    if not counts[-1]:
        return None
    last = max((at for at, count in enumerate(counts) if not count), default=-1)
    return (steps[last], steps[last + 1]) if last >= 0 else (0, steps[0])
