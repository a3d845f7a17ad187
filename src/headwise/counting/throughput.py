"""How fast requests are answered, what a step waits for, and how many of them memory holds: one page for each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .allocators import Rows
from .capacity import Demand, longest_context, most_rows
from .costs import WIDTH, short, time
from .serving import Step

MOST = 2**16  # rows at which the curve ends, where memory does not end it


class Rate(NamedTuple):
    """So many rows at once: seconds of a step, and tokens a second of all of them."""

    rows: int
    seconds: float
    tokens: float


@dataclass(frozen=True)
class Throughput:
    """Rows that are answered together, and a prompt that comes in beside them.

    >>> import headwise as hw
    >>> from headwise.counting.devices import Device
    >>> from headwise.counting.serving import Serving
    >>> serving = Serving(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h200"), layers=32)
    >>> told = Throughput("gqa", Demand(serving, Rows.alike(16, 8192)), prompt=8192)
    >>> [round(rate.tokens, -1) for rate in told.curve[:2]]  # n / ((2.684 + n 1.074) GB / 4.8 TB/s), nearly
    [1280.0, 1990.0]
    """

    name: str
    demand: Demand
    prompt: int

    @property
    def step(self) -> Step:
        """One token for every row."""
        return self.demand.serving.decoding(self.demand.rows)

    @property
    def mixed(self) -> Step:
        """The same with the last chunk of a prompt in the place of one row."""
        taken = (self.prompt - 1) // self.demand.chunk * self.demand.chunk
        return self.demand.serving.mixed(self.beside, self.prompt - taken, taken)

    @property
    def beside(self) -> Rows | None:
        """The rows without the first: who is answered while a prompt comes in."""
        (length, times), *rest = self.demand.rows.each
        each = (*(((length, times - 1),) if times > 1 else ()), *rest)
        return Rows(each) if each else None

    @property
    def first(self) -> float:
        """Seconds at least until the first token of the prompt."""
        return self.demand.serving.first_token(self.prompt, self.demand.chunk, self.beside)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(length for length, _ in self.demand.rows.each)

    @property
    def curve(self) -> list[Rate]:
        """Rates of 1, 2, 4 ... rows as long as the longest, as far as memory goes."""
        most = most_rows(self.demand) or MOST
        counts = sorted({most} | {2**n for n in range(MOST.bit_length()) if 2**n <= min(most, MOST)})
        steps = ((n, self.demand.serving.decoding(Rows.alike(n, self.length)).seconds) for n in counts)
        return [Rate(n, seconds, n / seconds) for n, seconds in steps]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        serving, rows = self.demand.serving, self.demand.rows
        long = f"{self.length:,}" if len(rows.each) == 1 else f"{min(rows.each)[0]:,} to {self.length:,}"
        yield from _wrapped(
            f"{self.name}: {_many(rows.count, 'row')} of {long} tokens, {serving.formats.maths}, a cache of "
            f"{serving.formats.cache} ({serving.allocator}), {serving.device.what}"
        )
        yield from ("", _operation("a token for every row", "FLOP", "bytes", "FLOP/byte", "waits for", "at least"))
        yield from _step(self.step)
        yield from ("", f"the same while a prompt of {self.prompt:,} tokens ends")
        yield from _step(self.mixed)
        seconds = self.step.seconds
        yield from ("", _said("first token of that prompt", time(self.first)))
        yield _said("then a token every", time(seconds))
        yield _said("tokens a second, all rows together", f"{rows.count / seconds:,.0f}")
        yield from self._turns()
        yield from ("", "rows".rjust(10) + "a step".rjust(14) + "tokens a second".rjust(20))
        for rate in self.curve:
            yield f"{rate.rows:,}".rjust(10) + time(rate.seconds).rjust(14) + f"{rate.tokens:,.0f}".rjust(20)

    def _turns(self) -> Iterator[str]:
        serving, rows, demand = self.demand.serving, self.demand.rows, self.demand
        tokens, context = serving.compute_bound_from(), serving.core_longest_from(rows.count)
        yield _said(
            "products with weights wait for compute from", "never" if tokens is None else f"{tokens:,} tokens a step"
        )
        yield _said("cores take longer than these from", "never" if context is None else f"{context:,} tokens a row")
        longest, most = longest_context(demand), most_rows(demand)
        yield _said(f"rows of {self.length:,} tokens that memory holds", _limit(most))
        yield _said(f"or {_many(rows.count, 'row')} of so many tokens", _limit(longest))
        if not demand.fits:
            yield "These rows do not fit; --verdict says what would."

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        demand, serving = self.demand, self.demand.serving
        seconds = self.step.seconds
        steps = {"decode": self.step, "mixed": self.mixed}
        return {
            "name": self.name,
            "rows": [list(each) for each in demand.rows.each],
            "allocator": str(serving.allocator),
            "first_token_seconds": self.first,
            "token_seconds": seconds,
            "tokens_per_second": demand.rows.count / seconds,
            "steps": {
                name: [{**asdict(one), "intensity": one.intensity} for one in step.operations]
                for name, step in steps.items()
            },
            "compute_bound_from_tokens": serving.compute_bound_from(),
            "core_longest_from_context": serving.core_longest_from(demand.rows.count),
            "cache_bytes": sum(term.value for term in demand.cache),
            "fits": demand.fits,
            "most_rows": most_rows(demand),
            "longest_context": longest_context(demand),
            "curve": [rate._asdict() for rate in self.curve],
        }


def _step(step: Step) -> Iterator[str]:
    for one in step.operations:
        cells = (f"{one.intensity:,.1f}", one.bound, time(one.seconds))
        yield _operation(f"  {one.name}", short(one.flops), short(one.moved), *cells)
    together = (short(sum(one.flops for one in step.operations)), short(sum(one.moved for one in step.operations)))
    yield _operation("  together", *together, "", "", time(step.seconds))


def _operation(name: str, *cells: str) -> str:
    widths = (10, 10, 11, 10, 9)
    numbers = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return f"{name:<30}{numbers}" if len(name) <= 30 else f"{name}\n{'':<30}{numbers}"


def _said(name: str, value: str) -> str:
    return f"{name:<46}{value:>22}"


def _limit(count: int | None) -> str:
    return "any number" if count is None else f"{count:,}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)
