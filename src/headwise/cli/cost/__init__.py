"""`headwise cost`: what specs cost before they run, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..screen import PRESETS, Arguments, Wrong, changed, document, named_spec, show, take_changes, take_form
from . import intensity, serving, verdict

if TYPE_CHECKING:
    from ...auditing import Check
    from ...counting.costs import Costs


class View(Protocol):
    """Something asked besides the prices: printed as text, and under its name in the document."""

    @property
    def data(self) -> Any:
        """The same as plain values."""
        ...


class Page(Protocol):
    """A module of this package: the options it takes, and what it shows when they are given."""

    def take(self, parser: argparse.ArgumentParser) -> None:
        """Add its options."""
        ...

    def views(self, given: argparse.Namespace, costs: Costs) -> Mapping[str, View]:
        """What was asked of it, by name; nothing when nothing was."""
        ...


PAGES: tuple[Page, ...] = (serving, verdict, intensity)


def main(argv: list[str]) -> int:
    """Price every spec that is named."""
    parser = Arguments(
        "cost",
        "What one attention layer costs before it runs: parameters, products, cache, and the time it takes at least.",
        "headwise cost gqa mla moh --model 4096 --heads 32 --context 32768 --batch 16",
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="a .toml or .json file, or the name of a preset")
    parser.add_argument(
        "--preset", action="append", default=[], metavar="NAME", help="one more preset, of " + ", ".join(PRESETS)
    )
    parser.add_argument("--model", type=int, metavar="WIDTH", help="the width of the presets' model")
    parser.add_argument("--heads", type=int, metavar="COUNT", help="how many heads the presets have")
    take_changes(parser)
    parser.add_argument("--context", type=int, default=2048, metavar="TOKENS", help="tokens of a row (2048)")
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS", help="rows (1)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument("--device", default="h200", help="h200, h100, a100, l40s, rtx4090, m2-max or cpu")
    parser.add_argument("--terms", action="store_true", help="every item with the formula that computed it")
    parser.add_argument("--verify", action="store_true", help="build each small and hold every formula against it")
    for page in PAGES:
        page.take(parser)
    take_form(parser)
    given = parser.parse_args(argv)
    costs = priced(given)
    checks = audited(costs) if given.verify else {}
    views = {name: view for page in PAGES for name, view in page.views(given, costs).items()}
    if given.json:
        told = {name: [{**check._asdict(), "holds": check.holds} for check in each] for name, each in checks.items()}
        more = {name: view.data for name, view in views.items()}
        show(document(costs.data | more | ({"verified": told} if given.verify else {})))
    else:
        said = [str(costs), *([costs.terms] if given.terms else []), *map(str, views.values())]
        show("\n\n".join([*said, *(_told(*item) for item in checks.items())]))
    return 0 if all(check.holds for each in checks.values() for check in each) else 1


def audited(costs: Costs) -> dict[str, list[Check]]:
    """Every formula against a small layer of each spec."""
    from ...auditing import audit

    return {price.name: audit(price.spec) for price in costs}


def _told(name: str, checks: list[Check]) -> str:
    rows = [("a small layer of it", "formula", "measured", "")]
    rows += [(c.what, f"{c.formula:,}", f"{c.measured:,}", "equal" if c.holds else "WRONG") for c in checks]
    return "\n".join([name, *(f"  {a:<24}{b:>16}{c:>16}  {d}".rstrip() for a, b, c, d in rows)])


def priced(given: argparse.Namespace) -> Costs:
    """The price of every spec that the command line names, in its order."""
    names = [*given.specs, *given.preset]
    if not names:
        raise Wrong("name at least one spec: a .toml or .json file, or a preset such as gqa")
    if strange := [name for name in given.preset if name not in PRESETS]:
        raise Wrong(f"there is no preset {strange[0]!r}; use one of {', '.join(PRESETS)}")
    sizes = {name: size for name in ("model", "heads") if (size := getattr(given, name)) is not None}
    from ...counting.costs import Costs
    from ...counting.pricing import Load, price

    load = Load(given.batch, given.context, given.dtype, given.device)
    return Costs(tuple(price(changed(named_spec(name, sizes), given.changes), load, name) for name in names))
