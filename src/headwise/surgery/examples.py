"""The texts that changed most, and what both models say of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..heads.objectives import Question
from ..models import Transformer, generate
from ..models.generating import longest, words_of
from ..tasks import IGNORED

SHOWN = 5  # examples
SAID = 16  # tokens that a model says behind the first half of a text
ANSWERED = 48  # tokens of an answer to a source
PLACES = 6  # of a text, of which it is told what both think is there


@dataclass(frozen=True)
class Example:
    """One text by its number: how good both were, what was read, what was wanted, and what both say."""

    number: int
    before: float
    after: float
    read: str
    wanted: str
    said_before: str
    said_after: str

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, order=True)
class Changed:
    """A text by how much worse it got, up or down; its question, and what both said."""

    far: float
    number: int
    losses: tuple[float, float] = field(compare=False)
    question: Question = field(compare=False)
    outputs: tuple[Tensor, Tensor] = field(compare=False)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """What was read, stream by stream; nothing where that is no text."""
        return [row.ids for rows in self.question.given.rows.values() for row in rows]


@dataclass
class Most:
    """The texts that changed most, as they come."""

    held: list[Changed] = field(default_factory=list)

    def take(self, one: Changed) -> None:
        """One text more, unless the same is there already."""
        if one.ids and any(one.ids == held.ids for held in self.held):
            return
        (heapq.heappush if len(self.held) < SHOWN else heapq.heappushpop)(self.held, one)

    def examples(self, nets: tuple[Transformer, Transformer], kind: str) -> tuple[Example, ...]:
        """As a reader sees them, the farthest first; `kind` is the objective that says what is asked."""
        return tuple(_example(one, nets, kind) for one in sorted(self.held, reverse=True))


def _example(one: Changed, nets: tuple[Transformer, Transformer], kind: str) -> Example:
    named = SHOWS.get(kind, _nothing)
    read, wanted, said = named(one, nets)
    return Example(one.number, *one.losses, read, wanted, *said)


Shown = tuple[str, str, tuple[str, str]]
Nets = tuple[Transformer, Transformer]


def _continued(one: Changed, nets: Nets) -> Shown:
    """What both say behind the first half of a text."""
    ids = one.question.given.rows["text"][0].ids
    half = max(1, len(ids) // 2)
    room = longest(nets[0].described.stacks[-1])
    count = max(1, min(SAID, SAID if room is None else room - half + 1))
    said = tuple(generate(net, list(ids[:half]), max_new_tokens=count) for net in nets)
    spell = _writing(nets[0])
    return spell(ids[:half]), spell(ids[half:]), (spell(said[0]), spell(said[1]))


def _translated(one: Changed, nets: Nets) -> Shown:
    rows, (read, write) = one.question.given.rows, (_reading(nets[0]), _writing(nets[0]))
    source, text = rows["source"][0].ids, rows["text"][0].ids
    said = ("", "")
    if nets[0].usage.begin:
        room = longest(nets[0].described.stacks[-1])
        count = min(ANSWERED, ANSWERED if room is None else max(1, room - len(nets[0].usage.begin)))
        told = [generate(net, list(source), max_new_tokens=count) for net in nets]
        said = write(told[0]), write(told[1])
    begin = len(nets[0].usage.begin)
    return read(source), write(text[begin:]), said


def _filled(one: Changed, nets: Nets) -> Shown:
    """What both think stands at masked places."""
    spell, labels = _writing(nets[0]), _labels(one)
    places = torch.nonzero(labels != IGNORED).flatten()[:PLACES]
    best = [flat(said).argmax(-1)[places.to(said.device)].tolist() for said in one.outputs]
    wanted = ", ".join(spell([label]) for label in labels[places].tolist())
    before, after = (", ".join(spell([label]) for label in told) for told in best)
    rows = one.question.given.rows
    return spell(rows["text"][0].ids) if "text" in rows else "", wanted, (before, after)


def _classed(one: Changed, nets: Nets) -> Shown:
    """Which class both take it for."""
    names = nets[0].usage.labels
    labels = _labels(one)
    places = torch.nonzero(labels != IGNORED).flatten()[:PLACES]

    def named(ids: Sequence[int]) -> str:
        return ", ".join(names[label] if label < len(names) else f"class {label}" for label in ids)

    best = [named(flat(said).argmax(-1)[places.to(said.device)].tolist()) for said in one.outputs]
    rows = one.question.given.rows
    read = _reading(nets[0])(rows["text"][0].ids) if "text" in rows else f"input {one.number}"
    return read, named(labels[places].tolist()), (best[0], best[1])


def _nothing(one: Changed, nets: Nets) -> Shown:
    rows = one.question.given.rows
    return _reading(nets[0])(rows["text"][0].ids) if "text" in rows else f"input {one.number}", "", ("", "")


SHOWS: dict[str, Callable[[Changed, Nets], Shown]] = {
    "next-token": _continued,
    "translation": _translated,
    "masked-token": _filled,
    "label": _classed,
}


def flat(said: Tensor) -> Tensor:
    """One row for each place."""
    return said.reshape(-1, said.shape[-1])


def _labels(one: Changed) -> Tensor:
    assert one.question.labels is not None, "something is asked"
    return one.question.labels


def _writing(net: Transformer) -> Callable[[Sequence[int]], str]:
    return _spelling(net, 1)


def _reading(net: Transformer) -> Callable[[Sequence[int]], str]:
    return _spelling(net, 0)


def _spelling(net: Transformer, which: int) -> Callable[[Sequence[int]], str]:
    """How ids are written, of the text that is read, 0, or said, 1."""
    if net.usage.tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    words = words_of(net)[which]
    return lambda ids: words.text(ids) or " ".join(words.token(one) for one in ids)
