"""Random trees of operators and digits, many at once, one level after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError
from ..masking.pattern_base import check_whole_number
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, OutputHeadSpec
from ..ops.counter_rng import HALF, Ints, RandomStreams
from .synthetic_task import Drawn, Generated, Shape, check_space, each_of, encoder, right_of, tallied
from .task import Batch, Tally

OPERATORS, DIGITS = 4, 10  # MIN, MAX, MED, SM; 0 to 9
QUARTER = 2**30  # of 2**32: how often a node is an operator


@dataclass
class Level:
    """The nodes of all trees at one depth, tree by tree: whose row, which node above, and what each is."""

    row: Ints
    parent: Ints
    operator: NDArray[np.bool_]
    arguments: Ints  # how many; 0 of a digit
    kind: Ints
    digit: Ints


def grow(draws: RandomStreams, depth: int, arguments: int, longest: int) -> tuple[list[Level], Ints]:
    """A tree for each example, and how many tokens it is: 1 for a digit, 2 for an operator.

    Trees of more than `longest` tokens are left unfinished; no others can become so long.
    """
    row = np.arange(len(draws))
    parent, met, length = np.full_like(row, -1), np.zeros_like(row), np.zeros_like(row)
    levels: list[Level] = []
    for above in reversed(range(depth)):
        number = met[row] + np.arange(len(row)) - np.searchsorted(row, row)
        chance, count, kind, digit = draws.blocks(row, number)
        operator = (chance < QUARTER) & (above > 0)
        many = np.where(operator, 2 + _below(count, arguments - 1), 0)
        levels.append(Level(row, parent, operator, many, _below(kind, OPERATORS), _below(digit, DIGITS)))
        length += np.bincount(row, 1 + operator, len(draws)).astype(np.int64)
        met += np.bincount(row, minlength=len(draws))
        parent = np.repeat(np.arange(len(row)), np.where(length[row] <= longest, many, 0))
        row = row[parent]
    return levels, length


def lengths(depth: int, arguments: int, longest: int) -> NDArray[np.float64]:
    """How likely a tree has 0, 1, ... `longest` tokens, up to the rounding of Fourier transforms.

    >>> lengths(2, 3, 5).round(4).tolist()  # a digit, or two arguments, or three
    [0.0, 0.75, 0.0, 0.0, 0.125, 0.125]
    """
    digit = np.eye(1, longest + 1, 1)[0]
    told = digit
    for _ in range(depth - 1):
        one = np.fft.rfft(told, 2 * (longest + 1))
        power, several = one, np.zeros_like(told)
        for _ in range(arguments - 1):
            # Lengths beyond the longest are cut off at every step, or they would come back as short ones.
            found = np.fft.irfft(power * one, 2 * (longest + 1))[: longest + 1]
            power, several = np.fft.rfft(found, 2 * (longest + 1)), several + found
        told = QUARTER / 2**32 * np.concatenate([[0, 0], several[:-2]]) / (arguments - 1)
        told = told + (1 - QUARTER / 2**32) * digit
    return told


def _below(words: np.ndarray, limit: int) -> Ints:
    return ((words * np.uint64(limit)) >> HALF).astype(np.int64)


def chosen(levels: Sequence[Level], rows: NDArray[np.bool_]) -> list[Level]:
    """The trees of these rows alone; levels that only others reach are empty."""
    out, above = [], np.zeros(1, np.int64)
    for level in levels:
        keep = rows[level.row]
        fields = {name: values[keep] for name, values in vars(level).items()}
        out.append(replace(level, **fields | {"parent": above[fields["parent"]]}))
        above = keep.cumsum() - 1
    return out


def written(levels: Sequence[Level]) -> tuple[list[Ints], list[Ints]]:
    """Where each node begins, the root at 1, and how many tokens it is with all that is below it; level by level."""
    sizes: list[Ints] = []
    for level, below in zip(reversed(levels), [None, *reversed(levels[1:])], strict=True):
        size = 1 + level.operator.astype(np.int64)
        if below is not None:
            size += np.bincount(below.parent, sizes[0], len(size)).astype(np.int64)
        sizes.insert(0, size)
    starts = [np.ones_like(sizes[0])]
    for level, size in zip(levels[1:], sizes[1:], strict=True):
        before = size.cumsum() - size
        first = np.searchsorted(level.parent, level.parent)  # the first argument of the same operator
        starts.append(starts[-1][level.parent] + 1 + before - before[first])
    return starts, sizes


def values(levels: Sequence[Level]) -> Ints:
    """The value of each tree."""
    below = levels[-1].digit
    for level in reversed(levels[:-1]):
        value = level.digit.copy()
        value[level.operator] = _reduced(below, level.arguments[level.operator], level.kind[level.operator])
        below = value
    return below


def _reduced(values: Ints, count: Ints, kind: Ints) -> Ints:
    """What operators make of their arguments, which stand one after another.

    >>> _reduced(np.array([1, 2, 5, 8, 8, 7, 6]), np.array([4, 3]), np.array([2, 3])).tolist()
    [3, 1]
    """
    if not len(count):
        return count
    first = count.cumsum() - count
    ranked = values[np.lexsort((values, np.repeat(first, count)))]
    middle = (ranked[first + (count - 1) // 2] + ranked[first + count // 2]) // 2
    return np.select(
        [kind == 0, kind == 1, kind == 2],
        [ranked[first], ranked[first + count - 1], middle],
        np.add.reduceat(values, first) % DIGITS,
    )


# SECTION: listops: the value of nested lists of digits, as one of ten classes.

SYMBOLS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "=")  # padding is 0, the first token of all 16
CLASSES, OPEN, CLOSE, READ = 10, 11, 15, 16
SIZES = {"depth": (2, 32), "arguments": (2, 32), "shortest": (4, 4096), "longest": (4, 4096)}
RARE = 1 / 500  # of all trees that are drawn, the fewest that may be kept


class Nested(NamedTuple):
    """What is known of an example: how deep its lists nest, and where the list of each token opens.

    An operator's own list is the one that it is an argument of, and the outermost one's is the first token.
    """

    depth: int
    parents: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class ListOps(Generated):
    """`= [MAX 2 9 [MIN 4 7 ] 0 ]` has the class 9 (1804.06028, as Long Range Arena generates it, 2011.04006).

    MIN, MAX, MED (of an even number, the mean of the two middle ones, cut down) and SM, the sum modulo 10. A node
    above `depth` is an operator one time in four and has 2 .. `arguments` arguments; else it is a digit. Kept are
    texts of `shortest` .. `longest` tokens, "=" not counted. `ListOps.published()` has the sizes of the Arena.

    >>> task = ListOps(arguments=4, shortest=9, longest=12)
    >>> batch = task.batch(0, 1)
    >>> print(task.text(batch.x[0].tolist()), batch.labels.tolist())
    = [MAX [MIN 8 2 5 ] 8 3 ] [8]
    """

    name: ClassVar[str] = "listops"
    depth: int = 4
    arguments: int = 10
    shortest: int = 8
    longest: int = 96

    @classmethod
    def published(cls, seed: int = 0) -> Self:
        """The Arena's sizes: ten levels, up to ten arguments, more than 500 and fewer than 2,000 tokens."""
        return cls(seed=seed, depth=10, arguments=10, shortest=501, longest=1999)

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob, (least, most) in SIZES.items():
            if check_whole_number(knob, getattr(self, knob), least) > most:
                raise SpecError(f"{knob}={getattr(self, knob)} is more than any model here learns; use at most {most}")
        if self.shortest > self.longest:
            fact = f"shortest={self.shortest} is more than longest={self.longest}"
            raise SpecError(f"{fact}; use shortest={self.longest} or less")
        share = lengths(self.depth, self.arguments, self.longest)[self.shortest :].sum()
        if share < RARE:
            fact = f"{max(share, 0):.2%} of the trees of {self!r} have {self.shortest} to {self.longest} tokens"
            raise SpecError(f"{fact}, too few to be drawn; use a wider range, or other depth and arguments")
        check_space(
            self, 4 * 10.0 ** min(self.longest - 2, self.arguments, 9), "use more arguments or a larger longest"
        )

    @property
    def chance(self) -> Mapping[str, float]:
        """Any digit. The classes are not alike frequent, so that always saying the commonest gives more."""
        return {"accuracy": 1 / CLASSES}

    def model(self) -> ModelSpec:
        """Four layers, and what the first token has gathered."""
        shape = Shape(width=64, heads=4, layers=4, feed=128)
        return encoder(self.name, len(SYMBOLS), shape, OutputHeadSpec("classes", CLASSES, at="first", bias="learned"))

    def draw(self, draws: RandomStreams) -> Drawn:
        levels, length = grow(draws, self.depth, self.arguments, self.longest)
        fits = (length >= self.shortest) & (length <= self.longest)
        levels = chosen(levels, fits)
        starts, sizes = written(levels)
        x = np.full((len(draws), self.longest + 1), -1)
        parents = np.zeros_like(x)
        x[:, 0] = READ
        for n, (level, start, size) in enumerate(zip(levels, starts, sizes, strict=True)):
            x[level.row, start] = np.where(level.operator, OPEN + level.kind, 1 + level.digit)
            parents[level.row, start] = starts[n - 1][level.parent] if n else 0
            row, end = level.row[level.operator], (start + size - 1)[level.operator]
            x[row, end], parents[row, end] = CLOSE, start[level.operator]
        labels = np.zeros(len(draws), np.int64)
        labels[levels[0].row] = values(levels)
        told = {"x": x, "labels": labels, "length": length + 1, "depth": _depth(levels, len(draws)), "parents": parents}
        return {"content": x, "fits": fits, **told}

    def show(self, drawn: Drawn) -> Batch:
        length = drawn["length"]
        x = torch.from_numpy(drawn["x"][:, : length.max()]).clamp(min=0)
        tokens = SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        rows = zip(drawn["depth"].tolist(), drawn["parents"].tolist(), length.tolist(), strict=True)
        gold = [Nested(depth, tuple(parents[:end])) for depth, parents, end in rows]
        return Batch(x, torch.from_numpy(drawn["labels"]), tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> Tally:
        """Accuracy, and that of each depth."""
        right, asked = right_of(logits, batch.labels)
        return tallied("accuracy", right, asked, each_of("depth", [one.depth for one in batch.gold], asked))

    def text(self, ids: list[int]) -> str:
        """As it is written."""
        return " ".join(SYMBOLS[one] for one in ids if one)


def _depth(levels: list[Level], rows: int) -> Ints:
    """How many levels each tree has."""
    deepest = np.zeros(rows, np.int64)
    for depth, level in enumerate(levels, 1):
        deepest[level.row] = depth
    return deepest
