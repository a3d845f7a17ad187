"""`headwise cost --devices`: tensor, pipeline and expert parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ...costs.cost_report import CostReport
    from ...costs.parallel_report import ParallelReport

DIVISIONS = ("tensor", "pipeline", "experts")


@dataclass(frozen=True)
class ParallelView:
    """The report of every model."""

    reports: tuple[ParallelReport, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.reports))

    @property
    def data(self) -> list[dict[str, Any]]:
        """The reports as plain values."""
        return [report.data for report in self.reports]


def add_parallel_arguments(parser: CommandParser) -> None:
    """Add --devices, --tensor, --pipeline and --experts."""
    group = parser.add_expert_group("several devices")
    group.add_argument("--devices", type=int, metavar="COUNT", help="serve models on several devices")
    group.add_argument("--tensor", type=int, metavar="COUNT", help="devices that divide each layer (default: 1)")
    group.add_argument("--pipeline", type=int, metavar="COUNT", help="stages that divide the layers (default: 1)")
    group.add_argument("--experts", type=int, metavar="COUNT", help="devices that divide the experts (default: 1)")


def make_parallel_views(args: argparse.Namespace, costs: CostReport) -> Mapping[str, ParallelView]:
    """Return the report of --devices, if it is given."""
    divisions = {name: getattr(args, name) for name in DIVISIONS if getattr(args, name) is not None}
    if args.devices is None:
        if divisions:
            name, count = next(iter(divisions.items()))
            raise UsageError(f"--{name} {count} divides several devices; add --devices {max(count, 1)}")
        return {}
    from ...costs.kv_cache_memory import RequestBatch
    from ...costs.parallel_report import ParallelReport
    from ...costs.parallelism import ParallelCost, ParallelPlan
    from ...costs.roofline import Device
    from ...model_spec import ModelSpec
    from .serving_options import apply_efficiency, number_formats

    plan = ParallelPlan(args.devices, **divisions)
    reports: list[ParallelReport] = []
    for estimate in costs:
        model, workload = estimate.spec_or_model, estimate.workload
        if not isinstance(model, ModelSpec):
            raise UsageError(f"--devices divides models, and {estimate.name} is one layer; name a model")
        device = apply_efficiency(args, Device.from_name(workload.device))
        requests = RequestBatch.uniform(workload.batch, workload.context)
        cost = ParallelCost(model, plan, device, requests, number_formats(args, estimate))
        reports.append(ParallelReport(estimate.name, cost, workload.context))
    return {"parallel": ParallelView(tuple(reports))}
