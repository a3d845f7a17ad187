"""The task "listops": evaluate nested lists of operators and digits, which are generated level by level."""

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

# --- Random trees, all examples of a batch at once -----------------------------------------------------

OPERATORS, DIGITS = 4, 10  # MIN, MAX, MED, SM; 0 to 9
QUARTER = 2**30  # a node is an operator if its 32 random bits are below this: one in four


@dataclass
class TreeLevel:
    """The nodes of all trees at one depth, sorted by tree."""

    row: Ints  # the tree of each node
    parent: Ints  # index of its parent in the level above
    is_operator: NDArray[np.bool_]
    arguments: Ints  # number of arguments; 0 for a digit
    kind: Ints  # which operator
    digit: Ints


def grow_trees(random: RandomStreams, depth: int, max_arguments: int, max_tokens: int) -> tuple[list[TreeLevel], Ints]:
    """Random trees, one per example, and their numbers of tokens: 1 for a digit, 2 for an operator.

    A tree that exceeds `max_tokens` is not grown further.
    """
    row = np.arange(len(random))
    parent, num_nodes, length = np.full_like(row, -1), np.zeros_like(row), np.zeros_like(row)
    levels: list[TreeLevel] = []
    for levels_below in reversed(range(depth)):
        node = num_nodes[row] + np.arange(len(row)) - np.searchsorted(row, row)  # number of a node in its tree
        chance, count, kind, digit = random.blocks(row, node)
        is_operator = (chance < QUARTER) & (levels_below > 0)
        arguments = np.where(is_operator, 2 + _scale_to_limit(count, max_arguments - 1), 0)
        kind, digit = _scale_to_limit(kind, OPERATORS), _scale_to_limit(digit, DIGITS)
        levels.append(TreeLevel(row, parent, is_operator, arguments, kind, digit))
        length += np.bincount(row, 1 + is_operator, len(random)).astype(np.int64)
        num_nodes += np.bincount(row, minlength=len(random))
        parent = np.repeat(np.arange(len(row)), np.where(length[row] <= max_tokens, arguments, 0))
        row = row[parent]
    return levels, length


def tree_length_distribution(depth: int, max_arguments: int, max_tokens: int) -> NDArray[np.float64]:
    """Probabilities that a random tree has 0, 1, ... `max_tokens` tokens, computed with FFTs.

    >>> tree_length_distribution(2, 3, 5).round(4).tolist()  # a digit, or two arguments, or three
    [0.0, 0.75, 0.0, 0.0, 0.125, 0.125]
    """
    digit = np.eye(1, max_tokens + 1, 1)[0]  # a digit is one token
    tree = digit  # length distribution of trees of the current depth
    for _ in range(depth - 1):
        spectrum = np.fft.rfft(tree, 2 * (max_tokens + 1))
        power, argument_lists = spectrum, np.zeros_like(tree)
        for _ in range(max_arguments - 1):
            # Longer lists are cut off at every step; otherwise they would wrap around to short lengths.
            lists = np.fft.irfft(power * spectrum, 2 * (max_tokens + 1))[: max_tokens + 1]
            power, argument_lists = np.fft.rfft(lists, 2 * (max_tokens + 1)), argument_lists + lists
        tree = QUARTER / 2**32 * np.concatenate([[0, 0], argument_lists[:-2]]) / (max_arguments - 1)
        tree = tree + (1 - QUARTER / 2**32) * digit
    return tree


def _scale_to_limit(words: np.ndarray, limit: int) -> Ints:
    return ((words * np.uint64(limit)) >> HALF).astype(np.int64)


def select_trees(levels: Sequence[TreeLevel], rows: NDArray[np.bool_]) -> list[TreeLevel]:
    """Keep the trees whose entry in the mask `rows` is True; deep levels may become empty."""
    out, new_index = [], np.zeros(1, np.int64)
    for level in levels:
        keep = rows[level.row]
        fields = {name: values[keep] for name, values in vars(level).items()}
        out.append(replace(level, **fields | {"parent": new_index[fields["parent"]]}))
        new_index = keep.cumsum() - 1
    return out


def locate_nodes(levels: Sequence[TreeLevel]) -> tuple[list[Ints], list[Ints]]:
    """First token of each node (the root is at 1) and number of tokens of its subtree, level by level."""
    sizes: list[Ints] = []
    for level, next_level in zip(reversed(levels), [None, *reversed(levels[1:])], strict=True):
        size = 1 + level.is_operator.astype(np.int64)
        if next_level is not None:
            size += np.bincount(next_level.parent, sizes[0], len(size)).astype(np.int64)
        sizes.insert(0, size)
    starts = [np.ones_like(sizes[0])]
    for level, size in zip(levels[1:], sizes[1:], strict=True):
        before = size.cumsum() - size
        first = np.searchsorted(level.parent, level.parent)  # the first argument of the same operator
        starts.append(starts[-1][level.parent] + 1 + before - before[first])
    return starts, sizes


