"""From two runs of different sizes, the formula of each memory: which of its axes are rows, tokens, heads, widths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from ..spec import AttentionSpec
from .imagined import CallSizes
from .symbols import SymbolicInt
from .watching import SavedTensor

# Powers of rows, tokens and tokens of a source that one axis may hold, as when axes are laid out as one.
SIZE_POWERS = sorted(product((0, 1), (0, 1, 2), (0, 1, 2)), key=sum)
HEAD_AXES = ("q", "kv", "v", "out", "voice")  # axes that count heads
WIDTH_AXES = ("model", "dim", "vdim", "source")  # axes by which a last axis is called first

BytesByStep = dict[str, int]  # bytes by the step that keeps them, each number knowing its formula


class SymbolicAxes:
    """The sizes of a load under their letters, and of a spec under the names of its axes."""

    def __init__(self, spec: AttentionSpec, load: CallSizes) -> None:
        told, letter = (load.tokens, "s") if spec.source is None else (load.source, "t")
        letters = SymbolicInt.of(load.batch, "b"), SymbolicInt.of(load.tokens, "s"), SymbolicInt.of(told, letter)
        self.load, self.names = CallSizes(*letters), dict(_named_axis_sizes(spec))

    def infer_width(self, size: int, last: bool, rows: bool) -> list[int]:
        """A size that is the same under every load, under the name of its axis where it has one."""
        if last:
            # Only what rows of tokens have may be a number of heads behind everything else: gates, say.
            order = [*WIDTH_AXES, *(name for name in self.names if name not in HEAD_AXES), *(HEAD_AXES if rows else ())]
        else:
            order = [*HEAD_AXES, *self.names]
        told = {name: self.names[name] for name in order if name in self.names}
        for known in told.values():
            if known == size != 1:
                return [known]
        for many, wide in product(HEAD_AXES, told):
            pair = [self.names[n] for n in (many, wide) if n in self.names]
            if len(pair) == 2 and pair[0] * pair[1] == size and 1 not in pair:
                return pair
        return [size]

    def infer_factors(self, saved: SavedTensor, other: SavedTensor, sizes: tuple[CallSizes, CallSizes]) -> list[int] | None:
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

    def _axis(self, pair: tuple[int, int], sizes: tuple[CallSizes, CallSizes], where: tuple[bool, bool]) -> list[int] | None:
        for powers in SIZE_POWERS:
            one, two = (_product_of_powers(each, powers) for each in sizes)
            if pair[0] * two == pair[1] * one and pair[0] % one == 0:
                letters = [size for size, times in zip(self.load, powers, strict=True) for _ in range(times)]
                return letters + self.infer_width(pair[0] // one, *where)
        for n in (1, 2):  # a token more, as of a sink
            more = pair[0] - sizes[0][n]
            if more == pair[1] - sizes[1][n]:
                return [self.load[n] + more]
        return None


def _named_axis_sizes(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    """Every axis of a spec with its size, and those that are laid end to end."""
    for _, part in spec.parts():
        sizes = spec.sizes_of(part)
        yield from ((name, SymbolicInt.of(size, name)) for name, size in sizes.items() if size > 1)
        layouts = [*(param.layout for param in part.params(spec).values()), *part.kv_entry_layouts(spec).values()]
        for axis in (axis for layout in layouts for axis in layout.axes if "|" in axis):
            size = sum(sizes[name] for name in axis.split("|"))
            yield axis, SymbolicInt.of(size, axis.replace("|", " + "), loose="sum")


def _product_of_powers(sizes: CallSizes, powers: Sequence[int]) -> int:
    total = 1
    for size, times in zip(sizes, powers, strict=True):
        total *= size**times
    return total


def infer_formulas(kept: Sequence[SavedTensor], others: Sequence[SavedTensor], axes: SymbolicAxes, sizes: tuple[CallSizes, CallSizes]) -> BytesByStep | None:
    """The bytes of every step, from two runs; None where these are not alike."""
    if [saved.step for saved in kept] != [other.step for other in others]:
        return None
    found: dict[str, dict[tuple[str, ...], int]] = {}
    for saved, other in zip(kept, others, strict=True):
        factors = axes.infer_factors(saved, other, sizes)
        if factors is None:
            return None
        step, value = found.setdefault(saved.step, {}), _symbolic_product(factors)
        alike = tuple(sorted(factor.text for factor in factors if isinstance(factor, SymbolicInt)))
        step[alike] = step[alike] + value if alike in step else value
    return {name: _symbolic_sum(list(each.values())) for name, each in found.items()}


def _symbolic_product(factors: Sequence[int]) -> int:
    """The product, its letters first."""
    number = 1
    for factor in factors:
        number *= 1 if isinstance(factor, SymbolicInt) else factor
    named: dict[str, SymbolicInt] = {factor.text: factor for factor in factors if isinstance(factor, SymbolicInt)}
    times = Counter(factor.text for factor in factors if isinstance(factor, SymbolicInt))
    order = sorted(named, key=lambda text: (text not in ("b", "s", "t"), text in ("s", "t"), text not in HEAD_AXES))
    total = number
    for text in order:
        total = total * (named[text] if times[text] == 1 else named[text] ** times[text])
    return total


def _symbolic_sum(values: Sequence[int]) -> int:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def sum_bytes_by_step(kept: Sequence[SavedTensor]) -> BytesByStep:
    """The bytes of every step of one run, where any other size is another kind of call."""
    found: BytesByStep = {}
    for saved in kept:
        found[saved.step] = found.get(saved.step, 0) + saved.nbytes
    return found
