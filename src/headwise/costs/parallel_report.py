"""Report of a model on several devices: memory of a device, a decode step, a prompt, and the bytes exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import pluralise
from ..translation.language import localise
from ..translation.terminal_text import heading_cell, label_cell, paragraph
from .cost_report import format_seconds
from .parallelism import ParallelCost, StepCost
from .roofline import format_gigabytes

NOTE = (
    "Times are lower bounds: every operation waits for what it receives, collectives run in rings at the full "
    "bandwidth of the link, and latency is left out. Memory leaves out activations."
)


@dataclass(frozen=True)
class ParallelReport:
    """The cost of a model on the devices of a plan, as text and as plain values; `prompt` is in tokens."""

    name: str
    cost: ParallelCost
    prompt: int

    def __str__(self) -> str:
        return "\n".join(self._lines())

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values; without steps if the devices cannot hold the model."""
        cost, plan = self.cost, self.cost.plan
        steps = {"decode": cost.decode_step, "prefill": cost.prefill_step(self.prompt)} if cost.fits else {}
        return {
            "name": self.name,
            "devices": plan.devices,
            "tensor": plan.tensor,
            "pipeline": plan.pipeline,
            "experts": plan.experts,
            "replicas": plan.replicas,
            "weights_bytes_per_device": cost.weight_bytes_per_device,
            "kv_bytes_per_device": cost.cache_bytes_per_device,
            "memory_per_device": cost.memory_per_device,
            "stages": [term._asdict() for term in cost.weight_terms],
            "fits": cost.fits,
            "steps": {name: _step_data(step) for name, step in steps.items()},
            "tokens_per_second": cost.tokens_per_second if cost.fits else None,
        }

    def _lines(self) -> Iterator[str]:
        cost, plan = self.cost, self.cost.plan
        division = f"tensor {plan.tensor}, pipeline {plan.pipeline}, experts {plan.experts}, replicas {plan.replicas}"
        title = f"{self.name} on {plan.devices:,} x {cost.device.description}: {division}"
        yield from paragraph(title)
        rows, length = cost.requests.num_requests, cost.requests.counts_by_length[0][0]
        yield localise(f"{pluralise(rows, 'row')} of {length:,} tokens, {cost.rows_per_replica:,} in each replica")
        yield ""
        yield localise("on one device of the largest stage")
        yield _line("weights", format_gigabytes(cost.weight_bytes_per_device))
        yield _line("KV cache", format_gigabytes(cost.cache_bytes_per_device))
        yield _line("weights and cache", format_gigabytes(cost.memory_per_device))
        yield _line("memory", format_gigabytes(int(cost.device.memory)))
        yield ""
        if not cost.fits:
            missing = format_gigabytes(cost.memory_per_device - int(cost.device.memory))
            fact = f"A device lacks {missing}, so no time of a step is estimated. Divide the model among more devices."
            yield from paragraph(fact)
            return
        step_rows = pluralise(cost.rows_per_micro_batch, "row")
        yield from _step_lines(f"decode step of {step_rows}, all stages", cost.decode_step)
        yield _line("tokens per second, all devices", f"{cost.tokens_per_second:,.0f}")
        yield ""
        yield from _step_lines(f"prefill of a prompt of {self.prompt:,} tokens", cost.prefill_step(self.prompt))
        yield ""
        yield from paragraph(NOTE)


def _step_lines(title: str, step: StepCost) -> Iterator[str]:
    yield localise(title)
    yield _line("computing", format_seconds(sum(step.compute_seconds)))
    yield _line("communicating", format_seconds(sum(step.communication_seconds)))
    yield _line("least time", format_seconds(step.seconds))
    for number, stage in enumerate(step.communication):
        if stage:
            yield localise(f"  a device of stage {number} sends, bytes")
        for exchange in stage:
            yield label_cell(f"    {exchange.name}", 46) + f"{exchange.sent:>22,}"
            yield from paragraph(exchange.formula, indent=" " * 6, hanging=" " * 8)


def _step_data(step: StepCost) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "compute_seconds": list(step.compute_seconds),
        "communication_seconds": list(step.communication_seconds),
        "communication": [[exchange._asdict() for exchange in stage] for stage in step.communication],
    }


def _line(name: str, value: str) -> str:
    return label_cell(f"  {name}", 46) + heading_cell(value, 22)
