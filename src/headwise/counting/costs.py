"""What several layers cost, side by side: `hw.cost`, and the table that `headwise cost` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, nearest
from ..spec import AttentionSpec
from .devices import Device
from .pricing import Load, Operation, Price, price

WIDTH = 80  # columns of a terminal
NAMES, COLUMN = 25, 11  # characters of a row's name, and of each spec's number
UNITS = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
VERSION = 1  # of the JSON document


@dataclass(frozen=True)
class Costs:
    """Prices under one load, in order; printed, they stand side by side."""

    prices: tuple[Price, ...]

    def __iter__(self) -> Iterator[Price]:
        return iter(self.prices)

    def __getitem__(self, name: str) -> Price:
        named = {price.name: price for price in self.prices}
        if name not in named:
            raise SpecError(f"nothing named {name!r} was priced; {nearest(name, named)}")
        return named[name]

    def __str__(self) -> str:
        return "\n".join(_page(self.prices))

    @property
    def terms(self) -> str:
        """Every item of every bill, with the formula that computed it."""
        return "\n".join(_terms(self.prices)).lstrip("\n")

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values: {"version", "device", "rows"}."""
        device = self.prices[0].load.device if self.prices else None
        return {"version": VERSION, "device": device, "rows": [price.data for price in self.prices]}


def cost(specs: AttentionSpec | Mapping[str, AttentionSpec], load: Load | None = None) -> Costs:
    """What layers cost before they run; nothing is built.

    >>> import headwise as hw
    >>> told = cost({n: hw.design(preset=n, model=4096, heads=32) for n in ("gqa", "mla")}, hw.Load(context=8192))
    >>> {price.name: price.data["kv_bytes_per_token"] for price in told}
    {'gqa': 4096, 'mla': 1152}
    """
    named = {"spec": specs} if isinstance(specs, AttentionSpec) else specs
    if not isinstance(named, Mapping) or not named:  # pyright: ignore[reportUnnecessaryIsInstance] - users err
        raise SpecError(f"cost was given {specs!r}; give a spec, or specs by name as in {{'gqa': hw.design(...)}}")
    return Costs(tuple(price(spec, load or Load(), name) for name, spec in named.items()))


def _page(prices: Sequence[Price]) -> list[str]:
    """The specs side by side, as many as a terminal holds."""
    load, each = prices[0].load, (WIDTH - NAMES) // COLUMN
    device = Device.named(load.device)
    rows = "row" if load.batch == 1 else "rows"
    told = f"one layer, {load.batch:,} {rows} of {load.context:,} tokens, {load.dtype}, {device.what}"
    lines = [*textwrap.wrap(told, WIDTH)]
    for start in range(0, len(prices), each):
        some = prices[start : start + each]
        lines += ["", _line("", [price.name[-COLUMN + 1 :] for price in some])]
        lines += [_line(name, [cell(price) for price in some]) for name, cell in CELLS.items()]
    told = (
        "Times are lower bounds: products and memory at their largest, overlapping. k, M, G, T, P are powers of 1000."
    )
    return [*lines, "", *textwrap.wrap(told, WIDTH)]


def _core(price: Price) -> Operation:
    return price.operations["decode"][-1]


def _each(price: Price) -> str:
    each = price.data["kv_bytes_per_token"]
    return "-" if price.decode is None else "a state" if each is None else short(each)


CELLS: dict[str, Callable[[Price], str]] = {
    "parameters": lambda price: short(price.parameters.total),
    "prefill, FLOP": lambda price: short(price.prefill.total),
    "its gradients, FLOP": lambda price: short(price.backward.total),
    "a decoding step, FLOP": lambda price: short(price.decode.total) if price.decode else "-",
    "cache, bytes a token": _each,
    "cache, bytes in all": lambda price: short(price.kept_bytes) if price.decode else "-",
    "prefill, seconds": lambda price: time(price.seconds("prefill")),
    "a step, seconds": lambda price: time(price.seconds("decode")) if price.decode else "-",
    "a step's core, FLOP/byte": lambda price: f"{_core(price).intensity:.1f}" if price.decode else "-",
    "and waits for": lambda price: _core(price).bound if price.decode else "-",
}


def _terms(prices: Sequence[Price]) -> list[str]:
    """Every item of every bill."""
    lines: list[str] = []
    for one in prices:
        bills = {"parameters": one.parameters, "prefill": one.prefill, "gradients": one.backward}
        bills |= {"a step": one.decode} if one.decode else {}
        for name, bill in [*bills.items(), ("cache, numbers", one.kept)]:
            lines += ["", f"{one.name}: {name}, {bill.total:,}"]
            for term in bill.terms:
                lines += textwrap.wrap(f"{term.name} = {term.formula} = {term.value:,}", WIDTH - 2,
                                       initial_indent="  ", subsequent_indent="      ")  # fmt: skip
    return lines


def short(number: int) -> str:
    """A whole number in a few characters.

    >>> short(67108864), short(999), short(2 * 10**15)
    ('67.11 M', '999', '2.00 P')
    """
    if number < 10_000:
        return f"{number:,}"
    power = min((len(str(number)) - 1) // 3, len(UNITS) - 1)
    return f"{number / 1000**power:.2f} {UNITS[power]}"


def time(seconds: float) -> str:
    """Seconds in a few characters.

    >>> time(0.00012), time(3.5)
    ('120.0 us', '3.50 s')
    """
    for scale, unit, digits in ((1.0, "s", 2), (1e-3, "ms", 1), (1e-6, "us", 1)):
        if seconds >= scale:
            return f"{seconds / scale:.{digits}f} {unit}"
    return f"{seconds / 1e-9:.1f} ns"


def _line(name: str, cells: Sequence[str]) -> str:
    return (name.ljust(NAMES) + "".join(cell.rjust(COLUMN) for cell in cells)).rstrip()
