"""What has to lie in memory to answer or to train, and how much of it a machine can hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..errors import SpecError, nearest
from .allocators import Rows, cache_terms
from .bills import Term
from .calls import LARGEST
from .devices import STORED, bytes_of
from .layers import alive
from .scopes import longest
from .serving import Serving, first

UNITS = {"b": 1} | {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}
UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}


@dataclass(frozen=True)
class Demand:
    """Rows to be served, prompts being taken `chunk` tokens at a time, on devices that divide weights and cache.

    training=16 says that each learned number takes 16 bytes with its gradient and what the optimiser keeps, rows being
    trained on and not answered: 16 (1910.02054), 18 with gradients in float32 (Megatron-LM), 20 with both
    (zhihu 624740065). Of activations the inputs of layers are kept then, and the rest of each formed again; devices
    divide the rows.
    """

    serving: Serving
    rows: Rows = field(default_factory=Rows)
    chunk: int = 2048
    training: int = 0
    devices: int = 1

    def __post_init__(self) -> None:
        for name, least in (("chunk", 1), ("training", 0), ("devices", 1)):
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= LARGEST:
                raise SpecError(f"{name}={size!r} is no size; give a whole number of at least {least}")
        if 0 < self.training < (least := bytes_of(self.serving.formats.maths)):
            raise SpecError(
                f"training={self.training} bytes of each number cannot hold it, which takes {least}; 16, 18 and 20 "
                "are usual"
            )

    @property
    def terms(self) -> tuple[Term, ...]:
        """What lies in memory, on all devices together: first what they divide, then what each of them needs."""
        return (*self._divided(), *self._working())

    @property
    def needed(self) -> int:
        """Bytes on one device, at least."""
        divided = -(-sum(term.value for term in self._divided()) // self.devices)
        rows, working = self.rows.count, sum(term.value for term in self._working())
        return divided + (-(-working * -(-rows // self.devices) // rows) if self.training else working)

    @property
    def fits(self) -> bool:
        """Whether a device can hold its share."""
        return self.needed <= self.serving.device.memory

    def alike(self, count: int, length: int) -> Demand:
        """The same for so many rows of one length."""
        rows = self.rows
        return replace(self, rows=Rows.alike(count, length, min(rows.shared, length), rows.source))

    @property
    def cache(self) -> tuple[Term, ...]:
        """What is remembered, by kind of layer; in training nothing is."""
        serving = self.serving
        if self.training:
            return ()
        terms = cache_terms(serving.attentions, self.rows, serving.allocator, serving.formats)
        return tuple(
            term._replace(name=serving.title("cache", layers))
            for layers, term in zip(serving.attentions, terms, strict=True)
        )

    def _divided(self) -> Iterator[Term]:
        serving, formats = self.serving, self.serving.formats
        if self.training:
            count = serving.weights.numbers
            how = f"{count:,} numbers x {self.training} bytes"
            yield Term("weights, gradients, optimiser", how, count * self.training)
            return
        scales = " and scales" if STORED[formats.weights] == 1 else "s"
        how = f"{serving.weights.numbers:,} numbers x {STORED[formats.weights]} byte{scales}"
        yield Term("weights", how, serving.weights.bytes)
        yield from self.cache

    @property
    def _tokens(self) -> int:
        """Tokens of one step: in training all of them, else one of each row and a chunk of one more prompt."""
        if self.training:
            return sum(length * times for length, times in self.rows.each)
        longest = max(length for length, _ in self.rows.each)
        return min(self.chunk, longest) + self.rows.count - 1

    def _working(self) -> Iterator[Term]:
        """What runs from layer to layer, and the widest of what is alive beside it; kernels may want more."""
        serving, tokens = self.serving, self._tokens
        between = self._alive("between layers", tokens, serving.model)
        if self.training:
            layers = sum(each.times for each in serving.attentions if each.name != "cross")
            yield Term("inputs of layers", f"{layers:,} layers x {between.formula}", layers * between.value)
        yield between
        answers = tokens if self.training else self.rows.count
        inside = [self._alive(f"inside {each.name}", tokens, alive(each.spec)) for each in serving.attentions]
        for each in serving.matrices:
            count = answers if each.name == "head" else tokens
            inside.append(self._alive(f"inside {each.name}", count, each.inside))
        yield max(inside, key=lambda term: term.value)

    def _alive(self, name: str, tokens: int, width: int) -> Term:
        each = bytes_of(self.serving.formats.maths)
        how = f"{tokens:,} tokens x {width:,} numbers x {each} bytes"
        return Term(name, how, tokens * width * each)


def longest_context(demand: Demand) -> int | None:
    """The most tokens that each of so many rows may have, at most all that have positions; None when any may.

    Eight billion bytes for layers of Llama-3-8B's attention; of a step only the cache grows with the context:

    >>> import headwise as hw
    >>> from headwise.counting.devices import Device
    >>> device = replace(Device.named("h200"), memory=8e9)
    >>> serving = Serving(hw.design(preset="gqa", model=4096, heads=32, kv=8), device, layers=32)
    >>> most = longest_context(Demand(serving, chunk=1))  # 32 x 41,943,040 weights, 4,096 + 14,336 numbers of a token
    >>> most, (8 * 10**9 - 2 * (32 * 41943040 + 18432)) // 131072
    (40554, 40554)
    """
    found = _most(lambda length: demand.alike(demand.rows.count, length), "a context of one token", demand)
    placed = longest(demand.serving.described).own  # learned positions end there, whatever memory holds
    return placed if found is None else min(found, placed or found)


def most_rows(demand: Demand) -> int | None:
    """The most rows, as long as the longest, that can be answered at once; None when no number is too many."""
    length = max(length for length, _ in demand.rows.each)
    return _most(lambda count: demand.alike(count, length), f"one row of {length:,} tokens", demand)


def last(fits: Callable[[int], bool], most: int = LARGEST) -> int:
    """The last whole number from 1 on that fits, where larger ones fit less; 0 when not even 1 does.

    >>> last(lambda n: n * n <= 50), last(lambda n: False), last(lambda n: True, most=7)
    (7, 0, 7)
    """
    over = first(lambda n: n > most or not fits(n))
    return LARGEST if over is None else over - 1


def _most(sized: Callable[[int], Demand], least: str, demand: Demand) -> int | None:
    found = last(lambda size: sized(size).fits)
    if not found:
        needed, memory = sized(1).needed, int(demand.serving.device.memory)
        raise SpecError(
            f"{least} takes {gigabytes(needed)} with weights and activations, and memory is {gigabytes(memory)}; "
            f"give {gigabytes(needed)} or more, or divide them among devices"
        )
    return None if found >= LARGEST else found


def gigabytes(count: int) -> str:
    """Bytes as 10^9 of them, few ones as 10^6.

    >>> gigabytes(16060522496), gigabytes(16777216)
    ('16.06 GB', '16.78 MB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 10**9 else f"{count / 1e6:,.2f} MB"


def bytes_said(text: str) -> int:
    """How many bytes a text such as "80 GB" or "5.38 GiB" says.

    >>> bytes_said("80 GB"), bytes_said("1.5GiB")
    (80000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    if not found:
        raise SpecError(f"{text!r} says no memory; write it as in '80 GB' or '5.38 GiB'")
    number, unit = found.groups()
    if (known := unit.lower() or "b") not in UNITS:
        raise SpecError(f"{text!r} has the unit {unit!r}; {nearest(known, UNITS)}")
    count = int(Fraction(number) * UNITS[known])
    if not 1 <= count <= LARGEST:
        raise SpecError(f"{text!r} is no memory of a machine; give from 1 to {LARGEST} bytes")
    return count
