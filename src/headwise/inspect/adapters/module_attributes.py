"""Attention pattern, head counts and site of a third-party module, from its attributes and config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import unwrap
from typing import Any, NamedTuple

from torch import nn

from ...masking.patterns import Blocks, Causal, Window
from ..site import POSSIBLE, Ability, Site

UNKNOWN_PATTERN = "set by each call"


def describe_pattern(module: nn.Module, kind: str) -> str:
    """Pattern of a module as headwise spec text, or UNKNOWN_PATTERN."""
    if kind == "cross":
        return "full()"
    config, causal = getattr(module, "config", None), is_causal(module)
    layer_type = _read_layer_type(module, config)
    if causal is None:
        return UNKNOWN_PATTERN
    if layer_type == "chunked_attention" and causal:
        return (Causal() & Blocks(_read_int(config, "attention_chunk_size"))).text
    window = _read_window(module, config, layer_type)
    if window and causal:
        return Window(window).text
    if window:  # most configs give the reach to one side, with or without the query's own key
        is_one_sided_reach = window == _read_int(config, "sliding_window") + 1
        return Window(2 * window - 1, after=window - 1).text if is_one_sided_reach else UNKNOWN_PATTERN
    return "causal()" if causal else "full()"


def is_causal(module: nn.Module) -> bool | None:
    """Value of the module's `is_causal` or `is_decoder`; None if it has neither."""
    values = [getattr(module, name, None) for name in ("is_causal", "is_decoder")]
    return next((bool(value) for value in values if value is not None), None)


def _read_layer_type(module: nn.Module, config: Any) -> str:
    """Layer type ("sliding_attention", ...) from the config or from the module; "" if unknown."""
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if isinstance(kinds, Sequence) and isinstance(layer, int) and layer < len(kinds):
        return str(kinds[layer])
    return str(getattr(module, "attention_type", ""))


def _read_window(module: nn.Module, config: Any, layer_type: str) -> int:
    """Number of keys in the sliding window; 0 if there is none."""
    if "sliding_window" in vars(module):
        return _read_int(module, "sliding_window")
    if layer_type == "local":
        return _read_int(config, "window_size")
    code = getattr(unwrap(type(module).forward), "__code__", None)
    mentions_window = code is not None and "sliding_window" in (*code.co_names, *code.co_consts)
    return (
        _read_int(config, "sliding_window")
        if layer_type == "sliding_attention" or (not layer_type and mentions_window)
        else 0
    )


def _read_int(holder: Any, name: str) -> int:
    value = getattr(holder, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# --- Head sizes and sites of third-party modules ----------------------------------------------------------

NUM_HEADS_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "heads")
NUM_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head")
HEAD_DIM_NAMES = (
    "qk_head_dim",
    "head_dim",
    "attention_head_size",
    "head_size",
    "key_value_proj_dim",
    "d_kv",
    "dim_head",
)
CROSS_ATTENTION_NAME = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


UNKNOWN_STACK = "model"  # stack name if neither path nor attributes identify encoder or decoder
NOT_CONVERTIBLE = Ability(False, "headwise cannot load this model as its own, which pruning and conversion need")


class HeadSizes(NamedTuple):
    """Query heads, KV heads and head dimension; 0 where unknown."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def make_site(
    path: str,
    module: nn.Module,
    sizes: HeadSizes,
    *,
    pattern: str | None = None,
    see: Ability = POSSIBLE,
    silence: Ability = POSSIBLE,
) -> Site:
    """Make the site of a third-party module; the stack is "encoder" or "decoder", from its path or attributes."""
    parts = path.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    layer = int(parts[numbers[0]]) if numbers else 0
    kind = (
        "cross"
        if getattr(module, "is_cross_attention", False)
        or CROSS_ATTENTION_NAME.search(parts[-1])
        or _is_cross_attention(parts)
        else "attention"
    )
    stack = _stack_name(parts[: numbers[0]] if numbers else parts[:-1], module)
    pattern_text = describe_pattern(module, kind) if pattern is None else pattern
    return Site(
        name=f"{stack}.{layer}.{kind}",
        stack=stack,
        layer=layer,
        kind=kind,
        path=path,
        heads=sizes.num_heads,
        q=sizes.num_heads,
        kv=sizes.num_kv_heads,
        dim=sizes.head_dim,
        pattern=pattern_text,
        spec=None,
        unsaid="headwise has no spec for this module",
        see=see,
        silence=silence,
        cut=NOT_CONVERTIBLE,
        share=NOT_CONVERTIBLE,
    )


def is_within(path: str, other: str) -> bool:
    """Whether the module at `path` is the module at `other` or inside it."""
    return path == other or path.startswith(f"{other}.") or not other


def _is_cross_attention(parts: list[str]) -> bool:
    return any(CROSS_ATTENTION_NAME.search(part) for part in parts[-2:])


def _stack_name(path_parts: list[str], module: nn.Module) -> str:
    for part in reversed(path_parts):
        if "decoder" in part:
            return "decoder"
        if "encoder" in part:
            return "encoder"
    causal = is_causal(module)
    return UNKNOWN_STACK if causal is None else "decoder" if causal else "encoder"


def read_head_sizes(module: nn.Module) -> HeadSizes:
    """Head sizes from the attributes of a module or its config."""
    config = getattr(module, "config", None)
    q = read_positive_int(module, NUM_HEADS_NAMES) or read_positive_int(config, NUM_HEADS_NAMES)
    groups = getattr(module, "num_key_value_groups", None)
    kv = read_positive_int(module, NUM_KV_HEADS_NAMES) or (q // groups if isinstance(groups, int) and groups else 0)
    dim = read_positive_int(module, HEAD_DIM_NAMES) or read_positive_int(config, ("head_dim", "d_kv"))
    return HeadSizes(q, kv or q, dim or _derive_head_dim(module, config, q))


def read_positive_int(source: Any, names: tuple[str, ...]) -> int:
    """First of these attributes that is a positive int; 0 if none is."""
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _derive_head_dim(module: nn.Module, config: Any, q: int) -> int:
    width = read_positive_int(module, ("embed_dim", "all_head_size", "hidden_size", "inner_dim")) or read_positive_int(
        config, ("hidden_size", "d_model")
    )
    return width // q if q else 0
