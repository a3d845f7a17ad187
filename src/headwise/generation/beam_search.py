"""Several answers of each prompt followed at once: the likeliest as a whole, not at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .decoding_config import DecodingConfig
from .decoding_state import DecodingState
from .sampling import NEG_INF, apply_repetition_penalty

IsFinished = Callable[[Sequence[int]], bool]  # whether an answer of these ids is over


class BeamHypothesis(NamedTuple):
    """An answer: its ids, and the sum of their log-likelihoods; once it is over, its score."""

    value: float
    ids: tuple[int, ...]


@dataclass
class BeamSearch:
    """The answers of one prompt: at most `beams` that go on, and as many that are over, both best first.

    Of all answers one token longer the likeliest are looked at, enough that `beams` of them go on whatever ends. One
    that ends, or has `count` tokens, is over if it is among the first `beams`, with its sum over its length to the
    power of the penalty as score. The search ends when nothing that goes on can score more than the `best` that are
    over.
    """

    how: DecodingConfig
    count: int
    ends: frozenset[int]
    ended: IsFinished
    active: list[BeamHypothesis] = field(default_factory=lambda: [BeamHypothesis(0.0, ())])
    over: list[BeamHypothesis] = field(default_factory=list)

    def step(self, log_probs: Tensor) -> list[int]:
        """One token more, by log-likelihoods [going, tokens]; which of those before each that goes on continues."""
        sums = torch.tensor([[one.value] for one in self.active], dtype=torch.float64) + log_probs.double().cpu()
        looked = max(2, 1 + len(self.ends)) * self.how.beams
        values, places = sums.flatten().topk(min(looked, sums.numel()))
        before, self.active = self.active, []
        parents: list[int] = []
        for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            parent, one = divmod(place, sums.shape[1])
            answer = BeamHypothesis(value, (*before[parent].ids, one))
            if value == NEG_INF:
                break
            if len(answer.ids) == self.count or self.ended(answer.ids):
                self._add_finished(answer, rank)
            elif len(self.active) < self.how.beams:
                self.active.append(answer)
                parents.append(parent)
        if self._is_decided:
            self.active = []
        return parents[: len(self.active)]

    def _add_finished(self, answer: BeamHypothesis, rank: int) -> None:
        if rank < self.how.beams:
            score = answer.value / len(answer.ids) ** self.how.length_penalty
            self.over = sorted([*self.over, BeamHypothesis(score, answer.ids)], key=lambda one: -one.value)[
                : self.how.beams
            ]

    @property
    def _is_decided(self) -> bool:
        """Whether what goes on comes too late: a sum only falls, so its best score is that over the kindest length."""
        if not self.active or len(self.over) < self.how.best:
            return False
        kindest = self.count if self.how.length_penalty > 0 else len(self.active[0].ids)
        return self.active[0].value / kindest**self.how.length_penalty <= self.over[self.how.best - 1].value


def run_beam_search(
    state: DecodingState, config: DecodingConfig, end_ids: frozenset[int], is_finished: IsFinished
) -> list[list[BeamHypothesis]]:
    """The `best` answers behind each prompt of a course, best first, their ends included.

    As transformers has it, a penalty for repetition reaches log-likelihoods, which are not brought to sum to one again.
    """
    searches = [BeamSearch(config, state.count, end_ids, is_finished) for _ in state.rows]
    while state.rows:
        logits = state.logits.to(torch.promote_types(state.logits.dtype, torch.float32))
        likely = apply_repetition_penalty(logits.log_softmax(-1), state.texts, config.repetition)
        index, ids, at = list[int](), list[int](), 0
        for prompt, rows in groupby(state.rows):
            own = likely[at : (stop := at + len(list(rows)))]
            index += [at + parent for parent in searches[prompt].step(own)]
            ids += [answer.ids[-1] for answer in searches[prompt].active]
            at = stop
        if not index:
            break
        state.keep(index)
        state.append_tokens(ids)
    return [search.over[: config.best] for search in searches]
