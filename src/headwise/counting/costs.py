"""What several layers cost, side by side: `hw.cost`, and the table that `headwise cost` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..blueprint import Model
from ..errors import SpecError, nearest
from ..spec import AttentionSpec
from .calls import Load
from .devices import Device
from .pricing import Price, price
from .scopes import fixed
from .whole import Described

WIDTH = 80  # columns of a terminal
NAMES, COLUMN = 25, 11  # characters of a row's name, and of each spec's number
CALLS = {"prefill": "prefill", "backward": "gradients", "decode": "a step", "prompt": "the prompt", "steps": "steps"}
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
    def operations(self) -> str:
        """Every operation: what it computes and moves, how long that takes at least, and what it waits for."""
        return "\n".join(_operations(self.prices)).lstrip("\n")

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values: {"version", "device", "load", "rows"}."""
        load = vars(self.prices[0].load) if self.prices else {"device": None}
        return {"version": VERSION, "device": load["device"], "load": load, "rows": [one.data for one in self.prices]}


def cost(described: Described | Mapping[str, Described], load: Load | None = None) -> Costs:
    """What layers and models cost before they run; nothing is built.

    >>> import headwise as hw
    >>> told = cost({n: hw.design(preset=n, model=4096, heads=32) for n in ("gqa", "mla")}, hw.Load(context=8192))
    >>> {price.name: price.data["kv_bytes_per_token"] for price in told}
    {'gqa': 4096, 'mla': 1152}
    """
    named: Any = described
    if isinstance(described, AttentionSpec | Model):
        named = {described.name if isinstance(described, Model) else "spec": described}
    known = isinstance(named, Mapping) and all(isinstance(one, AttentionSpec | Model) for one in named.values())
    if not known or not named:
        told = "give a spec or a model, or specs by name as in {'gqa': hw.design(...)}"
        raise SpecError(f"cost was given {described!r}; {told}")
    return Costs(tuple(price(one, load or Load(), name) for name, one in named.items()))


