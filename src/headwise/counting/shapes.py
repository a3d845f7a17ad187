"""From two runs of different sizes, the formula of each memory: which of its axes are rows, tokens, heads, widths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from ..spec import AttentionSpec
from .imagined import Sizes
from .symbols import Symbol
from .watching import Saved

# Powers of rows, tokens and tokens of a source that one axis may hold, as when axes are laid out as one.
POWERS = sorted(product((0, 1), (0, 1, 2), (0, 1, 2)), key=sum)
MANY = ("q", "kv", "v", "out", "voice")  # axes that count heads
WIDE = ("model", "dim", "vdim", "source")  # axes by which a last axis is called first

Kept = dict[str, int]  # bytes by the step that keeps them, each number knowing its formula


class Axes:
    """The sizes of a load under their letters, and of a spec under the names of its axes."""

    def __init__(self, spec: AttentionSpec, load: Sizes) -> None:
        told, letter = (load.tokens, "s") if spec.source is None else (load.source, "t")
        letters = Symbol.of(load.batch, "b"), Symbol.of(load.tokens, "s"), Symbol.of(told, letter)
        self.load, self.names = Sizes(*letters), dict(_names(spec))

    def width(self, size: int, last: bool, rows: bool) -> list[int]:
        """A size that is the same under every load, under the name of its axis where it has one."""
        if last:
            # Only what rows of tokens have may be a number of heads behind everything else: gates, say.
            order = [*WIDE, *(name for name in self.names if name not in MANY), *(MANY if rows else ())]
        else:
            order = [*MANY, *self.names]
        told = {name: self.names[name] for name in order if name in self.names}
        for known in told.values():
            if known == size != 1:
                return [known]
        for many, wide in product(MANY, told):
            pair = [self.names[n] for n in (many, wide) if n in self.names]
            if len(pair) == 2 and pair[0] * pair[1] == size and 1 not in pair:
                return pair
        return [size]

    def factors(self, saved: Saved, other: Saved, sizes: tuple[Sizes, Sizes]) -> list[int] | None:
        """What the bytes of one memory of two runs are a product of; None where they are none."""
        if len(saved.shape) != len(other.shape) or saved.dtype != other.dtype:
            return None
        found, rows = [saved.dtype.itemsize], False
        pairs = [pair for pair in zip(saved.shape, other.shape, strict=True) if pair != (1, 1)]
        for n, pair in enumerate(pairs, 1):
            axis = self._axis(pair, sizes, (n == len(pairs), rows))
            if axis is None:
                return None
            found += axis
            rows = rows or self.load.batch in axis
        return found

    def _axis(self, pair: tuple[int, int], sizes: tuple[Sizes, Sizes], where: tuple[bool, bool]) -> list[int] | None:
        for powers in POWERS:
            one, two = (_power(each, powers) for each in sizes)
            if pair[0] * two == pair[1] * one and pair[0] % one == 0:
                letters = [size for size, times in zip(self.load, powers, strict=True) for _ in range(times)]
                return letters + self.width(pair[0] // one, *where)
        for n in (1, 2):  # a token more, as of a sink
            more = pair[0] - sizes[0][n]
            if more == pair[1] - sizes[1][n]:
                return [self.load[n] + more]
        return None


def _names(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    """Every axis of a spec with its size, and those that are laid end to end."""
    for _, part in spec.parts():
        sizes = spec.sizes_of(part)
        yield from ((name, Symbol.of(size, name)) for name, size in sizes.items() if size > 1)
        layouts = [*(param.layout for param in part.params(spec).values()), *part.entry(spec).values()]
        for axis in (axis for layout in layouts for axis in layout.axes if "|" in axis):
            size = sum(sizes[name] for name in axis.split("|"))
            yield axis, Symbol.of(size, axis.replace("|", " + "), loose="sum")


def _power(sizes: Sizes, powers: Sequence[int]) -> int:
    total = 1
    for size, times in zip(sizes, powers, strict=True):
        total *= size**times
    return total


def terms(kept: Sequence[Saved], others: Sequence[Saved], axes: Axes, sizes: tuple[Sizes, Sizes]) -> Kept | None:
    """The bytes of every step, from two runs; None where these are not alike."""
    if [saved.step for saved in kept] != [other.step for other in others]:
        return None
    found: dict[str, dict[tuple[str, ...], int]] = {}
    for saved, other in zip(kept, others, strict=True):
        factors = axes.factors(saved, other, sizes)
        if factors is None:
            return None
        step, value = found.setdefault(saved.step, {}), _product(factors)
        alike = tuple(sorted(factor.text for factor in factors if isinstance(factor, Symbol)))
        step[alike] = step[alike] + value if alike in step else value
    return {name: _sum(list(each.values())) for name, each in found.items()}


def _product(factors: Sequence[int]) -> int:
    """The product, its letters first."""
    number = 1
    for factor in factors:
        number *= 1 if isinstance(factor, Symbol) else factor
    named: dict[str, Symbol] = {factor.text: factor for factor in factors if isinstance(factor, Symbol)}
    times = Counter(factor.text for factor in factors if isinstance(factor, Symbol))
    order = sorted(named, key=lambda text: (text not in ("b", "s", "t"), text in ("s", "t"), text not in MANY))
    total = number
    for text in order:
        total = total * (named[text] if times[text] == 1 else named[text] ** times[text])
    return total


def _sum(values: Sequence[int]) -> int:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def plain(kept: Sequence[Saved]) -> Kept:
    """The bytes of every step of one run, where any other size is another kind of call."""
    found: Kept = {}
    for saved in kept:
        found[saved.step] = found.get(saved.step, 0) + saved.nbytes
    return found
