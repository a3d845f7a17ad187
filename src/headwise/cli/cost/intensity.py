"""`headwise cost --boxes`: projections, core and output of a layer, FLOPs for each byte, and what they wait for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..screen import Wrong
from .serving import formats_of, reached

if TYPE_CHECKING:
    from ...counting.costs import Costs
    from ...counting.intensity import Boxes
    from ...counting.pricing import Price
    from ...spec import AttentionSpec


class Measure(argparse.Action):
    """Measures this machine at once, so that whatever is priced afterwards is priced on what was found."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Sequence[Any] | str | None,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        from ...counting.here import measure_anew

        measure_anew()
        setattr(namespace, self.dest, True)


def take(parser: argparse.ArgumentParser) -> None:
    """The page, and the measuring of this machine."""
    told = "the three boxes of a layer: intensity and time of 1, N and enough rows"
    parser.add_argument("--boxes", action="store_true", help=told)
    parser.add_argument("--measure", action=Measure, nargs=0, help="measure this machine anew, for --device here")


def _spec(price: Price) -> AttentionSpec:
    """The attention that is drawn: the spec itself, or the one that all layers of a model have."""
    from ...spec import AttentionSpec

    described = price.described
    found = [described] if isinstance(described, AttentionSpec) else [*{spec: 0 for _, spec in described.specs()}]
    if len(found) != 1:
        raise Wrong(f"{price.name} has {len(found)} kinds of attention; name a layer, as in --layer 0.attention")
    return found[0]


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, Boxes]:
    """The boxes of every spec, when they are asked for."""
    if given.measure and given.device != "here":
        raise Wrong("--measure measures this machine, and something else is priced; add --device here")
    if not given.boxes:
        return {}
    from ...counting.devices import Device
    from ...counting.intensity import Boxed, Boxes

    loads = {price.name: price.load for price in costs}
    layers = {
        price.name: Boxed(
            _spec(price),
            reached(given, Device.named(price.load.device)),
            price.load.context,
            formats_of(given, price),
        )
        for price in costs
    }
    return {"boxes": Boxes.of(layers, next(iter(loads.values())).batch)}
