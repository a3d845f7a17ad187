"""Throughput of serving: latency and tokens per second by the number of requests, and the limits of
a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import pluralise
from ..translation.terminal_text import pad, pad_left, text_width, wrap
from .cost_report import format_count, format_seconds
from .kv_cache_memory import RequestBatch
from .roofline import MemoryShortfall
from .serving_capacity import MemoryDemand, max_context, max_requests, min_devices
from .serving_cost import ServingStep

MAX_ROWS = 2**16  # the largest batch of the table, if memory allows it


class DecodeRate(NamedTuple):
    """Decoding with `rows` rows: seconds per step, and tokens per second of all rows together."""

    rows: int
    seconds: float
    tokens: float


@dataclass(frozen=True)
class ThroughputReport:
    """Latency and throughput of decoding a batch of requests, with and without a prompt that is
    prefilled meanwhile.

    The rate of n rows is about n / ((2.684 + n 1.074) GB / 4.8 TB/s):

    >>> import headwise as hw
    >>> from headwise.costs.roofline import Device
    >>> from headwise.costs.serving_cost import ServingCost
    >>> spec = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> serving = ServingCost(spec, Device.from_name("h200"), num_layers=32)
    >>> report = ThroughputReport(
    ...     "gqa", MemoryDemand(serving, RequestBatch.uniform(16, 8192)), prompt=8192
    ... )
    >>> [round(rate.tokens, -1) for rate in report.decode_rates[:2]]
    [1280.0, 1990.0]
    """

    name: str
    demand: MemoryDemand
    prompt: int

    @property
    def decode_step(self) -> ServingStep:
        """A step that decodes one token of every request."""
        return self.demand.serving.decode_step(self.demand.requests)

    @property
    def mixed_step(self) -> ServingStep:
        """A step that prefills the last chunk of the prompt and decodes all requests but one."""
        past = (self.prompt - 1) // self.demand.chunk * self.demand.chunk
        return self.demand.serving.mixed_step(self.other_requests, self.prompt - past, past)

    @property
    def other_requests(self) -> RequestBatch | None:
        """The requests without the first one, which are decoded while the prompt is prefilled."""
        (length, times), *others = self.demand.requests.counts_by_length
        counts = (*(((length, times - 1),) if times > 1 else ()), *others)
        return RequestBatch(counts) if counts else None

    @property
    def first_token_seconds(self) -> float:
        """Lower bound of the time to the first token of the prompt."""
        return self.demand.serving.first_token_seconds(
            self.prompt, self.demand.chunk, self.other_requests
        )

    @property
    def longest_length(self) -> int:
        """Length of the longest request."""
        return max(length for length, _ in self.demand.requests.counts_by_length)

    @property
    def decode_rates(self) -> list[DecodeRate]:
        """Rates with 1, 2, 4 ... rows as long as the longest, up to the number that fits into
        memory.
        """
        max_rows = max_requests(self.demand) or MAX_ROWS
        powers = {2**n for n in range(MAX_ROWS.bit_length()) if 2**n <= min(max_rows, MAX_ROWS)}
        rates: list[DecodeRate] = []
        for rows in sorted({max_rows} | powers):
            seconds = self.demand.serving.decode_step(
                RequestBatch.uniform(rows, self.longest_length)
            ).seconds
            rates.append(DecodeRate(rows, seconds, rows / seconds))
        return rates

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        serving, requests = self.demand.serving, self.demand.requests
        lengths = f"{self.longest_length:,}"
        if len(requests.counts_by_length) > 1:
            lengths = f"{min(requests.counts_by_length)[0]:,} to {lengths}"
        title = f"{self.name}: {pluralise(requests.num_requests, 'row')} of {lengths} tokens"
        formats = f"{serving.formats.compute}, {serving.formats.cache} cache ({serving.allocator})"
        yield from wrap(f"{title}, {formats}, {serving.device.description}")
        yield ""
        if not self.demand.fits:
            yield from self._shortfall_lines()
            return
        yield _operation_line("decode step", "FLOPs", "bytes", "FLOPs/byte", "bound by", "min time")
        yield from _step_lines(self.decode_step)
        yield ""
        yield f"decode step with the last chunk of a prompt of {self.prompt:,} tokens"
        yield from _step_lines(self.mixed_step)
        seconds = self.decode_step.seconds
        yield ""
        yield _value_line(
            "time to first token of that prompt", format_seconds(self.first_token_seconds)
        )
        yield _value_line("time per token", format_seconds(seconds))
        yield _value_line(
            "tokens per second, all rows together", f"{requests.num_requests / seconds:,.0f}"
        )
        yield from self._limit_lines()
        yield ""
        yield (pad_left("rows", 10) + pad_left("step", 14) + pad_left("tokens per second", 20))
        for rate in self.decode_rates:
            yield (
                f"{rate.rows:,}".rjust(10)
                + format_seconds(rate.seconds).rjust(14)
                + f"{rate.tokens:,.0f}".rjust(20)
            )

    def _shortfall_lines(self) -> Iterator[str]:
        """Lines of a device that cannot hold the requests: no times, but how much is missing."""
        demand, count = self.demand, min_devices(self.demand)
        shortfall = MemoryShortfall(
            "step", "these rows", demand.bytes_per_device, demand.serving.device
        )
        yield from wrap(str(shortfall))
        if count and count != shortfall.min_devices:
            yield from wrap(
                f"{count:,} devices hold them if each divides weights and cache and has all "
                "activations."
            )
        if demand.with_uniform_requests(1, 1).fits:
            yield from wrap("--memory-fit lists changes that would make them fit.")

    def _limit_lines(self) -> Iterator[str]:
        demand, serving, num_rows = (
            self.demand,
            self.demand.serving,
            self.demand.requests.num_requests,
        )
        tokens, context = serving.compute_bound_tokens(), serving.core_dominates_from(num_rows)
        limit = "never" if tokens is None else f"{tokens:,} tokens per step"
        yield _value_line("products with weights are compute-bound from", limit)
        limit = "never" if context is None else f"{context:,} tokens per row"
        yield _value_line("cores take longer than these from", limit)
        longest, most = max_context(demand), max_requests(demand)
        yield _value_line(
            f"rows of {self.longest_length:,} tokens that fit into memory", _format_limit(most)
        )
        yield _value_line(
            f"longest context of {pluralise(num_rows, 'row')}", _format_limit(longest)
        )

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values."""
        demand, serving = self.demand, self.demand.serving
        if not demand.fits:
            return {
                "name": self.name,
                "rows": [list(pair) for pair in demand.requests.counts_by_length],
                "allocator": str(serving.allocator),
                "cache_bytes": sum(term.value for term in demand.cache_terms),
                "fits": False,
                "needed_bytes": demand.bytes_per_device,
                "missing_bytes": demand.bytes_per_device - int(serving.device.memory),
                "devices": min_devices(demand),
            }
        seconds = self.decode_step.seconds
        steps = {"decode": self.decode_step, "mixed": self.mixed_step}
        return {
            "name": self.name,
            "rows": [list(pair) for pair in demand.requests.counts_by_length],
            "allocator": str(serving.allocator),
            "first_token_seconds": self.first_token_seconds,
            "token_seconds": seconds,
            "tokens_per_second": demand.requests.num_requests / seconds,
            "steps": {
                name: [
                    {**asdict(operation), "intensity": operation.intensity}
                    for operation in step.operations
                ]
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
    for operation in step.operations:
        cells = (f"{operation.intensity:,.1f}", operation.bound, format_seconds(operation.seconds))
        counts = (format_count(operation.flops), format_count(operation.moved))
        yield _operation_line(f"  {operation.name}", *counts, *cells)
    flops = sum(operation.flops for operation in step.operations)
    moved = sum(operation.moved for operation in step.operations)
    yield _operation_line(
        "  total", format_count(flops), format_count(moved), "", "", format_seconds(step.seconds)
    )


def _operation_line(name: str, *cells: str) -> str:
    widths = (10, 10, 11, 10, 9)
    numbers = "".join(pad_left(cell, width) for cell, width in zip(cells, widths, strict=True))
    return pad(name, 30) + numbers if text_width(name) <= 30 else f"{name}\n{'':<30}{numbers}"


def _value_line(name: str, value: str) -> str:
    return pad(name, 46) + pad_left(value, 22)


def _format_limit(count: int | None) -> str:
    return "any number" if count is None else f"{count:,}"
