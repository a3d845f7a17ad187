"""Attention settings shared by many families: RoPE, score scales, and the layers with a sliding
window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...attention.parts.dot_product import DotProduct
from ...attention.parts.rotary_embedding import (
    Llama3Scaling,
    NoScaling,
    PositionInterpolation,
    Rotary,
    RotaryScaling,
    YaRN,
)
from ...attention.spec.attention_spec import AttentionSpec
from .config_reader import TransformersConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su")
LENGTH_DEPENDENT = {
    "dynamic": "rescales the base with the length of the text",
    **dict.fromkeys(("longrope", "su"), "divides each frequency by its own factor"),
}
LLAMA3_RAMP = (("low", 1.0), ("high", 4.0))
SHARED_ROPE_KEYS = ("partial_rotary_factor",)  # top-level keys that concern every layer type
SLIDING_ATTENTION = "sliding_attention"
FULL_ATTENTION = "full_attention"


class RopeConfig:
    """RoPE settings of a config: top-level keys, or a table rope_scaling or rope_parameters.

    `rotary_fraction` is the share of rotated channels where partial_rotary_factor is missing.
    Families without it rotate all channels: transformers does not read the key there, so other
    values than 1 are refused.
    """

    def __init__(
        self,
        config: TransformersConfig,
        length: int,
        theta: float = 10_000.0,
        default: Mapping[str, Any] | None = None,
        rotary_fraction: float | None = None,
    ) -> None:
        self.length = length
        tables = [config.read_table(name) for name in ("rope_scaling", "rope_parameters")]
        table = next(
            (table for table in tables if table and table.values),
            TransformersConfig(default or {}, config.source),
        )
        nested = [name for name in (SLIDING_ATTENTION, FULL_ATTENTION) if name in table.values]
        if nested:
            table.fail(
                f"{nested[0]} has angles of its own",
                "this family uses one RoPE in all layers; give one table",
            )
        self.table = table
        self.theta = table.read_float(
            "rope_theta", default=config.read_float("rope_theta", default=theta)
        )
        self.rotary_fraction = _read_rotary_fraction(config, table, rotary_fraction)
        # precedes the key of the table
        pretrained = config.read_optional_int("original_max_position_embeddings")
        self.original_length = pretrained or table.read_int(
            "original_max_position_embeddings", default=length
        )
        name = "rope_type" if "rope_type" in table.values else "type"
        self.rope_type = table.read_choice(name, "default", ROPE_TYPES)

    def make_rotary(self, dim: int, pairs: str = "half") -> Rotary:
        """Return the rotary embedding for heads of dimension `dim`; refuse scalings that depend on
        the length of a text.
        """
        if self.rope_type in LENGTH_DEPENDENT:
            change = LENGTH_DEPENDENT[self.rope_type]
            self.table.refuse(
                f"rope_type {self.rope_type!r} {change}, which Rotary lacks",
                "give another rope_type",
            )
        dims = None if self.rotary_fraction == 1 else int(dim * self.rotary_fraction)
        return Rotary(base=self.theta, dims=dims, pairs=pairs, scaling=self.make_scaling())

    def make_scaling(self) -> RotaryScaling:
        """Return how the frequencies are scaled: linear interpolation (PI), Llama 3, YaRN, or not
        at all.
        """
        table = self.table
        if self.rope_type == "linear":
            return PositionInterpolation(table.read_float("factor", default=1.0))
        if self.rope_type == "llama3":
            low, high = (
                table.read_float(f"{side}_freq_factor", default=default)
                for side, default in LLAMA3_RAMP
            )
            return Llama3Scaling(self.factor, low, high, self.original_length)
        return self._make_yarn() if self.rope_type == "yarn" else NoScaling()

    @property
    def factor(self) -> float:
        """The factor by which RoPE scaling extends the context."""
        if self.table.values.get("factor") is None:
            return self.length / self.original_length
        return self.table.read_float("factor", default=1.0)

    def attention_mscale(self) -> float:
        """Return DeepSeek's extra factor for queries and for keys (`mscale_all_dim`); scores get
        its square.
        """
        of = self.table.values.get("mscale_all_dim")
        if of and self.rope_type != "default":
            return self._mscale(self.table.read_float("mscale_all_dim", default=1.0))
        return 1.0

    def _mscale(self, of: float) -> float:
        return 0.1 * of * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def _make_yarn(self) -> YaRN:
        table = self.table
        attention_factor = None
        if table.values.get("attention_factor") is not None:
            attention_factor = table.read_float("attention_factor", default=1.0)
        elif table.values.get("mscale") and table.values.get("mscale_all_dim"):
            numerator, denominator = (
                table.read_float(key, default=1.0) for key in ("mscale", "mscale_all_dim")
            )
            attention_factor = self._mscale(numerator) / self._mscale(denominator)
        fast, slow = (
            table.read_float(key, default=default) if table.values.get(key) else default
            for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
        )
        return YaRN(
            self.factor,
            self.original_length,
            fast,
            slow,
            attention_factor=attention_factor,
            truncate=table.read_bool("truncate", True),
        )


def _read_rotary_fraction(
    config: TransformersConfig, table: TransformersConfig, usual: float | None
) -> float:
    """Return the share of rotated channels; `usual` is None in families that rotate all of them."""
    name = "partial_rotary_factor"
    if usual is not None:
        return table.read_float(name, default=config.read_float(name, default=usual))
    for settings in (config, table):
        settings.require_default(
            name, 1.0, "is not read by transformers, which rotates all channels of this family"
        )
    return 1.0


WINDOW_REMEDY = "give sliding_window, with use_sliding_window = true if the family has that key"


def read_layer_patterns(
    config: TransformersConfig, layers: int, default: list[str], window: int | None
) -> list[str]:
    """Return the attention pattern of each layer; `default` holds the layer types of a config
    without layer_types.
    """
    types = config.read_choices("layer_types", (SLIDING_ATTENTION, FULL_ATTENTION)) or default
    if len(types) != layers:
        config.fail(f"layer_types names {len(types)} layers of {layers}", f"name {layers}")
    if SLIDING_ATTENTION in types and window is None:
        config.fail(
            f"layer_types names {SLIDING_ATTENTION!r} without a sliding_window", WINDOW_REMEDY
        )
    return [f"window({window})" if kind == SLIDING_ATTENTION else "causal()" for kind in types]


def read_ropes_by_layer_type(
    config: TransformersConfig, length: int, thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """Return the RoPE settings of each layer type; the old key `rope_scaling` applies to full
    attention only.
    """
    by_type = config.read_table("rope_parameters")
    if by_type and not {SLIDING_ATTENTION, FULL_ATTENTION} & set(by_type.values):
        by_type.fail(
            "rope_parameters has no table for a layer type",
            f"write {FULL_ATTENTION} = {{...}} and {SLIDING_ATTENTION} = {{...}}",
        )
    own_tables = {
        kind: by_type and by_type.read_table(kind) for kind in (SLIDING_ATTENTION, FULL_ATTENTION)
    }
    tables = {
        kind: dict(own.values) if own else dict[str, Any]() for kind, own in own_tables.items()
    }
    scaling = config.read_table("rope_scaling")
    if scaling:
        if "rope_type" not in scaling.values:
            scaling.fail(
                "rope_type is missing, without which transformers does not scale", "add rope_type"
            )
        tables[FULL_ATTENTION] |= scaling.values
    shared = {key: config.values[key] for key in SHARED_ROPE_KEYS if key in config.values}
    return {
        kind: RopeConfig(
            TransformersConfig(
                shared | {"rope_parameters": {"rope_theta": thetas[kind]} | table}, config.source
            ),
            length,
        )
        for kind, table in tables.items()
    }


def make_dot(scale: float, default: float) -> DotProduct:
    """Return the dot product scaled by `scale`, without an explicit scale if
    that is the default.
    """
    return DotProduct() if scale == default else DotProduct(scale=scale)


def rope_to_config(spec: AttentionSpec) -> dict[str, Any]:
    """Return the table `rope_parameters` for the rotary embedding of this spec.

    Only base and scaling are written; a scaling that transformers does not have becomes "default".
    """
    rotaries = [part for _, part in spec.parts() if isinstance(part, Rotary)]
    rotary = rotaries[0] if rotaries else Rotary()
    return {"rope_theta": rotary.base, **_scaling_to_config(rotary.scaling)}


def _scaling_to_config(scaling: RotaryScaling) -> dict[str, Any]:
    if isinstance(scaling, PositionInterpolation):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        ramp = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        original = {"original_max_position_embeddings": scaling.original}
        return {"rope_type": "llama3", "factor": scaling.factor, **ramp, **original}
    if isinstance(scaling, YaRN):
        ramp = {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        original = {"original_max_position_embeddings": scaling.original}
        if scaling.attention_factor is not None:
            ramp["attention_factor"] = scaling.attention_factor
        return {"rope_type": "yarn", "factor": scaling.factor, **ramp, **original}
    return {"rope_type": "default"}
