"""Scaling of rotary frequencies, to extend a model beyond the context length it was trained with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..errors import SpecError
from ..interfaces.registry import CheckedDataclass, part


@dataclass(frozen=True, repr=False)
class RotaryScaling(CheckedDataclass, ABC):
    """Base class: changes the rotary frequencies, and may scale the rotated channels by `attention_factor`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not value > 0:
                raise SpecError(f"{type(self).__name__}({name}={value!r}) must be positive; see its docstring")

    @abstractmethod
    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        """The scaled frequencies, given the plain ones."""

    @property
    def attention_factor(self) -> float:
        """The factor of the rotated channels."""
        return 1.0


@part
class Plain(RotaryScaling):
    """Leaves frequencies unchanged.

    >>> Plain().scale_frequencies([1.0, 0.5], 10_000.0, 4)
    [1.0, 0.5]
    """

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        return plain


@part
class PI(RotaryScaling):
    """Position interpolation: position t is treated as t / factor (2306.15595).

    >>> PI(4.0).scale_frequencies([1.0], 10_000.0, 2)
    [0.25]
    """

    factor: float = 2.0

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        return [f / self.factor for f in plain]


@part
class NTK(RotaryScaling):
    """NTK-aware scaling: base becomes base * factor^(dims / (dims - 2)).

    The lowest frequency is divided by exactly `factor`:

    >>> plain = [1.0, 0.01]
    >>> [round(b / f, 6) for b, f in zip(NTK(4.0).scale_frequencies(plain, 10_000.0, 4), plain)]
    [1.0, 0.25]
    """

    factor: float = 2.0

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        if dims <= 2:
            return plain
        scaled_base = base * self.factor ** (dims / (dims - 2))
        return [scaled_base ** (-2 * c / dims) for c in range(len(plain))]


@part
class YaRN(RotaryScaling):
    """YaRN: high frequencies are kept, low frequencies are divided by `factor` (2309.00071).

    A pair makes r = original f / (2 pi) rotations within the original context length. ramp="paper" blends linearly in r
    between `slow` and `fast`. Released checkpoints were trained with a blend that is linear in the pair's index between
    the indices where r is `fast` and `slow`: ramp="code" rounds these indices outwards, "exact" does not (gpt-oss).
    Rotated channels are multiplied by `swelling`, by default 0.1 ln(factor) + 1.

    >>> YaRN(4.0, original=2048).scale_frequencies([1.0], 10_000.0, 64)[0], round(YaRN(4.0).attention_factor, 4)
    (1.0, 1.1386)
    """

    factor: float = 4.0
    original: int = 4096
    fast: float = 32.0
    slow: float = 1.0
    ramp: str = "code"
    swelling: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ramp not in ("code", "exact", "paper"):
            raise SpecError(f"YaRN(ramp={self.ramp!r}) is unknown; use 'code', 'exact' or 'paper'")
        if self.fast <= self.slow:
            raise SpecError(f"YaRN(fast={self.fast}, slow={self.slow}) has fast at or below slow; use fast > slow")

    @property
    def attention_factor(self) -> float:
        """`swelling` if given, else 0.1 ln(factor) + 1."""
        default = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return default if self.swelling is None else self.swelling

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        fractions = (
            self._fractions_by_rotations(plain) if self.ramp == "paper" else self._fractions_by_index(plain, base, dims)
        )
        return [f * k + f / self.factor * (1 - k) for f, k in zip(plain, fractions, strict=True)]

    def _fractions_by_rotations(self, plain: list[float]) -> list[float]:
        """The fraction of each original frequency in the blend, for ramp="paper"."""
        rotations = [self.original * f / (2 * math.pi) for f in plain]
        return [_interpolate(r, self.slow, self.fast) for r in rotations]

    def _fractions_by_index(self, plain: list[float], base: float, dims: int) -> list[float]:
        """The fraction of each original frequency in the blend, for ramp="code" and "exact"."""

        def index(rotations: float) -> float:
            return dims * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        first, last = index(self.fast), index(self.slow)
        if self.ramp == "code":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        last = last + 0.001 if first == last else last
        return [1 - _interpolate(c, first, last) for c in range(len(plain))]


@part
class Llama3(RotaryScaling):
    """Llama 3.1 scaling: pairs with at least `high` rotations within `original` positions keep their frequency.

    Frequencies with `low` rotations or fewer are divided by `factor`; those in between are blended linearly.

    >>> Llama3().scale_frequencies([1.0, 1e-6], 500_000.0, 4)
    [1.0, 1.25e-07]
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high <= self.low:
            raise SpecError(f"Llama3(low={self.low}, high={self.high}) has high at or below low; use high > low")

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        fractions = [_interpolate(self.original * f / (2 * math.pi), self.low, self.high) for f in plain]
        return [f * k + f / self.factor * (1 - k) for f, k in zip(plain, fractions, strict=True)]


def _interpolate(x: float, low: float, high: float) -> float:
    return min(max((x - low) / (high - low), 0.0), 1.0)
