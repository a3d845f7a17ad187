"""Projections of attention modules by the names that libraries use, for modules that were not declared."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .declarations import FUSED_LAYOUTS, AttentionSite

FUSED_NAMES = ("qkv", "to_qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj")
SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
)
OUTPUT_NAMES = ("proj", "out_proj", "o_proj", "to_out", "to_out.0", "dense", "c_proj", "out", "wo", "o")
WIDTH_NAMES = ("attn_dim", "inner_dim", "all_head_size")  # attributes with the channels of all heads


def propose_sites(module: nn.Module, heads: int, kv_heads: int) -> Iterator[AttentionSite]:
    """Yield the declarations that fit a module by the names and sizes of its children, likely ones first.

    Whether one is right can only be seen in its outputs: the rows of a fused projection may lie by projection or by
    head.

    >>> layer = nn.ModuleDict({"qkv": nn.Linear(6, 18), "proj": nn.Linear(6, 6)})
    >>> [site.fused for site in propose_sites(layer, 3, 3)]
    ['by projection', 'by head']
    """
    names = [(name, name, name, layout) for name in FUSED_NAMES for layout in FUSED_LAYOUTS]
    names += [(*three, FUSED_LAYOUTS[0]) for three in SEPARATE_NAMES]
    for q, k, v, layout in names:
        for out in OUTPUT_NAMES:
            site = AttentionSite(q, k, v, out, heads, kv_heads, layout, _width_attributes(module, out))
            try:
                site.check(module)
            except ValueError:
                continue
            yield site


def _width_attributes(module: nn.Module, out: str) -> dict[str, str]:
    """Attributes that hold the input channels of the output projection."""
    width = getattr(dict(module.named_modules()).get(out), "in_features", None)
    return {name: "out" for name in WIDTH_NAMES if width is not None and getattr(module, name, None) == width}
