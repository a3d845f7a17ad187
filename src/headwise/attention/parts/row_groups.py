"""Output heads that are computed from several rows of weights: the base class, and their sum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import ClassVar

from torch import Tensor

from ...util.size_limits import MAX_HEADS
from ..interfaces import OutputStep
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads


class RowGroups(OutputStep):
    """Base class of steps that compute output head i from the rows of score heads n i to
    n i + n - 1, where n is `group_size`.
    """

    combines_rows: ClassVar[bool] = True

    @property
    @abstractmethod
    def group_size(self) -> int:
        """The number of rows in a group."""

    @property
    def needs_all_groups(self) -> bool:
        """True if every output head is computed from the rows of all heads."""
        return False

    def grouping_errors(self, heads: Heads) -> Iterator[str]:
        """Reasons why these heads do not form groups with the first head as output head."""
        name = type(self).__name__
        size = self.group_size
        if heads.rows != heads.q:
            yield (
                f"{name} needs one row per score head, but there are {heads.rows} rows for "
                f"{heads.q}; leave parts that change the number of heads out"
            )
        if heads.q % size:
            yield (
                f"{name} combines groups of {size} heads, but q={heads.q}; use "
                f"q={(heads.q // size + 1) * size}"
            )
        if any(head % size for head in heads.score_head_of_output):
            fact = f"score_head_of_output={heads.score_head_of_output} names other heads of groups"
            yield f"{fact}; name the first head of each group, 0, {size}, {2 * size}, ..."

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        if self.needs_all_groups:
            return frozenset(range(spec.heads.q))
        return whole_groups(heads, self.group_size)

    def required_rows(self, own_rows: tuple[int, ...], rows: int) -> tuple[int, ...]:
        if self.needs_all_groups:
            return tuple(range(rows))
        return repeat_consecutive(own_rows, self.group_size)

    def own_row_of_output(self, rows: int) -> tuple[int, ...]:
        return tuple(range(0, rows, self.group_size))


def whole_groups(heads: Iterable[int], size: int) -> frozenset[int]:
    """All heads of the groups of these heads.

    >>> sorted(whole_groups([5, 0], 2))
    [0, 1, 4, 5]
    """
    return frozenset(chain.from_iterable(_group_of(head, size) for head in heads))


def _group_of(head: int, size: int) -> range:
    """The heads of the group of this head.

    >>> list(_group_of(5, 2))
    [4, 5]
    """
    first = head - head % size
    return range(first, first + size)


def repeat_consecutive(numbers: Iterable[int], size: int, distance: int = 1) -> tuple[int, ...]:
    """Each number followed by the next ones at this distance, `size` in all.

    >>> repeat_consecutive([3, 8], 2), repeat_consecutive([3, 8], 2, distance=0)
    ((3, 4, 8, 9), (3, 3, 8, 8))
    """
    return tuple(number + distance * n for number in numbers for n in range(size))


@part
class SumRows(RowGroups):
    """o_i = (sum of the outputs of `rows` score heads) / sqrt(rows), the branches of multi-head
    low-rank attention (2603.02188).

    `design(heads=h, kv=g)` makes `rows` score heads for each of h output heads, and g key-value
    heads for each branch:

    >>> import headwise as hw
    >>> spec = hw.design(model=16, heads=4, kv=2, modifiers=(SumRows(rows=2),))
    >>> spec.heads.kv, spec.heads.kv_head_of_query
    (4, (0, 2, 0, 2, 1, 3, 1, 3))
    """

    paper = "2603.02188"
    rows: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields({"rows": (1, MAX_HEADS)}, {})

    @property
    def group_size(self) -> int:
        return self.rows

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        errors = [*self.grouping_errors(spec.heads)]
        yield from errors
        keys = spec.heads.kv_head_of_query
        groups = [keys[n : n + self.rows] for n in range(0, len(keys), self.rows)]
        shared = [group for group in groups if len(set(group)) < self.rows]
        if shared and not errors:
            yield (
                f"SumRows(rows={self.rows}) adds up heads with the key-value heads {shared[0]}; "
                "give each of them another one in heads.kv_head_of_query"
            )

    def fit_heads(self, heads: Heads) -> Heads:
        keys = repeat_consecutive(heads.kv_head_of_query, self.rows, distance=heads.kv)
        return replace(heads, q=heads.q * self.rows, kv=heads.kv * self.rows, kv_head_of_query=keys)

    def widen_heads(self, heads: Heads) -> Heads:
        """`heads` with key-value heads for each branch, if its groups were reset to even ones."""
        is_reset = len(set(heads.kv_head_of_query[: self.rows])) < self.rows
        if not is_reset or heads.q % self.rows or heads.kv % self.rows:
            return heads
        of_branch = Heads.grouped(
            q=heads.q // self.rows, kv=heads.kv // self.rows, dim=heads.dim, vdim=heads.vdim
        )
        return replace(heads, kv_head_of_query=self.fit_heads(of_branch).kv_head_of_query)

    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor:
        return o_BTRV.unflatten(-2, (-1, self.rows)).sum(-2) * self.rows**-0.5

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, pattern="causal", vdim=5)
        yield base(modifiers=(cls(rows=3),), kv=3)
