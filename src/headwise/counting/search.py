"""The size at which a count comes nearest to a number, among the whole numbers that can be a size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from ..errors import SpecError

EXHAUSTIVE_SIZES = 192  # sizes that are tried one by one; in a longer row those between which the number lies
MAX_SEARCH_SIZE = 2**14  # sizes that are tried one by one where the count goes up and down
MAX_DOUBLINGS = 256  # of a size, at most
MAX_EQUAL_COUNTS = 6  # doublings that change nothing, before the count is taken not to follow the size
NUM_MONOTONICITY_PROBES = 24  # places where neighbours are held against each other before a count is taken to be monotone


@dataclass
class SizeSearch:
    """Sizes that were tried, each with its count, or None where there can be no such size.

    `gap` is how many in a row may be impossible before there are taken to be no more.

    >>> squares = SizeSearch(lambda size: size**2 if size and size % 6 == 0 else None, start=6)
    >>> squares.nearest(10**6), squares.reached(10**6), len(squares.tried) < 500
    ((1002, 1004004), True, True)
    """

    count: Callable[[int], int | None]
    start: int
    gap: int = 64
    counts: dict[int, int | None] = field(default_factory=dict[int, "int | None"])

    def nearest(self, wanted: int) -> tuple[int, int]:
        """The size that comes nearest, and its count; of equals the one that changes least, then the smaller."""
        top = self._upper_bound(wanted)
        if top <= EXHAUSTIVE_SIZES or not self._is_monotonic(top):
            self._scan(top)
        else:
            self._bisect(wanted)
        return min(self.valid_counts, key=lambda one: (abs(one[1] - wanted), abs(one[0] - self.start), one[0]))

    def is_bracketed(self, wanted: int) -> bool:
        """Whether there are counts on both sides of the wanted one."""
        counts = [count for _, count in self.valid_counts]
        return min(counts) <= wanted <= max(counts)

    @property
    def valid_counts(self) -> list[tuple[int, int]]:
        """Every possible size that was tried, with its count, in order."""
        return sorted((size, count) for size, count in self.counts.items() if count is not None)

    def _at(self, size: int) -> int | None:
        if size not in self.counts:
            self.counts[size] = self.count(size)
        return self.counts[size]

    def _next(self, some: range) -> int | None:
        """The first possible size of these."""
        return next((size for size in some if self._at(size) is not None), None)

    def _upper_bound(self, wanted: int) -> int:
        """A size beyond which nothing comes nearer; it is doubled, which keeps what heads divide by."""
        size, level = self.start, 0
        begun = self._counted(size)
        for _ in range(MAX_DOUBLINGS if begun != wanted else 0):
            above = self._next(range(2 * size, 4 * size + self.gap))
            if above is None:
                return self._next(range(2 * size - 1, size, -1)) or size
            size, reached = above, self._counted(above)
            level = level + 1 if reached == begun else 0
            away = abs(reached - wanted) > abs(begun - wanted)
            if away or level == MAX_EQUAL_COUNTS or min(begun, reached) <= wanted <= max(begun, reached):
                break
        return size

    def _counted(self, size: int) -> int:
        count = self._at(size)
        if count is None:
            raise SpecError(f"there can be no size {size}; begin from one that there can be")
        return count

    def _is_monotonic(self, top: int) -> bool:
        """Whether the count only rises, or only falls, as far as can be told: over all that range, and in the small."""
        for place in range(0, top, max(top // NUM_MONOTONICITY_PROBES, 1)):
            one = self._next(range(place, min(place + self.gap, top)))
            _ = None if one is None else self._next(range(one + 1, min(one + self.gap, top)))
        counts = [count for _, count in self.valid_counts]
        ups = {other > one for one, other in pairwise(counts) if other != one}
        return len(ups) < 2

    def _bisect(self, wanted: int) -> None:
        """Try sizes between the two that enclose the wanted count, until there is none between them."""
        if not self.is_bracketed(wanted):
            return
        sides = pairwise(self.valid_counts)
        low, high = next((a, b) for (a, one), (b, other) in sides if min(one, other) <= wanted <= max(one, other))
        rises = self._counted(low) <= self._counted(high)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._next(range(middle, high))
            if found is None:
                high, found = middle, self._next(range(middle - 1, low, -1))
                if found is None:
                    return
            if (self._counted(found) < wanted) == rises:
                low = found
            else:
                high = found

    def _scan(self, top: int) -> None:
        if top > MAX_SEARCH_SIZE + self.gap:
            raise SpecError(
                f"the count goes up and down up to {top}, which is too far to look; begin from a smaller size"
            )
        for size in range(top + 1):
            self._at(size)
