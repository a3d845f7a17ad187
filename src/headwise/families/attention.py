"""What many families spell alike of attention: rotary positions, scales, and which layers read a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..blueprint import Nearly
from ..parts.dot import Dot
from ..parts.rotary import Rotary
from ..parts.rotary_scaling import PI, Llama3, Plain, Scaling, YaRN
from ..spec import AttentionSpec
from .config import Config

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su")
RAMP = (("low", 1.0), ("high", 4.0))
SLIDING, FULL = "sliding_attention", "full_attention"


class Rope:
    """What a config says of rotary positions: at the top in old files, in one table in new ones."""

    def __init__(
        self,
        config: Config,
        length: int,
        theta: float = 10_000.0,
        usual: Mapping[str, Any] | None = None,
        part: float = 1.0,
    ) -> None:
        self.length = config.size("original_max_position_embeddings", default=length)
        tables = [config.table(name) for name in ("rope_scaling", "rope_parameters")]
        told = next((table for table in tables if table and table.said), Config(usual or {}, config.where))
        nested = [name for name in (SLIDING, FULL) if name in told.said]
        if nested:
            told.wrong(f"{nested[0]} has angles of its own", "this family turns all layers alike; give one table")
        self.told = told
        self.theta = told.number("rope_theta", default=config.number("rope_theta", default=theta))
        self.part = told.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=part))
        name = "rope_type" if "rope_type" in told.said else "type"
        self.kind = told.word(name, "default", KINDS)

    def rotary(self, dim: int, pairs: str = "half") -> Rotary:
        """The turn of heads of this width."""
        dims = None if self.part == 1 else int(dim * self.part)
        return Rotary(base=self.theta, dims=dims, pairs=pairs, scaling=self.scaling())

    def scaling(self) -> Scaling:
        """What bends its frequencies."""
        told = self.told
        if self.kind == "linear":
            return PI(told.number("factor", default=1.0))
        if self.kind == "llama3":
            low, high = (told.number(f"{side}_freq_factor", default=usual) for side, usual in RAMP)
            return Llama3(self.factor, low, high, self.original)
        return self._yarn() if self.kind == "yarn" else Plain()

    def said(self, spec: AttentionSpec) -> AttentionSpec | Nearly:
        """The attention with these angles: nearly the spec where they follow the length of the text in hand."""
        if self.kind in ("longrope", "su"):
            told = f"divides every angle by a factor of its own, by other factors behind {self.length} tokens"
            return Nearly(spec, f"rope_type {self.kind!r} {told}, and swells what it turned")
        if self.kind != "dynamic":
            return spec
        return Nearly(spec, f"rope_type 'dynamic' stretches with the text; like this up to {self.length} tokens")

    @property
    def original(self) -> int:
        """The length that the angles were trained for."""
        return self.told.size("original_max_position_embeddings", default=self.length)

    @property
    def factor(self) -> float:
        """How much longer the text may be."""
        if self.told.said.get("factor") is None:
            return self.length / self.original
        return self.told.number("factor", default=1.0)

    def swelling(self) -> float:
        """What scores are multiplied with besides, by the key that DeepSeek's models add."""
        of = self.told.said.get("mscale_all_dim")
        return self._mscale(self.told.number("mscale_all_dim", default=1.0)) if of and self.kind != "default" else 1.0

    def _mscale(self, of: float) -> float:
        return 0.1 * of * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def _yarn(self) -> YaRN:
        told, swelling = self.told, None
        if told.said.get("attention_factor") is not None:
            swelling = told.number("attention_factor", default=1.0)
        elif told.said.get("mscale") and told.said.get("mscale_all_dim"):
            of, by = (told.number(key, default=1.0) for key in ("mscale", "mscale_all_dim"))
            swelling = self._mscale(of) / self._mscale(by)
        fast, slow = (
            told.number(key, default=usual) if told.said.get(key) else usual
            for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
        )
        ramp = "code" if told.flag("truncate", True) else "exact"
        return YaRN(self.factor, self.original, fast, slow, ramp, swelling)


def patterns(config: Config, layers: int, usual: list[str], window: int | None) -> list[str]:
    """The pattern of each layer: `usual` are the types that a config without layer_types gets."""
    types = config.words("layer_types", (SLIDING, FULL)) or usual
    if len(types) != layers:
        config.wrong(f"layer_types names {len(types)} layers of {layers}", f"name {layers}")
    if SLIDING in types and window is None:
        config.wrong(f"layer_types names {SLIDING!r} without a sliding_window", "give sliding_window")
    return [f"window({window})" if kind == SLIDING else "causal()" for kind in types]


def by_kind(config: Config, length: int, thetas: Mapping[str, float]) -> dict[str, Rope]:
    """The angles of each type of layer; what old files say of scaling is of those that read everything."""
    told = config.table("rope_parameters")
    if told and not {SLIDING, FULL} & set(told.said):
        told.wrong("no table of one type of layers", f"write {FULL} = {{...}} and {SLIDING} = {{...}}")
    scaling = config.table("rope_scaling")
    tables: dict[str, dict[str, Any]] = {SLIDING: {}, FULL: dict(scaling.said) if scaling else {}}
    for kind, table in tables.items():
        own = told and told.table(kind)
        table |= {"rope_theta": thetas[kind]} | (dict(own.said) if own else {})
    return {kind: Rope(Config({"rope_parameters": table}, config.where), length) for kind, table in tables.items()}


def kinds(config: Config, layers: int, usual: list[str], window: int | None) -> list[str]:
    """The type of each layer, as `patterns` says their patterns."""
    return [SLIDING if said != "causal()" else FULL for said in patterns(config, layers, usual, window)]


def alternating(layers: int) -> list[str]:
    """Sliding and full in turn, sliding first."""
    return [(SLIDING, FULL)[depth % 2] for depth in range(layers)]


def scaled(scale: float, usual: float) -> Dot:
    """Scores times `scale`; the plain word where that is the usual one."""
    return Dot() if scale == usual else Dot(scale=scale)


def rope_of(spec: AttentionSpec) -> dict[str, Any]:
    """The table that `Rope` reads as the rotary turn of this spec, as far as it has one that a table can say."""
    turns = [part for _, part in spec.parts() if isinstance(part, Rotary)]
    turn = turns[0] if turns else Rotary()
    return {"rope_theta": turn.base, **_scaled(turn.scaling)}


def _scaled(scaling: Scaling) -> dict[str, Any]:
    if isinstance(scaling, PI):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3):
        ramp = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        original = {"original_max_position_embeddings": scaling.original}
        return {"rope_type": "llama3", "factor": scaling.factor, **ramp, **original}
    if isinstance(scaling, YaRN):
        ramp = {"beta_fast": scaling.fast, "beta_slow": scaling.slow, "truncate": scaling.ramp != "exact"}
        original = {"original_max_position_embeddings": scaling.original}
        swelling = {} if scaling.swelling is None else {"attention_factor": scaling.swelling}
        return {"rope_type": "yarn", "factor": scaling.factor, **ramp, **original, **swelling}
    return {"rope_type": "default"}
