"""GPT-NeoX and BLOOM: queries, keys and values of a head lie side by side."""

from __future__ import annotations

from ..plan import Map
from ..slots import Slot

LAYER = "decoder.{layer}"


def layer(there: str, attention: str) -> dict[str, str | Slot]:
    """The rows of one layer."""
    fused, sides = f"{there}.{attention}.query_key_value", {"qkv": 3}
    rows: dict[str, str | Slot] = {}
    for place, side in enumerate("qkv"):
        at = {"qkv": place}
        matrix = Slot(f"{fused}.weight", "(q qkv dim) model", at, sides, ours="(q dim) model")
        bias = Slot(f"{fused}.bias", "(q qkv dim)", at, sides, ours="(q dim)")
        rows |= {f"{LAYER}.attention.project.{side}": matrix, f"{LAYER}.attention.project.{side}_bias": bias}
    names = {
        "attention.output.o": f"{attention}.dense.weight",
        "attention.output.o_bias": f"{attention}.dense.bias",
        "attention_norm.weight": "input_layernorm.weight",
        "attention_norm.bias": "input_layernorm.bias",
        "feed_norm.weight": "post_attention_layernorm.weight",
        "feed_norm.bias": "post_attention_layernorm.bias",
        "feed.up": "mlp.dense_h_to_4h.weight",
        "feed.up_bias": "mlp.dense_h_to_4h.bias",
        "feed.down": "mlp.dense_4h_to_h.weight",
        "feed.down_bias": "mlp.dense_4h_to_h.bias",
    }
    return rows | {f"{LAYER}.{ours}": f"{there}.{theirs}" for ours, theirs in names.items()}


MAP = Map(
    families=("gpt_neox",),
    trunks=("gpt_neox", ""),
    slots={
        "decoder.embedding.tokens": ".embed_in.weight",
        **layer(".layers.{layer}", "attention"),
        "decoder.norm.weight": ".final_layer_norm.weight",
        "decoder.norm.bias": ".final_layer_norm.bias",
        "head.tokens.weight": "embed_out.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)
