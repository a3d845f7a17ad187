"""Greedy decoding, and beam search for the outputs with the highest total log-probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ..transformer import EncoderOutput, Transformer
from .decoding_config import DecodingConfig
from .decoding_state import (
    NEG_INF,
    DecodingState,
    apply_repetition_penalty,
    eval_mode,
    require_language_model,
    run_decode_steps,
    sample_tokens,
)
from .text_output import Completion

# --- Greedy decoding ------------------------------------------------------------------------------


def greedy_decode(
    net: Transformer,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    sequence: SequenceInfo | None = None,
    end_id: int | None = None,
    encoder_output: EncoderOutput | None = None,
) -> list[list[int]]:
    """Return up to `max_new_tokens` most likely ids after each row of a prompt [B, P]; a row stops
    before `end_id`.

    If rows differ in length, pad them and give sequence=SequenceInfo.from_batch(prompt,
    lengths=..., pad="left"). `encoder_output` is what `net.encode(source)` returned. Past tokens
    are cached.

    >>> import torch, headwise as hw
    >>> described = hw.families.read_model_spec(
    ...     {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ... )
    >>> net = hw.build(described, seed=0)
    >>> first, second = greedy_decode(net, torch.tensor([[3, 1], [4, 1]]), max_new_tokens=5)
    >>> len(first), first == greedy_decode(net, torch.tensor([[3, 1]]), max_new_tokens=5)[0]
    (5, True)
    """
    _check_greedy_inputs(net, prompt, max_new_tokens, sequence)
    answers = [Completion(() if end_id is None else (end_id,)) for _ in range(len(prompt))]
    with eval_mode(net):
        course = DecodingState(
            net,
            prompt,
            max_new_tokens=max_new_tokens,
            sequence=sequence,
            encoder_output=encoder_output,
        )
        for _ in run_decode_steps(course, sample_tokens, answers, max_new_tokens):
            pass
    return [answer.ids for answer in answers]


def _check_greedy_inputs(
    net: Transformer, prompt: Tensor, count: int, tokens: SequenceInfo | None
) -> None:
    require_language_model(net.spec)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"max_new_tokens={count!r} is not a token count; give an integer of at least 1"
        )
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or not prompt.numel():
        shape = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(
            f"prompt is {shape}; give ids [rows, tokens] with at least one token in each row"
        )
    if tokens is not None and not bool(tokens.is_real.any(1).all()):
        raise ValueError("a row of the prompt is all padding; give at least one token in each row")


# --- Beam search ----------------------------------------------------------------------------------

IsFinished = Callable[[Sequence[int]], bool]  # whether an output with these ids has ended


class BeamHypothesis(NamedTuple):
    """The ids of a hypothesis and the sum of their log-probabilities, or its score once it is
    finished.
    """

    value: float
    ids: tuple[int, ...]


@dataclass
class BeamSearch:
    """The hypotheses of one prompt: at most `beams` active ones and `beams` finished ones (`over`),
    best first.

    Each step ranks enough of the extensions by one token that `beams` remain active whatever ends.
    An extension that ends, or has `count` tokens, is finished if it is among the first `beams`; its
    score is its sum divided by length ** length_penalty. The search ends when no active hypothesis
    can beat the `best` finished ones.
    """

    how: DecodingConfig
    count: int
    ends: frozenset[int]
    ended: IsFinished
    active: list[BeamHypothesis] = field(default_factory=lambda: [BeamHypothesis(0.0, ())])
    over: list[BeamHypothesis] = field(default_factory=list)

    def step(self, log_probs: Tensor) -> list[int]:
        """Extend by one token from log-probabilities [active, vocabulary]; return the parent of
        each new hypothesis.
        """
        sums = (
            torch.tensor([[hypothesis.value] for hypothesis in self.active], dtype=torch.float64)
            + log_probs.double().cpu()
        )
        before = self.active
        self.active = []
        is_last = len(before[0].ids) + 1 == self.count
        parents: list[int] = []
        for rank, (value, place) in enumerate(self._iter_extensions(sums.flatten())):
            is_full = is_last or len(self.active) == self.how.beams
            if value == NEG_INF or (rank >= self.how.beams and is_full):
                break
            parent, token_id = divmod(place, sums.shape[1])
            answer = BeamHypothesis(value, (*before[parent].ids, token_id))
            if is_last or self.ended(answer.ids):
                self._add_finished(answer, rank)
            elif len(self.active) < self.how.beams:
                self.active.append(answer)
                parents.append(parent)
        if self._is_decided:
            self.active = []
        return parents[: len(self.active)]

    def _iter_extensions(self, sums: Tensor) -> Iterator[tuple[float, int]]:
        """Iterate over sums and indices of the extensions, best first.

        The first ones suffice if outputs end at end ids alone; a stop text may end more.
        """
        count = min(max(2, 1 + len(self.ends)) * self.how.beams, len(sums))
        for _ in range(0, len(sums), count):
            values, places = sums.topk(count)
            yield from zip(values.tolist(), places.tolist(), strict=True)
            sums[places] = NEG_INF

    def _add_finished(self, answer: BeamHypothesis, rank: int) -> None:
        if rank < self.how.beams:
            score = answer.value / len(answer.ids) ** self.how.length_penalty
            ids = answer.ids
            finished = [*self.over, BeamHypothesis(score, ids)]
            self.over = sorted(finished, key=lambda hypothesis: -hypothesis.value)[: self.how.beams]

    @property
    def _is_decided(self) -> bool:
        """Whether no active hypothesis can win: sums only fall, which bounds its best score."""
        if not self.active or len(self.over) < self.how.best:
            return False
        last = self.over[self.how.best - 1]
        best_length = self.count if self.how.length_penalty > 0 else len(self.active[0].ids)
        return self.active[0].value / best_length**self.how.length_penalty <= last.value


def run_beam_search(
    state: DecodingState,
    config: DecodingConfig,
    end_ids: frozenset[int],
    is_finished: IsFinished,
) -> list[list[BeamHypothesis]]:
    """Return the `best` finished hypotheses of each prompt, best first, with their end ids.

    As in transformers, the repetition penalty applies to log-probabilities, which are not
    renormalised.
    """
    searches = [BeamSearch(config, state.count, end_ids, is_finished) for _ in state.rows]
    while state.rows:
        logits = state.logits.to(torch.promote_types(state.logits.dtype, torch.float32))
        penalised = apply_repetition_penalty(logits.log_softmax(-1), state.texts, config.repetition)
        index = list[int]()
        ids = list[int]()
        at = 0
        for prompt, rows in groupby(state.rows):
            stop = at + len(list(rows))
            index += [at + parent for parent in searches[prompt].step(penalised[at:stop])]
            ids += [answer.ids[-1] for answer in searches[prompt].active]
            at = stop
        if not index:
            break
        state.keep(index)
        state.append_tokens(ids)
    return [search.over[: config.best] for search in searches]
