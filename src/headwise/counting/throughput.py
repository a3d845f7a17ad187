"""How fast requests are answered, what a step waits for, and how many of them memory holds: one page for each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .allocators import RequestBatch
from .capacity import MemoryDemand, max_context, max_requests
from .costs import TERMINAL_WIDTH, format_count, format_seconds
from .serving import ServingStep

MAX_ROWS = 2**16  # rows at which the curve ends, where memory does not end it


class DecodeRate(NamedTuple):
    """So many rows at once: seconds of a step, and tokens a second of all of them."""

    rows: int
    seconds: float
    tokens: float


@dataclass(frozen=True)
class ThroughputReport:
    """Rows that are answered together, and a prompt that comes in beside them.

    >>> import headwise as hw
    >>> from headwise.select_counted.num_devices import Device
    >>> from headwise.select_counted.serving import Serving
    >>> serving = Serving(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h200"), layers=32)
    >>> told = ThroughputReport("gqa", MemoryDemand(serving, RequestBatch.alike(16, 8192)), prompt=8192)
    >>> [round(rate.tokens, -1) for rate in told.curve[:2]]  # n / ((2.684 + n 1.074) GB / 4.8 TB/s), nearly
    [1280.0, 1990.0]
    """

    name: str
    demand: MemoryDemand
    prompt: int

    @property
    def decode_step(self) -> ServingStep:
        """One token for every row."""
        return self.demand.serving.decode_step(self.demand.requests)

    @property
    def mixed_step(self) -> ServingStep:
        """The same with the last chunk of a prompt in the place of one row."""
        taken = (self.prompt - 1) // self.demand.chunk * self.demand.chunk
        return self.demand.serving.mixed_step(self.other_requests, self.prompt - taken, taken)

    @property
    def other_requests(self) -> RequestBatch | None:
        """The rows without the first: who is answered while a prompt comes in."""
        (length, times), *rest = self.demand.requests.counts_by_length
        each = (*(((length, times - 1),) if times > 1 else ()), *rest)
        return RequestBatch(each) if each else None

    @property
    def first_token_seconds(self) -> float:
        """Seconds at least until the first token of the prompt."""
        return self.demand.serving.first_token_seconds(self.prompt, self.demand.chunk, self.other_requests)

    @property
    def longest_length(self) -> int:
        """Tokens of the longest row."""
        return max(length for length, _ in self.demand.requests.counts_by_length)

    @property
    def decode_rates(self) -> list[DecodeRate]:
        """Rates of 1, 2, 4 ... rows as long as the longest, as far as memory goes."""
        most = max_requests(self.demand) or MAX_ROWS
        counts = sorted({most} | {2**n for n in range(MAX_ROWS.bit_length()) if 2**n <= min(most, MAX_ROWS)})
        steps = ((n, self.demand.serving.decode_step(RequestBatch.uniform(n, self.longest_length)).seconds) for n in counts)
        return [DecodeRate(n, seconds, n / seconds) for n, seconds in steps]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        serving, rows = self.demand.serving, self.demand.requests
        long = f"{self.longest_length:,}" if len(rows.counts_by_length) == 1 else f"{min(rows.counts_by_length)[0]:,} to {self.longest_length:,}"
        yield from _wrap(
            f"{self.name}: {_pluralise(rows.num_requests, 'row')} of {long} tokens, {serving.formats.compute}, a cache of "
            f"{serving.formats.cache} ({serving.allocator}), {serving.device.description}"
        )
        yield from ("", _operation_line("a token for every row", "FLOP", "bytes", "FLOP/byte", "waits for", "at least"))
        yield from _step_lines(self.decode_step)
        yield from ("", f"the same while a prompt of {self.prompt:,} tokens ends")
        yield from _step_lines(self.mixed_step)
        seconds = self.decode_step.seconds
        yield from ("", _value_line("first token of that prompt", format_seconds(self.first_token_seconds)))
        yield _value_line("then a token every", format_seconds(seconds))
        yield _value_line("tokens a second, all rows together", f"{rows.num_requests / seconds:,.0f}")
        yield from self._limit_lines()
        yield from ("", "rows".rjust(10) + "a step".rjust(14) + "tokens a second".rjust(20))
        for rate in self.decode_rates:
            yield f"{rate.rows:,}".rjust(10) + format_seconds(rate.seconds).rjust(14) + f"{rate.tokens:,.0f}".rjust(20)

    def _limit_lines(self) -> Iterator[str]:
        serving, rows, demand = self.demand.serving, self.demand.requests, self.demand
        tokens, context = serving.compute_bound_tokens(), serving.core_dominates_from(rows.num_requests)
        yield _value_line(
            "products with weights wait for compute from", "never" if tokens is None else f"{tokens:,} tokens a step"
        )
        yield _value_line("cores take longer than these from", "never" if context is None else f"{context:,} tokens a row")
        longest, most = max_context(demand), max_requests(demand)
        yield _value_line(f"rows of {self.longest_length:,} tokens that memory holds", _format_limit(most))
        yield _value_line(f"or {_pluralise(rows.num_requests, 'row')} of so many tokens", _format_limit(longest))
        if not demand.fits:
            yield "These rows do not fit; --verdict says what would."

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        demand, serving = self.demand, self.demand.serving
        seconds = self.decode_step.seconds
        steps = {"decode": self.decode_step, "mixed": self.mixed_step}
        return {
            "name": self.name,
            "rows": [list(each) for each in demand.requests.counts_by_length],
            "allocator": str(serving.allocator),
            "first_token_seconds": self.first_token_seconds,
            "token_seconds": seconds,
            "tokens_per_second": demand.requests.num_requests / seconds,
            "steps": {
                name: [{**asdict(one), "intensity": one.intensity} for one in step.operations]
                for name, step in steps.items()
            },
            "compute_bound_from_tokens": serving.compute_bound_tokens(),
            "core_longest_from_context": serving.core_dominates_from(demand.requests.num_requests),
            "cache_bytes": sum(term.value for term in demand.cache_terms),
            "fits": demand.fits,
            "most_rows": max_requests(demand),
            "longest_context": max_context(demand),
            "curve": [rate._asdict() for rate in self.decode_rates],
        }


def _step_lines(step: ServingStep) -> Iterator[str]:
    for one in step.operations:
        cells = (f"{one.intensity:,.1f}", one.bound, format_seconds(one.seconds))
        yield _operation_line(f"  {one.name}", format_count(one.flops), format_count(one.moved), *cells)
    together = (format_count(sum(one.flops for one in step.operations)), format_count(sum(one.moved for one in step.operations)))
    yield _operation_line("  together", *together, "", "", format_seconds(step.seconds))


def _operation_line(name: str, *cells: str) -> str:
    widths = (10, 10, 11, 10, 9)
    numbers = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return f"{name:<30}{numbers}" if len(name) <= 30 else f"{name}\n{'':<30}{numbers}"


def _value_line(name: str, value: str) -> str:
    return f"{name:<46}{value:>22}"


def _format_limit(count: int | None) -> str:
    return "any number" if count is None else f"{count:,}"


def _pluralise(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, TERMINAL_WIDTH)
