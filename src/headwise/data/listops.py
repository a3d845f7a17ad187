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
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    find_correct,
    make_small_encoder,
    slice_by_value,
    sum_by_slice,
)
from .task import Batch, MetricSums

OPERATORS, DIGITS = 4, 10  # MIN, MAX, MED, SM; 0 to 9
QUARTER = 2**30  # of 2**32: how often a node is an operator


@dataclass
class TreeLevel:
    """The nodes of all trees at one depth, tree by tree: whose row, which node above, and what each is."""

    row: Ints
    parent: Ints
    is_operator: NDArray[np.bool_]
    arguments: Ints  # how many; 0 of a digit
    kind: Ints
    digit: Ints


def grow_trees(random: RandomStreams, depth: int, max_arguments: int, max_tokens: int) -> tuple[list[TreeLevel], Ints]:
    """A tree for each example, and how many tokens it is: 1 for a digit, 2 for an operator.

    Trees of more than `longest` tokens are left unfinished; no others can become so long.
    """
    row = np.arange(len(random))
    parent, met, length = np.full_like(row, -1), np.zeros_like(row), np.zeros_like(row)
    levels: list[TreeLevel] = []
    for above in reversed(range(depth)):
        number = met[row] + np.arange(len(row)) - np.searchsorted(row, row)
        chance, count, kind, digit = random.blocks(row, number)
        operator = (chance < QUARTER) & (above > 0)
        many = np.where(operator, 2 + _scale_to_limit(count, max_arguments - 1), 0)
        levels.append(
            TreeLevel(row, parent, operator, many, _scale_to_limit(kind, OPERATORS), _scale_to_limit(digit, DIGITS))
        )
        length += np.bincount(row, 1 + operator, len(random)).astype(np.int64)
        met += np.bincount(row, minlength=len(random))
        parent = np.repeat(np.arange(len(row)), np.where(length[row] <= max_tokens, many, 0))
        row = row[parent]
    return levels, length


def tree_length_distribution(depth: int, max_arguments: int, max_tokens: int) -> NDArray[np.float64]:
    """How likely a tree has 0, 1, ... `longest` tokens, up to the rounding of Fourier transforms.

    >>> tree_length_distribution(2, 3, 5).round(4).tolist()  # a digit, or two arguments, or three
    [0.0, 0.75, 0.0, 0.0, 0.125, 0.125]
    """
    digit = np.eye(1, max_tokens + 1, 1)[0]
    told = digit
    for _ in range(depth - 1):
        one = np.fft.rfft(told, 2 * (max_tokens + 1))
        power, several = one, np.zeros_like(told)
        for _ in range(max_arguments - 1):
            # Lengths beyond the longest are cut off at every step, or they would come back as short ones.
            found = np.fft.irfft(power * one, 2 * (max_tokens + 1))[: max_tokens + 1]
            power, several = np.fft.rfft(found, 2 * (max_tokens + 1)), several + found
        told = QUARTER / 2**32 * np.concatenate([[0, 0], several[:-2]]) / (max_arguments - 1)
        told = told + (1 - QUARTER / 2**32) * digit
    return told


def _scale_to_limit(words: np.ndarray, limit: int) -> Ints:
    return ((words * np.uint64(limit)) >> HALF).astype(np.int64)


def select_trees(levels: Sequence[TreeLevel], rows: NDArray[np.bool_]) -> list[TreeLevel]:
    """The trees of these rows alone; levels that only others reach are empty."""
    out, above = [], np.zeros(1, np.int64)
    for level in levels:
        keep = rows[level.row]
        fields = {name: values[keep] for name, values in vars(level).items()}
        out.append(replace(level, **fields | {"parent": above[fields["parent"]]}))
        above = keep.cumsum() - 1
    return out


def locate_nodes(levels: Sequence[TreeLevel]) -> tuple[list[Ints], list[Ints]]:
    """Where each node begins, the root at 1, and how many tokens it is with all that is below it; level by level."""
    sizes: list[Ints] = []
    for level, below in zip(reversed(levels), [None, *reversed(levels[1:])], strict=True):
        size = 1 + level.is_operator.astype(np.int64)
        if below is not None:
            size += np.bincount(below.parent, sizes[0], len(size)).astype(np.int64)
        sizes.insert(0, size)
    starts = [np.ones_like(sizes[0])]
    for level, size in zip(levels[1:], sizes[1:], strict=True):
        before = size.cumsum() - size
        first = np.searchsorted(level.parent, level.parent)  # the first argument of the same operator
        starts.append(starts[-1][level.parent] + 1 + before - before[first])
    return starts, sizes


def evaluate_trees(levels: Sequence[TreeLevel]) -> Ints:
    """The value of each tree."""
    below = levels[-1].digit
    for level in reversed(levels[:-1]):
        value = level.digit.copy()
        value[level.is_operator] = _apply_operators(
            below, level.arguments[level.is_operator], level.kind[level.is_operator]
        )
        below = value
    return below


