"""Who reads whom in somebody else's attention, from what its module and its config say."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import unwrap
from typing import Any

from torch import nn

from ...pattern import Blocks, Causal, Window

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
