"""`headwise cost --serve`: requests answered together, step by step, and how many of them memory holds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..screen import Wrong

if TYPE_CHECKING:
    from ...counting.allocators import Rows
    from ...counting.capacity import Demand
    from ...counting.costs import Costs
    from ...counting.devices import Device, Formats
    from ...counting.pricing import Price
    from ...counting.throughput import Throughput

CHUNK = 2048
# What says more of these pages, and of which; alone it would change nothing.
MORE = {
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
class Pages:
    """One page for each spec, one below the other."""

    pages: tuple[Throughput, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.pages))

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [page.data for page in self.pages]


def take(parser: argparse.ArgumentParser) -> None:
    """The page, and what says more of it and of its neighbours."""
    parser.add_argument("--serve", action="store_true", help="answering many requests at once: steps, tokens a second")
    more = parser.add_argument_group("for --serve, --verdict and --boxes")
    more.add_argument("--layers", type=int, metavar="COUNT", help="so many layers of a spec (1)")
    more.add_argument("--allocator", metavar="NAME", help="ideal, ring, paged(16) or unified (ideal)")
    more.add_argument("--cache", metavar="DTYPE", help="what is remembered: int8, or as --dtype")
    more.add_argument("--weights", metavar="DTYPE", help="weights: int8, or as --dtype")
    more.add_argument("--reached", metavar="SHARES", help="of products and of bandwidth, as in 0.7,0.9 (1,1)")
    more.add_argument("--budget", metavar="MEMORY", help="in the place of the device's, as in '24 GiB'")
    more.add_argument("--chunk", type=int, metavar="TOKENS", help=f"of a prompt that one step takes ({CHUNK})")
    more.add_argument("--prompt", type=int, metavar="TOKENS", help="of a prompt that comes in (--context)")
    more.add_argument("--shared", type=int, metavar="TOKENS", help="a beginning that all rows have, kept once (0)")
    more.add_argument(
        "--lengths", metavar="TOKENS", help="of each row: 100,2000 or uniform(100,4000) or exponential(900)"
    )
    more.add_argument("--seed", type=int, metavar="NUMBER", help="what lengths are drawn by (0)")


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, Pages]:
    """The page of every spec, when it is asked for."""
    _check(given)
    if not given.serve:
        return {}
    from ...counting.throughput import Throughput

    prompt = given.prompt
    if prompt is not None and prompt < 1:
        raise Wrong(f"--prompt {prompt} is no prompt; give 1 token or more")
    return {
        "serving": Pages(
            tuple(Throughput(price.name, demand_of(given, price), prompt or price.load.context) for price in costs)
        )
    }


def demand_of(given: argparse.Namespace, price: Price) -> Demand:
    """What the command line asks of one spec."""
    from ...counting.allocators import Allocator
    from ...counting.capacity import Demand
    from ...counting.serving import Serving

    formats, layers = formats_of(given, price), 1 if given.layers is None else given.layers
    serving = Serving(
        price.described,
        _device(given, price),
        formats,
        layers,
        Allocator.named(given.allocator or "ideal"),
        price.whole.source,
    )
    demand = Demand(serving, _rows(given, price), CHUNK if given.chunk is None else given.chunk)
    if given.budget is not None:
        _enough(demand, given.budget)
    return demand


def formats_of(given: argparse.Namespace, price: Price) -> Formats:
    """How numbers are held."""
    from ...counting.devices import Formats

    return Formats(price.load.dtype, given.weights or "", given.cache or "")


def reached(given: argparse.Namespace, device: Device) -> Device:
    """The device as far as programs reach."""
    if given.reached is None:
        return device
    try:
        products, memory = map(float, given.reached.split(","))
    except ValueError:
        raise Wrong(f"--reached {given.reached!r} says no two shares; write products,memory as in 0.7,0.9") from None
    return device.reached(products, memory)


def _device(given: argparse.Namespace, price: Price) -> Device:
    from ...counting.capacity import bytes_said
    from ...counting.devices import Device

    device = reached(given, Device.named(price.load.device))
    return device if given.budget is None else replace(device, memory=float(bytes_said(given.budget)))


def _rows(given: argparse.Namespace, price: Price) -> Rows:
    from ...counting.allocators import Rows
    from ...counting.lengths import lengths

    shared = 0 if given.shared is None else given.shared
    if given.lengths is None:
        return Rows.alike(price.load.batch, price.load.context, shared, price.whole.source)
    return Rows.of(lengths(given.lengths, price.load.batch, given.seed or 0), shared, price.whole.source)


def _enough(demand: Demand, said: str) -> None:
    """Refuse a budget that not even the weights fit in."""
    from ...counting.capacity import gigabytes

    weights, memory = demand.serving.weights.bytes, demand.serving.device.memory
    if weights > memory:
        raise Wrong(
            f"--budget {said} is less than the weights, {gigabytes(weights)}; give {gigabytes(weights)} or more"
        )


def _check(given: argparse.Namespace) -> None:
    """Refuse what says more of a page that nobody asked for."""
    for name, pages in MORE.items():
        if getattr(given, name) is not None and not any(getattr(given, page) for page in pages.split()):
            shown = " or ".join(f"--{page}" for page in pages.split())
            raise Wrong(f"--{name} changes only what {shown} shows; add that, or leave --{name} out")
    if given.seed is not None and given.lengths is None:
        raise Wrong("--seed draws lengths, and none are said; add --lengths 'uniform(100, 4000)'")
