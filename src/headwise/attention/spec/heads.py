"""The heads of a layer: their number, their widths, and which key-value head
each query head uses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from ...util.errors import SpecError
from ...util.size_limits import MAX_HEAD_DIM, MAX_HEADS, check_size

# The fields of `Heads` that map heads to heads; empty ones stand for equal groups.
HEAD_MAPS = ("kv_head_of_query", "value_heads", "score_head_of_output")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a layer: `q` query heads on `kv` key-value heads.

    Queries and keys have `dim` channels per head, values `vdim` (0 means `dim`).

    ``kv_head_of_query[h]`` is the key-value head of query head h. ``value_heads[r]`` is the value
    head of row r of the attention weights; without `value_heads`, row h belongs to query head h and
    uses the value head ``kv_head_of_query[h]``. ``score_head_of_output[o]`` is the row of weights
    that output head o comes from. One class thus describes multi-head, grouped-query and
    multi-query attention and every pruned shape:

    >>> Heads.grouped(q=6, kv=2, dim=5).kv_head_of_query
    (0, 0, 0, 1, 1, 1)
    >>> Heads(q=3, kv=2, dim=5, kv_head_of_query=(0, 1, 1)).is_evenly_grouped
    False
    """

    q: int
    kv: int
    dim: int
    vdim: int = 0
    kv_head_of_query: tuple[int, ...] = ()
    value_heads: tuple[int, ...] = ()
    score_head_of_output: tuple[int, ...] = ()

    @staticmethod
    def grouped(*, q: int, dim: int, kv: int | None = None, vdim: int | None = None) -> Heads:
        """q query heads in kv equal groups that share a key-value head each (default: one key-value
        head per head).
        """
        if vdim is not None:
            _positive("vdim", vdim)
        return Heads(q=q, kv=q if kv is None else kv, dim=dim, vdim=vdim or 0)

    def __post_init__(self) -> None:
        for name in ("q", "kv", "dim"):
            _positive(name, getattr(self, name))
        if self.vdim == 0:
            object.__setattr__(self, "vdim", self.dim)
        _positive("vdim", self.vdim)
        for name in HEAD_MAPS:
            value = getattr(self, name)
            heads: list[Any] = (
                list(cast("list[Any]", value)) if isinstance(value, (tuple, list)) else [value]
            )
            if not isinstance(value, (tuple, list)) or any(type(head) is not int for head in heads):
                raise SpecError(
                    f"{name}={value!r} must be a tuple of head indices from 0, "
                    f"such as {name}=(0, 0, 1, 1)"
                )
            check_size(f"the length of heads.{name}", len(heads), MAX_HEADS)
            check_size(f"a head of heads.{name}", max(heads, default=0), MAX_HEADS)
            object.__setattr__(self, name, tuple(heads))
        if not self.kv_head_of_query:
            object.__setattr__(self, "kv_head_of_query", _even_groups(self.q, self.kv))
        if self.value_heads == self.kv_head_of_query:
            object.__setattr__(self, "value_heads", ())
        _check_all_heads_used(
            "kv_head_of_query", self.kv_head_of_query, self.q, self.kv, "key-value head"
        )
        if self.value_heads:
            _check_all_heads_used(
                "value_heads",
                self.value_heads,
                len(self.value_heads),
                self.num_value_heads,
                "value head",
            )
        if any(not 0 <= own < self.rows for own in self.score_head_of_output):
            raise SpecError(
                f"score_head_of_output={self.score_head_of_output} has a score head outside "
                f"0..{self.rows - 1}; "
                "give one per output head"
            )

    @property
    def value_head_of_row(self) -> tuple[int, ...]:
        """The value head of each row of attention weights."""
        return self.value_heads or self.kv_head_of_query

    @property
    def rows(self) -> int:
        """The number of rows of attention weights: one per score head, unless a mix changes the
        number of heads.
        """
        return len(self.value_head_of_row)

    @property
    def value_axis(self) -> str:
        """The name of the axis of value heads: "kv" if they are grouped as the
        keys are, else "v".
        """
        return "v" if self.value_heads else "kv"

    @property
    def num_value_heads(self) -> int:
        """The number of value heads."""
        return max(self.value_heads) + 1 if self.value_heads else self.kv

    @property
    def is_evenly_grouped(self) -> bool:
        """True if each key-value head is shared by an equal number of neighbouring query heads."""
        return (
            not self.value_heads
            and self.q % self.kv == 0
            and self.kv_head_of_query == _even_groups(self.q, self.kv)
        )

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        grouped = self.is_evenly_grouped
        values = {
            name: value
            for name, value in values.items()
            if not (
                value == ()
                or (name == "vdim" and value == self.dim)
                or (name == "kv_head_of_query" and grouped)
            )
        }
        args = ", ".join(f"{name}={value!r}" for name, value in values.items())
        if grouped and not self.score_head_of_output:
            return f"Heads.grouped({args})"
        return f"Heads({args})"


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(
            f"heads need {name} to be an integer of at least 1, not {value!r}; give {name}=1 or "
            "more"
        )
    check_size(f"heads.{name}", value, MAX_HEAD_DIM if name.endswith("dim") else MAX_HEADS)


def _even_groups(q: int, kv: int) -> tuple[int, ...]:
    if q % kv:
        divisors = [n for n in range(1, q + 1) if q % n == 0]
        raise SpecError(
            f"{q} query heads cannot share {kv} key-value heads evenly; use kv in {divisors}, or "
            "give kv_head_of_query="
        )
    return tuple(h // (q // kv) for h in range(q))


def _check_all_heads_used(
    name: str, head_map: tuple[int, ...], length: int, num_heads: int, kind: str
) -> None:
    if len(head_map) != length:
        raise SpecError(
            f"{name}={head_map} has {len(head_map)} entries for {length} heads; give one {kind} "
            "for each"
        )
    if sorted(set(head_map)) != list(range(num_heads)):
        raise SpecError(
            f"{name}={head_map} must contain every {kind} 0..{num_heads - 1} at least once and no "
            "other"
        )
