"""Several answers of each prompt followed at once: the likeliest as a whole, not at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .decoding_config import Decoding
from .decoding_state import Course
from .sampling import NEVER, penalised

Ended = Callable[[Sequence[int]], bool]  # whether an answer of these ids is over


class Followed(NamedTuple):
    """An answer: its ids, and the sum of their log-likelihoods; once it is over, its score."""

    value: float
    ids: tuple[int, ...]


@dataclass
class Search:
    """The answers of one prompt: at most `beams` that go on, and as many that are over, both best first.

    Of all answers one token longer the likeliest are looked at, enough that `beams` of them go on whatever ends. One
    that ends, or has `count` tokens, is over if it is among the first `beams`, with its sum over its length to the
    power of the penalty as score. The search ends when nothing that goes on can score more than the `best` that are
    over.
    """

    how: Decoding
    count: int
    ends: frozenset[int]
    ended: Ended
    going: list[Followed] = field(default_factory=lambda: [Followed(0.0, ())])
    over: list[Followed] = field(default_factory=list)

    def step(self, likely: Tensor) -> list[int]:
        """One token more, by log-likelihoods [going, tokens]; which of those before each that goes on continues."""
        sums = torch.tensor([[one.value] for one in self.going], dtype=torch.float64) + likely.double().cpu()
        looked = max(2, 1 + len(self.ends)) * self.how.beams
        values, places = sums.flatten().topk(min(looked, sums.numel()))
        before, self.going = self.going, []
        parents: list[int] = []
        for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            parent, one = divmod(place, sums.shape[1])
            answer = Followed(value, (*before[parent].ids, one))
            if value == NEVER:
                break
            if len(answer.ids) == self.count or self.ended(answer.ids):
                self._finish(answer, rank)
            elif len(self.going) < self.how.beams:
                self.going.append(answer)
                parents.append(parent)
        if self._decided:
            self.going = []
        return parents[: len(self.going)]

    def _finish(self, answer: Followed, rank: int) -> None:
        if rank < self.how.beams:
            score = answer.value / len(answer.ids) ** self.how.length_penalty
            self.over = sorted([*self.over, Followed(score, answer.ids)], key=lambda one: -one.value)[: self.how.beams]

    @property
    def _decided(self) -> bool:
        """Whether what goes on comes too late: a sum only falls, so its best score is that over the kindest length."""
        if not self.going or len(self.over) < self.how.best:
            return False
        kindest = self.count if self.how.length_penalty > 0 else len(self.going[0].ids)
        return self.going[0].value / kindest**self.how.length_penalty <= self.over[self.how.best - 1].value


def followed(course: Course, how: Decoding, ends: frozenset[int], ended: Ended) -> list[list[Followed]]:
    """The `best` answers behind each prompt of a course, best first, their ends included.

    As transformers has it, a penalty for repetition reaches log-likelihoods, which are not brought to sum to one again.
    """
    searches = [Search(how, course.count, ends, ended) for _ in course.rows]
    while course.rows:
        logits = course.logits.to(torch.promote_types(course.logits.dtype, torch.float32))
        likely = penalised(logits.log_softmax(-1), course.texts, how.repetition)
        index, ids, at = list[int](), list[int](), 0
        for prompt, rows in groupby(course.rows):
            own = likely[at : (stop := at + len(list(rows)))]
            index += [at + parent for parent in searches[prompt].step(own)]
            ids += [answer.ids[-1] for answer in searches[prompt].going]
            at = stop
        if not index:
            break
        course.keep(index)
        course.say(ids)
    return [search.over[: how.best] for search in searches]
