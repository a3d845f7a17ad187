"""Integers that carry the formula they were computed by, so that a formula and its value cannot
disagree.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Self, TypeVar

from ..attention.interfaces import Modifier, Part
from ..attention.spec.attention_spec import SLOTS, AttentionSpec

P = TypeVar("P", bound=Part)


class SymbolicInt(int):
    """An int with the formula it was computed by: products, sums and powers of names.

    >>> q, dim = SymbolicInt.of(8, "q"), SymbolicInt.of(64, "dim")
    >>> cost = 2 * q * dim * (dim + 1)
    >>> cost, cost.formula
    (66560, '2 q dim (dim + 1)')
    """

    factor: int
    text: str
    loose: bool  # a sum, which needs brackets inside a product

    @classmethod
    def of(cls, value: int, text: str, factor: int = 1, *, loose: str = "") -> Self:
        """Create a number whose formula is `factor` times `text`; `loose` is not empty if `text` is
        a sum.
        """
        number = super().__new__(cls, value)
        number.factor, number.text, number.loose = factor, text, bool(loose)
        return number

    @property
    def formula(self) -> str:
        """The formula, with its factor."""
        return self.text if self.factor == 1 else f"{self.factor} {self.name_as_factor}"

    @property
    def name_as_factor(self) -> str:
        """The text of the formula, without its factor, in brackets if it is a sum."""
        return f"({self.text})" if self.loose else self.text

    @property
    def formula_as_factor(self) -> str:
        """The formula, in brackets if it is a sum."""
        return f"({self.formula})" if self.loose else self.formula

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return other * int(
                self
            )  # a float, or a tuple that is repeated: the result is not an integer
        if not isinstance(other, SymbolicInt):
            return SymbolicInt.of(
                int(self) * other, self.text, self.factor * other, loose="sum" if self.loose else ""
            )
        text = f"{self.name_as_factor} {other.name_as_factor}"
        return SymbolicInt.of(int(self) * int(other), text, self.factor * other.factor)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __add__(self, other: int) -> int:
        if isinstance(other, SymbolicInt) and other.text == self.text:
            return SymbolicInt.of(
                int(self) + int(other),
                self.text,
                self.factor + other.factor,
                loose="sum" * self.loose,
            )
        return self._sum(other, "+") if other else self

    def __radd__(self, other: int) -> int:
        return (
            SymbolicInt.of(int(self) + other, f"{other} + {self.formula}", loose="sum")
            if other
            else self
        )

    def __sub__(self, other: int) -> int:
        return self._sum(other, "-") if other else self

    def __pow__(self, power: Any, mod: Any = None) -> Any:
        if isinstance(power, int) and power > 0 and mod is None:
            return SymbolicInt.of(
                int(self) ** power, f"{self.name_as_factor}^{power}", self.factor**power
            )
        return int(self) ** power

    def __floordiv__(self, other: int) -> int:
        divisor = other.name_as_factor if isinstance(other, SymbolicInt) else str(other)
        return SymbolicInt.of(
            int(self) // int(other), f"floor({self.formula_as_factor} / {divisor})"
        )

    def _sum(self, other: int, sign: str) -> int:
        text = formula_as_factor(other) if sign == "-" else formula(other)
        value = int(self) + int(other) if sign == "+" else int(self) - int(other)
        return SymbolicInt.of(value, f"{self.formula} {sign} {text}", loose="sum")


def formula(value: int) -> str:
    """Return the formula of a symbolic number, or the digits of a plain one."""
    return value.formula if isinstance(value, SymbolicInt) else f"{value}"


def formula_as_factor(value: int) -> str:
    """Return the formula of a symbolic number, in brackets if it is a sum, or the digits of a plain
    one.
    """
    return value.formula_as_factor if isinstance(value, SymbolicInt) else f"{value}"


def name_size(size: int, name: str) -> SymbolicInt:
    """Return the size as a symbolic integer with this name, unless it has a formula already."""
    return size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, name)


def name_sizes(spec: AttentionSpec) -> AttentionSpec:
    """Replace the sizes of a spec by symbolic integers, so that numbers computed from it carry
    their formulas.

    >>> import headwise as hw
    >>> spec = name_sizes(hw.design(model=8, heads=2))
    >>> (spec.model * spec.heads.q).formula, spec == hw.design(model=8, heads=2)
    ('model q', True)
    """
    heads = spec.heads
    sizes = {
        name: SymbolicInt.of(getattr(heads, name), name) for name in ("q", "kv", "dim", "vdim")
    }
    slots = {
        slot: _name_part_sizes(getattr(spec, slot), slot) for slot in SLOTS if slot != "pattern"
    }
    source = None if spec.source is None else SymbolicInt.of(spec.source, "source")
    return replace(
        spec,
        model=SymbolicInt.of(spec.model, "model"),
        source=source,
        heads=replace(heads, **sizes),
        modifiers=tuple(
            _name_part_sizes(modifier, name) for name, modifier in spec.parts_of(Modifier)
        ),
        **slots,
    )


def _name_part_sizes(part: P, owner: str) -> P:
    """Replace the integers above 1 of a part by symbolic ones: dynamic.rank, project.overlap."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    sizes = {
        name: SymbolicInt.of(size, f"{owner}.{name}")
        for name, size in values.items()
        if type(size) is int and size > 1
    }
    return replace(part, **sizes)
