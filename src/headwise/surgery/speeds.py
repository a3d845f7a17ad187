"""How fast two models run and how much they hold, measured in turns: one after the other, over and over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..counting.costs import cost
from ..errors import SpecError
from ..models import Transformer
from ..models.caches import Caches, Memory
from ..models.generating import answering
from ..tokens import Tokens
from .held import most_held
from .savings import load_of

FEWEST, MOST = 5, 31  # rounds of both models
SURE = 0.2  # spread beyond which nothing is concluded
ATTENTION = "attention"  # by itself
LENGTH = 256  # tokens that are read, unless said


@dataclass(frozen=True)
class Pace:
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


class Phase(NamedTuple):
    """What is timed: so many units in every run of what `begin` gives for a model."""

    name: str
    unit: str
    count: int
    begin: Callable[[Transformer], Callable[[], object]]


@dataclass(frozen=True)
class Speed:
    """One phase of both models: units a second, medians over rounds; `spread` is the width of the middle half of the
    rounds over their median, the larger of both; `faster` the median over rounds of what after gains on before.

    `verdict` is "faster", "slower", "as fast" where that half holds 1, or none where the spread is too large or rounds
    are too few. `held` are the most bytes that tensors take at once from the beginning of a run on: caches, but no
    weights.
    """

    phase: str
    unit: str
    before: float
    after: float
    faster: float
    low: float
    high: float
    spread: float
    rounds: int
    held: tuple[int, int]

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.rounds < FEWEST:
            return f"none: {self.rounds} rounds in the time, {FEWEST} are needed"
        if self.spread > SURE:
            return f"none: rounds spread {self.spread:.0%}, more than {SURE:.0%}"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "as fast"

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"held": list(self.held), "verdict": self.verdict}


@dataclass(frozen=True)
class Speeds:
    """Every phase, under which load, on what."""

    phases: tuple[Speed, ...]
    batch: int
    length: int
    steps: int
    machine: str
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"batch": self.batch, "length": self.length, "steps": self.steps, "machine": self.machine}
        return told | {"phases": [one.data for one in self.phases], "notes": list(self.notes)}


def speeds(before: Transformer, after: Transformer, pace: Pace) -> Speeds:
    """Both models timed in turns in this process, after a run of each that does not count.

    Its attentions read states, one after the other. Then all of it: a decoder reads a prompt and says tokens behind it;
    one with a source encodes it and says tokens; an encoder reads; a model of images looks at them.
    """
    length = _length(before, pace)
    given, notes = _given(before, pace.batch, length), list[str]()
    phases = list(_phases(before, given, (pace, length), notes))
    if not any(after.described.specs()):
        phases = [phase for phase in phases if phase.name != ATTENTION]
        notes.append("the model after has no attention left, so none is timed by itself")
    each = pace.seconds / len(phases)
    with answering(before), answering(after), torch.inference_mode():
        found = tuple(_measured(phase, (before, after), each) for phase in phases)
    threads = torch.get_num_threads()
    device = next(before.parameters()).device
    machine = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    return Speeds(found, pace.batch, length, pace.steps, machine, tuple(notes))


def _length(net: Transformer, pace: Pace) -> int:
    """As many tokens as fit, with those that are said behind them."""
    asked = (pace.length or LENGTH) + pace.steps
    fits = load_of(net, None if pace.length is None else asked, None)
    price = next(iter(cost(net.described, fits)))
    return price.whole.tokens if price.decode is None else max(1, min(asked, price.whole.tokens) - pace.steps)


def _given(net: Transformer, batch: int, length: int) -> Tensor:
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


def _phases(net: Transformer, given: Tensor, how: tuple[Pace, int], notes: list[str]) -> Iterator[Phase]:
    pace, length = how
    read = pace.batch * length
    if any(net.described.specs()):
        count, unit = (pace.batch, "images/s") if net.described.kind == "vision" else (read, "tokens/s")
        yield Phase(ATTENTION, unit, count, partial(_attending, pace.batch, length))
    if net.described.kind == "vision":
        yield Phase("forward", "images/s", pace.batch, lambda one: partial(one, given))
    elif net.described.kind == "encoder":
        yield Phase("forward", "tokens/s", read, lambda one: partial(one, given))
    elif net.described.kind == "encoder-decoder":
        yield Phase("encode", "tokens/s", read, lambda one: partial(one.encode, given))
        yield Phase("decode", "tokens/s", pace.batch * pace.steps, partial(_answering, given, pace.steps))
    else:
        yield Phase("prefill", "tokens/s", read, lambda one: partial(_read, one, given, length))
        if next(iter(cost(net.described, load_of(net, None, None)))).decode is None:
            notes.append(f"{net.described.name} reads ahead and says nothing token by token, so no decoding is timed")
        else:
            yield Phase("decode", "tokens/s", pace.batch * pace.steps, partial(_going_on, given, pace.steps))


def _attending(batch: int, length: int, net: Transformer) -> Callable[[], object]:
    """All attentions of a model, each by itself."""
    weight, draw = next(net.parameters()), torch.Generator().manual_seed(0)
    wide = {stack.name: stack.model for stack in net.described.stacks}
    given = {name: torch.randn(batch, length, model, generator=draw).to(weight) for name, model in wide.items()}
    source, every = next(iter(given.values())), list[Callable[[], object]]()
    for name, stack in net.stacks.items():
        for layer in stack.blocks:
            for role, attention in layer.attentions.items():
                read = source if role == "cross" else None
                every.append(partial(attention, given[name], source=read))
    return lambda: [run() for run in every]


def _read(net: Transformer, given: Tensor, capacity: int) -> tuple[Tensor, Caches | None]:
    """A prompt, remembered, and what is said behind its last token."""
    cache = _cache(net, len(given), capacity)
    return net.read(net.hidden(given, cache=cache)[:, -1:]), cache


def _going_on(given: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    length = given.shape[1]
    _, cache = _read(net, given, length + steps)
    return partial(_say, net, given[:, :1], cache, (steps, length, None))


def _answering(given: Tensor, steps: int, net: Transformer) -> Callable[[], object]:
    memory = net.encode(given)
    first = torch.zeros(len(given), 1, dtype=torch.int64, device=given.device)
    return partial(_say, net, first, _cache(net, len(given), steps), (steps, 0, memory))


def _say(net: Transformer, one: Tensor, cache: Caches | None, how: tuple[int, int, Memory | None]) -> Tensor:
    """One token after the other, the same each time: what it is changes no time."""
    steps, past, memory = how
    said = one
    for step in range(steps):
        at = None if cache is not None else Tokens.run(past + step, 1, one.device)
        said = net.read(net.hidden(one, tokens=at, source=memory, cache=cache))
    return said


def _cache(net: Transformer, batch: int, capacity: int) -> Caches | None:
    """What it remembers; nothing where all that read their past are gone."""
    try:
        return net.cache(batch=batch, capacity=capacity)
    except SpecError:
        return None


def _measured(phase: Phase, nets: tuple[Transformer, Transformer], seconds: float) -> Speed:
    """Rounds of both, the first of which does not count."""
    held = tuple(most_held(lambda net=net: phase.begin(net)()) for net in nets)
    for net in nets:
        _timed(phase, net)
    end, taken = time.perf_counter() + seconds, list[list[float]]()
    while len(taken) < MOST and (not taken or time.perf_counter() < end):
        order = nets if len(taken) % 2 == 0 else nets[::-1]
        both = [_timed(phase, net) for net in order]
        taken.append(both if order is nets else both[::-1])
    return told(phase, np.array(taken), (held[0], held[1]))


def _timed(phase: Phase, net: Transformer) -> float:
    run = phase.begin(net)
    _wait(net)
    begun = time.perf_counter()
    run()
    _wait(net)
    return max(time.perf_counter() - begun, 1e-9)


def _wait(net: Transformer) -> None:
    if next(net.parameters()).device.type == "cuda":
        torch.cuda.synchronize()


def told(phase: Phase, taken: Any, held: tuple[int, int]) -> Speed:
    """What the seconds of both in every round, [rounds, 2], come to.

    >>> told(Phase("forward", "tokens/s", 8, lambda net: lambda: None), np.array([[2.0, 1.0]] * 5), (0, 0)).verdict
    'faster'
    """
    median = np.median(taken, axis=0)
    low, high = np.quantile(taken, (0.25, 0.75), axis=0)
    gains = taken[:, 0] / taken[:, 1]
    spread = float(((high - low) / median).max())
    before, after = (phase.count / float(one) for one in median)
    middle = (float(np.quantile(gains, share)) for share in (0.5, 0.25, 0.75))
    return Speed(phase.name, phase.unit, before, after, *middle, spread, len(taken), held)
