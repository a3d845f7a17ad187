"""Rotary position embedding (RoPE): rotates queries and keys by their positions, so that scores
depend on distances.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...util.errors import SpecError
from ..interfaces import QKTransform, SingleVectorTransform
from ..interfaces.core_types import Param, PartParams, SpecFactory, SymmetryGroup
from ..interfaces.part import CheckedDataclass, part
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant

# --- Scaling of frequencies to longer contexts ----------------------------------------------------


@dataclass(frozen=True, repr=False)
class RotaryScaling(CheckedDataclass, ABC):
    """Base class: changes the rotary frequencies, and may scale the rotated channels by
    `channel_scale`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if type(value) in (int, float) and not value > 0:
                raise SpecError(
                    f"{type(self).__name__}({name}={value!r}) must be positive; see its docstring"
                )

    @abstractmethod
    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        """The scaled frequencies, given the plain ones."""

    @property
    def channel_scale(self) -> float:
        """The factor of the rotated channels."""
        return 1.0


@part
class NoScaling(RotaryScaling):
    """Leaves frequencies unchanged.

    >>> NoScaling().scale_frequencies([1.0, 0.5], 10_000.0, 4)
    [1.0, 0.5]
    """

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        return plain


@part
class PositionInterpolation(RotaryScaling):
    """Position interpolation: position t is treated as t / factor (2306.15595).

    >>> PositionInterpolation(4.0).scale_frequencies([1.0], 10_000.0, 2)
    [0.25]
    """

    factor: float = 2.0

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        return [f / self.factor for f in plain]


@part
class NTKScaling(RotaryScaling):
    """NTK-aware scaling: base becomes base * factor^(dims / (dims - 2)).

    The lowest frequency is divided by exactly `factor`:

    >>> plain = [1.0, 0.01]
    >>> [
    ...     round(b / f, 6)
    ...     for b, f in zip(NTKScaling(4.0).scale_frequencies(plain, 10_000.0, 4), plain)
    ... ]
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

    A pair makes r = original f / (2 pi) rotations within the original context length. ramp="paper"
    blends linearly in r between `beta_slow` and `beta_fast`. Released checkpoints were trained with
    a blend that is linear in the pair's index between the indices where r is `beta_fast` and
    `beta_slow`, as ramp="code" does: `truncate` rounds these indices outwards (not in gpt-oss).
    Rotated channels are multiplied by `attention_factor`, by default 0.1 ln(factor) + 1.

    >>> (
    ...     YaRN(4.0, original=2048).scale_frequencies([1.0], 10_000.0, 64)[0],
    ...     round(YaRN(4.0).channel_scale, 4),
    ... )
    (1.0, 1.1386)
    """

    factor: float = 4.0
    original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: str = "code"
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ramp not in ("code", "paper"):
            raise SpecError(f"YaRN(ramp={self.ramp!r}) is unknown; use 'code' or 'paper'")
        if self.ramp == "paper" and not self.truncate:
            raise SpecError(
                "YaRN(truncate=False) has no effect with ramp='paper', which has no indices; leave "
                "truncate out"
            )
        if self.beta_fast <= self.beta_slow:
            raise SpecError(
                f"YaRN(beta_fast={self.beta_fast}, beta_slow={self.beta_slow}) has beta_fast at or "
                "below beta_slow; use beta_fast > beta_slow"
            )

    @property
    def channel_scale(self) -> float:
        """`attention_factor` if given, else 0.1 ln(factor) + 1."""
        default = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return default if self.attention_factor is None else self.attention_factor

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        if self.ramp == "paper":
            fractions = self._fractions_by_rotations(plain)
        else:
            fractions = self._fractions_by_index(plain, base, dims)
        return [f * k + f / self.factor * (1 - k) for f, k in zip(plain, fractions, strict=True)]

    def _fractions_by_rotations(self, plain: list[float]) -> list[float]:
        """The fraction of each original frequency in the blend, for ramp="paper"."""
        rotations = [self.original * f / (2 * math.pi) for f in plain]
        return [_interpolate(r, self.beta_slow, self.beta_fast) for r in rotations]

    def _fractions_by_index(self, plain: list[float], base: float, dims: int) -> list[float]:
        """The fraction of each original frequency in the blend, for ramp="code"."""

        def index(rotations: float) -> float:
            return dims * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        first = index(self.beta_fast)
        last = index(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, dims - 1)
        last = last + 0.001 if first == last else last
        return [1 - _interpolate(c, first, last) for c in range(len(plain))]