def _apply_operators(values: Ints, count: Ints, kind: Ints) -> Ints:
    """What operators make of their arguments, which stand one after another.

    >>> _apply_operators(np.array([1, 2, 5, 8, 8, 7, 6]), np.array([4, 3]), np.array([2, 3])).tolist()
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


# --- listops -------------------------------------------------------------------------------------------

SYMBOLS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "=")  # padding is 0, the first token of all 16
NUM_CLASSES, FIRST_OPERATOR_ID, CLOSE_ID, READ_ID = 10, 11, 15, 16
SIZE_LIMITS = {"depth": (2, 32), "arguments": (2, 32), "shortest": (4, 4096), "longest": (4, 4096)}
MIN_LENGTH_PROBABILITY = 1 / 500  # of all trees that are drawn, the fewest that may be kept


class ListOpsAnnotation(NamedTuple):
    """What is known of an example: how deep its lists nest, and where the list of each token opens.

    An operator's own list is the one that it is an argument of, and the outermost one's is the first token.
    """

    depth: int
    parents: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class ListOps(SyntheticTask):
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
    def long_range_arena(cls, seed: int = 0) -> Self:
        """The Arena's sizes: ten levels, up to ten arguments, more than 500 and fewer than 2,000 tokens."""
        return cls(seed=seed, depth=10, arguments=10, shortest=501, longest=1999)

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob, (least, most) in SIZE_LIMITS.items():
            if check_whole_number(knob, getattr(self, knob), least) > most:
                raise SpecError(f"{knob}={getattr(self, knob)} is more than any model here learns; use at most {most}")
        if self.shortest > self.longest:
            fact = f"shortest={self.shortest} is more than longest={self.longest}"
            raise SpecError(f"{fact}; use shortest={self.longest} or less")
        share = tree_length_distribution(self.depth, self.arguments, self.longest)[self.shortest :].sum()
        if share < MIN_LENGTH_PROBABILITY:
            fact = f"{max(share, 0):.2%} of the trees of {self!r} have {self.shortest} to {self.longest} tokens"
            raise SpecError(f"{fact}, too few to be drawn; use a wider range, or other depth and arguments")
        check_num_examples(
            self, 4 * 10.0 ** min(self.longest - 2, self.arguments, 9), "use more arguments or a larger longest"
        )

    @property
    def chance(self) -> Mapping[str, float]:
        """Any digit. The classes are not alike frequent, so that always saying the commonest gives more."""
        return {"accuracy": 1 / NUM_CLASSES}

    def model(self) -> ModelSpec:
        """Four layers, and what the first token has gathered."""
        shape = ModelShape(width=64, heads=4, layers=4, feed=128)
        return make_small_encoder(
            self.name, len(SYMBOLS), shape, OutputHeadSpec("classes", NUM_CLASSES, at="first", bias="learned")
        )

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        levels, length = grow_trees(random, self.depth, self.arguments, self.longest)
        fits = (length >= self.shortest) & (length <= self.longest)
        levels = select_trees(levels, fits)
        starts, sizes = locate_nodes(levels)
        x = np.full((len(random), self.longest + 1), -1)
        parents = np.zeros_like(x)
        x[:, 0] = READ_ID
        for n, (level, start, size) in enumerate(zip(levels, starts, sizes, strict=True)):
            x[level.row, start] = np.where(level.is_operator, FIRST_OPERATOR_ID + level.kind, 1 + level.digit)
            parents[level.row, start] = starts[n - 1][level.parent] if n else 0
            row, end = level.row[level.is_operator], (start + size - 1)[level.is_operator]
            x[row, end], parents[row, end] = CLOSE_ID, start[level.is_operator]
        labels = np.zeros(len(random), np.int64)
        labels[levels[0].row] = evaluate_trees(levels)
        told = {
            "x": x,
            "labels": labels,
            "length": length + 1,
            "depth": _tree_depths(levels, len(random)),
            "parents": parents,
        }
        return {"content": x, "fits": fits, **told}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        length = examples["length"]
        x = torch.from_numpy(examples["x"][:, : length.max()]).clamp(min=0)
        tokens = SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        rows = zip(examples["depth"].tolist(), examples["parents"].tolist(), length.tolist(), strict=True)
        gold = [ListOpsAnnotation(depth, tuple(parents[:end])) for depth, parents, end in rows]
        return Batch(x, torch.from_numpy(examples["labels"]), tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy, and that of each depth."""
        right, asked = find_correct(logits, batch.labels)
        return sum_by_slice("accuracy", right, asked, slice_by_value("depth", [one.depth for one in batch.gold], asked))

    def text(self, ids: list[int]) -> str:
        """As it is written."""
        return " ".join(SYMBOLS[one] for one in ids if one)


def _tree_depths(levels: list[TreeLevel], rows: int) -> Ints:
    """How many levels each tree has."""
    deepest = np.zeros(rows, np.int64)
    for depth, level in enumerate(levels, 1):
        deepest[level.row] = depth
    return deepest
