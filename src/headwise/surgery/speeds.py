"""How fast two models run and how much they hold, measured in turns: one after the other, over and over."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ..models import Transformer
from ..models.generating import answering
from .held import measure_peak_bytes
from .phases import ATTENTION_PHASE, TimingOptions, TimedPhase, fit_lengths, make_timing_input, list_phases

MIN_ROUNDS, MAX_ROUNDS = 5, 31  # rounds of both models
MAX_SPREAD = 0.2  # spread beyond which nothing is concluded


@dataclass(frozen=True)
class PhaseSpeed:
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
        if self.rounds < MIN_ROUNDS:
            return f"none: {self.rounds} rounds in the time, {MIN_ROUNDS} are needed"
        if self.spread > MAX_SPREAD:
            return f"no verdict: rounds spread {self.spread:.0%}, more than {MAX_SPREAD:.0%}"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "as fast"

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"held": list(self.held), "verdict": self.verdict}


@dataclass(frozen=True)
class SpeedComparison:
    """Every phase, under which load, on what."""

    phases: tuple[PhaseSpeed, ...]
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


def compare_speed(before: Transformer, after: Transformer, timing: TimingOptions) -> SpeedComparison:
    """Both models timed in turns in this process, after a run of each that does not count.

    Its attentions read states, one after the other. Then all of it: a decoder reads a prompt and says tokens behind it;
    one with a source encodes it and says tokens; an encoder reads; a model of images looks at them.
    """
    length, steps = fit_lengths(before, timing)
    timing = replace(timing, steps=steps)
    read, notes = make_timing_input(before, timing.batch, length), list[str]()
    every = list(list_phases(before, read, (timing, length), notes))
    if not any(after.described.attention_specs()):
        every = [phase for phase in every if phase.name != ATTENTION_PHASE]
        notes.append("the model after has no attention left, so none is timed by itself")
    each = timing.seconds / len(every)
    with answering(before), answering(after), torch.inference_mode():
        found = tuple(_measure_phase(phase, (before, after), each) for phase in every)
    threads = torch.get_num_threads()
    device = next(before.parameters()).device
    machine = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    return SpeedComparison(found, timing.batch, length, steps, machine, tuple(notes))


def _measure_phase(phase: TimedPhase, nets: tuple[Transformer, Transformer], seconds: float) -> PhaseSpeed:
    """Rounds of both, the first of which does not count."""
    held = tuple(measure_peak_bytes(lambda net=net: phase.prepare(net)()) for net in nets)
    for net in nets:
        _time_run(phase, net)
    end, taken = time.perf_counter() + seconds, list[list[float]]()
    while len(taken) < MAX_ROUNDS and (not taken or time.perf_counter() < end):
        order = nets if len(taken) % 2 == 0 else nets[::-1]
        both = [_time_run(phase, net) for net in order]
        taken.append(both if order is nets else both[::-1])
    return summarise_rounds(phase, np.array(taken), (held[0], held[1]))


def _time_run(phase: TimedPhase, net: Transformer) -> float:
    run = phase.prepare(net)
    _synchronise(net)
    begun = time.perf_counter()
    run()
    _synchronise(net)
    return max(time.perf_counter() - begun, 1e-9)


def _synchronise(net: Transformer) -> None:
    if next(net.parameters()).device.type == "cuda":
        torch.cuda.synchronize()


def summarise_rounds(phase: TimedPhase, seconds: Any, peak_bytes: tuple[int, int]) -> PhaseSpeed:
    """What the seconds of both in every round, [rounds, 2], come to.

    >>> summarise_rounds(TimedPhase("forward", "tokens/s", 8, lambda net: lambda: None), np.array([[2.0, 1.0]] * 5), (0, 0)).verdict
    'faster'
    """
    median = np.median(seconds, axis=0)
    low, high = np.quantile(seconds, (0.25, 0.75), axis=0)
    gains = seconds[:, 0] / seconds[:, 1]
    spread = float(((high - low) / median).max())
    before, after = (phase.count / float(one) for one in median)
    least, faster, most = (float(np.quantile(gains, share)) for share in (0.25, 0.5, 0.75))
    return PhaseSpeed(phase.name, phase.unit, before, after, faster, least, most, spread, len(seconds), peak_bytes)