@part
class Llama3Scaling(RotaryScaling):
    """Llama 3.1 scaling: pairs with at least `high` rotations within `original` positions keep
    their frequency.

    Frequencies with `low` rotations or fewer are divided by `factor`; those in between are blended
    linearly.

    >>> Llama3Scaling().scale_frequencies([1.0, 1e-6], 500_000.0, 4)
    [1.0, 1.25e-07]
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high <= self.low:
            raise SpecError(
                f"Llama3Scaling(low={self.low}, high={self.high}) has high at or below low; use "
                "high > low"
            )

    def scale_frequencies(self, plain: list[float], base: float, dims: int) -> list[float]:
        fractions = [
            _interpolate(self.original * f / (2 * math.pi), self.low, self.high) for f in plain
        ]
        return [f * k + f / self.factor * (1 - k) for f, k in zip(plain, fractions, strict=True)]


def _interpolate(x: float, low: float, high: float) -> float:
    return min(max((x - low) / (high - low), 0.0), 1.0)


# --- Rotary embedding -----------------------------------------------------------------------------


LARGEST_TABLE = 2**16  # positions up to which cosines and sines are kept
SMALLEST_TABLE = 2**7


class AngleTable(NamedTuple):
    """Cosines and sines of the positions 0, 1, 2, ..., and the frequencies that they were computed
    from.
    """

    cos: Tensor
    sin: Tensor
    frequency: Tensor
    version: int


@part
class Rotary(QKTransform):
    """Rotates pair c of a head's first `dims` channels by the angle t base^(-2c/dims) at position t
    (2104.09864).

    pairs="half" pairs channels (c, c + dims/2), as Llama checkpoints on the Hub do; "interleaved"
    pairs (2c, 2c + 1), as in the paper. `scaling` changes the frequencies for longer contexts.
    `copies` is the number of heads concatenated into one vector of `dims` channels, as by
    `convert_to_latent`: each of them gets the frequencies of a single head.

    >>> Rotary(base=10_000.0).frequencies(4)
    [1.0, 0.01]
    """

    paper = "2104.09864"
    positional: ClassVar[bool] = True
    base: float = 10_000.0
    dims: int | None = None
    pairs: str = "half"
    scaling: RotaryScaling = NoScaling()
    copies: int = 1
    field_choices: ClassVar = {"pairs": ("half", "interleaved")}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not isinstance(self.scaling, RotaryScaling):
            yield (
                f"Rotary(scaling={self.scaling!r}) is not a RotaryScaling; use NoScaling, "
                "PositionInterpolation, NTKScaling, YaRN or Llama3Scaling"
            )
            return
        if not self.base > 1:
            yield f"Rotary(base={self.base!r}) must be above 1; 10000.0 is usual"
        available = spec.project.transformed_dims(spec)
        dims = available if self.dims is None else self.dims
        if dims % 2 or not 0 < dims <= available:
            yield (
                f"Rotary rotates pairs, not {dims} of {available} channels; use an even number "
                f"up to {available}"
            )
        elif self.copies < 1 or dims % (2 * self.copies):
            yield (
                f"Rotary(copies={self.copies}) does not divide {dims // 2} pairs; leave copies out"
            )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        dims = self.dims or spec.project.transformed_dims(spec)
        frequencies = self.frequencies(dims // self.copies) * self.copies
        return {"frequency": constant("turning", frequencies)}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"turning": (self.dims or spec.project.transformed_dims(spec)) // 2}

    def frequencies(self, dims: int) -> list[float]:
        """The angle per position of each pair, with scaling."""
        plain = [self.base ** (-2 * c / dims) for c in range(dims // 2)]
        return self.scaling.scale_frequencies(plain, self.base, dims)

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        if side == "v":
            return super().symmetry(spec, side, p)
        dims = self.dims or spec.project.transformed_dims(spec)
        unrotated = tuple(range(dims, spec.heads.dim))
        return SymmetryGroup(self.channel_pairs(dims), (unrotated,) if unrotated else ())

    def channel_pairs(self, dims: int) -> tuple[tuple[int, int], ...]:
        """The pairs of channels that are rotated together.

        >>> Rotary().channel_pairs(4), Rotary(pairs="interleaved").channel_pairs(4)
        (((0, 2), (1, 3)), ((0, 1), (2, 3)))
        """
        if self.pairs == "half":
            return tuple((c, c + dims // 2) for c in range(dims // 2))
        return tuple((c, c + 1) for c in range(0, dims, 2))

    def as_single_vector(
        self, spec: AttentionSpec, heads: int, p: Mapping[str, Tensor]
    ) -> SingleVectorTransform:
        dims = self.dims or spec.project.transformed_dims(spec)
        pairs = self.channel_pairs(dims)
        # With "half", the first channels of all pairs of all heads come first, then the second
        # ones.
        runs = list(zip(*pairs, strict=True)) if self.pairs == "half" else [range(dims)]
        sources = tuple(chain.from_iterable(product(range(heads), run) for run in runs))
        merged = replace(self, dims=None, copies=self.copies * heads)
        return SingleVectorTransform(merged, sources, {"frequency": p["frequency"].repeat(heads)})

    def precompute(
        self, sequence: SequenceInfo, table_dtype: torch.dtype, p: PartParams, keeps: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, times the attention factor, as `transform` takes
        them.
        """
        frequency = p["frequency"]
        start = sequence.start
        if not keeps or start is None or start + sequence.count > LARGEST_TABLE:
            return self.cos_sin(sequence.position, frequency, table_dtype, sequence.device)
        stop = start + sequence.count
        version = 0 if frequency.is_inference() else frequency._version
        table = p.cached.get(table_dtype)
        if (
            table is None
            or table.frequency is not frequency
            or table.version != version
            or table.cos.shape[1] < stop
        ):
            size = max(SMALLEST_TABLE, 2 ** (stop - 1).bit_length())
            positions = torch.arange(size, device=frequency.device)[None]
            angles = self.cos_sin(positions, frequency, table_dtype, sequence.device)
            table = AngleTable(*angles, frequency, version)
            # Fake tensors, and tensors of a CUDA graph during capture, hold no numbers yet.
            is_fake = type(table.cos) is not type(frequency)
            if not (is_fake or (frequency.is_cuda and torch.cuda.is_current_stream_capturing())):
                p.cached[table_dtype] = table
        return table.cos[:, start:stop], table.sin[:, start:stop]

    def cos_sin(
        self, position: Tensor, frequency: Tensor, table_dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [B, T], each [B, T, 1, pairs].

        With pairs="half" they are [B, T, 1, dims], and the sines of the first half are negative.
        """
        # Frequencies are float64: in float32, the angle at position 2^24 would be wrong by up to
        # half a rotation. They are on the CPU if the device has no float64.
        position = position.to(frequency.device)
        angle = position.view(*position.shape, 1, 1) * frequency
        cos = angle.cos()
        sin = angle.sin()
        factor = self.scaling.channel_scale
        if factor != 1:
            cos = cos * factor
            sin = sin * factor
        if self.pairs == "half":
            cos = torch.cat([cos, cos], -1)
            sin = torch.cat([-sin, sin], -1)
        return cos.to(device, table_dtype), sin.to(device, table_dtype)

    def transform(
        self, x_BTHK: Tensor, side: str, precomputed: tuple[Tensor, Tensor], p: PartParams
    ) -> Tensor:
        return rotate_pairs(x_BTHK, *precomputed, self.pairs)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(base=50.0, dims=2, pairs="interleaved"),))
        yield base(modifiers=(cls(copies=2),), kv=3)
        yield base(modifiers=(cls(scaling=PositionInterpolation(factor=4.0)),), pattern="causal")
        yield base(modifiers=(cls(scaling=NTKScaling(factor=4.0)),), pattern="causal")
        yield base(modifiers=(cls(scaling=YaRN(factor=4.0, original=32)),), pattern="causal")
        yield base(
            modifiers=(cls(scaling=YaRN(4.0, 32, 8.0, 2.0, "paper", 1.5)),), pattern="causal"
        )
        yield base(
            modifiers=(cls(scaling=YaRN(4.0, 32, 8.0, 2.0, truncate=False)),), pattern="causal"
        )
        yield base(
            modifiers=(cls(scaling=Llama3Scaling(factor=4.0, low=1.5, high=3.0, original=64)),),
            kv=3,
        )


def rotate_pairs(vectors: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """Vectors [..., K] with their pairs of channels rotated by angles that broadcast; `pairs` is
    "half" or "interleaved".
    """
    if cos.dtype != vectors.dtype:
        cos = cos.to(vectors.dtype)
        sin = sin.to(vectors.dtype)
    halves = pairs == "half"
    dims = cos.shape[-1] if halves else 2 * cos.shape[-1]
    is_whole = dims == vectors.shape[-1]
    x = vectors if is_whole else vectors[..., :dims]
    if halves:  # (a, b) to (a cos - b sin, b cos + a sin): the rolled x is (b, a)
        rotated = x * cos + x.roll(dims // 2, -1) * sin
    else:
        a = x[..., ::2]
        b = x[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return rotated if is_whole else torch.cat([rotated, vectors[..., dims:]], -1)
