"""BLOOM: fused as GPT-NeoX, with a norm behind the table of tokens; published files name no trunk."""

from __future__ import annotations

from ..plan import WeightNames
from .gpt_neox import name_gpt_neox_layer

BLOOM_WEIGHTS = WeightNames(
    families=("bloom",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".word_embeddings.weight",
        "decoder.embedding.norm.weight": ".word_embeddings_layernorm.weight",
        "decoder.embedding.norm.bias": ".word_embeddings_layernorm.bias",
        **name_gpt_neox_layer(".h.{layer}", "self_attention"),
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
)
