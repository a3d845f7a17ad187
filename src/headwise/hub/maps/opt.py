"""OPT: BART's names for the layers of a decoder."""

from __future__ import annotations

from ..plan import Map
from .bart import attention, norm

LAYER, THERE = "decoder.{layer}", ".layers.{layer}"

MAP = Map(
    families=("opt",),
    trunks=("model.decoder", "decoder"),
    slots={
        "decoder.embedding.tokens": ".embed_tokens.weight",
        "decoder.embedding.positions": ".embed_positions.weight",
        **attention(f"{LAYER}.attention", f"{THERE}.self_attn"),
        **norm(f"{LAYER}.attention_norm", f"{THERE}.self_attn_layer_norm"),
        f"{LAYER}.feed.up": f"{THERE}.fc1.weight",
        f"{LAYER}.feed.up_bias": f"{THERE}.fc1.bias",
        f"{LAYER}.feed.down": f"{THERE}.fc2.weight",
        f"{LAYER}.feed.down_bias": f"{THERE}.fc2.bias",
        **norm(f"{LAYER}.feed_norm", f"{THERE}.final_layer_norm"),
        **norm("decoder.norm", ".final_layer_norm"),
        "head.tokens.weight": "lm_head.weight",
    },
)
