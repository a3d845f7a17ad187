"""Where somebody else's attention stands in its model, and how large it is: from names and numbers it keeps."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from ...site import POSSIBLE, Ability, Site
from .reading import is_causal
from .reading import describe_pattern as said_pattern

NUM_HEADS_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "heads")
NUM_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head")
HEAD_DIM_NAMES = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "dim_head")
CROSS_ATTENTION_NAME = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


UNKNOWN_STACK = "model"  # a stack of which nobody says what it is
NOT_CONVERTIBLE = Ability(False, "its weights are not read as a model of headwise, which alone is cut; nothing is guessed")


class HeadSizes(NamedTuple):
    """Query heads, key-value heads, and the width of a head; 0 for what a module does not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def make_site(
    path: str, module: nn.Module, sizes: HeadSizes, *, pattern: str | None = None, see: Ability = POSSIBLE, silence: Ability = POSSIBLE
) -> Site:
    """The site of a module of somebody else's: its stack is named by its path, "encoder" or "decoder"."""
    parts = path.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    layer = int(parts[numbers[0]]) if numbers else 0
    kind = (
        "cross"
        if getattr(module, "is_cross_attention", False) or CROSS_ATTENTION_NAME.search(parts[-1]) or _is_cross_attention(parts)
        else "attention"
    )
    stack = _stack_name(parts[: numbers[0]] if numbers else parts[:-1], module)
    said = said_pattern(module, kind) if pattern is None else pattern
    return Site(
        name=f"{stack}.{layer}.{kind}", stack=stack, layer=layer, kind=kind, path=path,
        heads=sizes.num_heads, q=sizes.num_heads, kv=sizes.num_kv_heads, dim=sizes.head_dim, pattern=said, spec=None, unsaid="nothing reads it as a spec",
        see=see, silence=silence, cut=NOT_CONVERTIBLE, share=NOT_CONVERTIBLE,
    )  # fmt: skip


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
