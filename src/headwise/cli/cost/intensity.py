"""`headwise cost --boxes`: projections, core and output of a layer, FLOPs for each byte, and what they wait for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..screen import UsageError
from .serving import number_formats, apply_efficiency

if TYPE_CHECKING:
    from ...counting.costs import CostReport
    from ...counting.intensity import IntensityReport
    from ...counting.pricing import CostEstimate
    from ...spec import AttentionSpec


class MeasureMachineAction(argparse.Action):
    """Measures this machine at once, so that whatever is priced afterwards is priced on what was found."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Sequence[Any] | str | None,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        from ...counting.here import remeasure_this_machine

        remeasure_this_machine()
        setattr(namespace, self.dest, True)


def add_intensity_arguments(parser: argparse.ArgumentParser) -> None:
    """The page, and the measuring of this machine."""
    told = "the three boxes of a layer: intensity and time of 1, N and enough rows"
    parser.add_argument("--boxes", action="store_true", help=told)
    parser.add_argument("--measure", action=MeasureMachineAction, nargs=0, help="measure this machine anew, for --device here")


def _attention_spec(price: CostEstimate) -> AttentionSpec:
    """The attention that is drawn: the spec itself, or the one that all layers of a model have."""
    from ...spec import AttentionSpec

    described = price.spec_or_model
    found = [described] if isinstance(described, AttentionSpec) else [*{spec: 0 for _, spec in described.attention_specs()}]
    if len(found) != 1:
        raise UsageError(f"{price.name} has {len(found)} kinds of attention; name a layer, as in --layer 0.attention")
    return found[0]


def make_intensity_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, IntensityReport]:
    """The boxes of every spec, when they are asked for."""
    if given.measure and given.device != "here":
        raise UsageError("--measure measures this machine, and something else is priced; add --device here")
    if not given.boxes:
        return {}
    from ...counting.devices import Device
    from ...counting.intensity import DecodeLayer, IntensityReport

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
