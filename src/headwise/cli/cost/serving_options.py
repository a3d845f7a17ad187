"""`headwise cost --serve`, `--memory-fit`, `--intensity` and `--devices`: throughput, memory and
arithmetic intensity of serving, and tensor, pipeline and expert parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ...costs.cost_report import CostEstimate, CostReport
    from ...costs.decode_intensity import IntensityReport
    from ...costs.kv_cache_memory import RequestBatch
    from ...costs.parallelism import ParallelReport
    from ...costs.roofline import Device, NumberFormats
    from ...costs.serving_capacity import MemoryDemand, MemoryFit
    from ...costs.throughput_report import ThroughputReport
    from ...spec.attention_spec import AttentionSpec


PREFILL_CHUNK = 2048
# Options that only have an effect together with one of these reports.
DEPENDENT_OPTIONS = {
    "layers": "serve memory_fit",
    "allocator": "serve memory_fit",
    "cache": "serve memory_fit intensity devices",
    "efficiency": "serve intensity devices",
    "budget": "serve memory_fit",
    "chunk": "serve memory_fit",
    "shared": "serve memory_fit",
    "lengths": "serve memory_fit",
    "seed": "serve memory_fit",
    "prompt": "serve",
}


@dataclass(frozen=True)
class ReportsView:
    """The throughput report, or the report of several devices, of every spec or model."""

    reports: tuple[ThroughputReport | ParallelReport, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.reports))

    @property
    def data(self) -> list[dict[str, Any]]:
        """The reports as plain values."""
        return [report.data for report in self.reports]


def add_serving_arguments(parser: CommandParser) -> None:
    """Add --serve, and the options that it shares with --memory-fit and --intensity."""
    parser.add_argument(
        "--serve", action="store_true", help="latency and throughput of serving a batch of requests"
    )
    group = parser.add_expert_group("for --serve, --memory-fit and --intensity")
    group.add_argument(
        "--layers", type=int, metavar="COUNT", help="number of layers of a spec (default: 1)"
    )
    group.add_argument(
        "--allocator",
        metavar="NAME",
        help="cache allocation: ideal, ring, paged(16) or unified (default: ideal)",
    )
    group.add_argument(
        "--cache", metavar="DTYPE", help="format of the KV cache: int8 or fp8 (default: --dtype)"
    )
    group.add_argument(
        "--efficiency",
        metavar="SHARES",
        help="reached shares of peak FLOP/s and bandwidth, as in 0.7,0.9 (default: 1,1)",
    )
    group.add_argument(
        "--budget", metavar="MEMORY", help="memory, as in '24 GiB' (default: that of the device)"
    )
    group.add_argument(
        "--chunk",
        type=int,
        metavar="TOKENS",
        help=f"tokens of a prompt per prefill step (default: {PREFILL_CHUNK})",
    )
    group.add_argument(
        "--prompt",
        type=int,
        metavar="TOKENS",
        help="length of an arriving prompt (default: the context)",
    )
    group.add_argument(
        "--shared",
        type=int,
        metavar="TOKENS",
        help="length of a prefix that all rows share (default: 0)",
    )
    group.add_argument(
        "--lengths",
        metavar="TOKENS",
        help=(
            "100,2000 or uniform(100,4000) or exponential(900): lengths of the rows (default: "
            "the context)"
        ),
    )
    group.add_argument(
        "--seed", type=int, metavar="NUMBER", help="random seed of --lengths (default: 0)"
    )


def make_serving_views(args: argparse.Namespace, costs: CostReport) -> Mapping[str, ReportsView]:
    """Return the report of --serve, if it is given."""
    _check_dependent_options(args)
    if not args.serve:
        return {}
    from ...costs.throughput_report import ThroughputReport

    if args.prompt is not None and args.prompt < 1:
        raise UsageError(f"--prompt must be at least 1 token, got {args.prompt}")
    reports = tuple(
        ThroughputReport(
            estimate.name, memory_demand(args, estimate), args.prompt or estimate.workload.context
        )
        for estimate in costs
    )
    return {"serving": ReportsView(reports)}


def memory_demand(args: argparse.Namespace, estimate: CostEstimate) -> MemoryDemand:
    """Return the memory demand of one spec or model under the options."""
    from ...costs.kv_cache_memory import CacheAllocator
    from ...costs.serving_capacity import MemoryDemand
    from ...costs.serving_cost import ServingCost

    serving = ServingCost(
        estimate.spec_or_model,
        _serving_device(args, estimate),
        number_formats(args, estimate),
        1 if args.layers is None else args.layers,
        CacheAllocator.from_text(args.allocator or "ideal"),
        estimate.full_call.source,
    )
    demand = MemoryDemand(
        serving, _request_batch(args, estimate), PREFILL_CHUNK if args.chunk is None else args.chunk
    )
    if args.budget is not None:
        _check_memory_limit(demand, args.budget)
    return demand


def number_formats(args: argparse.Namespace, estimate: CostEstimate) -> NumberFormats:
    """Return the number formats of products, weights and cache."""
    from ...costs.roofline import NumberFormats

    return NumberFormats(estimate.workload.dtype, estimate.workload.weights, args.cache or "")


def apply_efficiency(args: argparse.Namespace, device: Device) -> Device:
    """Return the device with the shares of --efficiency."""
    if args.efficiency is None:
        return device
    try:
        compute, bandwidth = map(float, args.efficiency.split(","))
    except ValueError:
        fact = f"--efficiency needs two shares, got {args.efficiency!r}"
        raise UsageError(f"{fact}; write compute,bandwidth as in 0.7,0.9") from None
    return device.with_efficiency(compute, bandwidth)


def _serving_device(args: argparse.Namespace, estimate: CostEstimate) -> Device:
    from ...costs.roofline import Device
    from ...costs.serving_capacity import parse_bytes

    device = apply_efficiency(args, Device.from_name(estimate.workload.device))
    return (
        device if args.budget is None else replace(device, memory=float(parse_bytes(args.budget)))
    )


def _request_batch(args: argparse.Namespace, estimate: CostEstimate) -> RequestBatch:
    from ...costs.kv_cache_memory import RequestBatch, parse_lengths

    workload, source = estimate.workload, estimate.full_call.source
    shared = 0 if args.shared is None else args.shared
    if args.lengths is None:
        return RequestBatch.uniform(workload.batch, workload.context, shared, source)
    return RequestBatch.from_lengths(
        parse_lengths(args.lengths, workload.batch, args.seed or 0), shared, source
    )


def _check_memory_limit(demand: MemoryDemand, budget: str) -> None:
    """Raise an error if the weights alone exceed the budget."""
    from ...costs.roofline import format_gigabytes

    weights, memory = demand.serving.weights.bytes, demand.serving.device.memory
    if weights > memory:
        needed = format_gigabytes(weights)
        raise UsageError(
            f"--budget {budget} is less than the weights, {needed}; give {needed} or more"
        )


def _check_dependent_options(args: argparse.Namespace) -> None:
    """Raise an error for options that have no effect without a report that is not requested."""
    for name, reports in DEPENDENT_OPTIONS.items():
        if getattr(args, name) is not None and not any(
            getattr(args, report) for report in reports.split()
        ):
            options = " or ".join(f"--{report.replace('_', '-')}" for report in reports.split())
            raise UsageError(
                f"--{name} has an effect only with {options}; add that, or leave --{name} out"
            )
    if args.seed is not None and args.lengths is None:
        raise UsageError(
            "--seed has an effect only with --lengths; add --lengths 'uniform(100, 4000)'"
        )


# --- `headwise cost --intensity` ------------------------------------------------------------------


class MeasureMachineAction(argparse.Action):
    """Measures this machine when the option is parsed, so that everything after it uses the new
    measurement.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Sequence[Any] | str | None,
        option_string: str | None = None,
    ) -> None:
        from ...costs.roofline import remeasure_this_machine

        remeasure_this_machine()
        setattr(namespace, self.dest, True)


