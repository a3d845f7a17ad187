"""Measurements of the engine: throughput, latencies and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..errors import pluralise
from .kv_memory import KVMemory
from .model_runner import ModelRunner, StepRecord
from .requests import RequestTiming


class LatencySummary(NamedTuple):
    """Mean, median and 95th percentile of durations in seconds.

    >>> LatencySummary.of([3.0, 1.0, 2.0, 10.0])
    LatencySummary(mean=4.0, p50=2.0, p95=10.0)
    """

    mean: float
    p50: float
    p95: float

    @staticmethod
    def of(seconds: Iterable[float]) -> LatencySummary:
        """Summarise the durations; all zeros if there are none."""
        ordered = sorted(seconds)
        if not ordered:
            return LatencySummary(0.0, 0.0, 0.0)
        p50, p95 = (ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 95))
        return LatencySummary(sum(ordered) / len(ordered), p50, p95)


@dataclass(frozen=True)
class ServingReport:
    """Throughput, latencies until the first token (`wait`) and between tokens (`each`), and memory
    against the budget.

    `computed` counts prefilled prompt tokens, `shared` prompt tokens found in the cache, `sources`
    encoder tokens. `layers` is the number of layers with paged caches; `gathers` maps those that
    gather their pages to the reason.
    """

    requests: int
    tokens: int
    computed: int
    shared: int
    sources: int
    seconds: float
    wait: LatencySummary
    each: LatencySummary
    peak_bytes: int
    budget: int
    layers: int
    gathers: Mapping[str, str]
    steps: tuple[StepRecord, ...] = field(repr=False)

    @staticmethod
    def of(
        memory: KVMemory, timings: Sequence[RequestTiming], runner: ModelRunner
    ) -> ServingReport:
        """Report on the requests that have ended, and all steps of the engine."""
        with_tokens = [timing for timing in timings if timing.tokens]
        steps = tuple(runner.steps)
        return ServingReport(
            requests=len(timings),
            tokens=sum(timing.tokens for timing in with_tokens),
            computed=sum(step.tokens for step in steps),
            shared=runner.shared,
            sources=runner.sources,
            seconds=sum(step.seconds for step in steps),
            wait=LatencySummary.of(timing.wait for timing in with_tokens),
            each=LatencySummary.of(timing.each for timing in with_tokens if timing.tokens > 1),
            peak_bytes=runner.peak,
            budget=memory.budget,
            layers=memory.reading.layers,
            gathers=memory.reading.gathers,
            steps=steps,
        )

    @property
    def rate(self) -> float:
        """Tokens per second of step time, over all requests."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def data(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        values = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("steps", "wait", "each")
        }
        spreads = {"first_token_seconds": self.wait._asdict(), "token_seconds": self.each._asdict()}
        return {**values, "steps": len(self.steps), "tokens_per_second": self.rate, **spreads}

    def __str__(self) -> str:
        lines = [
            f"{pluralise(self.requests, 'request')}, {pluralise(self.tokens, 'token')} in "
            f"{self.seconds:,.2f} s of "
            f"{pluralise(len(self.steps), 'step')}",
            _format_line("tokens per second, all requests", f"{self.rate:,.1f}"),
            _format_line(
                "prompt tokens computed, found in the cache", f"{self.computed:,}, {self.shared:,}"
            ),
            " " * 34 + "".join(name.rjust(12) for name in ("mean", "median", "95 %")),
            _format_latency("time to the first token", self.wait),
            _format_latency("time between tokens", self.each),
            _format_line("peak bytes, budget", f"{self.peak_bytes:,}, {self.budget:,}"),
            _format_line(
                "layers that read pages in place, all layers",
                f"{self.layers - len(self.gathers)}, {self.layers}",
            ),
            *(
                (
                    f"  {count} {'layer gathers its' if count == 1 else 'layers gather their'} "
                    "pages: "
                    f"{why}"
                )
                for why, count in Counter(self.gathers.values()).items()
            ),
        ]
        return "\n".join(lines)


def _format_line(name: str, value: str) -> str:
    return f"{name:<46}{value:>24}"


def _format_latency(name: str, spread: LatencySummary) -> str:
    return f"{name:<34}" + "".join(f"{seconds * 1e3:,.2f} ms".rjust(12) for seconds in spread)
