"""Where somebody else's attention stands in its model, and how large it is: from names and numbers it keeps."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from ...site import YES, Ability, Site
from .reading import is_causal
from .reading import pattern as said_pattern

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "heads")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head")
WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "dim_head")
CROSS = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


UNKNOWN = "model"  # a stack of which nobody says what it is
NOT_READ = Ability(False, "its weights are not read as a model of headwise, which alone is cut; nothing is guessed")


class Sizes(NamedTuple):
    """Query heads, key-value heads, and the width of a head; 0 for what a module does not say."""

    q: int
    kv: int
    dim: int


def site(
    path: str, module: nn.Module, own: Sizes, *, pattern: str | None = None, see: Ability = YES, silence: Ability = YES
) -> Site:
    """The site of a module of somebody else's: its stack is named by its path, "encoder" or "decoder"."""
    parts = path.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    layer = int(parts[numbers[0]]) if numbers else 0
    kind = (
        "cross"
        if getattr(module, "is_cross_attention", False) or CROSS.search(parts[-1]) or _crosses(parts)
        else "attention"
    )
    stack = _stack(parts[: numbers[0]] if numbers else parts[:-1], module)
    said = said_pattern(module, kind) if pattern is None else pattern
    return Site(
        name=f"{stack}.{layer}.{kind}", stack=stack, layer=layer, kind=kind, path=path,
        heads=own.q, q=own.q, kv=own.kv, dim=own.dim, pattern=said, spec=None, unsaid="nothing reads it as a spec",
        see=see, silence=silence, cut=NOT_READ, share=NOT_READ,
    )  # fmt: skip


def within(path: str, other: str) -> bool:
    """Whether a module is another, or stands in it."""
    return path == other or path.startswith(f"{other}.") or not other


def _crosses(parts: list[str]) -> bool:
    return any(CROSS.search(part) for part in parts[-2:])


def _stack(before: list[str], module: nn.Module) -> str:
    for part in reversed(before):
        if "decoder" in part:
            return "decoder"
        if "encoder" in part:
            return "encoder"
    causal = is_causal(module)
    return UNKNOWN if causal is None else "decoder" if causal else "encoder"


def sizes(module: nn.Module) -> Sizes:
    """What a module, or its config, says of its heads."""
    config = getattr(module, "config", None)
    q = number(module, HEADS) or number(config, HEADS)
    groups = getattr(module, "num_key_value_groups", None)
    kv = number(module, GROUPS) or (q // groups if isinstance(groups, int) and groups else 0)
    dim = number(module, WIDTHS) or number(config, ("head_dim", "d_kv"))
    return Sizes(q, kv or q, dim or _derived(module, config, q))


def number(holder: Any, names: tuple[str, ...]) -> int:
    """The first of these that somebody keeps and that is a positive whole number; 0 if none is."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _derived(module: nn.Module, config: Any, q: int) -> int:
    width = number(module, ("embed_dim", "all_head_size", "hidden_size", "inner_dim")) or number(
        config, ("hidden_size", "d_model")
    )
    return width // q if q else 0