def add_intensity_arguments(parser: CommandParser) -> None:
    """Add --intensity and --measure."""
    group = parser.add_expert_group("arithmetic intensity")
    group.add_argument(
        "--intensity",
        action="store_true",
        help=(
            "arithmetic intensity of projections, core and output in a decode step, by number of "
            "rows"
        ),
    )
    group.add_argument(
        "--measure",
        action=MeasureMachineAction,
        nargs=0,
        help="measure this machine again, for --device here",
    )


def _attention_spec(estimate: CostEstimate) -> AttentionSpec:
    """Return the spec itself, or the only attention spec of a model."""
    from ...spec.attention_spec import AttentionSpec

    if isinstance(estimate.spec_or_model, AttentionSpec):
        return estimate.spec_or_model
    specs = list(dict.fromkeys(spec for _, spec in estimate.spec_or_model.attention_specs()))
    if len(specs) != 1:
        fact = f"{estimate.name} has {len(specs)} kinds of attention"
        raise UsageError(f"{fact}; name a layer, as in --layer 0.attention")
    return specs[0]


def make_intensity_views(
    args: argparse.Namespace, costs: CostReport
) -> Mapping[str, IntensityReport]:
    """Return the report of --intensity, if it is given."""
    if args.measure and args.device != "here":
        raise UsageError(
            f"--measure measures this machine, but the device is {args.device}; add --device here"
        )
    if not args.intensity:
        return {}
    from ...costs.decode_intensity import DecodeLayer, IntensityReport
    from ...costs.roofline import Device

    layers = {
        estimate.name: DecodeLayer(
            _attention_spec(estimate),
            apply_efficiency(args, Device.from_name(estimate.workload.device)),
            estimate.workload.context,
            number_formats(args, estimate),
        )
        for estimate in costs
    }
    return {"intensity": IntensityReport.from_layers(layers, costs.estimates[0].workload.batch)}


