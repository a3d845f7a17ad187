"""What is timed of a model: its attentions, the reading of a prompt, the saying of tokens behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..counting.costs import cost
from ..counting.scopes import image_tokens, max_lengths
from ..errors import SpecError
from ..models import Transformer
from ..models.caches import Caches, Memory
from ..models.generating import longest as known
from ..tokens import SequenceInfo
from .savings import default_workload

ATTENTION_PHASE = "attention"  # by itself
TIMED_LENGTH = 256  # tokens that are read, unless said


@dataclass(frozen=True)
class TimingOptions:
    """Rows, tokens of each that are read, and that are then said one by one; and seconds for all rounds together.

    Without a length it is 256, or as many as the model takes.
    """

    batch: int = 1
    length: int | None = None
    steps: int = 16
    seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "steps"):
            told = getattr(self, name)
            if not (name == "length" and told is None) and (type(told) is not int or told < 1):
                raise ValueError(f"{name}={told!r} cannot be measured; give a whole number of at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds!r} leave no time to measure; give more than 0")


class TimedPhase(NamedTuple):
    """What is timed: so many units in every run of what `begin` gives for a model."""

    name: str
    unit: str
    count: int
    prepare: Callable[[Transformer], Callable[[], object]]


def fit_lengths(net: Transformer, timing: TimingOptions) -> tuple[int, int]:
    """How many tokens are read and said: what is asked for, as far as the model has positions for both.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    >>> fit_lengths(net, TimingOptions())
    (256, 16)
    >>> fit_lengths(net, TimingOptions(length=2000))
    Traceback (most recent call last):
    ValueError: 2000 tokens read and 16 said are more than the 1024 positions of gpt2; give length=1008
    """
    described, most = net.described, max_lengths(net.described)
    if described.kind == "vision":
        return image_tokens(described)[-1] or 1, timing.steps
    two = len(described.stacks) > 1
    said = min(timing.steps, most.own or timing.steps) if two else min(timing.steps, (most.own or 2 * timing.steps) // 2 or 1)
    room = most.source if two else most.own and most.own - (0 if described.kind == "encoder" else said)
    asked = timing.length or min(TIMED_LENGTH, room or TIMED_LENGTH)
    if room and asked > room:
        fact = f"{asked} tokens read and {said} said are more than the {room + (0 if two else said)} positions"
        raise ValueError(f"{fact} of {described.name}; give length={room}")
    return asked, said


def make_timing_input(net: Transformer, batch: int, length: int) -> Tensor:
    """Something to read for the first stack: ids in turn, or noise where it reads numbers."""
    stack = net.described.stacks[0]
    embedding, weight = stack.embedding, next(net.parameters())
    draw = torch.Generator().manual_seed(0)
    if embedding is not None and embedding.tokens:
        return torch.randint(0, embedding.tokens, (batch, length), generator=draw).to(weight.device)
    if embedding is not None and (told := embedding.patches) is not None:
        shape = (batch, told.channels, told.rows * told.high, told.columns * told.wide)
    else:
        shape = (batch, length, stack.model)
    return torch.randn(shape, generator=draw).to(weight)


def list_phases(net: Transformer, inputs: Tensor, how: tuple[TimingOptions, int], notes: list[str]) -> Iterator[TimedPhase]:
    """Every phase of a kind of model; `notes` hear what cannot be timed."""
    pace, length = how
    read = pace.batch * length
    if any(net.described.attention_specs()):
        count, unit = (pace.batch, "images/s") if net.described.kind == "vision" else (read, "tokens/s")
        yield TimedPhase(ATTENTION_PHASE, unit, count, partial(_prepare_attentions, pace.batch, length))
    if net.described.kind == "vision":
        yield TimedPhase("forward", "images/s", pace.batch, lambda one: partial(one, inputs))
    elif net.described.kind == "encoder":
        yield TimedPhase("forward", "tokens/s", read, lambda one: partial(one, inputs))
    elif net.described.kind == "encoder-decoder":
        yield TimedPhase("encode", "tokens/s", read, lambda one: partial(one.encode, inputs))
        yield TimedPhase("decode", "tokens/s", pace.batch * pace.steps, partial(_prepare_source_decode, inputs, pace.steps))
    else:
        yield TimedPhase("prefill", "tokens/s", read, lambda one: partial(_prefill, one, inputs, length))
        if next(iter(cost(net.described, default_workload(net, None, None)))).decode_flops is None:
            notes.append(f"{net.described.name} reads ahead and says nothing token by token, so no decoding is timed")
        else:
            yield TimedPhase("decode", "tokens/s", pace.batch * pace.steps, partial(_prepare_decode, inputs, pace.steps))


def _prepare_attentions(batch: int, length: int, net: Transformer) -> Callable[[], object]:
    """All attentions of a model, each by itself."""
    weight, draw = next(net.parameters()), torch.Generator().manual_seed(0)
    given = {
        stack.name: torch.randn(batch, min(length, known(stack) or length), stack.model, generator=draw).to(weight)
        for stack in net.described.stacks
    }
    source, every = next(iter(given.values())), list[Callable[[], object]]()
    for name, stack in net.stacks.items():
        for layer in stack.blocks:
            for role, attention in layer.attentions.items():
                read = source if role == "cross" else None
                every.append(partial(attention, given[name], source=read))
    return lambda: [run() for run in every]


def _prefill(net: Transformer, given: Tensor, capacity: int) -> tuple[Tensor, Caches | None]:
    """A prompt, remembered, and what is said behind its last token."""
    cache = _make_cache(net, len(given), capacity)
    return net.read(net.hidden(given, cache=cache)[:, -1:]), cache


def _prepare_decode(given: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    length = given.shape[1]
    _, cache = _prefill(net, given, length + steps)
    return partial(_decode_steps, net, given[:, :1], cache, (steps, length, None))


def _prepare_source_decode(given: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    memory = net.encode(given)
    first = torch.zeros(len(given), 1, dtype=torch.int64, device=given.device)
    return partial(_decode_steps, net, first, _make_cache(net, len(given), steps), (steps, 0, memory))


def _decode_steps(net: Transformer, one: Tensor, cache: Caches | None, how: tuple[int, int, Memory | None]) -> Tensor:
    """One token after the other, the same each time: what it is changes no time."""
    steps, past, memory = how
    said = one
    for step in range(steps):
        at = None if cache is not None else SequenceInfo.contiguous(past + step, 1, one.device)
        said = net.read(net.hidden(one, tokens=at, source=memory, cache=cache))
    return said


def _make_cache(net: Transformer, batch: int, capacity: int) -> Caches | None:
    """What it remembers; nothing where all that read their past are gone."""
    try:
        return net.cache(batch=batch, capacity=capacity)
    except SpecError:
        return None
