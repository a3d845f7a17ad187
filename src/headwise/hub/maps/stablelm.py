"""StableLM and Cohere: Llama's names, norms that may have biases, and may be one for both sublayers."""

from __future__ import annotations

from .llama import LLAMA_WEIGHTS as LLAMA

OWN_LAYER, FILE_LAYER = "decoder.{layer}", ".layers.{layer}"
STABLELM_NAMES = {
    f"{OWN_LAYER}.attention_norm.bias": f"{FILE_LAYER}.input_layernorm.bias",
    f"{OWN_LAYER}.feed_norm.bias": f"{FILE_LAYER}.post_attention_layernorm.bias",
    f"{OWN_LAYER}.norm.weight": f"{FILE_LAYER}.input_layernorm.weight",
    f"{OWN_LAYER}.norm.bias": f"{FILE_LAYER}.input_layernorm.bias",
    "decoder.norm.bias": ".norm.bias",
}
STABLELM_WEIGHTS = LLAMA._replace(families=("stablelm", "cohere", "cohere2"), locations={**LLAMA.locations, **STABLELM_NAMES})