# --- `headwise cost --memory-fit` -----------------------------------------------------------------


@dataclass(frozen=True)
class MemoryFitView:
    """Whether each spec or model fits into memory."""

    fits: Mapping[str, MemoryFit]

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {fit}" for name, fit in self.fits.items())

    @property
    def data(self) -> dict[str, Any]:
        """The results as plain values, by name."""
        return {name: fit.data for name, fit in self.fits.items()}


def add_memory_fit_arguments(parser: CommandParser) -> None:
    """Add --memory-fit."""
    parser.add_argument(
        "--memory-fit",
        action="store_true",
        help="whether serving or training fits into memory; remedies",
    )


def make_memory_fit_views(
    args: argparse.Namespace, costs: CostReport
) -> Mapping[str, MemoryFitView]:
    """Return the report of --memory-fit, if it is given."""
    if not args.memory_fit:
        return {}
    from ...costs.serving_capacity import check_memory_fit
    from ...costs.training_memory import OptimiserMemory

    training = (
        OptimiserMemory.from_name(args.optimiser).bytes_per_parameter if args.optimiser else 0
    )
    fits: dict[str, MemoryFit] = {}
    for estimate in costs:
        demand = replace(memory_demand(args, estimate), training_bytes_per_parameter=training)
        fits[estimate.name] = check_memory_fit(demand)
    return {"memory_fit": MemoryFitView(fits)}


DIVISIONS = ("tensor", "pipeline", "experts")


def add_parallel_arguments(parser: CommandParser) -> None:
    """Add --devices, --tensor, --pipeline and --experts."""
    group = parser.add_expert_group("several devices")
    group.add_argument(
        "--devices", type=int, metavar="COUNT", help="serve models on several devices"
    )
    group.add_argument(
        "--tensor", type=int, metavar="COUNT", help="devices that divide each layer (default: 1)"
    )
    group.add_argument(
        "--pipeline", type=int, metavar="COUNT", help="stages that divide the layers (default: 1)"
    )
    group.add_argument(
        "--experts", type=int, metavar="COUNT", help="devices that divide the experts (default: 1)"
    )


def make_parallel_views(args: argparse.Namespace, costs: CostReport) -> Mapping[str, ReportsView]:
    """Return the report of --devices, if it is given."""
    divisions = {name: getattr(args, name) for name in DIVISIONS if getattr(args, name) is not None}
    if args.devices is None:
        if divisions:
            name, count = next(iter(divisions.items()))
            raise UsageError(
                f"--{name} {count} divides several devices; add --devices {max(count, 1)}"
            )
        return {}
    from ...costs.kv_cache_memory import RequestBatch
    from ...costs.parallelism import ParallelCost, ParallelPlan, ParallelReport
    from ...costs.roofline import Device
    from ...model_spec import ModelSpec

    plan = ParallelPlan(args.devices, **divisions)
    reports: list[ParallelReport] = []
    for estimate in costs:
        model, workload = estimate.spec_or_model, estimate.workload
        if not isinstance(model, ModelSpec):
            raise UsageError(
                f"--devices divides models, and {estimate.name} is one layer; name a model"
            )
        device = apply_efficiency(args, Device.from_name(workload.device))
        requests = RequestBatch.uniform(workload.batch, workload.context)
        cost = ParallelCost(model, plan, device, requests, number_formats(args, estimate))
        reports.append(ParallelReport(estimate.name, cost, workload.context))
    return {"parallel": ReportsView(tuple(reports))}
