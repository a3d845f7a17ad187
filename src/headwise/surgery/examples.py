"""The texts that changed most, and what both models say of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..heads.objectives import EvaluationInput
from ..models import Transformer, generate
from ..models.generating import longest, words_of
from ..tasks import IGNORED

MAX_EXAMPLES = 5  # examples
MAX_CONTINUATION_TOKENS = 16  # tokens that a model says behind the first half of a text
MAX_TRANSLATION_TOKENS = 48  # tokens of an answer to a source
MAX_POSITIONS = 6  # of a text, of which it is told what both think is there


@dataclass(frozen=True)
class ChangedExample:
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
class TextChange:
    """A text by how much worse it got, up or down; its question, and what both said."""

    abs_change: float
    number: int
    losses: tuple[float, float] = field(compare=False)
    question: EvaluationInput = field(compare=False)
    outputs: tuple[Tensor, Tensor] = field(compare=False)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """What was read, stream by stream; nothing where that is no text."""
        return [row.ids for rows in self.question.inputs.token_rows.values() for row in rows]


@dataclass
class LargestChanges:
    """The texts that changed most, as they come."""

    changes: list[TextChange] = field(default_factory=list)

    def add(self, one: TextChange) -> None:
        """One text more, unless the same is there already."""
        if one.ids and any(one.ids == held.ids for held in self.changes):
            return
        (heapq.heappush if len(self.changes) < MAX_EXAMPLES else heapq.heappushpop)(self.changes, one)

    def format_examples(self, nets: tuple[Transformer, Transformer], objective: str) -> tuple[ChangedExample, ...]:
        """As a reader sees them, the farthest first; `kind` is the objective that says what is asked."""
        return tuple(_format_example(one, nets, objective) for one in sorted(self.changes, reverse=True))


def _format_example(one: TextChange, nets: tuple[Transformer, Transformer], kind: str) -> ChangedExample:
    named = EXAMPLE_FORMATTERS.get(kind, _format_input)
    read, wanted, said = named(one, nets)
    return ChangedExample(one.number, *one.losses, read, wanted, *said)


FormattedTexts = tuple[str, str, tuple[str, str]]
ModelPair = tuple[Transformer, Transformer]


def _format_continuation(one: TextChange, nets: ModelPair) -> FormattedTexts:
    """What both say behind the first half of a text."""
    ids = one.question.inputs.token_rows["text"][0].ids
    half = max(1, len(ids) // 2)
    room = longest(nets[0].described.stacks[-1])
    count = max(1, min(MAX_CONTINUATION_TOKENS, MAX_CONTINUATION_TOKENS if room is None else room - half + 1))
    said = tuple(generate(net, list(ids[:half]), max_new_tokens=count) for net in nets)
    spell = _target_speller(nets[0])
    return spell(ids[:half]), spell(ids[half:]), (spell(said[0]), spell(said[1]))


def _format_translation(one: TextChange, nets: ModelPair) -> FormattedTexts:
    rows, (read, write) = one.question.inputs.token_rows, (_source_speller(nets[0]), _target_speller(nets[0]))
    source, text = rows["source"][0].ids, rows["text"][0].ids
    said = ("", "")
    if nets[0].usage.begin:
        room = longest(nets[0].described.stacks[-1])
        count = min(MAX_TRANSLATION_TOKENS, MAX_TRANSLATION_TOKENS if room is None else max(1, room - len(nets[0].usage.begin)))
        told = [generate(net, list(source), max_new_tokens=count) for net in nets]
        said = write(told[0]), write(told[1])
    begin = len(nets[0].usage.begin)
    return read(source), write(text[begin:]), said


def _format_masked_tokens(one: TextChange, nets: ModelPair) -> FormattedTexts:
    """What both think stands at masked places."""
    spell, labels = _target_speller(nets[0]), _get_labels(one)
    places = torch.nonzero(labels != IGNORED).flatten()[:MAX_POSITIONS]
    best = [flatten_positions(said).argmax(-1)[places.to(said.device)].tolist() for said in one.outputs]
    wanted = ", ".join(spell([label]) for label in labels[places].tolist())
    before, after = (", ".join(spell([label]) for label in told) for told in best)
    rows = one.question.inputs.token_rows
    return spell(rows["text"][0].ids) if "text" in rows else "", wanted, (before, after)


def _format_labels(one: TextChange, nets: ModelPair) -> FormattedTexts:
    """Which class both take it for."""
    names = nets[0].usage.labels
    labels = _get_labels(one)
    places = torch.nonzero(labels != IGNORED).flatten()[:MAX_POSITIONS]

    def named(ids: Sequence[int]) -> str:
        return ", ".join(names[label] if label < len(names) else f"class {label}" for label in ids)

    best = [named(flatten_positions(said).argmax(-1)[places.to(said.device)].tolist()) for said in one.outputs]
    rows = one.question.inputs.token_rows
    read = _source_speller(nets[0])(rows["text"][0].ids) if "text" in rows else f"input {one.number}"
    return read, named(labels[places].tolist()), (best[0], best[1])


def _format_input(one: TextChange, nets: ModelPair) -> FormattedTexts:
    rows = one.question.inputs.token_rows
    return _source_speller(nets[0])(rows["text"][0].ids) if "text" in rows else f"input {one.number}", "", ("", "")


EXAMPLE_FORMATTERS: dict[str, Callable[[TextChange, ModelPair], FormattedTexts]] = {
    "next-token": _format_continuation,
    "translation": _format_translation,
    "masked-token": _format_masked_tokens,
    "label": _format_labels,
}


def flatten_positions(said: Tensor) -> Tensor:
    """One row for each place."""
    return said.reshape(-1, said.shape[-1])


def _get_labels(one: TextChange) -> Tensor:
    assert one.question.labels is not None, "something is asked"
    return one.question.labels


def _target_speller(net: Transformer) -> Callable[[Sequence[int]], str]:
    return _make_speller(net, 1)


def _source_speller(net: Transformer) -> Callable[[Sequence[int]], str]:
    return _make_speller(net, 0)


def _make_speller(net: Transformer, which: int) -> Callable[[Sequence[int]], str]:
    """How ids are written, of the text that is read, 0, or said, 1."""
    if net.usage.tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    words = words_of(net)[which]
    return lambda ids: words.text(ids) or " ".join(words.token(one) for one in ids)
