"""OPT: BART's names for the layers of a decoder."""

from __future__ import annotations

from ..plan import WeightNames
from .bart import name_attention, name_norm

OWN_LAYER, FILE_LAYER = "decoder.{layer}", ".layers.{layer}"

OPT_WEIGHTS = WeightNames(
    families=("opt",),
    prefixes=("model.decoder", "decoder"),
    locations={
        "decoder.embedding.tokens": ".embed_tokens.weight",
        "decoder.embedding.positions": ".embed_positions.weight",
        **name_attention(f"{OWN_LAYER}.attention", f"{FILE_LAYER}.self_attn"),
        **name_norm(f"{OWN_LAYER}.attention_norm", f"{FILE_LAYER}.self_attn_layer_norm"),
        f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.fc1.weight",
        f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.fc1.bias",
        f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.fc2.weight",
        f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.fc2.bias",
        **name_norm(f"{OWN_LAYER}.feed_norm", f"{FILE_LAYER}.final_layer_norm"),
        **name_norm("decoder.norm", ".final_layer_norm"),
        "head.tokens.weight": "lm_head.weight",
    },
)
