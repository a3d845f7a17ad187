"""Who reads whom in somebody else's attention, from what its module and its config say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import unwrap
from typing import Any, NamedTuple

from torch import nn

from ...masking.patterns import Blocks, Causal, Window
from ..site import POSSIBLE, Ability, Site

UNKNOWN_PATTERN = "as each call says"


def describe_pattern(module: nn.Module, kind: str) -> str:
    """The pattern of a module in our words, or that it is nowhere said."""
    if kind == "cross":
        return "full()"
    config, causal = getattr(module, "config", None), is_causal(module)
    said = _read_layer_type(module, config)
    if causal is None:
        return UNKNOWN_PATTERN
    if said == "chunked_attention" and causal:
        return (Causal() & Blocks(_read_int(config, "attention_chunk_size"))).text
    keys = _read_window(module, config, said)
    if keys and causal:
        return Window(keys).text
    if keys:  # most say how far a window reaches to one side, some with the query's own key and some without
        plain = keys == _read_int(config, "sliding_window") + 1
        return Window(2 * keys - 1, after=keys - 1).text if plain else UNKNOWN_PATTERN
    return "causal()" if causal else "full()"


def is_causal(module: nn.Module) -> bool | None:
    """Whether a module says that it reads no key ahead; None if it says nothing."""
    said = [getattr(module, name, None) for name in ("is_causal", "is_decoder")]
    return next((bool(one) for one in said if one is not None), None)


def _read_layer_type(module: nn.Module, config: Any) -> str:
    """What the config says of this layer, or the module itself."""
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if isinstance(kinds, Sequence) and isinstance(layer, int) and layer < len(kinds):
        return str(kinds[layer])
    return str(getattr(module, "attention_type", ""))


def _read_window(module: nn.Module, config: Any, said: str) -> int:
    """How many keys a window has; 0 if there is none."""
    if "sliding_window" in vars(module):
        return _read_int(module, "sliding_window")
    if said == "local":
        return _read_int(config, "window_size")
    code = getattr(unwrap(type(module).forward), "__code__", None)
    asked = code is not None and "sliding_window" in (*code.co_names, *code.co_consts)
    return _read_int(config, "sliding_window") if said == "sliding_attention" or (not said and asked) else 0


def _read_int(holder: Any, name: str) -> int:
    value = getattr(holder, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# --- Where somebody else's attention stands in its model, and how large it is --------------------------

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


UNKNOWN_STACK = "model"  # a stack of which nobody says what it is
NOT_CONVERTIBLE = Ability(
    False, "its weights are not read as a model of headwise, which alone is cut; nothing is guessed"
)


class HeadSizes(NamedTuple):
    """Query heads, key-value heads, and the width of a head; 0 for what a module does not say."""

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
    """The site of a module of somebody else's: its stack is named by its path, "encoder" or "decoder"."""
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
    said = describe_pattern(module, kind) if pattern is None else pattern
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
        pattern=said,
        spec=None,
        unsaid="nothing reads it as a spec",
        see=see,
        silence=silence,
        cut=NOT_CONVERTIBLE,
        share=NOT_CONVERTIBLE,
    )


def is_within(path: str, other: str) -> bool:
    """Whether a module is another, or stands in it."""
    return path == other or path.startswith(f"{other}.") or not other


def _is_cross_attention(parts: list[str]) -> bool:
    return any(CROSS_ATTENTION_NAME.search(part) for part in parts[-2:])


def _stack_name(before: list[str], module: nn.Module) -> str:
    for part in reversed(before):
        if "decoder" in part:
            return "decoder"
        if "encoder" in part:
            return "encoder"
    causal = is_causal(module)
    return UNKNOWN_STACK if causal is None else "decoder" if causal else "encoder"


def read_head_sizes(module: nn.Module) -> HeadSizes:
    """What a module, or its config, says of its heads."""
    config = getattr(module, "config", None)
    q = read_positive_int(module, NUM_HEADS_NAMES) or read_positive_int(config, NUM_HEADS_NAMES)
    groups = getattr(module, "num_key_value_groups", None)
    kv = read_positive_int(module, NUM_KV_HEADS_NAMES) or (q // groups if isinstance(groups, int) and groups else 0)
    dim = read_positive_int(module, HEAD_DIM_NAMES) or read_positive_int(config, ("head_dim", "d_kv"))
    return HeadSizes(q, kv or q, dim or _derive_head_dim(module, config, q))


def read_positive_int(source: Any, names: tuple[str, ...]) -> int:
    """The first of these that somebody keeps and that is a positive whole number; 0 if none is."""
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
