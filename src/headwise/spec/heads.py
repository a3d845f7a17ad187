"""Heads: how many, how wide, and who reads whom."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from ..errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Heads:
    """`q` score heads of width `dim` read `kv` key-value heads; what they read is `vdim` wide (0 stands for `dim`).

    ``reads[h]`` is the key head that score head h reads, ``values[r]`` the value head that row r of the weights
    reads (row h is score head h's and reads the same one, unless given), ``speaks[o]`` the row that is output
    head o's own. Multi-head, grouped-query, multi-query and any pruned shape are one type:

    >>> Heads.grouped(q=6, kv=2, dim=5).reads
    (0, 0, 0, 1, 1, 1)
    >>> Heads(q=3, kv=2, dim=5, reads=(0, 1, 1)).is_evenly_grouped
    False
    """

    q: int
    kv: int
    dim: int
    vdim: int = 0
    reads: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    speaks: tuple[int, ...] = ()

    @staticmethod
    def grouped(*, q: int, dim: int, kv: int | None = None, vdim: int | None = None) -> Heads:
        """q heads in equal groups, each group sharing one of kv key-value heads (all their own by default)."""
        if vdim is not None:
            _positive("vdim", vdim)
        return Heads(q=q, kv=q if kv is None else kv, dim=dim, vdim=vdim or 0)

    def __post_init__(self) -> None:
        for name in ("q", "kv", "dim"):
            _positive(name, getattr(self, name))
        if self.vdim == 0:
            object.__setattr__(self, "vdim", self.dim)
        _positive("vdim", self.vdim)
        for name in ("reads", "values", "speaks"):
            object.__setattr__(self, name, _check_head_map(name, getattr(self, name)))
        if not self.reads:
            object.__setattr__(self, "reads", _even(self.q, self.kv))
        if self.values == self.reads:
            object.__setattr__(self, "values", ())
        _check_all_heads_used("reads", self.reads, self.q, self.kv, "key-value head")
        if self.values:
            _check_all_heads_used("values", self.values, len(self.values), self.num_value_heads, "value head")
        if any(not 0 <= own < self.rows for own in self.speaks):
            raise SpecError(
                f"speaks={self.speaks} names a score head outside 0..{self.rows - 1}; give one per output head"
            )

    @property
    def value_head_of_row(self) -> tuple[int, ...]:
        """The value head that each row of weights reads."""
        return self.values or self.reads

    @property
    def rows(self) -> int:
        """How many rows of weights could read values: one for each score head, unless a mixing makes it others."""
        return len(self.value_head_of_row)

    @property
    def value_axis(self) -> str:
        """The axis of the value heads: the keys' own, unless values are grouped otherwise."""
        return "v" if self.values else "kv"

    @property
    def num_value_heads(self) -> int:
        """How many value heads there are."""
        return max(self.values) + 1 if self.values else self.kv

    @property
    def is_evenly_grouped(self) -> bool:
        """Whether equal, neighbouring groups of score heads share each key-value head."""
        return not self.values and self.q % self.kv == 0 and self.reads == _even(self.q, self.kv)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        grouped = self.is_evenly_grouped
        shown = {
            name: value
            for name, value in shown.items()
            if not (value == () or (name == "vdim" and value == self.dim) or (name == "reads" and grouped))
        }
        said = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"Heads.grouped({said})" if grouped and not self.speaks else f"Heads({said})"


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"heads need a whole {name} of at least 1, not {value!r}; give {name}=1 or more")


def _check_head_map(name: str, told: object) -> tuple[int, ...]:
    row: list[Any] = list(cast("list[Any]", told)) if isinstance(told, (tuple, list)) else [told]
    if not isinstance(told, (tuple, list)) or any(type(head) is not int for head in row):
        raise SpecError(f"{name}={told!r} must list the numbers of heads, 0..1 for two; write {name}=(0, 0, 1, 1)")
    return tuple(row)


def _even(q: int, kv: int) -> tuple[int, ...]:
    if q % kv:
        ways = [n for n in range(1, q + 1) if q % n == 0]
        raise SpecError(
            f"{q} query heads cannot share {kv} key-value heads evenly; use kv in {ways}, or say reads= for each head"
        )
    return tuple(h // (q // kv) for h in range(q))


def _check_all_heads_used(name: str, who: tuple[int, ...], q: int, read: int, what: str) -> None:
    if len(who) != q:
        raise SpecError(f"{name}={who} says what {len(who)} heads read, but there are {q}; give one {what} for each")
    if sorted(set(who)) != list(range(read)):
        raise SpecError(f"{name}={who} must name every {what} 0..{read - 1} at least once and no other")