def _page(prices: Sequence[Price]) -> list[str]:
    """What is priced side by side, as many as a terminal holds."""
    load, each = prices[0].load, (WIDTH - NAMES) // COLUMN
    rows = "row" if load.batch == 1 else "rows"
    tokens = f"{load.context:,} tokens" + (f" and {load.generate:,} written" if load.generate else "")
    told = f"{load.batch:,} {rows} of {tokens}, {load.dtype}, {Device.named(load.device).what}"
    only = all(isinstance(one.described, AttentionSpec) for one in prices)
    lines = textwrap.wrap(f"one layer, {told}" if only else told, WIDTH)
    lines += [line for one in prices if not only for line in textwrap.wrap(f"{one.name}: {_what(one)}", WIDTH)]
    cells = [(name, cell) for name, cell in CELLS if name not in SOMETIMES or any(cell(one) != "-" for one in prices)]
    for start in range(0, len(prices), each):
        some = prices[start : start + each]
        wide = min((WIDTH - NAMES) // len(some), 2 * COLUMN) if len(prices) < each else COLUMN
        lines += ["", _line("", [one.name[-wide + 1 :] for one in some], wide)]
        lines += [_line(name.rstrip("."), [cell(one) for one in some], wide) for name, cell in cells]
    notes = [f"{one.name}: {note}" for one in prices for note in one.notes]
    said = [[], *(textwrap.wrap(note, WIDTH) for note in notes), *([[]] if notes else []), textwrap.wrap(ENDS, WIDTH)]
    return [*lines, *(line for told in said for line in told or [""])]


def _what(one: Price) -> str:
    """What a price is of, in a few words."""
    if isinstance(one.described, AttentionSpec):
        return "one layer"
    model, call = one.described, one.whole
    layers = " + ".join(str(len(stack.layers)) for stack in model.stacks)
    tokens = f", {call.tokens:,} tokens an image" if fixed(model)[-1] else ""
    source = f", {call.source:,} tokens of a source" if len(model.stacks) > 1 else ""
    return f"{model.kind} of {layers} {'layer' if layers == '1' else 'layers'}{tokens}{source}"


Cell = Callable[[Price], str]


def _flops(call: str) -> Iterator[tuple[str, Cell]]:
    """The rows of one call: asked, spent, counted."""
    name = {"prefill": "prefill", "backward": "its gradients", "decode": "a step", "generate": "writing"}[call]
    ways = {"FLOP asked": "flops", "  spent": "spent", "  counted": "counted"}
    for told, way in ways.items():

        def cell(one: Price, way: str = way) -> str:
            number = getattr(one, way).get(call)
            return "-" if number is None else short(number)

        yield (f"{name}, {told}" if way == "flops" else told + "." * len(call)), cell


def _waits(phase: str) -> Iterator[tuple[str, Cell]]:
    """The rows of the time that a phase takes."""
    name = {"prefill": "prefill", "decode": "a step"}[phase]
    yield f"{name}, seconds", lambda one: time(one.seconds(phase)) if phase in one.operations else "-"
    yield "  waits for" + "." * len(phase), lambda one: one.step(phase).bound if phase in one.operations else "-"


def _each(one: Price) -> str:
    told = one.kept_each
    return "-" if one.decode is None else "a state" if told is None and one.kept.terms else short(told or 0)


# The dots at the end of a name tell rows of one name apart, and are not shown.
CELLS: list[tuple[str, Cell]] = [
    ("parameters", lambda one: short(one.parameters.total)),
    ("  met by a token", lambda one: short(one.active) if one.active != one.parameters.total else "-"),
    ("weights, bytes", lambda one: short(one.weights_bytes)),
    *(row for call in ("prefill", "backward", "decode", "generate") for row in _flops(call)),
    ("cache, bytes a token", _each),
    ("  a token of the source", lambda one: short(one.told_each) if one.told_each else "-"),
    ("cache, bytes in all", lambda one: short(one.kept_bytes) if one.decode else "-"),
    *(row for phase in ("prefill", "decode") for row in _waits(phase)),
    ("its core, FLOP/byte", lambda one: f"{one.core.intensity:.1f}" if one.decode else "-"),
    ("  waits for", lambda one: one.core.bound if one.decode else "-"),
]
SOMETIMES = {name for name, _ in [CELLS[1], *_flops("generate")]} | {"  a token of the source"}
ENDS = (
    "Asked: allowed pairs only; spent: by the backend that runs it; counted: by torch, every pair. Times are lower "
    "bounds: products and memory at their largest, overlapping. k, M, G, T, P are powers of 1000."
)


def _operations(prices: Sequence[Price]) -> Iterator[str]:
    """Every operation of every phase."""
    heads = ("FLOP", "bytes", "FLOP/byte", "at least", "waits for")
    for one in prices:
        for phase, every in one.operations.items():
            name = {"prefill": "all tokens", "decode": "a step"}[phase]
            yield from ("", f"{one.name}: {name}".ljust(NAMES) + "".join(head.rjust(COLUMN) for head in heads))
            for each in (*every, one.step(phase)):
                told = "together" if each.name == phase else each.name
                numbers = (short(each.flops), short(each.moved), f"{each.intensity:.1f}", time(each.seconds))
                yield _line(f"  {told}", [*numbers, each.bound], COLUMN)


def _terms(prices: Sequence[Price]) -> list[str]:
    """Every item of every bill."""
    lines: list[str] = []
    for one in prices:
        bills = {"parameters": one.parameters, **{CALLS[name]: bill for name, bill in one.calls.items()}}
        bills |= {"cache, numbers a token": one.kept, "cache, numbers a token of the source": one.told}
        for name, bill in ((name, bill) for name, bill in bills.items() if bill.terms):
            lines += ["", f"{one.name}: {name}, {bill.total:,}"]
            for term in bill.terms:
                lines += textwrap.wrap(f"{term.name} = {term.formula} = {term.value:,}", WIDTH - 2,
                                       initial_indent="  ", subsequent_indent="      ")  # fmt: skip
    return lines


def short(number: int) -> str:
    """A whole number in a few characters.

    >>> short(67108864), short(999), short(2 * 10**15), short(2345 * 10**27)
    ('67.11 M', '999', '2.00 P', '2.34e30')
    """
    if number < 10_000:
        return f"{number:,}"
    digits = str(number)
    power = (len(digits) - 1) // 3
    if power >= len(UNITS):
        return f"{digits[0]}.{digits[1:3]}e{len(digits) - 1}"
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


def _line(name: str, cells: Sequence[str], wide: int) -> str:
    return (name.ljust(NAMES) + "".join(cell.rjust(wide) for cell in cells)).rstrip()
