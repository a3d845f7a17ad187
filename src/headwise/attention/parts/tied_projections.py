"""Grouped tied attention: one cached state is key and value of a group of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

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
from .initialisers import weight, xavier_uniform


@part
class TiedProjection(Project):
    """v_g = z W_KV^g; k_g = [the first channels of v_g, RoPE(z W_R)] with a rotary part that all
    heads share (2505.21487).

    The state v_g of each group and the rotary key, `rope` channels (default: half of heads.dim),
    are cached. QK transforms turn the last `rope` channels of queries and keys. At 16 heads of 64
    channels in 4 groups a token has 288 numbers, those of grouped-query attention 512:

    >>> import headwise as hw
    >>> spec = hw.design(model=1024, heads=16, kv=4, project=TiedProjection())
    >>> hw.costs.cached_numbers_per_token(spec), 4 * 64 + 32
    (288, 288)
    """

    paper = "2505.21487"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The authors' code has a bias in the rotary key; the code of 2603.02188, which compares "
        "it, has none, as here.",
    )
    unrestricted_sides: ClassVar[str] = ""
    rope: int | None = None
    field_minima: ClassVar = {"rope": 1}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads
        tied = heads.dim - self.transformed_dims(spec)
        if not 0 <= tied <= heads.vdim:
            yield (
                f"TiedProjection(rope={self.transformed_dims(spec)}) does not fit keys of "
                f"{heads.dim} channels that share the others with values of {heads.vdim}; use rope "
                f"of {max(heads.dim - heads.vdim, 1)} to {heads.dim}"
            )
        if heads.value_heads:
            yield "TiedProjection has one value for each key; leave value_heads out"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"rope": self.transformed_dims(spec)}

    def transformed_dims(self, spec: AttentionSpec) -> int:
        return spec.heads.dim // 2 if self.rope is None else self.rope

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {
            "q": weight("(q dim) model", xavier_uniform, "query"),
            "kv": weight("(kv vdim) source", xavier_uniform, "source"),
            "rotary": weight("rope source", xavier_uniform, "source"),
        }

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"state": AxisLayout.parse("kv vdim"), "rotary": AxisLayout.parse("rope")}

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        scale = heads.dim**-0.5
        keys = heads.kv_head_of_query
        return CoreShape(keys, spec.value_head_of_row, heads.dim, heads.vdim, scale)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        q_BTHK = F.linear(x_BTD, p["q"]).unflatten(-1, (-1, p.sizes["dim"]))
        own, rotary = q_BTHK.tensor_split([p.sizes["dim"] - p.sizes["rope"]], -1)
        return torch.cat([own, transform(rotary, "q")], -1)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        state = F.linear(z_BSE, p["kv"]).unflatten(-1, (-1, p.sizes["vdim"]))
        rotary = F.linear(z_BSE, p["rotary"])[..., None, :]
        return {"state": state, "rotary": transform(rotary, "k").squeeze(-2)}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        v_BSGV = entry["state"]
        tied = v_BSGV[..., : p.sizes["dim"] - p.sizes["rope"]]
        rotary = entry["rotary"][..., None, :].expand(*tied.shape[:-1], -1)
        return torch.cat([tied, rotary], -1), v_BSGV

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(project=cls(), modifiers=(Rotary(),), pattern="causal", kv=2, dim=8)
        yield base(project=cls(rope=3), source=13, vdim=5, kv=3)
