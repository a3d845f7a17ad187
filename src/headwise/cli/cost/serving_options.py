"""`headwise cost --serve`: requests answered together, step by step, and how many of them memory holds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arguments import UsageError

if TYPE_CHECKING:
    from ...costs.cost_report import CostEstimate, CostReport
    from ...costs.kv_cache_memory import RequestBatch
    from ...costs.roofline import Device, NumberFormats
    from ...costs.serving_capacity import MemoryDemand, MemoryFit, ThroughputReport
    from ...costs.serving_cost import IntensityReport
    from ...spec.attention_spec import AttentionSpec

PREFILL_CHUNK = 2048
# What says more of these pages, and of which; alone it would change nothing.
DEPENDENT_OPTIONS = {
    "layers": "serve verdict",
    "allocator": "serve verdict",
    "cache": "serve verdict boxes",
    "weights": "serve verdict boxes",
    "reached": "serve boxes",
    "budget": "serve verdict",
    "chunk": "serve verdict",
    "shared": "serve verdict",
    "lengths": "serve verdict",
    "seed": "serve verdict",
    "prompt": "serve",
}


@dataclass(frozen=True)
class ThroughputView:
    """One page for each spec, one below the other."""

    reports: tuple[ThroughputReport, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.reports))

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [page.data for page in self.reports]


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """The page, and what says more of it and of its neighbours."""
    parser.add_argument("--serve", action="store_true", help="answering many requests at once: steps, tokens a second")
    more = parser.add_argument_group("for --serve, --verdict and --boxes")
    more.add_argument("--layers", type=int, metavar="COUNT", help="so many layers of a spec (1)")
    more.add_argument("--allocator", metavar="NAME", help="ideal, ring, paged(16) or unified (ideal)")
    more.add_argument("--cache", metavar="DTYPE", help="what is remembered: int8, or as --dtype")
    more.add_argument("--weights", metavar="DTYPE", help="weights: int8, or as --dtype")
    more.add_argument("--reached", metavar="SHARES", help="of products and of bandwidth, as in 0.7,0.9 (1,1)")
    more.add_argument("--budget", metavar="MEMORY", help="in the place of the device's, as in '24 GiB'")
    more.add_argument("--chunk", type=int, metavar="TOKENS", help=f"of a prompt that one step takes ({PREFILL_CHUNK})")
    more.add_argument("--prompt", type=int, metavar="TOKENS", help="of a prompt that comes in (--context)")
    more.add_argument("--shared", type=int, metavar="TOKENS", help="a beginning that all rows have, kept once (0)")
    more.add_argument(
        "--lengths", metavar="TOKENS", help="of each row: 100,2000 or uniform(100,4000) or exponential(900)"
    )
    more.add_argument("--seed", type=int, metavar="NUMBER", help="what lengths are drawn by (0)")


def make_serving_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, ThroughputView]:
    """The page of every spec, when it is asked for."""
    _check_dependent_options(given)
    if not given.serve:
        return {}
    from ...costs.serving_capacity import ThroughputReport

    prompt = given.prompt
    if prompt is not None and prompt < 1:
        raise UsageError(f"--prompt {prompt} is no prompt; give 1 token or more")
    return {
        "serving": ThroughputView(
            tuple(
                ThroughputReport(price.name, memory_demand(given, price), prompt or price.workload.context)
                for price in costs
            )
        )
    }


def memory_demand(given: argparse.Namespace, price: CostEstimate) -> MemoryDemand:
    """What the command line asks of one spec."""
    from ...costs.kv_cache_memory import CacheAllocator
    from ...costs.serving_capacity import MemoryDemand
    from ...costs.serving_cost import ServingCost

    formats, layers = number_formats(given, price), 1 if given.layers is None else given.layers
    serving = ServingCost(
        price.spec_or_model,
        _serving_device(given, price),
        formats,
        layers,
        CacheAllocator.from_text(given.allocator or "ideal"),
        price.full_call.source,
    )
    demand = MemoryDemand(serving, _request_batch(given, price), PREFILL_CHUNK if given.chunk is None else given.chunk)
    if given.budget is not None:
        _check_memory_limit(demand, given.budget)
    return demand


def number_formats(given: argparse.Namespace, price: CostEstimate) -> NumberFormats:
    """How numbers are held."""
    from ...costs.roofline import NumberFormats

    return NumberFormats(price.workload.dtype, given.weights or "", given.cache or "")


def apply_efficiency(given: argparse.Namespace, device: Device) -> Device:
    """The device as far as programs reach."""
    if given.reached is None:
        return device
    try:
        products, memory = map(float, given.reached.split(","))
    except ValueError:
        raise UsageError(
            f"--reached {given.reached!r} says no two shares; write products,memory as in 0.7,0.9"
        ) from None
    return device.with_efficiency(products, memory)


def _serving_device(given: argparse.Namespace, price: CostEstimate) -> Device:
    from ...costs.roofline import Device
    from ...costs.serving_capacity import parse_bytes

    device = apply_efficiency(given, Device.from_name(price.workload.device))
    return device if given.budget is None else replace(device, memory=float(parse_bytes(given.budget)))


def _request_batch(given: argparse.Namespace, price: CostEstimate) -> RequestBatch:
    from ...costs.kv_cache_memory import RequestBatch, parse_lengths

    shared = 0 if given.shared is None else given.shared
    if given.lengths is None:
        return RequestBatch.uniform(price.workload.batch, price.workload.context, shared, price.full_call.source)
    return RequestBatch.from_lengths(
        parse_lengths(given.lengths, price.workload.batch, given.seed or 0), shared, price.full_call.source
    )


def _check_memory_limit(demand: MemoryDemand, said: str) -> None:
    """Refuse a budget that not even the weights fit in."""
    from ...costs.serving_capacity import format_gigabytes

    weights, memory = demand.serving.weights.bytes, demand.serving.device.memory
    if weights > memory:
        raise UsageError(
            f"--budget {said} is less than the weights, {format_gigabytes(weights)}; give "
            f"{format_gigabytes(weights)} or more"
        )


def _check_dependent_options(given: argparse.Namespace) -> None:
    """Refuse what says more of a page that nobody asked for."""
    for name, pages in DEPENDENT_OPTIONS.items():
        if getattr(given, name) is not None and not any(getattr(given, page) for page in pages.split()):
            shown = " or ".join(f"--{page}" for page in pages.split())
            raise UsageError(f"--{name} changes only what {shown} shows; add that, or leave --{name} out")
    if given.seed is not None and given.lengths is None:
        raise UsageError("--seed draws lengths, and none are said; add --lengths 'uniform(100, 4000)'")


# --- `headwise cost --boxes` ---------------------------------------------------------------------------


class MeasureMachineAction(argparse.Action):
    """Measures this machine at once, so that whatever is priced afterwards is priced on what was found."""

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


def add_intensity_arguments(parser: argparse.ArgumentParser) -> None:
    """The page, and the measuring of this machine."""
    told = "the three boxes of a layer: intensity and time of 1, N and enough rows"
    parser.add_argument("--boxes", action="store_true", help=told)
    parser.add_argument(
        "--measure", action=MeasureMachineAction, nargs=0, help="measure this machine anew, for --device here"
    )


def _attention_spec(price: CostEstimate) -> AttentionSpec:
    """The attention that is drawn: the spec itself, or the one that all layers of a model have."""
    from ...spec.attention_spec import AttentionSpec

    described = price.spec_or_model
    found = (
        [described] if isinstance(described, AttentionSpec) else [*{spec: 0 for _, spec in described.attention_specs()}]
    )
    if len(found) != 1:
        raise UsageError(f"{price.name} has {len(found)} kinds of attention; name a layer, as in --layer 0.attention")
    return found[0]


def make_intensity_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, IntensityReport]:
    """The boxes of every spec, when they are asked for."""
    if given.measure and given.device != "here":
        raise UsageError("--measure measures this machine, and something else is priced; add --device here")
    if not given.boxes:
        return {}
    from ...costs.roofline import Device
    from ...costs.serving_cost import DecodeLayer, IntensityReport

    loads = {price.name: price.workload for price in costs}
    layers = {
        price.name: DecodeLayer(
            _attention_spec(price),
            apply_efficiency(given, Device.from_name(price.workload.device)),
            price.workload.context,
            number_formats(given, price),
        )
        for price in costs
    }
    return {"boxes": IntensityReport.from_layers(layers, next(iter(loads.values())).batch)}


# --- `headwise cost --verdict` -------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryFitView:
    """The verdict on every spec."""

    fits: Mapping[str, MemoryFit]

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {verdict}" for name, verdict in self.fits.items())

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: verdict.data for name, verdict in self.fits.items()}


def add_memory_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The page."""
    told = "whether it fits on the device, and what would; with --optimiser, whether training does"
    parser.add_argument("--verdict", action="store_true", help=told)


def make_memory_fit_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, MemoryFitView]:
    """The verdict on every spec, when it is asked for."""
    if not given.verdict:
        return {}
    from ...costs.serving_capacity import check_memory_fit
    from ...costs.training_memory import OptimiserMemory

    training = OptimiserMemory.from_name(given.optimiser).bytes_per_parameter if given.optimiser else 0
    return {
        "verdict": MemoryFitView(
            {
                price.name: check_memory_fit(
                    replace(memory_demand(given, price), training_bytes_per_parameter=training)
                )
                for price in costs
            }
        )
    }
