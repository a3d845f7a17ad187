"""`--match`, `--breakeven`, `--complexity`: layers made alike in one number, and beside what they are compared with."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, nearest
from ..screen import WIDTH, Wrong

if TYPE_CHECKING:
    from ...counting.complexity import Complexity, Sizes
    from ...counting.costs import Costs
    from ...counting.growth import Growth
    from ...counting.matching import Match
    from ...counting.pricing import Price
    from ...spec import AttentionSpec
    from . import View

BY = ("params", "flops", "kv")
KERNEL, WINDOW = 3, 64


@dataclass(frozen=True)
class Matches:
    """What was changed of each spec, so that it comes nearest to the first."""

    first: str
    found: Mapping[str, Match]

    def __str__(self) -> str:
        lines = [f"made as large as {self.first} before they were priced:"]
        for name, match in self.found.items():
            lines += textwrap.wrap(f"{name}: {match}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"like": self.first, "rows": [{"name": name, **match.data} for name, match in self.found.items()]}


@dataclass(frozen=True)
class Compared:
    """The table of complexities, and how the time of small layers grows where that was measured."""

    counted: Complexity
    measured: Growth | None

    def __str__(self) -> str:
        return f"{self.counted}\n\n{self.measured}" if self.measured else str(self.counted)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.counted.data | {"measured": self.measured.data if self.measured else None}


def take(parser: argparse.ArgumentParser) -> None:
    """Their options."""
    more = parser.add_argument_group("comparing")
    more.add_argument("--match", choices=BY, help="change a size of each, so that it comes nearest to the first")
    told = "the size that may change: dim, vdim, kv, q, model, or one of a part, as in mla=project.rank"
    more.add_argument("--free", action="append", default=[], metavar="[SPEC=]SIZE", help=told)
    more.add_argument("--breakeven", action="store_true", help="lengths at which each costs less than the first")
    told = "attention beside recurrent and convolutional layers: counted, or measured as well"
    more.add_argument("--complexity", nargs="?", const="counted", choices=("counted", "measured"), help=told)
    more.add_argument("--kernel", type=int, metavar="TOKENS", help=f"of its convolutions ({KERNEL})")
    more.add_argument("--window", type=int, metavar="TOKENS", help=f"of its attention in a window ({WINDOW})")


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, View]:
    """What was asked for."""
    found: dict[str, View] = {}
    if given.breakeven:
        from ...counting.breakeven import break_even

        prices = apart(costs)
        found["break_even"] = break_even(
            {name: price.described for name, price in prices.items()}, costs.prices[0].load
        )
    if given.complexity:
        from ...counting.complexity import Complexity

        sizes = _sizes(given, costs)
        found["complexity"] = Compared(Complexity.of(sizes), _measured(given, sizes))
    elif given.kernel is not None or given.window is not None:
        raise Wrong("--kernel and --window are sizes of --complexity; give it, or leave them out")
    return found


def matched(given: argparse.Namespace, costs: Costs) -> tuple[Costs, dict[str, View]]:
    """Everything made as large as the first and priced anew, and what was changed for that."""
    if given.match is None:
        if given.free:
            raise Wrong(f"--free {given.free[0]} changes nothing without --match; give --match params, flops or kv")
        return costs, {}
    from ...counting.costs import Costs
    from ...counting.pricing import price

    first, *others = apart(costs).items()
    if not others:
        raise Wrong(f"--match makes others as large as the first, and there is only {first[0]}; name one more")
    free = _free(given, [name for name, _ in others])
    found = {name: _match(given.match, first, (name, one), free[name]) for name, one in others}
    anew = (price(found[name].spec, one.load, one.name) for name, one in others)
    return Costs((first[1], *anew)), {"matched": Matches(first[0], found)}


def apart(costs: Costs) -> dict[str, Price]:
    """Every price under a name of its own: what is named like one before it gets a number."""
    seen: Counter[str] = Counter()
    found: dict[str, Price] = {}
    for one in costs:
        seen[one.name] += 1
        found[one.name if seen[one.name] == 1 else f"{one.name} ({seen[one.name]})"] = one
    return found


def _free(given: argparse.Namespace, names: list[str]) -> dict[str, str | None]:
    """The size that is free of each, or None where nothing says which."""
    free: dict[str, str | None] = dict.fromkeys(names)
    for said in given.free:
        name, equals, size = said.rpartition("=")
        if equals and name not in free:
            raise Wrong(f"--free {said}: nothing that is changed is called {name!r}; {nearest(name, free)}")
        free |= {name: size} if equals else dict.fromkeys(names, size)
    return free


def _match(by: str, first: tuple[str, Price], other: tuple[str, Price], free: str | None) -> Match:
    from ...counting.matching import match

    like, spec = _spec(*first), _spec(*other)
    try:
        return match(spec, like=like, by=by, free=free, load=other[1].load)
    except SpecError as error:
        raise Wrong(f"{other[0]} cannot be made as large as {first[0]}: {error}") from None


def _spec(name: str, price: Price) -> AttentionSpec:
    from ...spec import AttentionSpec

    if isinstance(price.described, AttentionSpec):
        return price.described
    raise Wrong(
        f"--match changes single layers, and {name} is more; take one attention of it, as in --layer 0.attention"
    )


def _sizes(given: argparse.Namespace, costs: Costs) -> Sizes:
    """The surroundings of the first attention that is priced."""
    from ...counting.complexity import Sizes

    price = costs.prices[0]
    spec = next(iter(price.specs.values()), None)
    if spec is None:
        raise Wrong(f"--complexity takes its width from an attention, and {price.name} has none; name a spec first")
    kernel, window = (
        (KERNEL if given.kernel is None else given.kernel),
        (WINDOW if given.window is None else given.window),
    )
    return Sizes(price.load.context, spec.model, math.gcd(spec.heads.q, spec.model), kernel, window)


def _measured(given: argparse.Namespace, sizes: Sizes) -> Growth | None:
    if given.complexity != "measured":
        return None
    from ...counting.growth import growth

    return growth(sizes)
