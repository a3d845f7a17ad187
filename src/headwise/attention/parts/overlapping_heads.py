"""Overlapping heads (MOHSA): each head also uses some channels of its two neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Project
from ..interfaces.core_types import (
    AxisLayout,
    CoreShape,
    Param,
    PartParams,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .initialisers import fixed_values, weight, xavier_uniform, zeros_init

# Overlap as a function of the layer, counted from 0, and the number of layers (2410.14874, as in
# the released code).
OVERLAP_SCHEDULES: dict[str, Callable[[int, int], int]] = {
    "l": lambda layer, layers: layer,
    "l+1": lambda layer, layers: layer + 1,
    "l//2": lambda layer, layers: layer // 2,
    "l//2+1": lambda layer, layers: layer // 2 + 1,
    "L-l-1": lambda layer, layers: layers - layer - 1,
    "L-l": lambda layer, layers: layers - layer,
    "(L-l-1)//2": lambda layer, layers: (layers - layer - 1) // 2,
    "(L-l-1)//2+1": lambda layer, layers: (layers - layer - 1) // 2 + 1,
}


@part
class Overlapping(Project):
    """Head i uses channels [i D - overlap, (i + 1) D + overlap) of q, k and v, with zeros beyond
    the ends.

    The soft division of MOHSA (2410.14874): projections as in plain attention, scale 1/sqrt(D)
    despite the wider slices, W_O with h (D + 2 overlap) columns. Keys and values are cached before
    they are divided into heads. `heads.vdim` is D + 2 overlap. Channels have a separate axis,
    so pruning a head does not change the channels of its neighbours.

    `schedule` computes the overlap from the layer l = 0 .. L-1 when `spec.at_depth(l, L)` is
    called: "l" (as in the released code), "l+1", "l//2", "l//2+1", or decreasing "L-l-1", "L-l",
    "(L-l-1)//2", "(L-l-1)//2+1". Before that call, and with "fixed", `overlap` is used.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, project=Overlapping(overlap=1, schedule="l+1"))
    >>> (
    ...     spec.heads.vdim,
    ...     hw.costs.count_parameters(spec)
    ...     - hw.costs.count_parameters(hw.design(model=8, heads=2)),
    ... )
    (6, 32)
    >>> spec.at_depth(2, 6).project, spec.at_depth(2, 6).heads.vdim
    (Overlapping(overlap=3), 10)
    """

    paper = "2410.14874"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The scale is 1/sqrt(D) with the D channels of the head without overlap, as in the "
        "released code.",
        (
            "The released code uses the overlap l in layer l, so that the first layer has none: "
            'schedule="l". The '
            'preset uses another schedule of the paper, "l+1".'
        ),
    )
    supports_grouping: ClassVar[bool] = False
    overlap: int = 1
    bias: str = ""
    channels: int = 0
    schedule: str = "fixed"
    field_choices: ClassVar = {"schedule": ("fixed", *OVERLAP_SCHEDULES)}
    field_minima: ClassVar = {"overlap": 0}
    letter_fields: ClassVar = {"bias": "qkv"}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads
        if self.channels and self.channels < heads.q * heads.dim:
            needed = heads.q * heads.dim
            yield (
                f"Overlapping(channels={self.channels}) is less than the {needed} channels of "
                "all heads; leave it out"
            )
        if heads.vdim != heads.dim + 2 * self.overlap and self.overlap >= 0:
            yield (
                "overlapping heads have dim + 2 overlap channels; use "
                f"vdim={heads.dim + 2 * self.overlap}"
            )

    def widen_heads(self, heads: Heads) -> Heads:
        if self.overlap < 0:
            return heads  # `conflicts` reports the negative overlap
        return replace(heads, vdim=heads.dim + 2 * self.overlap)

    def at_depth(self, layer: int, layers: int) -> Self:
        if self.schedule == "fixed":
            return self
        return replace(
            self, overlap=OVERLAP_SCHEDULES[self.schedule](layer, layers), schedule="fixed"
        )

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, channels=self.sizes(spec)["channel"], schedule="fixed")

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"channel": self.channels or spec.heads.q * spec.heads.dim}

    def transformed_dims(self, spec: AttentionSpec) -> int:
        return spec.heads.dim + 2 * self.overlap

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        starts = fixed_values([head * spec.heads.dim for head in range(spec.heads.q)])
        weights = {
            "q": weight("channel model", xavier_uniform, "query"),
            "k": weight("channel source", xavier_uniform, "source"),
            "v": weight("channel source", xavier_uniform, "source"),
            "start": Param(AxisLayout.parse("q"), starts, trainable=False),
        }
        return weights | {f"{side}_bias": weight("channel", zeros_init) for side in self.bias}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"k": AxisLayout.parse("channel"), "v": AxisLayout.parse("channel")}

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        width = self.transformed_dims(spec)
        return CoreShape(
            heads.kv_head_of_query, spec.score_head_of_row, width, width, heads.dim**-0.5
        )

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        return transform(self._divide(self._project(x_BTD, "q", p), p), "q")

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        return {side: self._project(z_BSE, side, p) for side in "kv"}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        return transform(self._divide(entry["k"], p), "k"), transform(
            self._divide(entry["v"], p), "v"
        )

    def _project(self, x: Tensor, side: str, p: PartParams) -> Tensor:
        return F.linear(x, p[side], p[f"{side}_bias"] if side in self.bias else None)

    def _divide(self, channels_BTC: Tensor, p: PartParams) -> Tensor:
        padded = F.pad(channels_BTC, (self.overlap, self.overlap))
        offsets = torch.arange(p.sizes["dim"] + 2 * self.overlap, device=padded.device)
        return padded[..., p["start"][:, None] + offsets]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(project=cls(overlap=1), vdim=6, modifiers=(Rotary(),), pattern="causal")
        yield base(project=cls(overlap=5, bias="qkv"), vdim=14, source=13)
        yield base(project=cls(overlap=0, channels=28), vdim=4)
        yield base(project=cls(overlap=2, schedule="l//2+1"), vdim=8, pattern="causal")
