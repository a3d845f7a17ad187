"""Rotary positions: queries and keys turn with where they stand, so that only distances matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import QKTransform, SingleVectorTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import Param, PartParams, SpecFactory, SymmetryGroup
from ..interfaces.registry import part
from ..kernels import small_batch_ops
from ..kernels.simd import SIMD_WIDTH
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values
from .rotary_scaling import NTK, PI, Llama3, Plain, RotaryScaling, YaRN


class RotaryAngles:
    """How far every pair of channels turns at each position; cosine and sine are worked out when they are asked for."""

    def __init__(
        self, position_BT: Tensor, frequency: Tensor, attention_factor: float, angle_dtype: torch.dtype
    ) -> None:
        self.position_BT, self.frequency, self.swell, self.exact = position_BT, frequency, attention_factor, angle_dtype
        self.pairs = frequency.shape[0]
        self._waves: tuple[Tensor, Tensor] | None = None

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """The cosine and the sine of every pair's angle."""
        if self._waves is None:
            # In float64, whatever the layer: in float32 an angle of position 2^24 is off by half a turn.
            angle = self.position_BT.view(*self.position_BT.shape, 1, 1) * self.frequency
            cos, sin = angle.cos(), angle.sin()
            if self.swell != 1:
                cos, sin = cos * self.swell, sin * self.swell
            self._waves = cos.to(self.exact), sin.to(self.exact)
        return self._waves


@part
class Rotary(QKTransform):
    """Pair c of a head's first `dims` channels turns by t base^(-2c/dims) at position t (2104.09864).

    pairs="half" takes channels (c, c + dims/2) together, as Llama checkpoints on the Hub; "interleaved" takes
    (2c, 2c + 1), as the paper. `scaling` bends the frequencies for longer texts. Where `copies` heads are laid out as
    one vector of dims channels, as in a latent that all of them were merged into, each has the frequencies of one.

    >>> Rotary(base=10_000.0).frequencies(4)
    [1.0, 0.01]
    """

    paper = "2104.09864"
    positional: ClassVar[bool] = True
    base: float = 10_000.0
    dims: int | None = None
    pairs: str = "half"
    scaling: RotaryScaling = Plain()
    copies: int = 1

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.pairs not in ("half", "interleaved"):
            yield f"Rotary(pairs={self.pairs!r}) is unknown; use 'half' or 'interleaved'"
        if not isinstance(self.scaling, RotaryScaling):
            yield f"Rotary(scaling={self.scaling!r}) is no scaling; use Plain, PI, NTK, YaRN or Llama3"
            return
        if not self.base > 1:
            yield f"Rotary(base={self.base!r}) must be above 1; 10000.0 is usual"
        reached = spec.project.transformed_dims(spec)
        dims = reached if self.dims is None else self.dims
        if dims % 2 or not 0 < dims <= reached:
            yield f"Rotary turns pairs, but {dims} of {reached} channels are asked; use an even number up to {reached}"
        elif self.copies < 1 or dims % (2 * self.copies):
            yield f"Rotary(copies={self.copies}) does not divide {dims // 2} pairs; leave copies out"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        dims = self.dims or spec.project.transformed_dims(spec)
        each = self.frequencies(dims // self.copies)
        return {"frequency": Param(AxisLayout.parse("turning"), fixed_values(each * self.copies), trainable=False)}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"turning": (self.dims or spec.project.transformed_dims(spec)) // 2}

    def frequencies(self, dims: int) -> list[float]:
        """The angle per position of each pair, after scaling."""
        plain = [self.base ** (-2 * c / dims) for c in range(dims // 2)]
        return self.scaling.scale_frequencies(plain, self.base, dims)

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        if side == "v":
            return super().symmetry(spec, side, p)
        dims = self.dims or spec.project.transformed_dims(spec)
        rest = tuple(range(dims, spec.heads.dim))
        return SymmetryGroup(self.channel_pairs(dims), (rest,) if rest else ())

    def channel_pairs(self, dims: int) -> tuple[tuple[int, int], ...]:
        """The channels that turn together, pair by pair.

        >>> Rotary().channel_pairs(4), Rotary(pairs="interleaved").channel_pairs(4)
        (((0, 2), (1, 3)), ((0, 1), (2, 3)))
        """
        if self.pairs == "half":
            return tuple((c, c + dims // 2) for c in range(dims // 2))
        return tuple((c, c + 1) for c in range(0, dims, 2))

    def as_single_vector(self, spec: AttentionSpec, heads: int, p: Mapping[str, Tensor]) -> SingleVectorTransform:
        dims = self.dims or spec.project.transformed_dims(spec)
        one = self.channel_pairs(dims)
        sides = [[pair[half] for pair in one] for half in range(2)] if self.pairs == "half" else [list(range(dims))]
        lay = tuple((head, channel) for side in sides for head in range(heads) for channel in side)
        turn = replace(self, dims=None, copies=self.copies * heads)
        return SingleVectorTransform(turn, lay, {"frequency": p["frequency"].repeat(heads)})

    def precompute(self, position_BT: Tensor, exact: torch.dtype, p: PartParams) -> RotaryAngles:
        return RotaryAngles(position_BT, p["frequency"], self.scaling.attention_factor, exact)

    def transform(self, x_BTHK: Tensor, side: str, placed: RotaryAngles, p: PartParams) -> Tensor:
        if self.pairs == "half" and placed.pairs % SIMD_WIDTH == 0 and small_batch_ops.is_small_batch(x_BTHK):
            return small_batch_ops.apply_rotary(x_BTHK, placed.position_BT, placed.frequency, placed.swell)
        cos, sin = placed.cos_sin
        if cos.dtype != x_BTHK.dtype:
            cos, sin = cos.to(x_BTHK.dtype), sin.to(x_BTHK.dtype)
        turned = 2 * cos.shape[-1]
        x = x_BTHK if turned == x_BTHK.shape[-1] else x_BTHK[..., :turned]
        halves = self.pairs == "half"
        a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
        a, b = a * cos - b * sin, a * sin + b * cos
        if turned < x_BTHK.shape[-1]:
            rest = x_BTHK[..., turned:]
            return torch.cat([a, b, rest] if halves else [torch.stack([a, b], -1).flatten(-2), rest], -1)
        return torch.cat([a, b], -1) if halves else torch.stack([a, b], -1).flatten(-2)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(base=50.0, dims=2, pairs="interleaved"),))
        yield base(modifiers=(cls(copies=2),), kv=3)
        yield base(modifiers=(cls(scaling=PI(factor=4.0)),), pattern="causal")
        yield base(modifiers=(cls(scaling=NTK(factor=4.0)),), pattern="causal")
        yield base(modifiers=(cls(scaling=YaRN(factor=4.0, original=32)),), pattern="causal")
        yield base(modifiers=(cls(scaling=YaRN(4.0, 32, 8.0, 2.0, "paper", 1.5)),), pattern="causal")
        yield base(modifiers=(cls(scaling=YaRN(4.0, 32, 8.0, 2.0, "exact")),), pattern="causal")
        yield base(modifiers=(cls(scaling=Llama3(factor=4.0, low=1.5, high=3.0, original=64)),), kv=3)
