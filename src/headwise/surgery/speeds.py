"""How fast two models run and how much they hold, measured in turns: one after the other, over and over."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ..models import Transformer
from ..models.generating import answering
from .held import most_held
from .phases import ATTENTION, Pace, Phase, fitting, given, phases

FEWEST, MOST = 5, 31  # rounds of both models
SURE = 0.2  # spread beyond which nothing is concluded


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
            return f"no verdict: rounds spread {self.spread:.0%}, more than {SURE:.0%}"
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
    length, steps = fitting(before, pace)
    pace = replace(pace, steps=steps)
    read, notes = given(before, pace.batch, length), list[str]()
    every = list(phases(before, read, (pace, length), notes))
    if not any(after.described.specs()):
        every = [phase for phase in every if phase.name != ATTENTION]
        notes.append("the model after has no attention left, so none is timed by itself")
    each = pace.seconds / len(every)
    with answering(before), answering(after), torch.inference_mode():
        found = tuple(_measured(phase, (before, after), each) for phase in every)
    threads = torch.get_num_threads()
    device = next(before.parameters()).device
    machine = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    return Speeds(found, pace.batch, length, steps, machine, tuple(notes))


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
    least, faster, most = (float(np.quantile(gains, share)) for share in (0.25, 0.5, 0.75))
    return Speed(phase.name, phase.unit, before, after, faster, least, most, spread, len(taken), held)
