"""What a model says behind prompts: all of it, or as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from ..models.transformer import Transformer
from ..ops.counter_rng import RandomStream
from .beam_search import Followed, followed
from .compiled_step import Tell, unheard
from .decoding_config import USUAL, Decoding, check_together
from .decoding_state import Choose, Course, answering, check_says, steps
from .prompts import Given, begun, taken
from .sampling import Past, pick
from .text_output import Answer, Telling, words_of

Seed = int | Sequence[int] | None
END = object()  # behind the last step


class Said(NamedTuple):
    """An answer: its ids, its text where there is a tokenizer, and its score if several were followed."""

    ids: list[int]
    text: str | None = None
    score: float | None = None


def generate(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    how: Decoding = USUAL,
    seed: Seed = None,
) -> Any:
    """What a model says behind a prompt: new ids behind ids, text behind text, and a list of either for a list.

    What is read is a text to go on from; or, where a second stack answers, the source. Ids are read as they are, text
    between what the model's usage says stands around it; special ids end an answer and are not told. At temperature 0
    every token is the likeliest. Else they are drawn: row n of a batch from stream n of one seed, or a list of seeds
    says for each row which stream 0 it draws from, as it would alone. With how=Decoding(best=...) each answer is a
    list, best first.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 8}
    >>> net = hw.build(hw.families.read(config), seed=0)
    >>> first, second = generate(net, [[3, 1, 4], [1]], max_new_tokens=5)
    >>> len(first), generate(net, [1], max_new_tokens=5) == second
    (5, True)
    >>> generate(net, [3, 1, 4], max_new_tokens=9)
    Traceback (most recent call last):
    ValueError: 3 tokens and 9 new ones are 3 more than the 8 positions of gpt2 can take; ask for at most 6 new ...
    """
    asked = Asked.of(model, max_new_tokens, temperature, how)
    given = taken(model, ids_or_text, how.window)
    found = asked.answers(given, streams_of(seed, len(given.rows)) if temperature else ())
    said = [[one.text if given.kind == "text" else one.ids for one in best] for best in found]
    plain = [best if how.best > 1 else best[0] for best in said]
    return plain[0] if given.form == "alone" else plain


def stream(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    how: Decoding = USUAL,
    seed: Seed = None,
) -> Iterator[Any]:
    """What `generate` says behind one prompt, as it comes: ids, or pieces of text that stay whatever follows.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 8}
    >>> net = hw.build(hw.families.read(config), seed=0)
    >>> list(stream(net, [3, 1, 4], max_new_tokens=5)) == generate(net, [3, 1, 4], max_new_tokens=5)
    True
    """
    asked = Asked.of(model, max_new_tokens, temperature, how)
    given = taken(model, ids_or_text, how.window)
    if given.form == "together":
        raise ValueError(f"{len(given.rows)} prompts cannot be told as they come; give one, or call generate")
    if how.beams > 1:
        raise SpecError(f"beams={how.beams} are decided at the end; call generate, or give beams=1")
    return asked.pieces(given, streams_of(seed, 1) if temperature else ())


def streams_of(seed: Seed, count: int, first: int = 0) -> list[RandomStream]:
    """What each of so many rows draws from; without a seed, one from torch's own generator.

    >>> [row.number for row in streams_of(7, 2)], [row.seed for row in streams_of([7, 5], 2)]
    ([0, 1], [7, 5])
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [RandomStream(seed, first + n) for n in range(count)]
    told = list(seed) if isinstance(seed, (list, tuple, range)) else []
    if len(told) != count or not all(isinstance(one, int) and not isinstance(one, bool) for one in told):
        raise SpecError(f"seed={seed!r} is no seed for {count} rows; give a whole number, or one for each row")
    return [RandomStream(one) for one in told]


@dataclass(frozen=True)
class Asked:
    """A model, and how it is to answer; `tell` hears whether steps are compiled, and why, whenever texts are begun."""

    net: Transformer
    count: int
    temperature: float
    how: Decoding
    tell: Tell = unheard

    @staticmethod
    def of(net: Transformer, count: int, temperature: float, how: Decoding, tell: Tell = unheard) -> Asked:
        """The same, if it can be meant."""
        if not isinstance(net, Transformer):
            raise ValueError(f"model is of type {type(net).__name__}; give what hw.build or hw.load returned")
        check_together(how, temperature, check_says(net.described))
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"max_new_tokens={count!r} cannot be; give a whole number of at least 1")
        return Asked(net, count, temperature, how, tell)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that an answer stops before."""
        return self.how.ends(self.net.usage.end)

    def answers(self, given: Given, streams: Sequence[RandomStream] = ()) -> list[list[Said]]:
        """The answers to each prompt, best first."""
        found = [self.answer(given.kind, row) for row in given.rows]
        with answering(self.net):
            course = self._course(given)
            if self.how.beams > 1:
                return self._followed(course, given)
            for _ in steps(course, self._choose(course, streams), found, self.count):
                pass
        return [[_said(answer, given.kind)] for answer in found]

    def pieces(self, given: Given, streams: Sequence[RandomStream] = ()) -> Iterator[Any]:
        """The answer to one prompt, as it comes."""
        answer = self.answer(given.kind, given.rows[0])
        with answering(self.net):
            course = self._course(given)
        return self._told(answer, given.kind, steps(course, self._choose(course, streams), [answer], self.count))

    def _told(self, answer: Answer, kind: str, going: Iterator[None]) -> Iterator[Any]:
        while True:
            with answering(self.net):  # and not while whoever reads does something else with it
                last = next(going, END)
            if kind == "ids":
                yield from answer.fresh_ids()
            elif piece := answer.fresh_text():
                yield piece
            if last is END:
                return

    def _course(self, given: Given) -> Course:
        prompt = begun(self.net, given.rows, next(self.net.parameters()).device)
        told = {"tokens": prompt.tokens, "memory": prompt.memory, "how": self.how}
        course = Course(self.net, prompt.ids, count=self.count, **told)
        self.tell(course.choice)
        return course

    def _choose(self, course: Course, streams: Sequence[RandomStream]) -> Choose:
        """Each row draws from the stream of its prompt."""

        def choose(logits: Tensor, past: Past) -> list[int]:
            own = [streams[row] for row in course.rows] if streams else ()
            return pick(logits, past, temperature=self.temperature, how=self.how, streams=own)

        return choose

    def answer(self, kind: str, prompt: list[int]) -> Answer:
        """An answer that is still empty; where ids are asked for, text matters only if it may stop them."""
        if kind == "ids" and not self.how.words:
            return Answer(self.ends)
        before = prompt if self.net.described.kind == "decoder" else ()
        return Answer(self.ends, self.how.words, Telling(words_of(self.net)[1], before))

    def _followed(self, course: Course, given: Given) -> list[list[Said]]:
        ends, stops = self.ends, self.how.words
        words = words_of(self.net)[1] if stops else None

        def ended(ids: Sequence[int]) -> bool:
            return ids[-1] in ends or (words is not None and any(stop in words.text(ids) for stop in stops))

        found = followed(course, self.how, ends, ended)
        return [
            [self._scored(one, given.kind, row) for one in best] for best, row in zip(found, given.rows, strict=True)
        ]

    def _scored(self, one: Followed, kind: str, prompt: list[int]) -> Said:
        answer = self.answer(kind, prompt)
        for token in one.ids:
            answer.take(token)
        answer.close()
        return _said(answer, kind)._replace(score=one.value)


def _said(answer: Answer, kind: str) -> Said:
    return Said(answer.ids, answer.text if kind == "text" else None)