def evaluate_trees(levels: Sequence[TreeLevel]) -> Ints:
    """Value of each tree, 0 to 9."""
    values = levels[-1].digit
    for level in reversed(levels[:-1]):
        level_values = level.digit.copy()
        level_values[level.is_operator] = _apply_operators(
            values, level.arguments[level.is_operator], level.kind[level.is_operator]
        )
        values = level_values
    return values


def _apply_operators(values: Ints, count: Ints, kind: Ints) -> Ints:
    """Results of operators; `values` are their arguments one after the other, `count` the number of each.

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


# --- The task ------------------------------------------------------------------------------------------

SYMBOLS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "=")  # 0 is padding; every row begins with 16
NUM_CLASSES, FIRST_OPERATOR_ID, CLOSE_ID, READ_ID = 10, 11, 15, 16
SIZE_LIMITS = {"depth": (2, 32), "arguments": (2, 32), "shortest": (4, 4096), "longest": (4, 4096)}
MIN_LENGTH_PROBABILITY = 1 / 500  # at least this share of random trees must have an allowed length


class ListOpsAnnotation(NamedTuple):
    """Annotation of an example: nesting depth, and for each token the index of the operator of its list.

    The parent of an operator is the operator that it is an argument of; the parent of the outermost one is token 0.
    """

    depth: int
    parents: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class ListOps(SyntheticTask):
    """Evaluate a nested list: `= [MAX 2 9 [MIN 4 7 ] 0 ]` has the class 9 (1804.06028).

    Lists are generated as in Long Range Arena (2011.04006). The operators are MIN, MAX, MED (the median; for an even
    number of arguments the mean of the two middle ones, rounded down) and SM (the sum modulo 10). A node above level
    `depth` is an operator with probability 1/4 and has 2 .. `arguments` arguments; all other nodes are digits. Only
    lists of `shortest` .. `longest` tokens are used, "=" not counted. `ListOps.long_range_arena()` has the sizes of
    the Arena.

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
        """The task with the sizes of Long Range Arena: ten levels, up to ten arguments, 501 to 1,999 tokens."""
        return cls(seed=seed, depth=10, arguments=10, shortest=501, longest=1999)

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, (minimum, maximum) in SIZE_LIMITS.items():
            if check_whole_number(option, getattr(self, option), minimum) > maximum:
                raise SpecError(f"{option}={getattr(self, option)} is too large; use at most {maximum}")
        if self.shortest > self.longest:
            fact = f"shortest={self.shortest} is more than longest={self.longest}"
            raise SpecError(f"{fact}; use shortest={self.longest} or less")
        share = tree_length_distribution(self.depth, self.arguments, self.longest)[self.shortest :].sum()
        if share < MIN_LENGTH_PROBABILITY:
            fact = f"only {max(share, 0):.2%} of the trees of {self!r} have {self.shortest} to {self.longest} tokens"
            raise SpecError(f"{fact}; use a wider range of lengths, or other depth and arguments")
        check_num_examples(
            self, 4 * 10.0 ** min(self.longest - 2, self.arguments, 9), "use more arguments or a larger longest"
        )

    @property
    def chance(self) -> Mapping[str, float]:
        """Accuracy of guessing any digit; always guessing the most frequent class scores a little more."""
        return {"accuracy": 1 / NUM_CLASSES}

    def model(self) -> ModelSpec:
        """An encoder of four layers that classifies the state of the first token."""
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
        return {
            "content": x,
            "fits": fits,
            "x": x,
            "labels": labels,
            "length": length + 1,
            "depth": _tree_depths(levels, len(random)),
            "parents": parents,
        }

    def to_batch(self, examples: ExampleArrays) -> Batch:
        length = examples["length"]
        x = torch.from_numpy(examples["x"][:, : length.max()]).clamp(min=0)
        tokens = SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        rows = zip(examples["depth"].tolist(), examples["parents"].tolist(), length.tolist(), strict=True)
        gold = [ListOpsAnnotation(depth, tuple(parents[:end])) for depth, parents, end in rows]
        return Batch(x, torch.from_numpy(examples["labels"]), tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy overall and by depth."""
        correct, has_label = find_correct(logits, batch.labels)
        by_depth = slice_by_value("depth", [example.depth for example in batch.gold], has_label)
        return sum_by_slice("accuracy", correct, has_label, by_depth)

    def text(self, ids: list[int]) -> str:
        """Symbols of the ids, padding left out."""
        return " ".join(SYMBOLS[token_id] for token_id in ids if token_id)


def _tree_depths(levels: list[TreeLevel], rows: int) -> Ints:
    depths = np.zeros(rows, np.int64)
    for depth, level in enumerate(levels, 1):
        depths[level.row] = depth
    return depths
