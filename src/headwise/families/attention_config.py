"""What many families spell alike of attention: rotary positions, scales, and which layers read a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..model_spec import ApproximateAttention
from ..parts.dot_product import Dot
from ..parts.rotary_embedding import Rotary
from ..parts.rotary_scaling import PI, Llama3, Plain, RotaryScaling, YaRN
from ..spec.attention_spec import AttentionSpec
from .config_reader import TransformersConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su")
LLAMA3_RAMP = (("low", 1.0), ("high", 4.0))
SLIDING_ATTENTION, FULL_ATTENTION = "sliding_attention", "full_attention"


class RopeConfig:
    """What a config says of rotary positions: at the top in old files, in one table in new ones."""

    def __init__(
        self,
        config: TransformersConfig,
        length: int,
        theta: float = 10_000.0,
        default: Mapping[str, Any] | None = None,
        rotary_fraction: float = 1.0,
    ) -> None:
        self.length = config.read_int("original_max_position_embeddings", default=length)
        tables = [config.read_table(name) for name in ("rope_scaling", "rope_parameters")]
        told = next(
            (table for table in tables if table and table.values), TransformersConfig(default or {}, config.source)
        )
        nested = [name for name in (SLIDING_ATTENTION, FULL_ATTENTION) if name in told.values]
        if nested:
            told.fail(f"{nested[0]} has angles of its own", "this family turns all layers alike; give one table")
        self.table = told
        self.theta = told.read_float("rope_theta", default=config.read_float("rope_theta", default=theta))
        self.rotary_fraction = told.read_float(
            "partial_rotary_factor", default=config.read_float("partial_rotary_factor", default=rotary_fraction)
        )
        name = "rope_type" if "rope_type" in told.values else "type"
        self.rope_type = told.read_choice(name, "default", ROPE_TYPES)

    def make_rotary(self, dim: int, pairs: str = "half") -> Rotary:
        """The turn of heads of this width."""
        dims = None if self.rotary_fraction == 1 else int(dim * self.rotary_fraction)
        return Rotary(base=self.theta, dims=dims, pairs=pairs, scaling=self.make_scaling())

    def make_scaling(self) -> RotaryScaling:
        """What bends its frequencies."""
        told = self.table
        if self.rope_type == "linear":
            return PI(told.read_float("factor", default=1.0))
        if self.rope_type == "llama3":
            low, high = (told.read_float(f"{side}_freq_factor", default=usual) for side, usual in LLAMA3_RAMP)
            return Llama3(self.factor, low, high, self.original_length)
        return self._make_yarn() if self.rope_type == "yarn" else Plain()

    def attention_with_limits(self, spec: AttentionSpec) -> AttentionSpec | ApproximateAttention:
        """The attention with these angles: nearly the spec where they follow the length of the text in hand."""
        if self.rope_type in ("longrope", "su"):
            told = f"divides every angle by a factor of its own, by other factors behind {self.length} tokens"
            return ApproximateAttention(spec, f"rope_type {self.rope_type!r} {told}, and swells what it turned")
        if self.rope_type != "dynamic":
            return spec
        return ApproximateAttention(
            spec, f"rope_type 'dynamic' stretches with the text; like this up to {self.length} tokens"
        )

    @property
    def original_length(self) -> int:
        """The length that the angles were trained for."""
        return self.table.read_int("original_max_position_embeddings", default=self.length)

    @property
    def factor(self) -> float:
        """How much longer the text may be."""
        if self.table.values.get("factor") is None:
            return self.length / self.original_length
        return self.table.read_float("factor", default=1.0)

    def attention_mscale(self) -> float:
        """What scores are multiplied with besides, by the key that DeepSeek's models add."""
        of = self.table.values.get("mscale_all_dim")
        return (
            self._mscale(self.table.read_float("mscale_all_dim", default=1.0))
            if of and self.rope_type != "default"
            else 1.0
        )

    def _mscale(self, of: float) -> float:
        return 0.1 * of * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def _make_yarn(self) -> YaRN:
        told, swelling = self.table, None
        if told.values.get("attention_factor") is not None:
            swelling = told.read_float("attention_factor", default=1.0)
        elif told.values.get("mscale") and told.values.get("mscale_all_dim"):
            of, by = (told.read_float(key, default=1.0) for key in ("mscale", "mscale_all_dim"))
            swelling = self._mscale(of) / self._mscale(by)
        fast, slow = (
            told.read_float(key, default=usual) if told.values.get(key) else usual
            for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
        )
        ramp = "code" if told.read_bool("truncate", True) else "exact"
        return YaRN(self.factor, self.original_length, fast, slow, ramp, swelling)


def read_layer_patterns(config: TransformersConfig, layers: int, default: list[str], window: int | None) -> list[str]:
    """The pattern of each layer: `usual` are the types that a config without layer_types gets."""
    types = config.read_choices("layer_types", (SLIDING_ATTENTION, FULL_ATTENTION)) or default
    if len(types) != layers:
        config.fail(f"layer_types names {len(types)} layers of {layers}", f"name {layers}")
    if SLIDING_ATTENTION in types and window is None:
        config.fail(f"layer_types names {SLIDING_ATTENTION!r} without a sliding_window", "give sliding_window")
    return [f"window({window})" if kind == SLIDING_ATTENTION else "causal()" for kind in types]


def read_ropes_by_layer_type(
    config: TransformersConfig, length: int, thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """The angles of each type of layer; what old files say of scaling is of those that read everything."""
    told = config.read_table("rope_parameters")
    if told and not {SLIDING_ATTENTION, FULL_ATTENTION} & set(told.values):
        told.fail(
            "no table of one type of layers", f"write {FULL_ATTENTION} = {{...}} and {SLIDING_ATTENTION} = {{...}}"
        )
    scaling = config.read_table("rope_scaling")
    tables: dict[str, dict[str, Any]] = {SLIDING_ATTENTION: {}, FULL_ATTENTION: dict(scaling.values) if scaling else {}}
    for kind, table in tables.items():
        own = told and told.read_table(kind)
        table |= {"rope_theta": thetas[kind]} | (dict(own.values) if own else {})
    return {
        kind: RopeConfig(TransformersConfig({"rope_parameters": table}, config.source), length)
        for kind, table in tables.items()
    }


def read_layer_types(config: TransformersConfig, layers: int, default: list[str], window: int | None) -> list[str]:
    """The type of each layer, as `patterns` says their patterns."""
    return [
        SLIDING_ATTENTION if said != "causal()" else FULL_ATTENTION
        for said in read_layer_patterns(config, layers, default, window)
    ]


def alternate_layer_types(layers: int) -> list[str]:
    """Sliding and full in turn, sliding first."""
    return [(SLIDING_ATTENTION, FULL_ATTENTION)[depth % 2] for depth in range(layers)]


def make_dot(scale: float, default: float) -> Dot:
    """Scores times `scale`; the plain word where that is the usual one."""
    return Dot() if scale == default else Dot(scale=scale)


def rope_to_config(spec: AttentionSpec) -> dict[str, Any]:
    """The table that `Rope` reads as the rotary turn of this spec, as far as it has one that a table can say."""
    turns = [part for _, part in spec.parts() if isinstance(part, Rotary)]
    turn = turns[0] if turns else Rotary()
    return {"rope_theta": turn.base, **_scaling_to_config(turn.scaling)}


def _scaling_to_config(scaling: RotaryScaling) -> dict[str, Any]:
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
