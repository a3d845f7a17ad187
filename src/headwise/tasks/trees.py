"""Random trees of operators and digits, many at once, one level after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..draws import HALF, RandomStreams, Ints

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
